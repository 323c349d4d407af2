"""Checks if a row of the kernel table has the epilogue of the gemm that names it."""

from __future__ import annotations

import numpy as np

from jax_tcgemm.kernels.config import KernelConfig
from jax_tcgemm.problem.alignment import COPY_BYTES
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, StridedGemm


def lacks_epilogue(row: KernelConfig, gemm: StridedGemm, x: Operands, spec: GemmSpec) -> bool:
    """Checks if the named row can compute the product but not its epilogue.

    This is ``has_epilogue`` of ``cuda/dispatch/heuristic.cc``, except for addresses, which are
    known only at run time.

    Args:
        row: the row that is named.
        gemm: the folded gemm.
        x: the operands.
        spec: the primitive's parameters; ``out_dtype`` is what the kernel writes.

    Returns:
        False also for a row that swaps operands: it cannot leave the product in float32 for a
        separate epilogue. Another row takes its place.
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
    """Checks if TMA can read ``c`` or there is none, as in ``cuda/sm90/tma_descriptor.cc``."""
    if c is None:
        return True
    *batch, stride_m, stride_n = gemm.strides.c
    whole = all(stride * dtype.itemsize % COPY_BYTES == 0 for stride in (*batch, stride_m))
    return c.dtype == dtype and len(batch) <= 1 and stride_n == 1 and stride_m > 0 and whole
