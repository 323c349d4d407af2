"""How groups of rows times packed weights are divided: by rows, experts, whole tiles of n or k."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_tcgemm.partitioning import packed
from jax_tcgemm.partitioning.ragged import Groups
from jax_tcgemm.partitioning.rules import Rule
from jax_tcgemm.partitioning.shard import Shard
from jax_tcgemm.partitioning.work import Array, Work
from jax_tcgemm.problem.packed import PackedSpec

_Apply = Callable[..., list[jax.Array]]


def rule(apply: _Apply) -> Rule:
    """Returns the rule of ``packed_ragged_p``; ``apply`` binds it."""
    return Rule(packed.accepts, _work, functools.partial(_local, apply), (PackedSpec,))


def _work(spec: PackedSpec, types: Sequence[Any]) -> Work:
    """Describes the product in tiles, as that of one packed weight."""
    x, _, scales, sizes = types
    tiles = packed.Tiles.of(spec, scales)
    m = x.shape[0]
    result = Array(("m", tiles.n), tiles.columns * spec.out_dtype.itemsize, "the result")
    k_groups = tiles.k if tiles.has_groups else None
    return Work(
        extents={"g": sizes.shape[0], "m": m} | tiles.extents,
        operands=(
            Array(("m", tiles.k), tiles.rows * x.dtype.itemsize, "lhs"),
            Array(("g", tiles.n, tiles.k, None, None), tiles.values_bytes, "values"),
            Array(("g", tiles.n, k_groups, None, None), tiles.scales_bytes, "scales"),
            Array((None,), sizes.dtype.itemsize, "group_sizes"),
        ),
        product=result,
        results=(result,),
        factors=frozenset((0, 1, 2)),
        operations=2.0 * m * spec.n * spec.k,
        # The rows of a result know their group; its columns need only their sum.
        unscattered=frozenset("n"),
        whole=frozenset(("n", "k")),
    )


def _local(apply: _Apply, shard: Shard, spec: PackedSpec, *operands: jax.Array) -> list[jax.Array]:
    """Multiplies the device's rows by its experts, and adds up the parts of sums."""
    x, values, scales, group_sizes = operands
    groups = Groups.of(shard, group_sizes)
    x = groups.to_front(shard, x)
    own = packed.own_spec(spec, values, scales)
    (y,) = apply(own, x, values, scales, groups.sizes)
    return [shard.total(groups.back(shard, y))]
