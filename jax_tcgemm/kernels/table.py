"""The table of kernel configurations: a row is a kernel, or several for its layouts.

This file and ``older_rows.py`` are the only list of kernels. CMake runs ``cuda/build/generate.py``
over it, C++ dispatch and its heuristic read the generated rows, and tests take their parameters
from it.
"""

from __future__ import annotations

import hashlib
from typing import Any

from jax_tcgemm.kernels import older_rows
from jax_tcgemm.kernels.arithmetic import (
    ALL_ARITHMETIC,
    ARITHMETIC,
    PLANE_PRODUCTS,
    RUN_TIME_ARITHMETIC,
)
from jax_tcgemm.kernels.config import KernelConfig


def _sm90(
    algorithm: str,
    tile_m: int,
    tile_n: int,
    stages: int,
    *,
    cluster: tuple[int, int] = (1, 1),
    split_k: int = 1,
    schedule: str = "cooperative",
    gated: bool = False,
    skinny: bool = False,
    grouped: str = "none",
    promote: bool = False,
    planes: bool = False,
    pairs: bool = False,
    swap_ab: bool = False,
    epilogue: str = "any",
) -> KernelConfig:
    if grouped == "k":
        epilogue = "none"
    elif swap_ab:
        epilogue = "sum"
    warpgroups = 1 if skinny or schedule == "pingpong" else {192: 3, 64: 1}.get(tile_m, 2)
    return KernelConfig(
        "sm90",
        algorithm,
        tile_m,
        tile_n,
        tile_k=128 // ALL_ARITHMETIC[algorithm].a.bytes,
        warps_m=4 * warpgroups,
        warps_n=1,
        stages=stages,
        loader="tma",
        cluster_m=cluster[0],
        cluster_n=cluster[1],
        split_k=split_k,
        schedule=schedule,
        gated=gated,
        skinny=skinny,
        grouped=grouped,
        promote=promote,
        planes=planes,
        pairs=pairs,
        swap_ab=swap_ab,
        epilogue=epilogue,
    )


def _rows() -> list[KernelConfig]:
    rows = [*older_rows.sm80_rows(), *older_rows.sm75_rows()]
    for algorithm, most in older_rows.MOST:
        rows += [
            # This row computes the most products for each byte from shared memory and from L2.
            _sm90(algorithm, 128, 256, 4, cluster=(2, 1)),
            # For other numbers of whole waves.
            _sm90(algorithm, 256, 160, 3, cluster=(2, 1), epilogue="none"),
            _sm90(algorithm, 128, 192, 4, cluster=(2, 1), schedule="pingpong"),
            _sm90(algorithm, 128, 224, 4, cluster=(2, 1), epilogue=most),
            _sm90(algorithm, 128, 128, 6, cluster=(2, 1), schedule="pingpong"),
            _sm90(algorithm, 128, 128, 6, schedule="pingpong", epilogue="sum"),
            # For odd numbers of tiles along m.
            _sm90(algorithm, 128, 192, 4, cluster=(1, 2), schedule="pingpong"),
            # For batches of small products, where L2 limits the speed.
            _sm90(algorithm, 128, 128, 6, cluster=(2, 2), schedule="pingpong"),
            # For few tiles.
            _sm90(algorithm, 128, 256, 4, epilogue=most),
            _sm90(algorithm, 128, 64, 8, epilogue="sum"),
            _sm90(algorithm, 64, 128, 6, schedule="pingpong"),
            _sm90(algorithm, 64, 128, 6, cluster=(2, 1), schedule="pingpong"),
            _sm90(algorithm, 64, 64, 6),
            # For so few tiles that blocks share k.
            _sm90(algorithm, 128, 64, 8, split_k=2),
            # Tile heights that the rows above do not have: for other numbers of whole waves, and
            # for few tiles of operands whose rows are not whole lines.
            _sm90(algorithm, 128, 160, 5, cluster=(2, 1), schedule="pingpong", swap_ab=True),
            _sm90(algorithm, 128, 72, 8, cluster=(2, 1), swap_ab=True),
            _sm90(algorithm, 128, 72, 8, cluster=(4, 1), swap_ab=True),
            _sm90(algorithm, 128, 72, 8, cluster=(4, 2), swap_ab=True),
            # For one tile of rows of A, which blocks share, and long tiles of B.
            _sm90(algorithm, 256, 128, 4, cluster=(2, 1), swap_ab=True),
            # More blocks share operands, so they request fewer bytes from L2: for rows that are not
            # whole lines, and for other numbers of whole waves.
            *(
                _sm90(algorithm, m, n, stages, cluster=cluster, schedule="pingpong", epilogue="sum")
                for m, n, stages, cluster in (
                    (128, 128, 6, (4, 1)),
                    (128, 128, 6, (1, 4)),
                    (128, 128, 6, (2, 4)),
                    (128, 96, 6, (4, 2)),
                    (64, 128, 6, (4, 1)),
                    (64, 128, 6, (1, 4)),
                )
            ),
            *(
                _sm90(algorithm, m, n, stages, cluster=cluster, schedule="pingpong", swap_ab=True)
                for m, n, stages, cluster in (
                    (128, 192, 4, (2, 2)),
                    (128, 160, 5, (2, 2)),
                    (128, 128, 6, (2, 4)),
                    (128, 96, 6, (4, 1)),
                )
            ),
            *(
                _sm90(algorithm, m, n, stages, cluster=cluster, epilogue="sum")
                for m, n, stages, cluster in (
                    (128, 64, 8, (2, 1)),
                    (128, 64, 8, (1, 4)),
                    (64, 64, 8, (2, 2)),
                    (192, 96, 5, (2, 4)),
                    (192, 128, 5, (2, 4)),
                    (192, 192, 4, (1, 2)),
                )
            ),
            # For float32 results.
            _sm90(algorithm, 128, 128, 6, cluster=(2, 1), promote=True),
            _sm90(algorithm, 64, 128, 6, schedule="pingpong", promote=True),
            # For two weights.
            _sm90(algorithm, 128, 256, 4, cluster=(2, 1), gated=True),
            _sm90(algorithm, 128, 128, 6, cluster=(2, 1), schedule="pingpong", gated=True),
            # For odd numbers of tiles along m.
            _sm90(algorithm, 128, 256, 4, cluster=(1, 2), gated=True),
            _sm90(algorithm, 128, 128, 6, cluster=(1, 4), schedule="pingpong", gated=True),
            # For two weights and a float32 result.
            _sm90(algorithm, 128, 128, 6, cluster=(2, 1), gated=True, promote=True),
            # For groups of rows. Where memory makes tiles equally fast, the smallest tile comes
            # first. Blocks that share rows of one group waste nothing, whatever the group's size.
            _sm90(algorithm, 64, 128, 6, schedule="pingpong", grouped="m"),
            _sm90(algorithm, 128, 128, 6, schedule="pingpong", grouped="m"),
            _sm90(algorithm, 128, 256, 4, cluster=(1, 2), grouped="m"),
            _sm90(algorithm, 128, 192, 4, cluster=(1, 2), schedule="pingpong", grouped="m"),
            # For groups of k.
            _sm90(algorithm, 128, 256, 4, cluster=(2, 1), grouped="k"),
            _sm90(algorithm, 128, 128, 6, schedule="pingpong", grouped="k"),
            # For groups with a float32 result.
            _sm90(algorithm, 128, 128, 6, grouped="m", promote=True),
            _sm90(algorithm, 128, 128, 6, grouped="k", promote=True),
        ]
        # For few rows or columns, where memory limits the speed: many bytes are in flight, and all
        # blocks run at once. Sums are promoted where that costs nothing.
        rows += [
            _sm90(
                *(algorithm, tile_m, tile_n, stages),
                split_k=split_k,
                skinny=True,
                promote=tile_m * tile_n <= 64 * 128,  # registers hold two such sets
                epilogue=epilogue,
            )
            for tile_m, tile_n, stages, split_k, epilogue in (
                (64, 16, 8, 1, "any"),
                (64, 16, 8, 2, "any"),
                (128, 16, 4, 1, "any"),
                (128, 16, 4, 4, "any"),
                (256, 16, 3, 1, "none"),
                (64, 32, 8, 1, "any"),
                (64, 32, 8, 2, "any"),
                (128, 32, 3, 1, "any"),
                (256, 32, 3, 1, "none"),
                (64, 64, 8, 1, "any"),
                (64, 64, 8, 2, "any"),
                (128, 64, 3, 1, "any"),
                (256, 64, 3, 1, "none"),
            )
        ]
        # The same for two weights, with functions only.
        rows += [
            _sm90(
                *(algorithm, tile_m, tile_n, stages),
                split_k=split_k,
                skinny=True,
                gated=True,
                promote=tile_m * tile_n <= 64 * 128,
                epilogue="none",
            )
            for tile_m, tile_n, stages, split_k in (
                (128, 16, 4, 1),
                (128, 16, 4, 2),
                (128, 16, 4, 4),
                (256, 16, 3, 1),
                (128, 32, 3, 1),
                (128, 32, 3, 2),
                (256, 32, 3, 1),
                (128, 64, 3, 1),
            )
        ]
    rows += [
        _sm90("TF32_TF32_F32", 128, 256, 4, cluster=(2, 1)),
        _sm90("TF32_TF32_F32", 256, 128, 4, cluster=(1, 2)),
        _sm90("TF32_TF32_F32", 128, 128, 6, cluster=(2, 1)),
        _sm90("TF32_TF32_F32", 128, 64, 8, cluster=(2, 1)),
        _sm90("TF32_TF32_F32", 64, 128, 8),
        _sm90("TF32_TF32_F32", 64, 64, 6),
        # More blocks share operands; for other numbers of whole waves.
        _sm90("TF32_TF32_F32", 128, 128, 6, cluster=(1, 4)),
        _sm90("TF32_TF32_F32", 128, 64, 8, cluster=(2, 2)),
        _sm90("TF32_TF32_F32", 128, 160, 5, cluster=(2, 1)),
    ]
    rows += [
        # For a real operand times a complex one.
        _sm90("TF32_TF32_F32", 128, 256, 4, cluster=(2, 1), pairs=True),
        _sm90("TF32_TF32_F32", 128, 128, 6, cluster=(2, 1), pairs=True),
    ]
    # For planes of float32 operands, and for few tiles of them.
    for algorithm in sorted({row.factors for row in PLANE_PRODUCTS.values()}):
        rows += [
            _sm90(algorithm, 128, 128, 6, cluster=(2, 1), planes=True),
            _sm90(algorithm, 64, 128, 8, schedule="pingpong", planes=True),
        ]
    for algorithm in ARITHMETIC:
        rows.append(KernelConfig("simt", algorithm, 4, 32, 32, 4, 1, 1, "direct"))
    for algorithm, _ in older_rows.MOST:
        rows += [
            # These rows run on any GPU. Otherwise only sm90 rows compute such products.
            KernelConfig("simt", algorithm, 4, 64, 32, 4, 1, 1, "direct", gated=True),
            KernelConfig("simt", algorithm, 4, 32, 32, 4, 1, 1, "direct", grouped="m"),
            KernelConfig("simt", algorithm, 4, 32, 32, 4, 1, 1, "direct", grouped="k"),
        ]
    rows.append(KernelConfig("simt", "TF32_TF32_F32", 4, 32, 32, 4, 1, 1, "direct", pairs=True))
    return rows


def _streamed(
    algorithm: str, split_k: int, *, gated: bool = False, grouped: str = "none"
) -> KernelConfig:
    return KernelConfig(
        "sm90",
        algorithm,
        tile_m=16,
        tile_n=256 if gated else 128,
        tile_k=128,
        warps_m=1,
        warps_n=4,
        stages=6 if gated else 4,  # with one weight, two blocks fit on an SM
        loader="tma_turned",
        split_k=split_k,
        gated=gated,
        grouped=grouped,
        # Its sums are in float32 anyway.
        promote=ALL_ARITHMETIC[algorithm].promotes,
        epilogue="none",
    )


def _run_time_rows() -> list[KernelConfig]:
    """Returns rows whose kernels are compiled at run time, each with its epilogue."""
    rows = []
    for algorithm, arithmetic in RUN_TIME_ARITHMETIC.items():
        if arithmetic.promotes:
            # Promotion takes two more sets of accumulators, or one.
            common: dict[str, Any] = {"promote": True, "epilogue": "none"}
            tiles = [
                (128, 192, 4, "cooperative", (2, 1)),
                (128, 128, 6, "cooperative", (2, 1)),
                (128, 128, 6, "cooperative", (1, 1)),
                (128, 64, 8, "cooperative", (1, 1)),
                (64, 128, 6, "pingpong", (1, 1)),
                (64, 64, 6, "cooperative", (1, 1)),
                (64, 32, 8, "cooperative", (1, 1)),
            ]
            rows += [
                _sm90(algorithm, 128, 128, 6, cluster=(2, 1), gated=True, **common),
                _sm90(algorithm, 128, 128, 6, cluster=(1, 2), gated=True, **common),
                _sm90(algorithm, 128, 128, 6, grouped="m", **common),
            ]
        else:
            common = {"epilogue": "none"}
            tiles = [
                (128, 256, 4, "cooperative", (2, 1)),
                (128, 256, 4, "cooperative", (1, 1)),
                (128, 192, 4, "pingpong", (2, 1)),
                (128, 192, 4, "pingpong", (1, 2)),
                (128, 128, 6, "pingpong", (2, 1)),
                (128, 128, 6, "pingpong", (1, 1)),
                (128, 64, 8, "cooperative", (1, 1)),
                (64, 128, 6, "pingpong", (1, 1)),
                (64, 64, 6, "cooperative", (1, 1)),
                (64, 32, 8, "cooperative", (1, 1)),
            ]
            groups = {"grouped": "m", **common}
            rows += [
                _sm90(algorithm, 128, 256, 4, cluster=(2, 1), gated=True, **common),
                _sm90(algorithm, 128, 256, 4, cluster=(1, 2), gated=True, **common),
                _sm90(algorithm, 128, 256, 4, cluster=(1, 2), **groups),
                _sm90(algorithm, 128, 192, 4, cluster=(1, 2), schedule="pingpong", **groups),
                _sm90(algorithm, 128, 128, 6, schedule="pingpong", **groups),
                _sm90(algorithm, 64, 128, 6, schedule="pingpong", **groups),
            ]
            if arithmetic.a == arithmetic.b:
                # For few rows or columns, both operands contiguous along k.
                rows += [
                    _sm90(algorithm, 64, n, 8, split_k=split_k, skinny=True, **common)
                    for n, split_k in ((16, 1), (16, 2), (32, 2), (64, 2))
                ]
        rows += [
            _sm90(algorithm, m, n, stages, schedule=schedule, cluster=cluster, **common)
            for m, n, stages, schedule, cluster in tiles
        ]
        # For few rows of A times a B whose n is contiguous. The other rows need B transposed.
        rows += [_streamed(algorithm, split_k) for split_k in (1, 2, 4)]
        rows += [_streamed(algorithm, split_k, gated=True) for split_k in (1, 2, 4)]
        rows += [_streamed(algorithm, split_k, grouped="m") for split_k in (1, 2, 4)]
    return rows


CONFIGS: tuple[KernelConfig, ...] = tuple(_rows())
RUN_TIME_CONFIGS: tuple[KernelConfig, ...] = tuple(_run_time_rows())

BY_NAME = {config.name: config for config in (*CONFIGS, *RUN_TIME_CONFIGS)}
if len(BY_NAME) != len(CONFIGS) + len(RUN_TIME_CONFIGS):
    raise ValueError("two rows of the kernel table have one name")


# The digest differs if the rows differ.
TABLE_DIGEST = hashlib.sha256(repr((CONFIGS, RUN_TIME_CONFIGS)).encode()).hexdigest()[:12]
