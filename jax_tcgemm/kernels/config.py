"""A kernel configuration: a row of the kernel table, as in ``cuda/kernel_config.h``.

This module imports only the standard library, so that the build can run it before anything is
installed.
"""

from __future__ import annotations

import dataclasses

from jax_tcgemm.kernels import checks
from jax_tcgemm.kernels.arithmetic import ALL_ARITHMETIC, Arithmetic


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """One kernel configuration.

    Attributes:
        arch: kernel family: ``"sm90"`` (TMA, mbarrier, wgmma), ``"sm80"`` (cp.async, ldmatrix,
            mma.sync), ``"sm75"`` (only ldmatrix and mma.sync) or ``"simt"`` (float32 FMA, for
            products too small for a pipeline, or if no other row fits: see ``is_fallback``).
        algorithm: name of the row in the table of arithmetic.
        tile_m: rows of D that one thread block computes.
        tile_n: columns of D that one thread block computes.
        tile_k: elements of k in one stage of the shared-memory ring; simt: in one trip to memory.
        warps_m: warps of a tile along m; a warp computes ``tile_m / warps_m`` rows.
        warps_n: warps of a tile along n; a warp computes ``tile_n / warps_n`` columns.
        stages: stages of the shared-memory ring.
        loader: how the kernel loads operands:

            - ``"cp_async"`` copies 16-byte chunks asynchronously. It needs operands whose base,
              strides and contiguous extent are multiples of 16 bytes.
            - ``"register"`` (sm75) copies such operands through registers.
            - ``"realign"`` copies through registers, too, and takes any alignment.
            - ``"direct"`` loads from global memory to registers. In simt it takes any alignment,
              without shared memory; in sm80 the operands of ``"cp_async"``, for little work.
            - ``"tma"`` (sm90) copies boxes. It needs a base and strides that are multiples of 16
              bytes.
            - ``"tma_turned"`` (sm90) does the same for few rows and an 8-bit B that is contiguous
              along n (see ``streams_b``).
        promote: add up the products of some k-tiles separately, and add these sums in float32. The
            tensor cores truncate sums instead of rounding them, which a float32 result of 16-bit
            operands would show. A row's name ends with ``promote``, except the names of skinny,
            streamed and direct rows.
        planes: A and B are bfloat16 planes of float32 operands, and nothing else (sm90).
        pairs: B is complex. It stands for a real matrix of twice its extents along k and n (sm90,
            where n is contiguous; simt).
        cluster_m: blocks along m that share one load of their columns of B (sm90).
        cluster_n: blocks along n that share one load of their rows of A (sm90).
        split_k: blocks that share the k of one tile and add up their accumulators in a fixed order
            (sm80, sm90). In direct sm80 rows, warps of one block share it instead.
        schedule: ``"cooperative"``: all consumer warps compute one tile; ``"pingpong"`` (sm90):
            two warpgroups compute a tile each, and one multiplies while the other writes.
        gated: half of ``tile_n`` is columns of one weight, half is columns of the other, and D has
            as many columns as one weight (sm90, simt). In skinny rows it is half of ``tile_m``,
            which then goes along n.
        skinny: for few rows or few columns (sm90): ``tile_m`` goes along the longer of m and n,
            whichever operand that belongs to, and ``tile_n`` along the shorter.
        grouped: the dimension that consecutive groups divide; only the device knows their sizes
            (sm90, simt). ``"none"``: there are no groups. ``"m"``: the rows of A and D, so that
            each group has its own B (``lax``: ragged non-contracting). ``"k"``: the contraction
            dimension, so that each group makes its own D (``lax``: ragged contracting).
        swap_ab: the kernel computes D^T = B^T A^T (sm90): ``tile_m`` and ``cluster_m`` go along n,
            ``tile_n`` and ``cluster_n`` along m. Such a row needs an A whose k is contiguous.
            Without a function it also needs a D of the operands' type whose rows are multiples of
            16 bytes. Another row computes all other products that ask for this row.
        epilogue: the epilogues that the kernel has. They are most of its code and of its compile
            time:

            - ``"none"`` (sm90): D is the product.
            - ``"sum"`` (sm75, sm80, sm90): also ``alpha * product + bias + beta * C``. sm90 rows
              have only unrolled code for it: D has the operands' type, and the rows of D and C are
              multiples of 16 bytes. Rows that swap operands take no C.
            - ``"any"``: every epilogue.

            If the rows of D are not multiples of 16 bytes, sm90 rows with ``"none"`` or ``"sum"``
            can still add a bias, but no C. Exceptions: skinny and grouped rows, and swapped
            operands.
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
    planes: bool = False
    pairs: bool = False
    cluster_m: int = 1
    cluster_n: int = 1
    split_k: int = 1
    schedule: str = "cooperative"
    gated: bool = False
    skinny: bool = False
    grouped: str = "none"
    swap_ab: bool = False
    epilogue: str = "any"

    def __post_init__(self) -> None:
        checks.check(self)

    @property
    def arithmetic(self) -> Arithmetic:
        return ALL_ARITHMETIC[self.algorithm]

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of A or B."""
        return self.arithmetic.a.bytes

    @property
    def instruction_k(self) -> int:
        """Elements of k that the tensor cores add up before they round the sum."""
        return self.arithmetic.k // 2 if self.arch == "sm75" else self.arithmetic.k

    @property
    def tag(self) -> str:
        """The algorithm's name inside a row's name."""
        return self.arithmetic.tag

    @property
    def copies_whole_chunks(self) -> bool:
        """Returns true if operands must be addressed in multiples of 16 bytes."""
        return self.is_direct or self.loader in ("cp_async", "register", "tma", "tma_turned")

    @property
    def is_fallback(self) -> bool:
        """Returns true if the row is slow, and used only if no other row computes a product."""
        return self.arch == "simt" and (self.gated or self.pairs or self.grouped != "none")

    def has_every(self, work: str) -> bool:
        """Checks if the row has all epilogues of this work, for any operands and layouts.

        Args:
            work: ``"none"``, ``"sum"`` or ``"any"``, as for ``epilogue``.
        """
        adds = work == "sum" and self.arch in ("sm75", "sm80")
        return work == "none" or self.epilogue == "any" or adds

    @property
    def goes_by_name(self) -> bool:
        """Returns true if ``config=`` may name the row: it takes operands that users give."""
        return not (self.planes or self.pairs)

    @property
    def streams_b(self) -> bool:
        """Returns true if the row reads an 8-bit B contiguous along n, for few rows of A."""
        return self.loader == "tma_turned"

    @property
    def is_direct(self) -> bool:
        """Returns true if the row is for little work: ``mma.sync`` without stages or copies."""
        return self.arch == "sm80" and self.loader == "direct"

    @property
    def rounds_sums(self) -> bool:
        """Returns true if float32 results of 16-bit operands are as accurate as float32 sums."""
        return self.promote or self.planes or self.arch == "simt"

    @property
    def output_n(self) -> int:
        """Columns of D in a tile."""
        return self.tile_n // 2 if self.gated and not self.skinny else self.tile_n

    @property
    def warp_m(self) -> int:
        return self.tile_m // self.warps_m

    @property
    def warp_n(self) -> int:
        return self.tile_n // self.warps_n

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n * self.split_k

    @property
    def consumer_warps(self) -> int:
        """Warps that multiply."""
        return self.warps_m * self.warps_n * (2 if self.schedule == "pingpong" else 1)

    @property
    def name(self) -> str:
        """The row's name: a file name, the custom call's ``config`` and a test id."""
        tile = f"{self.arch}_{self.tag}_{self.tile_m}x{self.tile_n}x{self.tile_k}"
        kinds = "_gated" if self.gated else ""
        kinds += f"_grouped_{self.grouped}" if self.grouped != "none" else ""
        if self.arch == "sm90":
            cluster = f"_c{self.cluster_m}x{self.cluster_n}"
            split = f"_k{self.split_k}" if self.split_k > 1 else ""
            kind = "skinny" if self.skinny else "streamed" if self.streams_b else self.schedule
            promote = "_promote" if self.promote and kind == self.schedule else ""
            promote += "_planes" if self.planes else "_pairs" if self.pairs else ""
            swap_ab = "_swap_ab" if self.swap_ab else ""
            return f"{tile}_s{self.stages}{cluster}{split}_{kind}{kinds}{promote}{swap_ab}"
        if self.is_direct:
            return f"{tile}_k{self.split_k}_direct"
        suffix = "_realign" if self.loader == "realign" else ""
        suffix += "_promote" if self.promote else "_pairs" if self.pairs else ""
        return f"{tile}_w{self.warps_m}x{self.warps_n}_s{self.stages}{suffix}{kinds}"
