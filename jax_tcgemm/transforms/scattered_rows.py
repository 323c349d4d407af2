"""Scatter-adds of 16-bit rows to few rows, as in the gradient of a small embedding.

XLA adds 16-bit numbers to memory one by one, by compare-and-swap: adding 4,096 rows of 1,024
elements to two rows takes 57 ms on an H200. This module computes each result row as one sum.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm import _compat
from jax_tcgemm.transforms import kernel_calls
from jax_tcgemm.transforms.graph import Node
from jax_tcgemm.transforms.products import HALF_TYPES, is_on_device, is_typed

# Each row of the result reads all added rows again. With at most ``_MOST_ROWS`` result rows, that
# is faster than any number of additions to one address. With fewer than ``_LEAST_ADDED`` added
# rows for each result row, XLA's additions do not wait for each other.
_MOST_ROWS = 16
_LEAST_ADDED = 64

_MODES = {
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    lax.GatherScatterMode.CLIP,
}


def rows_as_sums(node: Node) -> Any:
    """Returns a jaxpr that computes a scatter-add as sums.

    Returns:
        A closed jaxpr that adds in float32 and rounds once; ``None`` if the node is no scatter-add
        of rows to few rows.
    """
    if node.name != "scatter-add" or not is_on_device(node) or is_typed(node):
        return None
    operand, indices, updates = (x.aval for x in node.inputs)
    extents = (*operand.shape, *indices.shape, *updates.shape)
    if operand.dtype not in HALF_TYPES or not all(isinstance(x, int) for x in extents):
        return None
    if not operand.shape or not 0 < operand.shape[0] <= _MOST_ROWS:
        return None
    if math.prod(indices.shape) < _LEAST_ADDED * operand.shape[0]:
        return None
    if node.params["mode"] not in _MODES or not _adds_whole_rows(node, operand, indices, updates):
        return None
    if any(_compat.is_sharded_type(x) for x in (operand, indices, updates)):
        return None
    return kernel_calls.traced_call(node, _sums)


def _adds_whole_rows(node: Node, operand: Any, indices: Any, updates: Any) -> bool:
    """Checks if each index selects a row of the operand and the updates are whole rows."""
    numbers = node.params["dimension_numbers"]
    rank, window = len(indices.shape) - 1, len(operand.shape) - 1
    return (
        tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(numbers.inserted_window_dims) == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.update_window_dims) == tuple(range(rank, rank + window))
        and updates.shape == (*indices.shape[:-1], *operand.shape[1:])
    )


def _sums(node: Node, values: list[Any]) -> list[jax.Array]:
    operand, indices, updates = values
    count = operand.shape[0]
    ids = indices.reshape(-1)
    if jnp.iinfo(ids.dtype).bits < 8:  # such a dtype may not hold the number of rows
        ids = ids.astype(jnp.int32)
    if node.params["mode"] == lax.GatherScatterMode.CLIP:
        ids = jnp.clip(ids, 0, count - 1)
    added = updates.reshape(len(ids), *operand.shape[1:])
    # A product with zeros and ones would spread an infinity of one row to all others.
    goes = ids == jnp.arange(count, dtype=ids.dtype)[:, None]
    goes = goes.reshape(count, -1, *(1,) * (operand.ndim - 1))
    sums = jnp.sum(jnp.where(goes, added, 0), axis=1, dtype=jnp.float32)
    return [(operand.astype(jnp.float32) + sums).astype(operand.dtype)]
