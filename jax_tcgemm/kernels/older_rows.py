"""The rows of the kernel table for GPUs before Hopper: families sm80 and sm75."""

from __future__ import annotations

from jax_tcgemm.kernels.arithmetic import ALL_ARITHMETIC
from jax_tcgemm.kernels.config import KernelConfig

# Float16 products are less common, so fewer of their rows have every epilogue.
MOST = (("BF16_BF16_F32", "any"), ("F16_F16_F32", "sum"))


def _sm80(
    algorithm: str,
    tile: tuple[int, int, int],
    warps: tuple[int, int],
    stages: int,
    loader: str = "cp_async",
    *,
    promote: bool = False,
    epilogue: str = "any",
) -> KernelConfig:
    return KernelConfig(
        *("sm80", algorithm, *tile, *warps, stages, loader), promote=promote, epilogue=epilogue
    )


def _direct(algorithm: str, tile_n: int, split_k: int) -> KernelConfig:
    row = ALL_ARITHMETIC[algorithm]
    return KernelConfig(
        *("sm80", algorithm, 16, tile_n, 64 // row.a.bytes, 1, 1, 1, "direct"),
        split_k=split_k,
        promote=row.promotes,
    )


def sm75_rows() -> list[KernelConfig]:
    """Returns the float16 rows for GPUs without cp.async.

    There are large and small tiles, rows for any alignment, and rows for float32 results.
    """

    def row(algorithm: str, tile: int, loader: str = "register", **options) -> KernelConfig:
        return KernelConfig("sm75", algorithm, tile, tile, 32, 2, 2, 2, loader, **options)

    return [
        row("F16_F16_F32", 128),
        row("F16_F16_F32", 64),
        row("F16_F16_F32", 64, "realign"),
        row("F16_F16_F32", 64, promote=True),
        row("F16_F16_F32", 64, "realign", promote=True),
        row("F16_F16_F16", 128, epilogue="sum"),
        row("F16_F16_F16", 64),
        row("F16_F16_F16", 64, "realign"),
    ]


def sm80_rows() -> list[KernelConfig]:
    """Returns the sm80 rows.

    For all operands, a large and a small tile have every epilogue. The other rows have sums.
    """
    rows = []
    for algorithm, most in MOST:
        rows += [
            # Registers hold at most 64 x 64 a warp. The fewer bytes each product needs from shared
            # memory, the more products a kernel computes.
            _sm80(algorithm, (128, 256, 64), (2, 4), 3, epilogue="sum"),
            _sm80(algorithm, (256, 128, 64), (4, 2), 3, epilogue="sum"),
            _sm80(algorithm, (128, 128, 64), (2, 2), 3, epilogue=most),
            # The same for GPUs with 163 and 99 KiB of shared memory.
            _sm80(algorithm, (128, 256, 32), (2, 4), 4, epilogue="sum"),
            _sm80(algorithm, (128, 128, 32), (2, 2), 4),
            # For fewer or smaller tiles.
            _sm80(algorithm, (128, 64, 64), (2, 2), 3, epilogue="sum"),
            _sm80(algorithm, (64, 128, 64), (2, 2), 3, epilogue="sum"),
            _sm80(algorithm, (64, 64, 64), (2, 2), 3),
            _sm80(algorithm, (16, 64, 64), (1, 2), 3, epilogue=most),
            _sm80(algorithm, (128, 128, 32), (2, 4), 3, "realign", epilogue="sum"),
            _sm80(algorithm, (64, 64, 32), (2, 2), 3, "realign"),
            # For float32 results: there are two sets of accumulators, so each set is half as large.
            _sm80(algorithm, (128, 128, 64), (2, 4), 3, promote=True, epilogue="sum"),
            _sm80(algorithm, (64, 64, 64), (2, 2), 3, promote=True),
            _sm80(algorithm, (64, 64, 32), (2, 2), 3, "realign", promote=True),
        ]
    return [
        *rows,
        _sm80("F16_F16_F16", (128, 256, 64), (2, 4), 3, epilogue="sum"),
        _sm80("F16_F16_F16", (64, 64, 64), (2, 2), 3),
        _sm80("F16_F16_F16", (64, 64, 32), (2, 2), 3, "realign"),
        _sm80("TF32_TF32_F32", (256, 128, 32), (4, 2), 3, epilogue="sum"),
        _sm80("TF32_TF32_F32", (128, 256, 32), (2, 4), 3, epilogue="sum"),
        _sm80("TF32_TF32_F32", (128, 128, 32), (2, 2), 3),
        _sm80("TF32_TF32_F32", (128, 128, 16), (2, 2), 4, epilogue="sum"),
        _sm80("TF32_TF32_F32", (128, 64, 32), (2, 2), 3),
        _sm80("TF32_TF32_F32", (64, 64, 32), (2, 2), 3),
        _sm80("TF32_TF32_F32", (128, 128, 32), (2, 4), 3, "realign", epilogue="sum"),
        _sm80("TF32_TF32_F32", (64, 64, 16), (2, 2), 3, "realign"),
        # For little work, where the start takes most of the time.
        *(
            _direct(algorithm, tile_n, split_k)
            for algorithm in ("BF16_BF16_F32", "F16_F16_F32", "TF32_TF32_F32")
            for tile_n, split_k in ((16, 8), (32, 4))
        ),
    ]
