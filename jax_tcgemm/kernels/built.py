"""Lists the kernels that the build compiles.

Kernels of other rows are compiled where they are first needed. The build compiles every row of the
``simt`` family. It also compiles two float16 rows each of ``sm75``, ``sm80`` and ``sm90``, for
systems on which nothing can be compiled. Among the other rows, it compiles those without which
measured products take longer: lab/built_rows.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax_tcgemm.kernels.config import KernelConfig

# A row's name, and the epilogues for which the build has kernels: the row's epilogues, or fewer.
_BUILT: Mapping[str, str] = {
    "sm75_f16_64x64x32_w2x2_s2": "sum",
    "sm75_f16_64x64x32_w2x2_s2_realign_promote": "sum",
    "sm80_bf16_128x128x64_w2x2_s3": "sum",
    "sm80_bf16_64x64x64_w2x2_s3": "any",
    "sm80_bf16_64x64x32_w2x2_s3_realign": "sum",
    "sm80_bf16_64x64x64_w2x2_s3_promote": "sum",
    "sm80_bf16_64x64x32_w2x2_s3_realign_promote": "any",
    "sm80_f16_64x64x64_w2x2_s3": "sum",
    "sm80_f16_64x64x32_w2x2_s3_realign_promote": "any",
    "sm80_tf32_128x128x16_w2x2_s4": "sum",
    "sm80_tf32_64x64x32_w2x2_s3": "any",
    "sm80_tf32_64x64x16_w2x2_s3_realign": "sum",
    "sm80_bf16_16x16x32_k8_direct": "any",
    "sm80_bf16_16x32x32_k4_direct": "any",
    "sm80_tf32_16x16x16_k8_direct": "any",
    "sm80_tf32_16x32x16_k4_direct": "any",
    "sm90_bf16_128x256x64_s4_c2x1_cooperative": "sum",
    "sm90_bf16_128x192x64_s4_c2x1_pingpong": "any",
    "sm90_bf16_128x224x64_s4_c2x1_cooperative": "sum",
    "sm90_bf16_128x128x64_s6_c2x1_pingpong": "sum",
    "sm90_bf16_128x192x64_s4_c1x2_pingpong": "none",
    "sm90_bf16_128x128x64_s6_c2x2_pingpong": "sum",
    "sm90_bf16_64x128x64_s6_c1x1_pingpong": "sum",
    "sm90_bf16_64x128x64_s6_c2x1_pingpong": "sum",
    "sm90_bf16_64x64x64_s6_c1x1_cooperative": "any",
    "sm90_bf16_128x160x64_s5_c2x1_pingpong_swap_ab": "sum",
    "sm90_bf16_128x72x64_s8_c2x1_cooperative_swap_ab": "sum",
    "sm90_bf16_128x72x64_s8_c4x1_cooperative_swap_ab": "sum",
    "sm90_bf16_128x128x64_s6_c4x1_pingpong": "sum",
    "sm90_bf16_128x128x64_s6_c1x4_pingpong": "sum",
    "sm90_bf16_128x128x64_s6_c2x4_pingpong": "sum",
    "sm90_bf16_128x96x64_s6_c4x2_pingpong": "sum",
    "sm90_bf16_64x128x64_s6_c4x1_pingpong": "sum",
    "sm90_bf16_64x128x64_s6_c1x4_pingpong": "sum",
    "sm90_bf16_128x160x64_s5_c2x2_pingpong_swap_ab": "sum",
    "sm90_bf16_128x128x64_s6_c2x4_pingpong_swap_ab": "sum",
    "sm90_bf16_128x96x64_s6_c4x1_pingpong_swap_ab": "sum",
    "sm90_bf16_128x64x64_s8_c2x1_cooperative": "sum",
    "sm90_bf16_128x64x64_s8_c1x4_cooperative": "sum",
    "sm90_bf16_64x64x64_s8_c2x2_cooperative": "sum",
    "sm90_bf16_192x96x64_s5_c2x4_cooperative": "sum",
    "sm90_bf16_192x128x64_s5_c2x4_cooperative": "sum",
    "sm90_bf16_192x192x64_s4_c1x2_cooperative": "sum",
    "sm90_bf16_128x128x64_s6_c2x1_cooperative_promote": "none",
    "sm90_bf16_64x128x64_s6_c1x1_pingpong_promote": "none",
    "sm90_bf16_128x256x64_s4_c2x1_cooperative_gated": "any",
    "sm90_bf16_128x128x64_s6_c2x1_pingpong_gated": "any",
    "sm90_bf16_64x128x64_s6_c1x1_pingpong_grouped_m": "sum",
    "sm90_bf16_128x128x64_s6_c1x1_pingpong_grouped_m": "sum",
    "sm90_bf16_128x256x64_s4_c1x2_cooperative_grouped_m": "sum",
    "sm90_bf16_128x192x64_s4_c1x2_pingpong_grouped_m": "none",
    "sm90_bf16_128x256x64_s4_c2x1_cooperative_grouped_k": "none",
    "sm90_bf16_128x128x64_s6_c1x1_pingpong_grouped_k": "none",
    "sm90_bf16_128x128x64_s6_c1x1_cooperative_grouped_m_promote": "none",
    "sm90_bf16_128x128x64_s6_c1x1_cooperative_grouped_k_promote": "none",
    "sm90_bf16_64x16x64_s8_c1x1_skinny": "any",
    "sm90_bf16_64x16x64_s8_c1x1_k2_skinny": "any",
    "sm90_bf16_128x16x64_s4_c1x1_skinny": "any",
    "sm90_bf16_128x16x64_s4_c1x1_k4_skinny": "any",
    "sm90_bf16_64x32x64_s8_c1x1_skinny": "any",
    "sm90_bf16_64x32x64_s8_c1x1_k2_skinny": "any",
    "sm90_bf16_128x32x64_s3_c1x1_skinny": "sum",
    "sm90_bf16_64x64x64_s8_c1x1_skinny": "sum",
    "sm90_bf16_64x64x64_s8_c1x1_k2_skinny": "sum",
    "sm90_bf16_128x64x64_s3_c1x1_skinny": "sum",
    "sm90_f16_128x256x64_s4_c2x1_cooperative": "sum",
    "sm90_f16_64x64x64_s6_c1x1_cooperative": "any",
    "sm90_tf32_128x256x32_s4_c2x1_cooperative": "sum",
    "sm90_tf32_256x128x32_s4_c1x2_cooperative": "none",
    "sm90_tf32_128x128x32_s6_c2x1_cooperative": "sum",
    "sm90_tf32_128x64x32_s8_c2x1_cooperative": "sum",
    "sm90_tf32_64x128x32_s8_c1x1_cooperative": "sum",
    "sm90_tf32_64x64x32_s6_c1x1_cooperative": "sum",
    "sm90_tf32_128x128x32_s6_c1x4_cooperative": "sum",
    "sm90_tf32_128x64x32_s8_c2x2_cooperative": "sum",
    "sm90_tf32_128x160x32_s5_c2x1_cooperative": "sum",
    "sm90_tf32_128x256x32_s4_c2x1_cooperative_pairs": "none",
    "sm90_tf32_128x128x32_s6_c2x1_cooperative_pairs": "none",
    "sm90_bf16_128x128x64_s6_c2x1_cooperative_planes": "none",
    "sm90_bf16_64x128x64_s8_c1x1_pingpong_planes": "none",
}


def built_epilogue(row: KernelConfig) -> str | None:
    """Returns the epilogues of a row's kernels in the build, ``None`` if it has none."""
    return row.epilogue if row.arch == "simt" else _BUILT.get(row.name)
