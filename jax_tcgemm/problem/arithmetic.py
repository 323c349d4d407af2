"""Chooses the types in which a product is multiplied, accumulated and finished."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithmPreset, Precision

from jax_tcgemm.kernels.arithmetic import (
    ALL_ARITHMETIC,
    ARITHMETIC,
    PLANE_PRODUCTS,
    RUN_TIME_ARITHMETIC,
    Arithmetic,
    PlaneProduct,
)

# The element type of a and b in each row of the table.
INPUT_DTYPES: dict[str, np.dtype] = {row.name: jnp.dtype(row.a.name) for row in ARITHMETIC.values()}


def written_dtype(algorithm: str, out: np.dtype) -> np.dtype:
    """Returns the type in which a kernel writes D, before a conversion to ``out``."""
    written = [jnp.dtype(each.name) for each in ARITHMETIC[algorithm].outputs]
    return out if out in written else written[-1]


def sum_dtype(algorithm: str) -> np.dtype:
    """Returns the type of the accumulators."""
    return jnp.dtype(ALL_ARITHMETIC[algorithm].accumulator.name)


def _writing(rows: list[Arithmetic], out: np.dtype) -> Arithmetic | None:
    """Returns the first row that writes ``out``, or else the first row.

    All rows multiply in the same way.
    """
    own = (row for row in rows if written_dtype(row.name, out) == out)
    return next(own, rows[0] if rows else None)


def _named(name: str, out: np.dtype) -> Arithmetic | None:
    """Returns a row that multiplies as the preset says, if possible one writing ``out``."""
    preset = ARITHMETIC.get(name)
    if preset is None:
        return None
    how = (preset.a, preset.b, preset.accumulator, preset.multiplied)
    rows = [
        row for row in ARITHMETIC.values() if (row.a, row.b, row.accumulator, row.multiplied) == how
    ]
    return _writing(rows, out)


def types_of_parts(a: np.dtype, b: np.dtype, out: np.dtype) -> tuple[np.dtype, np.dtype, np.dtype]:
    """Returns the types of the real products that compute a product of these types.

    Args:
        a: dtype of ``a``.
        b: dtype of ``b``.
        out: dtype of the result.

    Returns:
        float32 if all types are complex64; otherwise the types themselves.
    """
    if a == b == out == jnp.complex64:
        part = jnp.dtype(jnp.float32)
        return part, part, part
    return a, b, out


def resolve_algorithm(a: np.dtype, b: np.dtype, out: np.dtype, precision: Any) -> str | None:
    """Returns the kernel algorithm that computes a gemm, ``None`` if XLA must.

    Args:
        a: dtype of ``a``.
        b: dtype of ``b``.
        out: dtype of the result.
        precision: canonical ``lax`` precision.

    Returns:
        The name of a row in the table of arithmetic. If ``precision`` is a ``DotAlgorithmPreset``,
        it takes floating-point operands of any type and converts them to its own. Otherwise the
        operands' common type decides, as in XLA's GPU compiler: float32 is computed in TF32 unless
        the caller asks for ``Precision.HIGHEST``. XLA computes the product of a float16 and a
        bfloat16 operand. TF32 holds both without rounding, but XLA's sums are more accurate than
        those of the kernels. Only rounded operands hide this difference.
    """
    if not jnp.issubdtype(out, jnp.floating) or out.itemsize > 4:
        return None
    if isinstance(precision, DotAlgorithmPreset) and precision is not DotAlgorithmPreset.DEFAULT:
        are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (a, b))
        row = _named(precision.name, out)
        return row.name if row is not None and are_floats else None
    if is_float8(a) or is_float8(b):
        return None
    common = common_dtype(a, b)
    defaults = (row for row in ARITHMETIC.values() if row.is_default)
    row = _writing([row for row in defaults if INPUT_DTYPES[row.name] == common], out)
    if row is None or (row.rounds_operands and common not in (a, b)):
        return None
    if precision is DotAlgorithmPreset.DEFAULT:
        return row.name
    if not isinstance(precision, tuple) or not all(isinstance(p, Precision) for p in precision):
        return None
    if row.rounds_operands and Precision.HIGHEST in precision:
        return None
    return row.name


# Presets of 8-bit floats, and whether they add up parts of k in float32.
_PROMOTES = {
    "ANY_F8_ANY_F8_F32": True,
    "ANY_F8_ANY_F8_ANY": True,
    "ANY_F8_ANY_F8_F32_FAST_ACCUM": False,
    "ANY_F8_ANY_F8_ANY_FAST_ACCUM": False,
    "DEFAULT": False,
}


def resolve_run_time(a: np.dtype, b: np.dtype, out: np.dtype, precision: Any) -> str | None:
    """Returns the arithmetic of 8-bit operands, whose kernels are compiled at run time.

    Args:
        a: dtype of ``a``.
        b: dtype of ``b``.
        out: dtype of the result; int32 for integers.
        precision: canonical ``lax`` precision. As in XLA, sums are those of the tensor cores by
            default, and a higher precision promotes them.

    Returns:
        The name of a row in the table of arithmetic, ``None`` if there is none.
    """
    names = (np.dtype(a).name, np.dtype(b).name)
    rows = [x for x in RUN_TIME_ARITHMETIC.values() if (x.a.name, x.b.name) == names]
    if not rows:
        return None
    if rows[0].accumulator.name == "int32":
        return rows[0].name if out == jnp.int32 else None
    if not jnp.issubdtype(out, jnp.floating) or out.itemsize > 4:
        return None
    if isinstance(precision, DotAlgorithmPreset):
        promotes = _PROMOTES.get(precision.name)
    elif isinstance(precision, tuple) and all(isinstance(p, Precision) for p in precision):
        promotes = any(p is not Precision.DEFAULT for p in precision)
    else:
        return None
    return next((row.name for row in rows if row.promotes == promotes), None)


def is_quantized(a: np.dtype, b: np.dtype) -> bool:
    """Checks if there is arithmetic for these types: two 8-bit floats, or two int8."""
    names = (np.dtype(a).name, np.dtype(b).name)
    return any((row.a.name, row.b.name) == names for row in RUN_TIME_ARITHMETIC.values())


def resolve_planes(a: np.dtype, b: np.dtype, out: np.dtype, precision: Any) -> PlaneProduct | None:
    """Returns the products of planes that compute a float32 gemm, ``None`` if none do.

    Args:
        a: dtype of ``a``.
        b: dtype of ``b``.
        out: dtype of the result.
        precision: canonical ``lax`` precision: ``Precision.HIGHEST`` for either operand, or a
            preset that names a row of ``PLANE_PRODUCTS``. A preset takes narrower floats as well.
    """
    if not jnp.issubdtype(out, jnp.floating) or out.itemsize > 4:
        return None
    if isinstance(precision, DotAlgorithmPreset):
        floats = all(jnp.issubdtype(x, jnp.floating) and x.itemsize <= 4 for x in (a, b))
        return PLANE_PRODUCTS.get(precision.name) if floats else None
    is_highest = isinstance(precision, tuple) and Precision.HIGHEST in precision
    return PLANE_PRODUCTS["F32_F32_F32"] if is_highest and a == b == jnp.float32 else None


def common_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """Returns the dtype in which operands are multiplied, after a check accepted them.

    It also promotes under ``jax_numpy_dtype_promotion="strict"``: operands of derivatives may
    differ in type although the user's operands do not. JAX promotes neither 8-bit floats nor
    numbers of fewer than 8 bits. These floats count as float32, such integers as 8-bit integers.
    """
    if a == b:
        return jnp.dtype(a)
    a, b = map(_promotable, (a, b))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(jnp.promote_types(a, b))


def _promotable(dtype: np.dtype) -> np.dtype:
    if is_float8(dtype):
        return jnp.dtype(jnp.float32)
    return at_least_8_bits(dtype)


def at_least_8_bits(dtype: np.dtype) -> np.dtype:
    """Returns the dtype; int8, uint8 or float32 for numbers of fewer bits, such as int4."""
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype if jnp.finfo(dtype).bits >= 8 else jnp.dtype(jnp.float32)
    if not jnp.issubdtype(dtype, jnp.integer) or jnp.iinfo(dtype).bits >= 8:
        return dtype
    is_signed = jnp.issubdtype(dtype, jnp.signedinteger)
    return jnp.dtype(jnp.int8 if is_signed else jnp.uint8)


def is_float8(dtype: np.dtype) -> bool:
    """Checks if this is one of the 8-bit floats, which XLA multiplies as they are."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 8


def accumulator_dtype(a: np.dtype, b: np.dtype, out: np.dtype) -> np.dtype:
    """Returns the dtype of the product and the epilogue, before the one rounding.

    It is at least float32 for an inexact result, and the result's own type for integers and
    booleans.
    """
    if not jnp.issubdtype(out, jnp.inexact):
        return out
    wide = at_least_float32(out)
    for operand in (a, b):
        if jnp.issubdtype(operand, jnp.inexact):
            wide = common_dtype(wide, at_least_float32(operand))
    return jnp.dtype(wide)


def at_least_float32(dtype: np.dtype) -> np.dtype:
    """Returns an inexact ``dtype``, or float32 if it is narrower or no inexact type."""
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    is_wide = jnp.issubdtype(dtype, jnp.complexfloating) or dtype.itemsize >= 4
    return jnp.dtype(dtype if is_inexact and is_wide else jnp.float32)
