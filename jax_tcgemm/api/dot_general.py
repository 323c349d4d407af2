"""``dot_general``: computes ``lax.dot_general`` as one gemm if a kernel serves it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import eager, quantized
from jax_tcgemm.api.packed_dot_general import multiplied_weight, packed_dot_general
from jax_tcgemm.api.scaled_dot import quantized_dot_general
from jax_tcgemm.lowering import dots, fallback
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem.arithmetic import (
    is_quantized,
    resolve_algorithm,
    resolve_planes,
    resolve_run_time,
    types_of_parts,
)
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Axes, Operands
from jax_tcgemm.quantized.packed import PackedWeight, is_weight

_Dims = tuple[int, ...]


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
    **kwargs: Any,
) -> jax.Array:
    """Drop-in replacement for ``jax.lax.dot_general`` that uses the kernels of ``gemm``.

    Pass it as ``dot_general=`` to Flax layers or as ``_dot_general=`` to ``jnp.einsum``.

    Batch, contracted and free dimensions are read in place: they become strides and batch
    dimensions of one gemm. The function copies an operand (``lax.transpose``) only in these cases:

    - The contracted dimensions of the operand, or the free dimensions of ``rhs``, are not adjacent
      in the order of the other operand or of the result.
    - The free dimensions of ``lhs`` are so scattered that rows in place would take many times the
      tiles.

    Calls that no kernel serves go to ``lax.dot_general``: other dtypes and precisions,
    dimensions of extent 0, products without a contracted or without a free dimension, symbolic
    shapes, and operands that are unreduced (sums over mesh axes yet to be made). Such a call has
    the precision ``"highest"`` in place of BF16_BF16_F32_X9, on CPUs in place of all presets that
    JAX lacks there, and, for complex operands, in place of all but the least precise presets.
    ``JAX_TCGEMM_LOG=1`` prints which calls those are.

    16-bit operands are accumulated in float32 unless ``precision`` says otherwise. The result is
    rounded once.

    Args:
        lhs: array of any rank, ``Quantized`` (or qwix's ``QArray``), or ``PackedWeight``.
        rhs: the same. Only one operand may be packed, and the other is then an array.
        dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
        precision: as in ``lax.dot_general``; ``None`` means ``jax.default_matmul_precision``.
            float32 is computed in TF32 unless ``"highest"`` or a wider preset is requested.
        preferred_element_type: dtype of the result; ``None`` means that of ``lax.dot_general``.
        out_sharding: as in ``lax.dot_general``.
        **kwargs: other arguments that ``lax.dot_general`` of the installed JAX takes.

    Returns:
        An array with the batch dimensions, then the free dimensions of ``lhs``, then those of
        ``rhs``. Its dtype is that of ``lax.dot_general``.

    Raises:
        TypeError: as ``lax.dot_general`` does.
        ValueError: as ``lax.dot_general`` does.

    Example:
        >>> y = dot_general(x, w, (((1,), (0,)), ((), ())))  # x @ w
        >>> y.shape
        (8, 256)
        >>> z = jnp.einsum("mk,kn->nm", x, w, _dot_general=dot_general)
    """
    options = (dimension_numbers, precision, preferred_element_type)
    lhs, rhs = map(eager.held_weight, (lhs, rhs))
    if any(map(is_weight, (lhs, rhs))):
        if out_sharding is not None or kwargs:
            raise TypeError(
                f"quantized operands are not taken beside out_sharding={out_sharding}, {kwargs}"
            )
        is_packed = any(isinstance(x, PackedWeight) for x in (lhs, rhs))
        if is_packed or multiplied_weight(lhs, rhs, *options) is not None:
            return packed_dot_general(dot_general, lhs, rhs, *options)
        return quantized_dot_general(lhs, rhs, *options)
    by_lax = functools.partial(
        lax.dot_general, lhs, rhs, *options, out_sharding=out_sharding, **kwargs
    )
    are_arrays = all(isinstance(x, (jax.Array, np.ndarray)) for x in (lhs, rhs))
    spec = getattr(out_sharding, "spec", out_sharding)
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return by_lax()
    if not are_arrays or dimension_numbers is None or kwargs:
        return by_lax()
    try:
        dims = tuple(tuple(map(_indices, pair)) for pair in dimension_numbers)
    except (TypeError, ValueError):
        return by_lax()
    return _contract(
        lhs,
        rhs,
        dims=dims,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


@eager.one_program("dims", "precision", "preferred_element_type", "out_sharding")
def _contract(
    lhs: ArrayLike,
    rhs: ArrayLike,
    *,
    dims: Any,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes ``dot_general`` of two arrays; the dimension numbers are tuples."""
    options = {
        "dims": dims,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    a, b = jnp.asarray(lhs), jnp.asarray(rhs)
    by_lax = functools.partial(
        lax.dot_general,
        dimension_numbers=dims,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    result = jax.eval_shape(by_lax, lhs, rhs)  # raises the errors of lax
    is_typed = out_sharding is not None or _compat.is_sharded(a, b)
    if is_typed and not _compat.is_unreduced(a, b):
        own = functools.partial(_contract, **options)
        return _compat.with_automatic_axes(own, (a, b), _compat.shardings_of(by_lax, lhs, rhs))
    asked = _compat.canonicalize_precision(precision)
    problem = _problem(a, b, dims, asked, result)
    if isinstance(problem, str):
        operands = " x ".join(f"{x.dtype}{list(x.shape)}" for x in (a, b))
        fallback.report(f"dot_general {operands} -> {result.dtype}", problem, strict=False)
        if out_sharding is None and dots.lacks_preset(asked, a.dtype, b.dtype):
            return dots.by_preset(a, b, dims, asked, preferred_element_type)
        return by_lax(lhs, rhs)
    operands, spec = problem
    if is_quantized(a.dtype, b.dtype):
        product = quantized.quantized_product(operands, spec, result.dtype)
    else:
        (product,) = gemm_primitive.bind(operands, spec)
    return lax.reshape(product, result.shape)


def _indices(dims: Any) -> _Dims:
    """Returns dimension numbers as a tuple; ``lax`` takes any sequence or one integer."""
    dims = dims if isinstance(dims, (tuple, list)) else np.ravel(dims)
    return tuple(map(operator.index, dims))


def _problem(
    lhs: jax.Array, rhs: jax.Array, dims: Any, precision: Any, result: jax.ShapeDtypeStruct
) -> tuple[Operands, GemmSpec] | str:
    """Returns the primitive's operands and parameters, or why no kernel is used."""
    if not all(isinstance(extent, int) for extent in (*lhs.shape, *rhs.shape)):
        return "symbolic shapes"
    if 0 in (*lhs.shape, *rhs.shape):
        return "an extent of 0"
    if _compat.is_unreduced(lhs, rhs):
        return "types that are sums over mesh axes"
    if result.weak_type and not lhs.dtype == rhs.dtype == result.dtype:
        return "a weak type other than the operands'"
    if not _has_kernel(lhs.dtype, rhs.dtype, result.dtype, precision):
        return f"no kernel for these types with precision {precision}"
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dims
    k = math.prod(lhs.shape[dim] for dim in lhs_contracted)
    if k == 1:
        return "nothing is contracted"
    batch = math.prod(lhs.shape[dim] for dim in lhs_batch)
    m, n = lhs.size // (batch * k), rhs.size // (batch * k)
    if m == n == 1:
        return "products of vectors"
    left = _Factor.of(lhs, lhs_batch, lhs_contracted)
    right = _Factor.of(rhs, rhs_batch, rhs_contracted)
    if n == 1:
        # Exchanged operands give the same order of the result. One row of D is contiguous, one
        # column is not.
        left, right = right, left
        precision = _compat.exchanged_precision(precision)
    operands, axes = _gemm(*_arranged(left, right))
    return operands, GemmSpec(axes, jnp.dtype(result.dtype), precision)


def _has_kernel(lhs: np.dtype, rhs: np.dtype, out: np.dtype, precision: Any) -> bool:
    types = (*types_of_parts(lhs, rhs, out), precision)
    try:
        if is_quantized(lhs, rhs):
            return resolve_run_time(*types) is not None  # integers only to int32
        # The primitive also knows what to do with presets that JAX lacks on CPUs.
        planes = resolve_planes if dots.lacks_preset(precision) else fallback.possible_planes
        return any(f(*types) is not None for f in (resolve_algorithm, planes))
    except (TypeError, ValueError):  # lax multiplies types that do not promote, such as float8
        return False


# A name is a role and a number: batch and contracted dimensions have the same name in both factors.
_Name = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class _Factor:
    """An operand and the name of each of its dimensions."""

    array: jax.Array
    names: tuple[_Name, ...]

    @staticmethod
    def of(array: jax.Array, batch: _Dims, contracted: _Dims) -> _Factor:
        """Names the dimensions and drops those of extent 1."""
        names = {dim: ("batch", i) for i, dim in enumerate(batch)}
        names |= {dim: ("k", i) for i, dim in enumerate(contracted)}
        names |= {dim: ("free", dim) for dim in range(array.ndim) if dim not in names}
        kept = [dim for dim in range(array.ndim) if array.shape[dim] != 1]
        dropped = [dim for dim in range(array.ndim) if dim not in kept]
        return _Factor(lax.squeeze(array, dropped), tuple(names[dim] for dim in kept))

    def role(self, role: str) -> tuple[_Name, ...]:
        """Returns the names of a role in memory order."""
        return tuple(name for name in self.names if name[0] == role)

    def extent(self, names: tuple[_Name, ...]) -> int:
        return math.prod(self.array.shape[self.names.index(name)] for name in names)

    def adjoin(self, names: tuple[_Name, ...]) -> bool:
        """Checks if these dimensions are adjacent in this order, so that one stride covers them."""
        at = [self.names.index(name) for name in names]
        return all(j == i + 1 for i, j in itertools.pairwise(at))

    def last_run(self, names: tuple[_Name, ...]) -> tuple[_Name, ...]:
        """Returns the longest end of ``names`` whose dimensions are adjacent."""
        return next(names[i:] for i in range(len(names) + 1) if self.adjoin(names[i:]))

    def moved(self, contracted: tuple[_Name, ...]) -> _Factor:
        """Returns a copy in which the free and then the contracted dimensions are adjacent."""
        names = (*self.role("batch"), *self.role("free"), *contracted)
        order = [self.names.index(name) for name in names]
        return _Factor(lax.transpose(self.array, order), names)

    def merged(self, names: tuple[_Name, ...], name: _Name) -> _Factor:
        """Returns the factor with adjacent dimensions merged into one; moves no data."""
        start, shape = self.names.index(names[0]), self.array.shape
        stop = start + len(names)
        merged = (*self.names[:start], name, *self.names[stop:])
        if len(names) == 1:
            return _Factor(self.array, merged)
        shape = (*shape[:start], self.extent(names), *shape[stop:])
        return _Factor(lax.reshape(self.array, shape), merged)


_K = ("k", 0)
_N = ("n", 0)

# Rows and columns of the smallest tile of most kernels. An operand is copied if it would take more
# than _MOST_TILES times the tiles of its copy.
_TILE = 64
_MOST_TILES = 4


def _arranged(left: _Factor, right: _Factor) -> list[_Factor]:
    """Returns the factors with one contracted dimension each, moving the fewest elements."""
    rows, columns = left.role("free"), right.role("free")
    is_scattered = _is_scattered(left)
    # Rows that are not adjacent always become batch dimensions. Without rows, so do such columns.
    is_split = not right.adjoin(columns) if rows else _is_scattered(right)

    def moves(contracted: tuple[_Name, ...]) -> tuple[bool, bool]:
        return is_scattered or not left.adjoin(contracted), is_split or not right.adjoin(contracted)

    def moved_elements(contracted: tuple[_Name, ...]) -> int:
        move_left, move_right = moves(contracted)
        return move_left * left.array.size + move_right * right.array.size

    contracted = min(left.role("k"), right.role("k"), key=moved_elements)
    return [
        (factor.moved(contracted) if is_moved else factor).merged(contracted, _K)
        for factor, is_moved in zip((left, right), moves(contracted), strict=True)
    ]


def _is_scattered(factor: _Factor) -> bool:
    """Checks if rows (columns) lie in so many short pieces that tiles would be mostly empty."""
    free = factor.role("free")
    piece = factor.last_run(free)
    pieces = factor.extent(free[: len(free) - len(piece)])
    tiles = pieces * -(-factor.extent(piece) // _TILE)
    return tiles > _MOST_TILES * -(-factor.extent(free) // _TILE)


def _gemm(left: _Factor, right: _Factor) -> tuple[Operands, Operands]:
    """Returns the primitive's operands and their axes.

    The primitive's result has the batch, then all free dimensions of ``left`` and ``right`` in
    order. The last free dimension of ``left`` is m. The adjacent dimensions at the end of ``right``
    are n. The others are batch dimensions that only one operand has; those of ``left`` fold into m
    if one stride covers both.
    """
    if not left.role("free"):
        left = _Factor(lax.expand_dims(left.array, [left.array.ndim]), (*left.names, ("free", -1)))
    *outer_rows, m = left.role("free")
    columns = right.role("free")
    n = right.last_run(columns)
    outer_columns = columns[: len(columns) - len(n)]
    right = right.merged(n, _N)
    batch = sorted(left.role("batch"))

    def axes(factor: _Factor, names: list[_Name | None]) -> Axes:
        return tuple(None if name is None else factor.names.index(name) for name in names)

    absent = [None] * len(outer_rows), [None] * len(outer_columns)
    return Operands(left.array, right.array), Operands(
        axes(left, [*batch, *outer_rows, *absent[1], m, _K]),
        axes(right, [*batch, *absent[0], *outer_columns, _K, _N]),
    )
