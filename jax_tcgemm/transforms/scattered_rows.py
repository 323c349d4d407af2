"""Scatter-adds of 16-bit rows, as in the gradient of an embedding.

XLA adds 16-bit numbers to memory by compare-and-swap, and rounds after each addition. Additions to
one address wait for each other: 6 to 40 us each on an H200, more the more of them there are. 4,096
rows of 768 numbers take 0.06 ms if their indices are uniform, 3.6 ms if they are distributed like
words, and 17 ms if a third of them is padding. This module adds in float32, and rounds once.
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
from jax_tcgemm.transforms.numbers import size_of
from jax_tcgemm.transforms.products import HALF_TYPES, is_on_device, is_typed

# Fewer additions hardly wait for each other.
_LEAST_ADDED = 64
# The most rows of the result, and of what is added: their sum is an int32.
_MOST_ROWS = 2**30 - 1
# The bytes for each row of the result that looking for first rows takes.
_BYTES_OF_ROW = 4

_MODES = {
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    lax.GatherScatterMode.CLIP,
}


def scatter_in_float32(node: Node) -> Any:
    """Returns a jaxpr that computes a scatter-add in float32.

    Returns:
        A closed jaxpr that rounds once; ``None`` if the node is no scatter-add of 16-bit rows.
    """
    if node.name != "scatter-add" or not is_on_device(node) or is_typed(node):
        return None
    operand, indices, updates = (x.aval for x in node.inputs)
    extents = (*operand.shape, *indices.shape, *updates.shape)
    if operand.dtype not in HALF_TYPES or not all(isinstance(x, int) for x in extents):
        return None
    if not operand.shape or not 0 < operand.shape[0] <= _MOST_ROWS:
        return None
    if not _LEAST_ADDED <= math.prod(indices.shape) <= _MOST_ROWS:
        return None
    if node.params["mode"] not in _MODES or node.params["unique_indices"]:
        return None
    if not _adds_whole_rows(node, operand, indices, updates):
        return None
    # Otherwise few additions to a large array, in place, would take the time of all its rows.
    if not _is_small(operand, indices) and _BYTES_OF_ROW * operand.shape[0] > size_of([updates]):
        return None
    if any(_compat.is_sharded_type(x) for x in (operand, indices, updates)):
        return None
    return kernel_calls.traced_call(node, _added)


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


def _is_small(operand: Any, indices: Any) -> bool:
    """Checks if the result in float32 takes no more memory than what is added to it."""
    return operand.shape[0] <= math.prod(indices.shape)


def _added(node: Node, values: list[Any]) -> list[jax.Array]:
    operand, indices, updates = values
    updates = updates.astype(jnp.float32)
    if jnp.iinfo(indices.dtype).bits < 32:  # such a dtype may not hold the number of rows
        indices = indices.astype(jnp.int32)
    if not _is_small(operand, indices):
        return [_added_to_first_rows(operand, indices, updates, node.params["mode"])]
    names = "dimension_numbers", "indices_are_sorted", "mode"
    same: Any = {name: node.params[name] for name in names}
    sums = lax.scatter_add(operand.astype(jnp.float32), indices, updates, **same)
    return [sums.astype(operand.dtype)]


def _added_to_first_rows(
    operand: jax.Array, indices: jax.Array, updates: jax.Array, mode: Any
) -> jax.Array:
    """Adds the rows of each index at the place of its first row, then the sums to the operand."""
    count = operand.shape[0]
    ids = indices.reshape(-1)
    if mode == lax.GatherScatterMode.CLIP:
        ids = jnp.clip(ids, 0, count - 1)
    # One more row takes what is not added.
    ids = jnp.where((ids >= 0) & (ids < count), ids, count).astype(jnp.int32)
    numbers = jnp.arange(len(ids), dtype=jnp.int32)
    inside: Any = {"mode": "promise_in_bounds"}
    firsts = jnp.full(count + 1, len(ids), jnp.int32).at[ids].min(numbers, **inside)
    places = firsts.at[ids].get(**inside)
    added = updates.reshape(len(ids), *operand.shape[1:])
    sums = jnp.zeros_like(added).at[places].add(added, **inside)
    # Sums beside the first rows are empty. They go to different rows beyond the last one.
    rows = jnp.where((places == numbers) & (ids < count), ids, count + numbers)
    old = operand.at[rows].get(mode="fill", fill_value=0, unique_indices=True)
    new = (old.astype(jnp.float32) + sums).astype(operand.dtype)
    return operand.at[rows].set(new, mode="drop", unique_indices=True)
