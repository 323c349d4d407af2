"""How a product with a packed weight is divided: by rows, whole tiles of columns, or of k."""

from __future__ import annotations

import dataclasses
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

    def local(shard: Shard, spec: PackedSpec, *operands: jax.Array) -> list[jax.Array]:
        return _local(shard, spec, operands, apply)

    return Rule(_accepts, _work, local, (PackedSpec,))


def _accepts(spec: PackedSpec, types: Sequence[Any]) -> bool:
    del spec
    return types[0].dtype in (jnp.bfloat16, jnp.float16) and all(
        extent > 0 for x in types for extent in x.shape
    )


def _unit(spec: PackedSpec) -> int:
    """Returns the extent along k by which tiles and groups are divided alike."""
    return TILE if spec.groups == 1 else math.lcm(TILE, spec.group)


def _work(spec: PackedSpec, types: Sequence[Any]) -> Work:
    """Describes the product in tiles: one of n is 64 columns, one of k is ``_unit`` rows."""
    x, values, scales = types
    *batch, m, _ = x.shape
    unit = _unit(spec)
    n = None if spec.n % TILE else "n"
    k = None if spec.k % unit else "k"
    names = tuple(f"batch{i}" for i in range(len(batch)))
    own = names if values.ndim > 4 else ()
    extents = dict(zip(names, batch, strict=True)) | {"m": m}
    columns = TILE if n else spec.n
    rows = unit if k else spec.k
    if n:
        extents["n"] = spec.n // TILE
    if k:
        extents["k"] = spec.k // unit
    # An element of an array in tiles has the bytes of all its elements.
    weight = columns * rows * spec.bits // 8
    strips = columns * scales.shape[-2] * scales.dtype.itemsize
    has_groups = spec.groups > 1 and k is not None
    strips *= unit // spec.group if has_groups else spec.groups
    result = Array((*names, "m", n), columns * spec.out_dtype.itemsize, "the result")
    return Work(
        extents=extents,
        operands=(
            Array((*names, "m", k), rows * x.dtype.itemsize, "x"),
            Array((*own, n, k, None, None), weight, "values"),
            Array((*own, n, k if has_groups else None, None, None), strips, "scales"),
        ),
        product=result,
        results=(result,),
        factors=frozenset((0, 1, 2)),
        operations=2.0 * math.prod(batch) * m * spec.n * spec.k,
        whole=frozenset(("n", "k")),
    )


def _local(
    shard: Shard, spec: PackedSpec, operands: Sequence[jax.Array], apply: Callable[..., jax.Array]
) -> list[jax.Array]:
    """Multiplies the device's tiles, and adds up the parts of sums over k."""
    x, values, scales = operands
    n = spec.n if spec.n % TILE else values.shape[-4] * TILE
    k = spec.k if spec.k % _unit(spec) else values.shape[-3] * TILE
    group = k if scales.shape[-3] == 1 else spec.group
    own = dataclasses.replace(spec, n=n, k=k, group=group)
    return [shard.total(apply(x, values, scales, own))]
