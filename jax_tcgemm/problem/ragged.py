"""Specs of products over groups of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tcgemm.problem.epilogue import PLAIN, Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands


def dot(
    out_dtype: np.dtype,
    precision: Any,
    config: str | None = None,
    *,
    transpose_b: bool = False,
    has_bias: bool = False,
    epilogue: Epilogue = PLAIN,
) -> GemmSpec:
    """Returns the product of each group of rows and the group's matrix.

    Its operands are ``a`` ``(m, k)``, ``b`` ``(g, k, n)`` and ``group_sizes`` ``(g,)``, int32. The
    result is ``(m, n)``.

    Args:
        out_dtype: dtype of the results.
        precision: canonical ``lax`` precision.
        config: name of the requested kernel configuration, or ``None``.
        transpose_b: whether ``b`` is ``(g, n, k)``.
        has_bias: whether ``bias`` ``(g, n)`` is an operand.
        epilogue: the epilogue of each group's product, of the form ``"add"``.
    """
    b = (0, 2, 1) if transpose_b else (0, 1, 2)
    axes = Operands((None, 0, 1), b, (0,), bias=(0, 1) if has_bias else None)
    return GemmSpec(axes, out_dtype, precision, epilogue, config, grouped="m")


def contraction(out_dtype: np.dtype, precision: Any, config: str | None = None) -> GemmSpec:
    """Returns the product that contracts over the rows of each group.

    Its operands are ``a`` ``(k, m)``, ``b`` ``(k, n)`` and ``group_sizes`` ``(g,)``, int32. The
    result is ``(g, m, n)``. Arguments as in ``dot``.
    """
    axes = Operands((None, 1, 0), (None, 0, 1), (0,))
    return GemmSpec(axes, out_dtype, precision, config=config, grouped="k")
