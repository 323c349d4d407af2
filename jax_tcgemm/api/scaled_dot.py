"""``scaled_dot`` and products of ``Quantized`` arrays of any dimensions, as one ``gemm``."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments, eager
from jax_tcgemm.api.gemm import gemm
from jax_tcgemm.api.scaled_matrices import DimensionNumbers, matrices
from jax_tcgemm.problem.arithmetic import common_dtype
from jax_tcgemm.problem.strides import Shape
from jax_tcgemm.quantized import arrays
from jax_tcgemm.quantized.scaled_array import ScaledArray

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# The largest k for which sums of products of differences of int8 values are exact in int32.
_MOST_EXACT_K = (2**31 - 1) // 255**2


def scaled_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    *,
    lhs_scale: ArrayLike | None = None,
    rhs_scale: ArrayLike | None = None,
    dimension_numbers: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Product of scaled 8-bit operands: ``(lhs * lhs_scale) @ (rhs * rhs_scale)``.

    The function has the arguments of ``jax.lax.scaled_dot`` and takes more shapes of scales: each
    element of a scale applies to one block of its operand.

    ``gemm`` multiplies float8 pairs (e4m3fn and e5m2 in any pairing) and int8 pairs directly. Sums
    of float8 are promoted (``precision="highest"``). The documentation of ``gemm`` says which
    scales its kernels apply; these are float32 numbers (``lax`` rounds them, and scaled operands,
    to bfloat16). ``gemm`` dequantizes operands with other scales first.

    Other pairs are dequantized to the dtype of the operand that has more than 8 bits, or else to
    the result's dtype.

    Operands are read in place if batch dimensions come first, then the free and the contracted ones
    in either order. Otherwise they are copied.

    Cotangents of 8-bit operands are rounded to 8 bits, and those of the scales are 0. Scales of
    blocks raise ``TypeError`` when they are differentiated.

    Args:
        lhs: array of any rank.
        rhs: array of any rank.
        lhs_scale: factors of ``lhs``: one element, or an array of the rank of ``lhs`` whose extents
            divide those of ``lhs``. ``None`` means 1.
        rhs_scale: the same for ``rhs``.
        dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
            ``None`` means the product of ``(..., m, k)`` and ``(..., k, n)`` of the same rank,
            where the leading dimensions are the batch.
        preferred_element_type: dtype of the result; ``None`` means bfloat16.

    Returns:
        An array with the batch dimensions, then the free dimensions of ``lhs``, then those of
        ``rhs``.

    Raises:
        TypeError: an argument's type or dtype is not accepted, or ``dimension_numbers`` does not
            fit the shapes.
        ValueError: a scale's shape does not fit.

    Example:
        >>> p = quantize(x, jnp.int8, tile=(1, -1))  # a scale for each row
        >>> q = quantize(w, jnp.int8, tile=(-1, 1))  # a scale for each column
        >>> y = scaled_dot(p.qvalue, q.qvalue, lhs_scale=p.scale, rhs_scale=q.scale)
        >>> y.shape
        (8, 256)
    """
    lhs, rhs = arguments.array("lhs", lhs), arguments.array("rhs", rhs)
    dtype = jnp.bfloat16 if preferred_element_type is None else preferred_element_type
    return _scaled_dot(
        lhs,
        rhs,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        dims=dimension_numbers_of(dimension_numbers, lhs.shape, rhs.shape),
        dtype=jnp.dtype(dtype),
    )


@eager.one_program("dims", "dtype")
def _scaled_dot(
    lhs: jax.Array, rhs: jax.Array, *, lhs_scale: Any, rhs_scale: Any, dims: Any, dtype: np.dtype
) -> jax.Array:
    a, b = _with_scale("lhs", lhs, lhs_scale), _with_scale("rhs", rhs, rhs_scale)
    return _contracted(a, b, dims, "highest", dtype)


def _with_scale(name: str, value: jax.Array, scale: Any) -> ScaledArray:
    if scale is None:
        return ScaledArray(value)
    scale = arguments.array(f"{name}_scale", scale)
    scale = scale.reshape((1,) * value.ndim) if scale.size == 1 else scale
    arrays.check_divides(f"{name}_scale", scale.shape, name, value.shape)
    return ScaledArray(value, scale)


def quantized_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """``lax.dot_general`` of operands of which at least one is quantized.

    Two float8 or two int8 operands are multiplied directly and scaled, as in ``scaled_dot``.
    ``precision`` selects their sums, as in ``gemm``. Zero points of int8 are subtracted from the
    exact product if neither they nor scales change along the contracted dimensions and k is at most
    33025. Other pairs are dequantized as in ``scaled_dot``.

    Args:
        lhs: a ``Quantized``, an object with its fields such as qwix's ``QArray``, or an array.
        rhs: the same.
        dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
        precision: as in ``gemm``.
        preferred_element_type: dtype of the result. ``None`` means that of an operand that is not
            quantized and has more than 8 bits, or else the common dtype of the scales.

    Returns:
        An array with the batch dimensions, then the free dimensions of ``lhs``, then those of
        ``rhs``.

    Raises:
        TypeError: a type or dtype is not accepted, or ``dimension_numbers`` does not fit.
        ValueError: the shape of a scale or zero point does not fit.
    """
    lhs, rhs = (
        x if arrays.is_quantized(x) else arguments.array(name, x)
        for name, x in (("lhs", lhs), ("rhs", rhs))
    )
    shapes = [(x.qvalue if arrays.is_quantized(x) else x).shape for x in (lhs, rhs)]
    dtype = result_dtype(lhs, rhs) if preferred_element_type is None else preferred_element_type
    return _quantized_dot_general(
        lhs,
        rhs,
        dims=dimension_numbers_of(dimension_numbers, *shapes),
        precision=precision,
        dtype=jnp.dtype(dtype),
    )


@eager.one_program("dims", "precision", "dtype")
def _quantized_dot_general(
    lhs: Any, rhs: Any, *, dims: Any, precision: Any, dtype: np.dtype
) -> jax.Array:
    return _contracted(ScaledArray.of(lhs), ScaledArray.of(rhs), dims, precision, dtype)


def _contracted(
    lhs: ScaledArray, rhs: ScaledArray, dims: DimensionNumbers, precision: Any, dtype: np.dtype
) -> jax.Array:
    """Computes the product of two operands, of type ``dtype``."""
    if _compat.is_sharded(lhs.value, rhs.value):
        own = functools.partial(_contracted, dims=dims, precision=precision, dtype=dtype)
        values = (x.value.astype(jnp.float32) for x in (lhs, rhs))
        shardings = _compat.shardings_of(lambda a, b: lax.dot_general(a, b, dims), *values)
        return _compat.with_automatic_axes(own, (lhs, rhs), shardings)
    types = lhs.dtype, rhs.dtype
    is_native = is_native_pair(*types)
    has_zero_points = lhs.zero_point is not None or rhs.zero_point is not None
    is_corrected = is_native and has_zero_points and _is_exact(lhs, rhs, dims)
    if not is_native or (has_zero_points and not is_corrected):
        common = common_of(*types, dtype)
        lhs, rhs = (ScaledArray(x.dequantized(common)) for x in (lhs, rhs))
    shape = _result_shape(lhs.shape, rhs.shape, dims)
    sides = matrices(lhs, rhs, dims)
    if is_corrected:
        arguments.check_scaled(dtype)
        return _without_zero_points(*sides).astype(dtype).reshape(shape)
    (a, transpose_a), (b, transpose_b) = sides
    scales: dict[str, Any] = {
        name: x.scale.astype(jnp.float32)
        for name, x in {"a_scale": a, "b_scale": b}.items()
        if x.scale is not None and x.value.size  # no scale fits an empty operand
    }
    product = gemm(
        a.value,
        b.value,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        precision=precision,
        preferred_element_type=dtype,
        **scales,
    )
    return product.reshape(shape)


def is_native_pair(lhs: np.dtype, rhs: np.dtype) -> bool:
    """Checks if operands of these dtypes are multiplied without dequantization."""
    return lhs == rhs == jnp.int8 or all(x.name in _FLOAT8 for x in (lhs, rhs))


def common_of(lhs: np.dtype, rhs: np.dtype, result: np.dtype) -> np.dtype:
    """Returns the dtype in which operands without a kernel for their own dtypes are multiplied."""
    wide = [dtype for dtype in (lhs, rhs) if dtype.itemsize > 1]
    common = functools.reduce(common_dtype, wide) if wide else result
    return jnp.dtype(common if jnp.issubdtype(common, jnp.floating) else jnp.float32)


def result_dtype(lhs: Any, rhs: Any) -> np.dtype:
    """Returns the dtype of an operand of more than 8 bits, or else the scales' common one."""
    wide, scales = [], []
    for x in (lhs, rhs):
        if arrays.is_quantized(x):
            scales.append(x.scale.dtype)
        elif x.dtype.itemsize > 1:
            wide.append(x.dtype)
    dtypes = wide or [dtype for dtype in scales if dtype.itemsize > 1]
    return jnp.dtype(functools.reduce(common_dtype, dtypes) if dtypes else jnp.bfloat16)


def _without_zero_points(lhs: tuple[ScaledArray, bool], rhs: tuple[ScaledArray, bool]) -> jax.Array:
    """Computes an int8 product exactly, subtracts the zero points and applies the scales.

    ``(a - p) @ (b - q) = a @ b - p * sum(b) - sum(a) * q + k * p * q``. Each term may leave the
    range of int32, whose arithmetic is modulo 2^32; the total does not.
    """
    (a, transpose_a), (b, transpose_b) = lhs, rhs
    product = gemm(
        a.value,
        b.value,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        preferred_element_type=jnp.int32,
    )
    a_sums, p, a_scale = _rank_one(a, -2 if transpose_a else -1, transpose_a)
    b_sums, q, b_scale = _rank_one(b, -1 if transpose_b else -2, transpose_b)
    k = np.int32(a.shape[-2 if transpose_a else -1])
    exact = product - p * b_sums - a_sums * q + k * (p * q)
    return exact.astype(jnp.float32) * (a_scale * b_scale)


def _rank_one(x: ScaledArray, k_axis: int, is_transposed: bool) -> list[jax.Array]:
    """Returns sums along k, zero points and scales, ``(..., m, 1)`` or ``(..., 1, n)``."""
    sums = jnp.sum(x.value, k_axis, keepdims=True, dtype=jnp.int32)
    zero = jnp.zeros_like(sums) if x.zero_point is None else x.zero_point.astype(jnp.int32)
    scale = jnp.ones_like(sums) if x.scale is None else x.scale
    scale = scale.astype(jnp.float32)
    parts = [sums, *(arrays.spread(y, sums.shape) for y in (zero, scale))]
    return [jnp.swapaxes(y, -1, -2) if is_transposed else y for y in parts]


def _is_exact(lhs: ScaledArray, rhs: ScaledArray, dims: DimensionNumbers) -> bool:
    """Checks if ``_without_zero_points`` can compute the product of these operands."""
    zeros = [x.zero_point for x in (lhs, rhs) if x.zero_point is not None]
    is_constant = all(x.is_constant_along(*d) for x, d in zip((lhs, rhs), dims[0], strict=True))
    k = math.prod(lhs.shape[dim] for dim in dims[0][0])
    return is_constant and k <= _MOST_EXACT_K and all(zero.dtype == jnp.int8 for zero in zeros)


def dimension_numbers_of(given: Any, lhs: Shape, rhs: Shape) -> DimensionNumbers:
    """Returns dimension numbers as tuples of non-negative numbers, and checks that they fit."""
    if given is None:
        if len(lhs) != len(rhs) or len(lhs) < 2:
            raise TypeError(
                "without dimension_numbers lhs and rhs must have the same rank of at least 2, got "
                f"lhs.shape={lhs} and rhs.shape={rhs}"
            )
        batch = tuple(range(len(lhs) - 2))
        given = ((len(lhs) - 1,), (len(lhs) - 2,)), (batch, batch)
    dims = tuple(
        tuple(tuple(map(operator.index, np.ravel(side))) for side in pair) for pair in given
    )
    _result_shape(lhs, rhs, dims)
    return dims  # pyright: ignore[reportReturnType]


def _result_shape(lhs: Shape, rhs: Shape, dims: Any) -> Shape:
    """Returns the shape of the result after ``lax`` has checked everything."""
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lhs, rhs))
    return jax.eval_shape(lambda a, b: lax.dot_general(a, b, dims), a, b).shape
