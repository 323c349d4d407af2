"""Attention's products in a decode step: few rows times a cache of keys or values.

With grouped queries, several heads of the queries read one head of the cache. Programs repeat each
head of the cache, or give the product several rows. XLA reads a repeated head several times, and
transposes the cache for several rows. A kernel of this package takes all these heads as rows, and
reads the cache once, in the order in which it is stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm import _compat
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.api.dot_general import dot_general
from jax_tcgemm.problem.arithmetic import resolve_algorithm
from jax_tcgemm.transforms.graph import Atom, Node, Value
from jax_tcgemm.transforms.products import HALF_TYPES, is_on_device, is_typed
from jax_tcgemm.transforms.spread import Spread

# Products with more rows for each matrix of the batch are not those of a decode step.
_MOST_ROWS = 64
# Below these sizes of a cache, XLA's kernels are as fast (lab/fusion.md): for several rows, for
# several rows with the heads repeated, and for one row. One row also needs heads of some extent.
_LEAST_BYTES = 4 * 2**20
_LEAST_REPEATED_BYTES = 8 * 2**20
_LEAST_BYTES_OF_ONE = 16 * 2**20
_LEAST_HEAD = 128
# Attention has a batch of sequences and of heads. A single batch dimension may be that of experts,
# whose weights XLA reads as fast.
_LEAST_BATCH_DIMENSIONS = 2
# At most this many operations between a product and a stored value are followed.
_MOST_FOLLOWED = 40
# Operations that write a part of a stored array in place.
_IN_PLACE = frozenset({"dynamic_update_slice", "scatter"})
# Operations that keep the values of a cache; ``Spread`` follows them.
_FOLLOWED = jaxprs.VIEWS | {"broadcast_in_dim", "convert_element_type", "transpose"}
_ALGORITHMS = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)


@dataclasses.dataclass(frozen=True)
class Cache:
    """How a product of a batch reads a stored cache.

    Attributes:
        dtype: name of the dtype of the stored values.
        side: the number of the operand that the cache makes.
        stored: the extents of the cache in memory, outermost first, without extents of 1.
        axes: for each of them, the axis of the operand.
        heads: for each batch dimension of the product, its extent in the cache and how often each
            of these matrices is repeated.
        is_converted: whether the program converts the cache to float32. The products of numbers of
            16 bits are exact then.
    """

    dtype: str
    side: int
    stored: tuple[int, ...]
    axes: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    is_converted: bool

    @property
    def reason(self) -> str:
        """The reason in the report why a kernel computes the product."""
        return f"few rows, which read the stored {self.dtype} cache once"

    def product(self, node: Node, values: Sequence[Any]) -> jax.Array:
        """Computes the product.

        Args:
            node: the product.
            values: the operands, with the cache in the place of what the program makes of it. The
                other operand has the cache's dtype, or float32 if that is bfloat16.
        """
        (contracted, batch), own = _dimensions(node, self.side), _dimensions(node, 1 - self.side)
        cache = values[self.side].reshape(self.stored)
        x, free = _with_rows(values[1 - self.side], *own)
        x = self._grouped(x)
        groups = [axis for axis, (extent, _) in zip(batch, self.heads, strict=True) if extent > 1]
        dims = (
            ((x.ndim - 1,), (self.axes.index(contracted[0]),)),
            (tuple(range(len(groups))), tuple(self.axes.index(axis) for axis in groups)),
        )
        (result,) = node.outputs
        if x.dtype == cache.dtype:
            y = dot_general(x, cache, dims, self.precision(node), result.dtype)
        else:
            y = _wide_product(x, cache, dims)
        y = self._ungrouped(y)
        y = y.reshape(*y.shape[:-2], *free, y.shape[-1])
        y = jnp.moveaxis(y, -1, len(batch)) if self.side == 0 else y
        return y.astype(result.dtype)

    def precision(self, node: Node) -> Any:
        """Returns the precision of the product of 16-bit operands.

        It is never ``None``, which would stand for the user's default.
        """
        given = node.params["precision"]
        if self.is_converted or given is None:
            return lax.Precision.DEFAULT
        return _compat.exchanged_precision(given) if self.side == 0 else given

    def _grouped(self, x: jax.Array) -> jax.Array:
        """Returns rows ``(batch..., rows, k)`` as ``(heads of the cache..., rows, k)``."""
        count = len(self.heads)
        x = x.reshape(*(n for head in self.heads for n in head), *x.shape[-2:])
        x = x.transpose(*range(0, 2 * count, 2), *range(1, 2 * count, 2), -2, -1)
        return x.reshape(*(extent for extent, _ in self.heads if extent > 1), -1, x.shape[-1])

    def _ungrouped(self, y: jax.Array) -> jax.Array:
        """Does the opposite of ``_grouped``."""
        count = len(self.heads)
        extents, repeats = zip(*self.heads, strict=True)
        y = y.reshape(*extents, *repeats, -1, y.shape[-1])
        pairs = [axis for i in range(count) for axis in (i, count + i)]
        y = y.transpose(*pairs, -2, -1)
        return y.reshape(*map(math.prod, self.heads), *y.shape[-2:])


def _dimensions(node: Node, side: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the contracted and the batch dimensions of an operand."""
    contracted, batch = node.params["dimension_numbers"]
    return tuple(contracted[side]), tuple(batch[side])


def _with_rows(
    x: jax.Array, contracted: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[jax.Array, list[int]]:
    """Returns an operand as ``(batch..., rows, k)``, and the extents of the rows' dimensions."""
    free = [axis for axis in range(x.ndim) if axis not in (*contracted, *batch)]
    x = x.transpose(*batch, *free, *contracted)
    extents = x.shape[len(batch) : -1]
    return x.reshape(*x.shape[: len(batch)], math.prod(extents), x.shape[-1]), [*extents]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _wide_product(x: jax.Array, cache: jax.Array, dims: Any) -> jax.Array:
    """Multiplies float32 rows, as three bfloat16 planes, by a bfloat16 cache."""
    planes = jnp.concatenate(_planes(x), -2)
    y = dot_general(planes, cache, dims, lax.Precision.DEFAULT, jnp.float32)
    high, *low = jnp.split(y, 3, -2)
    # An infinity of the cache times a plane that is 0 is NaN. The smallest numbers come first.
    return high + jnp.where(jnp.isfinite(high), low[1] + low[0], 0)


@_wide_product.defjvp
def _(dims: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Differentiates in float32. Cotangents of the planes would be bfloat16."""

    def exact(x: jax.Array, cache: jax.Array) -> jax.Array:
        return lax.dot_general(x, cache.astype(x.dtype), dims, lax.Precision.HIGHEST)

    (x, cache), (dx, dcache) = primals, tangents
    return _wide_product(x, cache, dims), exact(dx, cache) + exact(x, dcache)


def _planes(x: jax.Array) -> list[jax.Array]:
    """Returns bfloat16 numbers whose sum is a float32 number, the largest first.

    An infinity or NaN is in the first one alone.
    """
    most = float(jnp.finfo(jnp.bfloat16).max)  # larger finite numbers would round to infinity
    planes: list[jax.Array] = []
    for _ in range(3):
        # XLA would remove a conversion to bfloat16 and back.
        high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        high = jnp.where(jnp.isfinite(x), jnp.clip(high, -most, most), high)
        planes.append(high.astype(jnp.bfloat16))
        x = jnp.where(jnp.isfinite(high), x - high, 0)
    return planes


# --- Recognition ---------------------------------------------------------------------------------


def with_caches(items: Iterable[Any]) -> list[Any]:
    """Returns the items; products of few rows times a stored cache have the cache as an input."""
    items = list(items)
    makers = {value: item for item in items for value in item.outputs}
    return [_with_cache(item, makers) for item in items]


def _with_cache(item: Any, makers: Mapping[Value, Any]) -> Any:
    if not isinstance(item, Node) or item.name != "dot_general" or item.stored is not None:
        return item
    if not is_on_device(item) or is_typed(item):
        return item
    if not all(isinstance(n, int) and n > 0 for x in item.inputs for n in x.aval.shape):
        return item
    for side in (1, 0):
        found = _Search(makers, item.context).stored(item.inputs[side])
        cache = None if found is None else _cache_of(item, side, *found)
        if found is None or cache is None:
            continue
        other = _operand(item.inputs[1 - side], found[0].dtype, makers)
        if other is None or not _has_kernel(item, cache, other):
            continue
        inputs = (found[0], other) if side == 0 else (other, found[0])
        return Node(item.eqn, inputs, item.outputs, item.scope, stored=cache)
    return item


def _has_kernel(product: Node, cache: Cache, other: Atom) -> bool:
    """Checks if a kernel multiplies the cache's type with the precision of the product."""
    out = jnp.dtype(product.outputs[0].dtype)
    is_wide = other.aval.dtype != cache.dtype
    if (cache.is_converted or is_wide) and isinstance(product.params["precision"], _ALGORITHMS):
        return False
    if is_wide:
        return out == jnp.float32 or out in HALF_TYPES
    precision = _compat.canonicalize_precision(cache.precision(product))
    dtype = jnp.dtype(cache.dtype)
    return out.itemsize <= 4 and resolve_algorithm(dtype, dtype, out, precision) is not None


class _Search:
    """Follows an operand back to a stored cache.

    Attributes:
        makers: the item that computes each value; stored values have none.
        context: that of the product, which all operations must share.
    """

    def __init__(self, makers: Mapping[Value, Any], context: Any):
        self.makers, self.context = makers, context

    def stored(self, operand: Atom) -> tuple[Value, Spread] | None:
        """Returns the 16-bit cache that makes an operand, and how its elements are spread."""
        nodes: list[Node] = []
        value = operand
        while isinstance(value, Value) and not self.is_in_memory(value):
            node = self.makers.get(value)
            if len(nodes) == _MOST_FOLLOWED or not self.may_follow(node):
                return None
            nodes.append(node)
            value = node.inputs[0]
        if not isinstance(value, Value) or value.dtype not in HALF_TYPES:
            return None
        spread: Spread | None = Spread.of(value.shape)
        for node in reversed(nodes):
            spread = None if spread is None else spread.after(node)
        return None if spread is None else (value, spread)

    def may_follow(self, node: Any) -> TypeGuard[Node]:
        """Checks if an operation keeps the values of its operand, or widens their type."""
        if not isinstance(node, Node) or node.name not in _FOLLOWED or is_typed(node):
            return False
        types = [jnp.dtype(x.aval.dtype) for x in (node.inputs[0], node.outputs[0])]
        keeps = types[0] == types[1] or (types[0] in HALF_TYPES and types[1] == jnp.float32)
        return keeps and node.context == self.context

    def is_in_memory(self, value: Value) -> bool:
        """Checks if a value is an argument or a constant, or one that is updated in place."""
        for _ in range(_MOST_FOLLOWED):
            node = self.makers.get(value)
            if node is None:
                return True
            target = node.inputs[0] if isinstance(node, Node) and node.inputs else None
            if not isinstance(target, Value) or node.name not in _IN_PLACE:
                return False
            value = target
        return False


def _cache_of(product: Node, side: int, cache: Value, spread: Spread) -> Cache | None:
    """Returns how a product reads a cache; ``None`` if XLA's kernel is as fast."""
    contracted, batch = _dimensions(product, side)
    free = [i for i in range(len(spread.axes)) if i not in (*contracted, *batch)]
    if len(contracted) != 1 or len(free) != 1 or len(batch) < _LEAST_BATCH_DIMENSIONS:
        return None
    columns = [spread.axes[axis] for axis in (*contracted, *free)]
    if any(len(factors) != 1 or not factors[0][1] for factors in columns):
        return None
    heads: list[tuple[int, int]] = []
    for axis in batch:
        factors = spread.axes[axis]
        own = [n for n, stride in factors if stride]
        if len(own) > 1 or (own and not factors[0][1]):
            return None
        extent = own[0] if own else 1
        heads.append((extent, spread.shape[axis] // extent))
    places = sorted(
        ((stride, n, axis) for axis, factors in enumerate(spread.axes) for n, stride in factors),
        reverse=True,
    )
    stored = [(n, axis) for stride, n, axis in places if stride]
    found = Cache(
        jnp.dtype(cache.dtype).name,
        side,
        tuple([n for n, _ in stored]),
        tuple([axis for _, axis in stored]),
        tuple(heads),
        product.inputs[side].aval.dtype != cache.dtype,
    )
    repeats = math.prod(n for _, n in heads)
    k, n = (spread.shape[axis] for axis in (contracted[0], free[0]))
    matrices = math.prod(extent for extent, _ in heads)
    rows = product.inputs[1 - side].aval.size // (k * matrices)
    is_along_k = columns[0][0][1] == 1
    return found if _pays(rows, repeats, cache.bytes, 0 if is_along_k else n) else None


def _pays(rows: int, repeats: int, size: int, columns: int) -> bool:
    """Checks if a kernel is expected to take less time than XLA's.

    Args:
        rows: the rows that multiply each matrix of the cache.
        repeats: how often the program repeats each matrix of the cache, for as many of these rows.
        size: the bytes of the cache.
        columns: the columns of each matrix. 0 if the contraction dimension is contiguous, as it
            usually is for keys: XLA reads such a cache at the speed of memory for one row.
    """
    if rows > _MOST_ROWS:
        return False
    if rows == repeats == 2 and not columns:
        return False  # XLA reads each head twice, as fast
    if rows == 1:
        return columns >= _LEAST_HEAD and size >= _LEAST_BYTES_OF_ONE
    return size >= _LEAST_BYTES or (repeats > 1 and size * repeats >= _LEAST_REPEATED_BYTES)


def _operand(value: Atom, dtype: Any, makers: Mapping[Value, Any]) -> Atom | None:
    """Returns the operand that multiplies a cache, before its conversion from the cache's dtype.

    ``None`` if its type is neither the cache's nor one that bfloat16 planes represent.
    """
    maker = makers.get(value) if isinstance(value, Value) else None
    if isinstance(maker, Node) and maker.name == "convert_element_type":
        (source,) = maker.inputs
        if isinstance(source, Value) and source.dtype == dtype and value.dtype == jnp.float32:
            return source
    own = jnp.dtype(value.aval.dtype)
    return value if own == dtype or (own == jnp.float32 and dtype == jnp.bfloat16) else None
