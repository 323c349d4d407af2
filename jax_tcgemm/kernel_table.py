"""The table of kernel configurations: one row, one kernel translation unit.

This file is the only list of kernels. CMake runs ``cuda/generate.py`` over it, C++ dispatch and its
heuristic read the generated rows, and tests take their parameters from it. It imports the standard
library alone, so that the build can run it before anything is installed.
"""

from __future__ import annotations

import dataclasses

# Bytes of shared memory a thread block may use on the GPUs that have most (sm_90). sm_80 gives
# 163 KiB, sm_86 and sm_89 99 KiB: rows above a device's own limit are skipped at run time.
MAX_SHARED_MEMORY_BYTES = 227 * 1024

ELEMENT_BYTES = {
    "BF16_BF16_F32": 2,
    "F16_F16_F32": 2,
    "F16_F16_F16": 2,
    "TF32_TF32_F32": 4,
}

# How an algorithm is written inside a row's name.
ALGORITHM_TAGS = {
    "BF16_BF16_F32": "bf16",
    "F16_F16_F32": "f16",
    "F16_F16_F16": "f16acc16",
    "TF32_TF32_F32": "tf32",
}


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """One kernel configuration.

    Attributes:
        arch: kernel family: ``"sm80"`` (cp.async, ldmatrix, mma.sync) or ``"simt"`` (float32 FMA,
            for products too small for a pipeline).
        algorithm: name of the ``jax.lax.DotAlgorithmPreset`` it computes.
        tile_m: rows of D one thread block computes.
        tile_n: columns of D one thread block computes.
        tile_k: elements of k in one stage of the shared-memory ring; in one trip to memory (simt).
        warps_m: warps along m; a warp computes ``tile_m / warps_m`` rows.
        warps_n: warps along n; a warp computes ``tile_n / warps_n`` columns.
        stages: stages of the shared-memory ring.
        loader: ``"cp_async"`` copies 16-byte chunks asynchronously and needs operands whose base,
            strides and contiguous extent are multiples of 16 bytes; ``"realign"`` goes through
            registers and takes any alignment; ``"direct"`` (simt) has no shared memory and takes
            any too.
        promote: accumulate each k-tile apart and add it in float32. The tensor cores cut sums off
            instead of rounding them, which a float32 result of 16-bit operands would show.
    """

    arch: str
    algorithm: str
    tile_m: int
    tile_n: int
    tile_k: int
    warps_m: int
    warps_n: int
    stages: int
    loader: str = "cp_async"
    promote: bool = False

    def __post_init__(self) -> None:
        def require(condition: bool, what: str) -> None:
            if not condition:
                raise ValueError(f"{self}: {what}")

        require(self.algorithm in ELEMENT_BYTES, f"algorithm must be one of {set(ELEMENT_BYTES)}")
        if self.arch == "simt":
            require(self.loader == "direct", "simt kernels load directly")
            require(self.tile_m * self.tile_n == self.threads, "a thread computes one element")
            return
        require(self.arch == "sm80", "arch must be sm80 or simt")
        require(self.loader in ("cp_async", "realign"), "loader must be cp_async or realign")
        row_bytes = self.tile_k * self.element_bytes
        require(row_bytes in (64, 128), "tile_k must span 64 or 128 bytes")
        require(self.warp_m % 16 == 0, "a warp's rows must be a multiple of 16")
        require(self.warp_n in (32, 64, 128), "a warp's columns must be 32, 64 or 128")
        require(self.stages >= 3, "the ring needs at least 3 stages")
        require(
            not self.promote or self.algorithm in ("BF16_BF16_F32", "F16_F16_F32"),
            "only float32 sums of 16-bit products are promoted",
        )
        require(
            self.shared_memory_bytes <= MAX_SHARED_MEMORY_BYTES,
            f"{self.shared_memory_bytes} bytes of shared memory",
        )
        chunks = row_bytes // 16
        for extent in (self.tile_m, self.tile_n):
            require(extent * chunks % self.threads == 0, "tile must be a whole number of passes")

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.algorithm]

    @property
    def warp_m(self) -> int:
        return self.tile_m // self.warps_m

    @property
    def warp_n(self) -> int:
        return self.tile_n // self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def shared_memory_bytes(self) -> int:
        """The ring, then a float32 slab of 16 rows of accumulators for each warp."""
        if self.arch == "simt":
            return 0
        ring = self.stages * (self.tile_m + self.tile_n) * self.tile_k * self.element_bytes
        return ring + self.warps_m * 16 * self.tile_n * 4

    @property
    def name(self) -> str:
        """File name, FFI attribute, tuning key and test id."""
        suffix = "_realign" if self.loader == "realign" else ""
        suffix += "_promote" if self.promote else ""
        return (
            f"{self.arch}_{ALGORITHM_TAGS[self.algorithm]}"
            f"_{self.tile_m}x{self.tile_n}x{self.tile_k}"
            f"_w{self.warps_m}x{self.warps_n}_s{self.stages}{suffix}"
        )


def _rows() -> list[KernelConfig]:
    rows = []
    for algorithm in ("BF16_BF16_F32", "F16_F16_F32"):
        rows += [
            # 64 x 64 a warp is as much as registers hold; fewer bytes from shared memory for each
            # product mean more products.
            KernelConfig("sm80", algorithm, 128, 256, 64, 2, 4, 3),
            KernelConfig("sm80", algorithm, 256, 128, 64, 4, 2, 3),
            KernelConfig("sm80", algorithm, 128, 128, 64, 2, 2, 3),
            # The same for GPUs with 163 and 99 KiB of shared memory.
            KernelConfig("sm80", algorithm, 128, 256, 32, 2, 4, 4),
            KernelConfig("sm80", algorithm, 128, 128, 32, 2, 2, 4),
            # For fewer or smaller tiles.
            KernelConfig("sm80", algorithm, 128, 64, 64, 2, 2, 3),
            KernelConfig("sm80", algorithm, 64, 128, 64, 2, 2, 3),
            KernelConfig("sm80", algorithm, 64, 64, 64, 2, 2, 3),
            KernelConfig("sm80", algorithm, 16, 64, 64, 1, 2, 3),
            KernelConfig("sm80", algorithm, 128, 128, 32, 2, 4, 3, "realign"),
            KernelConfig("sm80", algorithm, 64, 64, 32, 2, 2, 3, "realign"),
            # For float32 results: a second set of accumulators, so half as many of each.
            KernelConfig("sm80", algorithm, 128, 128, 64, 2, 4, 3, promote=True),
            KernelConfig("sm80", algorithm, 64, 64, 64, 2, 2, 3, promote=True),
            KernelConfig("sm80", algorithm, 64, 64, 32, 2, 2, 3, "realign", promote=True),
        ]
    rows += [
        KernelConfig("sm80", "F16_F16_F16", 128, 256, 64, 2, 4, 3),
        KernelConfig("sm80", "F16_F16_F16", 64, 64, 64, 2, 2, 3),
        KernelConfig("sm80", "F16_F16_F16", 64, 64, 32, 2, 2, 3, "realign"),
        KernelConfig("sm80", "TF32_TF32_F32", 256, 128, 32, 4, 2, 3),
        KernelConfig("sm80", "TF32_TF32_F32", 128, 256, 32, 2, 4, 3),
        KernelConfig("sm80", "TF32_TF32_F32", 128, 128, 32, 2, 2, 3),
        KernelConfig("sm80", "TF32_TF32_F32", 128, 128, 16, 2, 2, 4),
        KernelConfig("sm80", "TF32_TF32_F32", 128, 64, 32, 2, 2, 3),
        KernelConfig("sm80", "TF32_TF32_F32", 64, 64, 32, 2, 2, 3),
        KernelConfig("sm80", "TF32_TF32_F32", 128, 128, 32, 2, 4, 3, "realign"),
        KernelConfig("sm80", "TF32_TF32_F32", 64, 64, 16, 2, 2, 3, "realign"),
    ]
    for algorithm in ELEMENT_BYTES:
        rows.append(KernelConfig("simt", algorithm, 4, 32, 32, 4, 1, 1, "direct"))
    return rows


CONFIGS: tuple[KernelConfig, ...] = tuple(_rows())

_BY_NAME = {config.name: config for config in CONFIGS}
if len(_BY_NAME) != len(CONFIGS):
    raise ValueError("two rows of the kernel table have one name")


def by_name(name: str) -> KernelConfig:
    """Returns the row called ``name``.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(
            f"config={name!r} is not a kernel configuration; known: {sorted(_BY_NAME)}"
        ) from None


def for_algorithm(algorithm: str) -> tuple[KernelConfig, ...]:
    """Returns the rows that compute ``algorithm`` (a ``DotAlgorithmPreset`` name)."""
    return tuple(config for config in CONFIGS if config.algorithm == algorithm)
