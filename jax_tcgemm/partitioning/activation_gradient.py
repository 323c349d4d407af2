"""How the cotangent of an activation's input is divided among devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_tcgemm.partitioning.rules import Rule
from jax_tcgemm.partitioning.shard import Shard
from jax_tcgemm.partitioning.work import Array, Work
from jax_tcgemm.problem.arithmetic import accumulator_dtype


def rule(apply: Callable[..., list[jax.Array]], spec_class: type) -> Rule:
    """Returns the rule of ``gradient_p``; ``apply`` binds it to operands and a spec."""

    def local(shard: Shard, spec: Any, *operands: jax.Array) -> list[jax.Array]:
        return _local(shard, spec, operands, apply)

    return Rule(lambda spec, types: types[0].size > 0, _work, local, (spec_class,))


def _work(spec: Any, types: Sequence[Any]) -> Work:
    g, z = types
    dims = (*(f"row{i}" for i in range(z.ndim - 1)), "n")
    sums = tuple(Array(("n",), dtype.itemsize, "the sums") for dtype in spec.bias_dtypes)
    result = Array(dims, z.dtype.itemsize, "the result")
    return Work(
        extents=dict(zip(dims, z.shape, strict=True)),
        operands=(Array(dims, g.dtype.itemsize, "g"), Array(dims, z.dtype.itemsize, "z")),
        product=result,
        results=(result, *sums),
        factors=frozenset((0, 1)),
        operations=0,
    )


def _local(
    shard: Shard, spec: Any, operands: Sequence[jax.Array], apply: Callable[..., list[jax.Array]]
) -> list[jax.Array]:
    """Sums rows at least in float32, also over devices, and rounds once."""
    _, *sums = shard.plan.work.results
    if not spec.bias_dtypes or not shard.plan.summed_digits(sums[0]):
        return apply(operands, spec)
    for axis, name in enumerate(shard.plan.work.operands[0].dims[:-1]):
        operands = [shard.without_padding(x, axis, str(name)) for x in operands]
    z_dtype = operands[1].dtype
    dtype = accumulator_dtype(z_dtype, z_dtype, z_dtype)
    wide = dataclasses.replace(spec, bias_dtypes=(dtype,) * len(spec.bias_dtypes))
    d, *parts = apply(operands, wide)
    each = zip(parts, sums, spec.bias_dtypes, strict=True)
    return [d, *(shard.total(x, array).astype(dtype) for x, array, dtype in each)]
