"""In which element types a product is multiplied, accumulated and finished."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithmPreset, Precision

# The element type of a and b in each kernel algorithm.
INPUT_DTYPES: dict[str, np.dtype] = {
    "BF16_BF16_F32": jnp.dtype(jnp.bfloat16),
    "F16_F16_F32": jnp.dtype(jnp.float16),
    "F16_F16_F16": jnp.dtype(jnp.float16),
    "TF32_TF32_F32": jnp.dtype(jnp.float32),
}

# What the default arithmetic on each input type is.
_DEFAULT_ALGORITHMS = {
    jnp.dtype(jnp.bfloat16): "BF16_BF16_F32",
    jnp.dtype(jnp.float16): "F16_F16_F32",
    jnp.dtype(jnp.float32): "TF32_TF32_F32",
}


def resolve_algorithm(a: np.dtype, b: np.dtype, out: np.dtype, precision: Any) -> str | None:
    """Returns the kernel algorithm that computes a gemm, ``None`` where XLA's own product must.

    Args:
        a: dtype of ``a``.
        b: dtype of ``b``.
        out: dtype of the result.
        precision: canonical ``lax`` precision.

    Returns:
        The name of a ``DotAlgorithmPreset`` for which there are kernels. Named explicitly as
        ``precision`` it takes floating-point operands of any type, converted to its own;
        otherwise the operands' common type decides, as in XLA's GPU compiler: float32 is computed
        in TF32 unless ``Precision.HIGHEST`` is asked for. The product of a float16 and a bfloat16
        operand, both of which TF32 holds as they are, is XLA's own: its sums are more accurate
        than those of the kernels, which only operands that were rounded hide.
    """
    if not jnp.issubdtype(out, jnp.floating) or out.itemsize > 4:
        return None
    if isinstance(precision, DotAlgorithmPreset) and precision is not DotAlgorithmPreset.DEFAULT:
        are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (a, b))
        return precision.name if precision.name in INPUT_DTYPES and are_floats else None
    if is_float8(a) or is_float8(b):
        return None
    algorithm = _DEFAULT_ALGORITHMS.get(common_dtype(a, b))
    if algorithm == "TF32_TF32_F32" and jnp.float32 not in (a, b):
        return None
    if precision is DotAlgorithmPreset.DEFAULT:
        return algorithm
    if not isinstance(precision, tuple) or not all(isinstance(p, Precision) for p in precision):
        return None
    if algorithm == "TF32_TF32_F32" and Precision.HIGHEST in precision:
        return None
    return algorithm


def common_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """Returns the dtype in which operands are multiplied that were accepted before.

    Under ``jax_numpy_dtype_promotion="strict"`` too: operands of derivatives may differ in type
    where the user's do not. An 8-bit float, which JAX promotes with nothing, counts as float32.
    """
    if a == b:
        return jnp.dtype(a)
    a, b = (jnp.dtype(jnp.float32) if is_float8(dtype) else dtype for dtype in (a, b))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(jnp.promote_types(a, b))


def is_float8(dtype: np.dtype) -> bool:
    """Whether this is one of the 8-bit floats, which XLA multiplies as they are."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


def accumulator_dtype(a: np.dtype, b: np.dtype, out: np.dtype) -> np.dtype:
    """Returns the dtype in which the product and the epilogue are computed, before one rounding.

    At least float32 for an inexact result, the result's own type for integers and booleans.
    """
    if not jnp.issubdtype(out, jnp.inexact):
        return out
    wide = at_least_float32(out)
    for operand in (a, b):
        if jnp.issubdtype(operand, jnp.inexact):
            wide = common_dtype(wide, at_least_float32(operand))
    return jnp.dtype(wide)


def at_least_float32(dtype: np.dtype) -> np.dtype:
    """Returns an inexact ``dtype``, or float32 for the narrower ones."""
    is_wide = jnp.issubdtype(dtype, jnp.complexfloating) or dtype.itemsize >= 4
    return jnp.dtype(dtype if is_wide else jnp.float32)
