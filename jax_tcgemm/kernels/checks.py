"""Checks rows of the kernel table, family by family.

This module imports only the standard library, so that the build can run it before anything is
installed. The build checks shared memory and registers (``KernelConfig::fits`` of
``cuda/kernel_config.h``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jax_tcgemm.kernels.arithmetic import ALL_ARITHMETIC

if TYPE_CHECKING:
    from jax_tcgemm.kernels.config import KernelConfig

Require = Callable[[bool, str], None]


def check(row: KernelConfig) -> None:
    """Checks that a row can be built, or compiled at run time, as a kernel.

    Raises:
        ValueError: the row cannot be built or compiled; the message says why.
    """

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"{row}: {what}")

    require(row.algorithm in ALL_ARITHMETIC, f"algorithm must be one of {set(ALL_ARITHMETIC)}")
    require(row.epilogue in ("none", "sum", "any"), "unknown epilogue")
    require(row.arch == "sm90" or not row.planes, "planes are of sm90 rows")
    require(row.arch in ("sm90", "simt") or not row.pairs, "pairs are of sm90 and simt rows")
    if row.pairs:
        _check_pairs(row, require)
    if row.arch == "simt":
        _check_simt(row, require)
        return
    require(row.arch in ("sm75", "sm80", "sm90"), "arch must be sm90, sm80, sm75 or simt")
    if row.arithmetic.at_run_time:
        require(row.arch == "sm90" and row.epilogue == "none", "the build has no kernel")
    of_family = {"sm75": _check_sm75, "sm80": _check_sm80, "sm90": _check_sm90}
    of_family[row.arch](row, require)


def _check_simt(row: KernelConfig, require: Require) -> None:
    require(row.loader == "direct", "simt kernels load directly")
    threads = 32 * row.consumer_warps
    require(row.tile_m * row.output_n == threads, "a thread computes one element")
    require(row.epilogue == "any", "simt kernels have every epilogue")
    require(row.grouped in ("none", "m", "k"), "unknown grouped")
    require(not row.gated or row.grouped == "none", "grouped rows have one weight")
    require(
        row.arithmetic.promotes or row.pairs or not row.is_fallback,
        "gated and grouped rows are 16-bit, with float32 sums",
    )


def _check_sm75(row: KernelConfig, require: Require) -> None:
    require(row.loader in ("register", "realign"), "loader must be register or realign")
    require(row.stages == 2, "a stage is read while the other is written")
    require(row.arithmetic.turing, "sm75 kernels multiply float16")
    require(row.warp_m % 32 == 0, "a warp's rows must be a multiple of 32")
    _check_mma_sync(row, require)


def _check_direct(row: KernelConfig, require: Require) -> None:
    require(row.tile_m % 16 == 0 and row.tile_n % 16 == 0, "a lane has two lines at least")
    widest = max(row.tile_m, row.tile_n)
    require(widest // 8 * row.element_bytes <= 16, "lines that lie together are read at once")
    require(row.tile_k * row.element_bytes == 64, "tile_k must span 64 bytes")
    require((row.warps_m, row.warps_n, row.stages) == (1, 1, 1), "each warp computes the tile")
    require(row.split_k in (2, 4, 8), "split_k must be 2, 4 or 8")
    require(32 * row.split_k % (row.tile_n // 4) == 0, "a thread has vectors of the same columns")
    require(row.promote == row.arithmetic.promotes, "sums of parts of k are added in float32")
    require(row.arithmetic.accumulator.tag == "f32", "sums are float32")
    require(row.epilogue == "any", "direct kernels have every epilogue")
    require(row.cluster_m == row.cluster_n == 1, "direct kernels have no clusters")
    require(not (row.gated or row.skinny or row.swap_ab), "direct kernels have one weight")
    require(row.grouped == "none", "direct kernels know no groups")


def _check_sm80(row: KernelConfig, require: Require) -> None:
    if row.loader == "direct":
        _check_direct(row, require)
        return
    require(row.loader in ("cp_async", "realign"), "loader must be cp_async, realign or direct")
    require(row.stages >= 3, "the ring needs at least 3 stages")
    _check_mma_sync(row, require)


def _check_mma_sync(row: KernelConfig, require: Require) -> None:
    row_bytes = row.tile_k * row.element_bytes
    require(row_bytes in (64, 128), "tile_k must span 64 or 128 bytes")
    require(row.warp_m % 16 == 0, "a warp's rows must be a multiple of 16")
    require(row.warp_n in (32, 64, 128), "a warp's columns must be 32, 64 or 128")
    require(
        not row.promote or row.arithmetic.promotes,
        "only float32 sums of 16-bit products are promoted",
    )
    require(row.epilogue != "none", "mma.sync kernels have sums at least")
    require(row.cluster_size == 1, "mma.sync kernels have no clusters")
    require(not row.gated, "mma.sync kernels have one weight")
    require(not row.skinny, "mma.sync kernels have one place for m and n")
    require(row.grouped == "none", "mma.sync kernels know no groups")
    require(not row.swap_ab, "mma.sync kernels compute D, not its transpose")
    chunks = row_bytes // 16
    threads = 32 * row.consumer_warps
    for extent in (row.tile_m, row.tile_n):
        require(extent * chunks % threads == 0, "tile must be a whole number of passes")


def _check_streamed(row: KernelConfig, require: Require) -> None:
    require(row.element_bytes == 1, "operands of more than 8 bits are taken as they lie")
    require(row.tile_m == 16, "an instruction has 16 rows")
    require(row.output_n == row.tile_k == 128, "a warp reads 32 rows of 128 bytes")
    require((row.warps_m, row.warps_n) == (1, 4), "four warps share k, and the columns")
    require(row.stages >= 3, "the ring needs at least 3 stages")
    require(row.cluster_m == row.cluster_n == 1, "blocks share no operand")
    require(row.split_k in (1, 2, 4), "split_k must be 1, 2 or 4")
    require(row.schedule == "cooperative", "a tile has no other to alternate with")
    require(row.grouped in ("none", "m"), "no groups of k")
    require(not (row.skinny or row.swap_ab or (row.gated and row.grouped == "m")), "of one kind")


def _check_planes(row: KernelConfig, require: Require) -> None:
    require(row.arithmetic.a.tag == "bf16", "planes are of bfloat16")
    require(row.stages >= 6, "the ring holds three planes of two k-tiles")
    require(
        row.tile_m * row.tile_n // row.warps_m <= 64 * 32,
        "planes take two more sets of accumulators",
    )
    require(row.epilogue == "any", "rows for planes have every epilogue")
    require(row.split_k == 1 and row.grouped == "none", "neither parts of k nor groups")
    require(not (row.promote or row.skinny or row.gated or row.swap_ab), "of one kind")


def _check_pairs(row: KernelConfig, require: Require) -> None:
    require(row.element_bytes == 4, "complex numbers are pairs of float32")
    require(row.grouped == "none" and not (row.planes or row.skinny or row.gated), "of one kind")
    if row.arch == "simt":
        return
    require(row.schedule == "cooperative" and row.split_k == 1, "neither turns nor parts of k")
    require(row.cluster_n == 1, "whole slabs of B go to one block")


def _check_sm90(row: KernelConfig, require: Require) -> None:
    if row.streams_b:
        _check_streamed(row, require)
        return
    require(row.loader == "tma", "loader must be tma or tma_turned")
    require(row.stages >= 3, "the ring needs at least 3 stages")
    require(
        not row.promote
        or row.skinny
        or (
            row.element_bytes <= 2
            and row.split_k == 1
            and row.tile_m * row.tile_n // row.warps_m
            <= (64 * 48 if row.element_bytes == 1 else 64 * 32)
        ),
        "promoting takes two more sets of accumulators, of products of 8 bits one",
    )
    if row.planes:
        _check_planes(row, require)
    require(row.arithmetic.wgmma, "sums of wgmma are float32, or int32")
    require(row.tile_k * row.element_bytes == 128, "tile_k must span 128 bytes")
    require(row.warps_n == 1 and row.warps_m % 4 == 0, "warpgroups share a tile along m")
    require(row.tile_m % (16 * row.warps_m) == 0, "a warpgroup computes 64 rows at a time")
    require(
        row.consumer_warps <= 8
        or (row.consumer_warps == 12 and row.element_bytes == 2 and row.tile_n <= 192),
        "three consumer warpgroups have 160 registers a thread, and no fragments of A",
    )
    if row.skinny:
        _check_skinny(row, require)
        return
    if row.swap_ab:
        _check_swap_ab(row, require)
    require(
        row.epilogue == "any" or row.element_bytes <= 2,
        "some layouts of float32 operands are swapped, which takes any epilogue's code",
    )
    unit = 8 if row.swap_ab else 32
    require(row.tile_n % unit == 0 and row.tile_n <= 256, f"tile_n must be a multiple of {unit}")
    require(row.schedule in ("cooperative", "pingpong"), "unknown schedule")
    require(row.split_k in (1, 2, 4, 8), "split_k must be 1, 2, 4 or 8")
    require(row.cluster_size <= 8, "a cluster has at most 8 blocks")
    if row.split_k > 1:
        require(row.schedule == "cooperative", "pingpong does not split k")
        require(row.epilogue == "any", "what adds up has every epilogue")
        require(row.tile_m % row.split_k == 0, "each block finishes a share of the rows")
        require(
            row.tile_m * row.tile_n * 4 <= row.stages * (row.tile_m + row.tile_n) * 128,
            "the accumulators must fit in the ring",
        )
        require(128 % (row.tile_n // 4) == 0, "tile_n must be a power of two")
    if row.gated:
        require(row.epilogue == "any" or row.arithmetic.at_run_time, "gating is an epilogue")
        require(
            row.element_bytes <= 2 and row.split_k == 1,
            "gated rows are of 16 bits or fewer, unsplit",
        )
        require(row.tile_n % 128 == 0, "half of tile_n must be a multiple of 64")
    require(row.grouped in ("none", "m", "k"), "unknown grouped")
    if row.grouped != "none":
        require(
            row.element_bytes <= 2 and row.split_k == 1,
            "grouped rows are of 16 bits or fewer, unsplit",
        )
        require(not row.gated, "grouped rows have one weight")
    if row.grouped == "k":
        require(row.epilogue == "none", "groups of k have no epilogue")
        require(row.tile_m % 64 == 0 and row.tile_n % 64 == 0, "tiles must be whole slabs")
    for extent, sharers in ((row.tile_m, row.cluster_n), (row.tile_n, row.cluster_m)):
        require(sharers in (1, 2, 4), "a cluster shares an operand by 1, 2 or 4")
        require(extent % sharers == 0, "a cluster shares whole rows of an operand")


def _check_swap_ab(row: KernelConfig, require: Require) -> None:
    require(row.element_bytes == 2, "float32 operands are swapped as their layouts need it")
    require(
        row.split_k == 1
        and row.epilogue != "any"
        and not (row.promote or row.gated or row.grouped != "none"),
        "rows that swap operands compute products, with a bias at most",
    )


def _check_skinny(row: KernelConfig, require: Require) -> None:
    require(row.element_bytes <= 2, "float32 operands have layouts of their own")
    require(
        row.element_bytes == 2 or not (row.promote or row.arithmetic.promotes),
        "a kernel scaled by blocks is not skinny, and has the rows that promote",
    )
    require(
        row.arithmetic.a == row.arithmetic.b,
        "the kernel calls the longer operand A, which is B if there are few rows",
    )
    require(row.tile_n in (16, 32, 64), "a skinny tile_n is 16, 32 or 64")
    require(row.epilogue != "sum", "a skinny kernel has no epilogue or any")
    require(
        not row.gated or (row.tile_m % 128 == 0 and row.epilogue == "none"),
        "half of tile_m must be a multiple of 64, and two weights take functions only",
    )
    require(row.grouped == "none" and not row.swap_ab, "skinny rows have neither groups nor D^T")
    require(row.warps_m == 4, "a skinny kernel has one consumer warpgroup")
    require(row.schedule == "cooperative", "a lone warpgroup has no other to alternate with")
    require(row.cluster_m == row.cluster_n == 1, "skinny blocks share no operand")
    require(row.split_k in (1, 2, 4, 8), "split_k must be 1, 2, 4 or 8")
    require(4 * row.split_k <= row.tile_n, "each block finishes a share of the sums")
    require(
        not row.promote or row.tile_m * row.tile_n <= 64 * 128,
        "promoting takes a second set of accumulators, of at most 64",
    )
    require(
        row.tile_m <= 128 or 4 * row.split_k < row.tile_n,
        "half of every 16 rows is read in one pass, of 128 rows at most",
    )
