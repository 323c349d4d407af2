"""The problem for which the extension ranks rows of the kernel table."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ChoiceInput:
    """A product and a device, as in ``ChoiceInput`` of ``cuda/dispatch/heuristic.h``.

    Attributes:
        algorithm: the name of the arithmetic, such as ``"BF16_BF16_F32"``.
        m: rows of the result; for a ragged product, rows of each group.
        n: columns of the result.
        k: the contraction dimension.
        batch: the number of products.
        aligned: whether TMA and ``cp.async`` can address both operands.
        sm_count: the number of streaming multiprocessors.
        shared_memory_per_block: the most shared memory of a block, in bytes.
        float32_result: whether the result has the wider of its possible types. For an epilogue that
            is compiled at run time, ``shows_sums`` takes its place.
        compute_capability: ten times the major number, plus the minor one.
        layout: ``"n"`` or ``"t"`` for each operand, ``"t"`` if it is transposed.
        workspace_bytes: memory for partial results over parts of k.
        epilogue: what follows the product: ``"none"``, ``"sum"`` (C, bias) or ``"any"``.
        gated: whether the product has two weights.
        grouped: ``"m"`` if the rows are divided into groups, ``"k"`` if the contraction dimension
            is, else ``"none"``.
        max_cluster_size: the most blocks of a cluster that fit on the device; 0 if any do.
        batch_rank: the number of batch dimensions.
        row_alignment_a: the largest power of two, up to 128, that divides the row stride of A, in
            bytes.
        row_alignment_b: the same for B.
        d_by_tma: whether TMA can write the result.
        has_c: whether the product has an addend C.
        c_by_tma: whether TMA can read C.
        compiled: whether the epilogue is compiled at run time.
        reduces: whether such an epilogue reduces blocks of 16 x 16 results.
        shows_sums: whether its results show the last bits of the sums, which may need promotion.
        run_time_rows: whether kernels that the build lacks may be compiled.
        tma_addressable: whether TMA can address both operands; ``None`` if ``aligned`` says it.
    """

    algorithm: str
    m: int
    n: int
    k: int
    batch: int
    aligned: bool
    sm_count: int
    shared_memory_per_block: int
    float32_result: bool = False
    compute_capability: int = 80
    layout: str = "nn"
    workspace_bytes: int = 0
    epilogue: str = "none"
    gated: bool = False
    grouped: str = "none"
    max_cluster_size: int = 0
    batch_rank: int = 0
    row_alignment_a: int = 128
    row_alignment_b: int = 128
    d_by_tma: bool = True
    has_c: bool = False
    c_by_tma: bool = True
    compiled: bool = False
    reduces: bool = False
    shows_sums: bool = False
    run_time_rows: bool = True
    tma_addressable: bool | None = None
