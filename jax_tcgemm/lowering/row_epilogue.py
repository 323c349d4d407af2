"""Whether a row of the kernel table has the epilogue of a gemm for which it is named."""

from __future__ import annotations

import numpy as np

from jax_tcgemm.kernels.config import KernelConfig
from jax_tcgemm.problem.alignment import COPY_BYTES
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, StridedGemm


def lacks_epilogue(row: KernelConfig, gemm: StridedGemm, x: Operands, spec: GemmSpec) -> bool:
    """Says whether the product is the row's and its epilogue cannot be.

    As ``has_epilogue`` of ``cuda/dispatch/heuristic.cc``, but for addresses, which are known at
    run time.

    Args:
        row: the row that is named.
        gemm: the folded gemm.
        x: the operands.
        spec: the primitive's parameters, ``out_dtype`` being what the kernel writes.

    Returns:
        False as well for a row that cannot leave the product in float32, for an epilogue to be
        computed from: one that swaps operands. Another takes its place.
    """
    if row.has_every(spec.work) or row.swap_ab:
        return False
    if row.skinny or spec.work == "any":
        return True
    width = spec.out_dtype.itemsize
    if gemm.n * width % COPY_BYTES:
        return x.c is not None
    widens = width != row.element_bytes
    return row.epilogue == "none" or widens or not c_by_tma(gemm, x.c, spec.out_dtype)


def c_by_tma(gemm: StridedGemm, c: np.ndarray | None, dtype: np.dtype) -> bool:
    """Says whether TMA can read ``c``, if there is one: as ``cuda/sm90/tma_descriptor.cc``."""
    if c is None:
        return True
    *batch, stride_m, stride_n = gemm.strides.c
    whole = all(stride * dtype.itemsize % COPY_BYTES == 0 for stride in (*batch, stride_m))
    return c.dtype == dtype and len(batch) <= 1 and stride_n == 1 and stride_m > 0 and whole
