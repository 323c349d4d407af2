"""``scaled_dot`` and products of ``Quantized`` arrays: any dimensions, as one ``gemm``."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm.api import arguments, eager, quantization
from jax_tcgemm.api import gemm as gemm_api
from jax_tcgemm.problem.strides import Shape

_Dims = tuple[int, ...]
_DimensionNumbers = tuple[tuple[_Dims, _Dims], tuple[_Dims, _Dims]]

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# Up to this k a sum of products of differences of int8 values is exact in int32.
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

    Has the arguments of ``jax.lax.scaled_dot`` and takes more shapes of scales: each element of a
    scale holds for a block of its operand. float8 operands (e4m3fn and e5m2 in any pairing) and
    int8 ones are multiplied as they are by ``gemm``, which says what scales its kernels apply. Sums
    of float8 are promoted (``precision="highest"``), and scales are float32 numbers, where ``lax``
    rounds both them and the scaled operands to bfloat16. Other pairs are dequantised: to the dtype
    of the operand that has more than 8 bits, else to the result's. Operands are read where they lie
    if batch dimensions come first, then the free and the contracted ones in either order; else they
    are copied. Operands of 8 bits are not differentiated.

    Args:
        lhs: array of any rank.
        rhs: array of any rank.
        lhs_scale: factors of ``lhs``, of its rank with extents that divide its own, or of one
            element. ``None`` is 1.
        rhs_scale: factors of ``rhs``, likewise.
        dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
            ``None`` is the product of ``(..., m, k)`` and ``(..., k, n)`` of the same rank, the
            leading dimensions being the batch.
        preferred_element_type: dtype of the result; ``None`` is bfloat16.

    Returns:
        The batch dimensions, then the free dimensions of ``lhs``, then those of ``rhs``.

    Raises:
        TypeError: an argument's type or dtype is not accepted, or ``dimension_numbers`` does not
            fit the shapes.
        ValueError: a scale's shape does not fit.
    """
    lhs, rhs = arguments.array("lhs", lhs), arguments.array("rhs", rhs)
    dtype = jnp.bfloat16 if preferred_element_type is None else preferred_element_type
    return _scaled_dot(
        lhs,
        rhs,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        dims=_dimension_numbers(dimension_numbers, lhs.shape, rhs.shape),
        dtype=jnp.dtype(dtype),
    )


@eager.one_program("dims", "dtype")
def _scaled_dot(
    lhs: jax.Array, rhs: jax.Array, *, lhs_scale: Any, rhs_scale: Any, dims: Any, dtype: np.dtype
) -> jax.Array:
    operands = []
    for name, value, scale in (("lhs", lhs, lhs_scale), ("rhs", rhs, rhs_scale)):
        if scale is not None:
            scale = arguments.array(f"{name}_scale", scale)
            scale = scale.reshape((1,) * value.ndim) if scale.size == 1 else scale
            quantization.check_divides(f"{name}_scale", scale.shape, name, value.shape)
        operands.append(_Scaled(value, scale))
    return _contracted(*operands, dims, "highest", dtype)


def quantized_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """``lax.dot_general`` of operands of which at least one is quantised.

    Two operands of float8 or two of int8 are multiplied as they are and scaled, as in
    ``scaled_dot``, with the sums that ``precision`` asks ``gemm`` for. Zero points of int8 are
    subtracted from the exact product if neither they nor scales change along the contracted
    dimensions and k is at most 33025. Other pairs are dequantised as in ``scaled_dot``.

    Args:
        lhs: a ``Quantized``, an object with its fields such as qwix's ``QArray``, or an array.
        rhs: the same.
        dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
        precision: as in ``gemm``.
        preferred_element_type: dtype of the result; ``None`` is the common one of the scales and
            of an operand that is not quantised.

    Returns:
        The batch dimensions, then the free dimensions of ``lhs``, then those of ``rhs``.

    Raises:
        TypeError: a type or dtype is not accepted, or ``dimension_numbers`` does not fit.
        ValueError: the shape of a scale or zero point does not fit.
    """
    lhs, rhs = (
        x if quantization.is_quantized(x) else arguments.array(name, x)
        for name, x in (("lhs", lhs), ("rhs", rhs))
    )
    shapes = [(x.qvalue if quantization.is_quantized(x) else x).shape for x in (lhs, rhs)]
    dtype = _result_dtype(lhs, rhs) if preferred_element_type is None else preferred_element_type
    return _quantized_dot_general(
        lhs,
        rhs,
        dims=_dimension_numbers(dimension_numbers, *shapes),
        precision=precision,
        dtype=jnp.dtype(dtype),
    )


@eager.one_program("dims", "precision", "dtype")
def _quantized_dot_general(
    lhs: Any, rhs: Any, *, dims: Any, precision: Any, dtype: np.dtype
) -> jax.Array:
    return _contracted(_Scaled.of(lhs), _Scaled.of(rhs), dims, precision, dtype)


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """An operand, its scale and its zero point, which are of its rank."""

    value: jax.Array
    scale: jax.Array | None = None
    zero_point: jax.Array | None = None

    @staticmethod
    def of(x: Any) -> _Scaled:
        """Returns the parts of a quantised operand; another one is its own value."""
        if not quantization.is_quantized(x):
            return _Scaled(x)
        for name in ("scale", "zero_point"):
            if getattr(x, name) is not None:
                shape = getattr(x, name).shape
                quantization.check_divides(name, shape, "qvalue", x.qvalue.shape)
        return _Scaled(x.qvalue, x.scale, x.zero_point)

    def map(self, function: Any) -> _Scaled:
        """Applies a function to each part that there is."""
        parts = (self.value, self.scale, self.zero_point)
        return _Scaled(*(None if x is None else function(x) for x in parts))

    def is_constant_along(self, dims: _Dims) -> bool:
        factors = [x for x in (self.scale, self.zero_point) if x is not None]
        return all(x.shape[dim] == 1 for x in factors for dim in dims)

    def dequantised(self, dtype: np.dtype) -> _Scaled:
        if self.scale is None:
            return _Scaled(self.value.astype(dtype))
        parts = quantization.Quantized(self.value, self.scale, self.zero_point)
        return _Scaled(parts.dequantize(dtype))


def _contracted(
    lhs: _Scaled, rhs: _Scaled, dims: _DimensionNumbers, precision: Any, dtype: np.dtype
) -> jax.Array:
    """Computes the product of two operands, of type ``dtype``."""
    types = lhs.value.dtype, rhs.value.dtype
    is_native = types == (jnp.int8, jnp.int8) or all(x.name in _FLOAT8 for x in types)
    has_zero_points = lhs.zero_point is not None or rhs.zero_point is not None
    is_corrected = is_native and has_zero_points and _is_exact(lhs, rhs, dims)
    if not is_native or (has_zero_points and not is_corrected):
        common = _common_dtype(*types, dtype)
        lhs, rhs = lhs.dequantised(common), rhs.dequantised(common)
    shape = _result_shape(lhs.value.shape, rhs.value.shape, dims)
    sides = _matrices(lhs, rhs, dims)
    if is_corrected:
        return _without_zero_points(*sides).astype(dtype).reshape(shape)
    (a, transpose_a), (b, transpose_b) = sides
    operands = {"a_scale": a, "b_scale": b}
    scales = {name: x.scale for name, x in operands.items() if x.value.size}
    return gemm_api.gemm(
        a.value,
        b.value,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        precision=precision,
        preferred_element_type=dtype,
        **{name: x.astype(jnp.float32) for name, x in scales.items() if x is not None},
    ).reshape(shape)


def _common_dtype(lhs: np.dtype, rhs: np.dtype, result: np.dtype) -> np.dtype:
    """Returns the type in which operands are multiplied that no kernel takes as they are."""
    wide = [dtype for dtype in (lhs, rhs) if dtype.itemsize > 1]
    common = jnp.result_type(*wide) if wide else result
    return jnp.dtype(common if jnp.issubdtype(common, jnp.floating) else jnp.float32)


def _result_dtype(lhs: Any, rhs: Any) -> np.dtype:
    """Returns the common dtype of what scales and wide operands are; bfloat16 where none is."""
    dtypes = [(x.scale if quantization.is_quantized(x) else x).dtype for x in (lhs, rhs)]
    wide = [dtype for dtype in dtypes if dtype.itemsize > 1]
    return jnp.dtype(jnp.result_type(*wide) if wide else jnp.bfloat16)


def _without_zero_points(lhs: tuple[_Scaled, bool], rhs: tuple[_Scaled, bool]) -> jax.Array:
    """Computes the product of int8 matrices exactly, subtracts their zero points and scales.

    ``(a - p) @ (b - q) = a @ b - p * sum(b) - sum(a) * q + k * p * q``. Each of these may leave the
    range of int32, whose arithmetic is modulo 2^32; the whole does not.
    """
    (a, transpose_a), (b, transpose_b) = lhs, rhs
    product = gemm_api.gemm(
        a.value,
        b.value,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        preferred_element_type=jnp.int32,
    )
    a_sums, p, a_scale = _rank_one(a, -2 if transpose_a else -1, transpose_a)
    b_sums, q, b_scale = _rank_one(b, -1 if transpose_b else -2, transpose_b)
    k = np.int32(a.value.shape[-2 if transpose_a else -1])
    exact = product - p * b_sums - a_sums * q + k * (p * q)
    return exact.astype(jnp.float32) * (a_scale * b_scale)


def _rank_one(x: _Scaled, k_axis: int, is_transposed: bool) -> list[jax.Array]:
    """Returns sums along k, zero points and scales, ``(..., m, 1)`` or ``(..., 1, n)``."""
    sums = jnp.sum(x.value, k_axis, keepdims=True, dtype=jnp.int32)
    zero = jnp.zeros_like(sums) if x.zero_point is None else x.zero_point.astype(jnp.int32)
    scale = jnp.ones_like(sums) if x.scale is None else x.scale
    scale = scale.astype(jnp.float32)
    parts = [sums, *(quantization.spread(y, sums.shape) for y in (zero, scale))]
    return [jnp.swapaxes(y, -1, -2) if is_transposed else y for y in parts]


def _is_exact(lhs: _Scaled, rhs: _Scaled, dims: _DimensionNumbers) -> bool:
    """Says whether ``_without_zero_points`` serves these operands."""
    zeros = [x.zero_point for x in (lhs, rhs) if x.zero_point is not None]
    is_constant = all(x.is_constant_along(d) for x, d in zip((lhs, rhs), dims[0], strict=True))
    k = math.prod(lhs.value.shape[dim] for dim in dims[0][0])
    return is_constant and k <= _MOST_EXACT_K and all(zero.dtype == jnp.int8 for zero in zeros)


def _dimension_numbers(given: Any, lhs: Shape, rhs: Shape) -> _DimensionNumbers:
    """Returns dimension numbers as tuples of non-negative numbers that are known to fit."""
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
    """Returns the shape of the result, once ``lax`` has checked all."""
    operands = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lhs, rhs))
    return jax.eval_shape(lambda *x: lax.dot_general(*x, dims), *operands).shape


def _matrices(lhs: _Scaled, rhs: _Scaled, dims: _DimensionNumbers) -> list[tuple[_Scaled, bool]]:
    """Returns the operands as matrices after the batch, and whether they are stored transposed."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dims
    pairs = list(zip(lhs_contracted, rhs_contracted, strict=True))
    # In the order in which the larger operand has them, so that only the smaller one is copied.
    pairs.sort(key=operator.itemgetter(0 if lhs.value.size >= rhs.value.size else 1))
    return [
        _matrix(lhs, lhs_batch, tuple(pair[0] for pair in pairs), k_comes_first=False),
        _matrix(rhs, rhs_batch, tuple(pair[1] for pair in pairs), k_comes_first=True),
    ]


def _matrix(
    x: _Scaled, batch: _Dims, contracted: _Dims, k_comes_first: bool
) -> tuple[_Scaled, bool]:
    """Returns ``(*batch, m, k)``, or ``(*batch, k, m)``, and whether it is transposed.

    Args:
        x: the operand.
        batch: its batch dimensions.
        contracted: its contracted dimensions.
        k_comes_first: whether k comes first in a matrix that is not transposed.
    """
    free = tuple(d for d in range(x.value.ndim) if d not in (*batch, *contracted))
    groups = [(contracted, free), (free, contracted)]
    in_place = [pair for pair in groups if _lies_so((*batch, *pair[0], *pair[1]), x.value.shape)]
    # A copy has k last, which is what the tensor cores read.
    first, last = in_place[0] if in_place else groups[1]
    x = x.map(lambda y: lax.transpose(y, (*batch, *first, *last)))
    shape, start, middle = x.value.shape, len(batch), len(batch) + len(first)
    x = x.map(lambda y: _merged(_refined(y, shape, start, middle), start, middle))
    return x, (first == contracted) != k_comes_first


def _lies_so(order: _Dims, shape: Shape) -> bool:
    """Says whether a transposition moves nothing."""
    moved = [dim for dim in order if shape[dim] != 1]
    return moved == sorted(moved)


def _refined(factor: jax.Array, shape: Shape, start: int, middle: int) -> jax.Array:
    """Repeats factors of an operand of ``shape`` until they are some of the matrices to be.

    Dimensions from ``start`` to ``middle``, and those after, become one each. Blocks remain blocks
    where nothing changes after the first dimension of blocks, and every element has a factor of its
    own along those before. Along the batch there are no blocks. The operand itself stays as it is.
    """
    full = list(factor.shape)
    for dim in range(start):
        full[dim] = 1 if full[dim] == 1 else shape[dim]
    for group in (range(start, middle), range(middle, len(shape))):
        last = max((dim for dim in group if factor.shape[dim] > 1), default=0)
        for dim in group:
            full[dim] = shape[dim] if dim < last else full[dim]
    return quantization.spread(factor, tuple(full))


def _merged(x: jax.Array, start: int, middle: int) -> jax.Array:
    """Makes matrices of all dimensions after the batch."""
    groups = x.shape[start:middle], x.shape[middle:]
    return lax.reshape(x, (*x.shape[:start], *map(math.prod, groups)))
