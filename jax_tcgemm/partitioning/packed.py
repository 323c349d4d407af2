"""How a product with a packed weight is divided: by rows, whole tiles of columns, or of k."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tcgemm.partitioning.rules import Rule
from jax_tcgemm.partitioning.shard import Shard
from jax_tcgemm.partitioning.work import Array, Work
from jax_tcgemm.problem.packed import TILE, PackedSpec


def rule(apply: Callable[..., jax.Array]) -> Rule:
    """Returns the rule of ``packed_p``; ``apply`` binds it to operands and a spec."""
    return Rule(accepts, _work, functools.partial(_local, apply), (PackedSpec,))


def accepts(spec: PackedSpec, types: Sequence[Any]) -> bool:
    """Checks if operands of these types can be divided."""
    del spec
    return types[0].dtype in (jnp.bfloat16, jnp.float16) and all(
        extent > 0 for x in types for extent in x.shape
    )


def _unit(spec: PackedSpec) -> int:
    """Returns the extent along k by which tiles and groups are divided alike."""
    return TILE if spec.groups == 1 else math.lcm(TILE, spec.group)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A packed weight in tiles: one of n is 64 columns, one of k is ``_unit`` rows.

    An element of an array in tiles has the bytes of all its elements.

    Attributes:
        n: name of the dimension of columns, ``None`` if it cannot be divided.
        k: name of the contracted dimension, ``None`` if it cannot be divided.
        columns: extent of a tile along n.
        rows: extent of a tile along k.
        has_groups: whether the scales are divided along k.
        extents: number of tiles of each dimension that can be divided.
        values_bytes: bytes of the values of a tile.
        scales_bytes: bytes of the scales of a tile.
    """

    n: str | None
    k: str | None
    columns: int
    rows: int
    has_groups: bool
    extents: dict[str, int]
    values_bytes: int
    scales_bytes: int

    @staticmethod
    def of(spec: PackedSpec, scales: Any) -> Tiles:
        """Returns the tiles of a weight; ``scales`` is its array of scales, or its type."""
        unit = _unit(spec)
        n = None if spec.n % TILE else "n"
        k = None if spec.k % unit else "k"
        columns = TILE if n else spec.n
        rows = unit if k else spec.k
        has_groups = spec.groups > 1 and k is not None
        strips = columns * scales.shape[-2] * scales.dtype.itemsize
        strips *= unit // spec.group if has_groups else spec.groups
        extents = {"n": spec.n // TILE} if n else {}
        extents |= {"k": spec.k // unit} if k else {}
        weight = columns * rows * spec.bits // 8
        return Tiles(n, k, columns, rows, has_groups, extents, weight, strips)


def own_spec(spec: PackedSpec, values: jax.Array, scales: jax.Array) -> PackedSpec:
    """Returns the parameters of a product with a device's part of the weight."""
    n = spec.n if spec.n % TILE else values.shape[-4] * TILE
    k = spec.k if spec.k % _unit(spec) else values.shape[-3] * TILE
    group = k if scales.shape[-3] == 1 else spec.group
    return dataclasses.replace(spec, n=n, k=k, group=group)


def _work(spec: PackedSpec, types: Sequence[Any]) -> Work:
    """Describes the product in tiles."""
    x, values, scales = types
    *batch, m, _ = x.shape
    names = tuple(f"batch{i}" for i in range(len(batch)))
    own = names if values.ndim > 4 else ()
    tiles = Tiles.of(spec, scales)
    result = Array((*names, "m", tiles.n), tiles.columns * spec.out_dtype.itemsize, "the result")
    k_groups = tiles.k if tiles.has_groups else None
    return Work(
        extents=dict(zip(names, batch, strict=True)) | {"m": m} | tiles.extents,
        operands=(
            Array((*names, "m", tiles.k), tiles.rows * x.dtype.itemsize, "x"),
            Array((*own, tiles.n, tiles.k, None, None), tiles.values_bytes, "values"),
            Array((*own, tiles.n, k_groups, None, None), tiles.scales_bytes, "scales"),
        ),
        product=result,
        results=(result,),
        factors=frozenset((0, 1, 2)),
        operations=2.0 * math.prod(batch) * m * spec.n * spec.k,
        whole=frozenset(("n", "k")),
    )


def _local(
    apply: Callable[..., jax.Array], shard: Shard, spec: PackedSpec, *operands: jax.Array
) -> list[jax.Array]:
    """Multiplies the device's tiles, and adds up the parts of sums over k."""
    x, values, scales = operands
    return [shard.total(apply(x, values, scales, own_spec(spec, values, scales)))]
