"""How products over groups of rows are divided: by rows, experts or contracted dimension."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.lowering import reference
from jax_tcgemm.lowering.ragged_reference import group_bounds
from jax_tcgemm.partitioning.rules import Rule
from jax_tcgemm.partitioning.shard import Shard
from jax_tcgemm.partitioning.work import Array, Work
from jax_tcgemm.problem import ragged
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.epilogue import PLAIN, Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

_Bind = Callable[[Operands, GemmSpec], list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class RaggedSpec:
    """A product over groups of rows in the form that the custom call carries.

    Exported programs have the names of this class and of its fields.

    Attributes:
        out_dtype: dtype of the results.
        precision: canonical ``lax`` precision.
        transpose_rhs: whether ``rhs`` is ``(g, n, k)``.
        epilogue: the epilogue.
        config: name of the requested kernel configuration, or ``None``.
    """

    out_dtype: np.dtype
    precision: Any
    transpose_rhs: bool = False
    epilogue: Epilogue = PLAIN
    config: str | None = None


def dot_rule(bind: _Bind) -> Rule:
    """Returns the rule of ``ragged_dot_p``; ``bind`` applies it."""
    local = functools.partial(_local_dot, bind)
    return Rule(_accepts, _dot_work, local, (RaggedSpec, Epilogue), _told)


def contraction_rule(bind: _Bind) -> Rule:
    """Returns the rule of ``ragged_contraction_p``; ``bind`` applies it."""
    local = functools.partial(_local_contraction, bind)
    return Rule(_accepts, _contraction_work, local, (RaggedSpec, Epilogue), _told)


def _told(spec: GemmSpec) -> RaggedSpec:
    like = spec.out_dtype, spec.precision, spec.transposes_b, spec.epilogue, spec.config
    return RaggedSpec(*like)


def _accepts(spec: GemmSpec, types: Sequence[Any]) -> bool:
    """Checks if the rule divides this product.

    It takes every type, because XLA gathers the matrices of all groups for a loop over them.
    """
    # A DotAlgorithm, which no kernel has, is a named tuple.
    is_known = type(spec.precision) is tuple or isinstance(spec.precision, lax.DotAlgorithmPreset)
    return is_known and all(extent > 0 for x in types for extent in x.shape)


def _work(
    spec: RaggedSpec, types: Sequence[Any], dims: Sequence[tuple[str | None, ...]], result: str
) -> Work:
    extents: dict[str, int] = {"g": types[2].shape[0]}
    for names, x in zip(dims, types, strict=True):
        extents |= {name: size for name, size in zip(names, x.shape, strict=True) if name}
    each = Array(tuple(result), spec.out_dtype.itemsize, "the result")
    return Work(
        extents=extents,
        operands=tuple(
            Array(names, x.dtype.itemsize, label)
            for names, x, label in zip(
                dims, types, ("lhs", "rhs", "group_sizes", "bias"), strict=False
            )
        ),
        product=each,
        results=(each,) * sum(spec.epilogue.results),
        factors=frozenset((0, 1)),
        operations=2.0 * extents["m"] * extents["k"] * extents["n"],
        # The rows of a result know their group; its columns need only their sum.
        unscattered=frozenset("n") if result == "mn" else frozenset(),
    )


def _dot_work(spec: RaggedSpec, types: Sequence[Any]) -> Work:
    rhs = ("g", "n", "k") if spec.transpose_rhs else ("g", "k", "n")
    dims = [("m", "k"), rhs, (None,), ("g", "n")]
    return _work(spec, types, dims[: len(types)], "mn")


def _contraction_work(spec: RaggedSpec, types: Sequence[Any]) -> Work:
    return _work(spec, types, [("m", "k"), ("m", "n"), (None,)], "gkn")


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups that a device computes, among the rows that it has.

    Attributes:
        sizes: rows of each group, int32.
        first: the row at which the first group begins.
    """

    sizes: jax.Array
    first: jax.Array

    @staticmethod
    def of(shard: Shard, group_sizes: jax.Array) -> Groups:
        """Clips all groups to the device's rows and takes the device's own groups."""
        plan = shard.plan
        begins, ends = group_bounds(group_sizes, plan.work.extents["m"])
        count = plan.part("g")
        padding = (0, count * plan.devices.parts(plan.layout["g"]) - len(group_sizes))
        begins, ends = (jnp.pad(x, padding, mode="edge") for x in (begins, ends))
        # Padding groups begin where the last group ends.
        begins = jnp.where(jnp.arange(len(begins)) < len(group_sizes), begins, ends)
        start, rows = shard.start("m"), plan.part("m")
        begins, ends = (
            jnp.clip(lax.dynamic_slice(x, (shard.start("g"),), (count,)) - start, 0, rows)
            for x in (begins, ends)
        )
        return Groups(ends - begins, begins[0])

    def to_front(self, shard: Shard, x: jax.Array) -> jax.Array:
        """Moves rows so that those of the first group come first."""
        return jnp.roll(x, -self.first, axis=0) if shard.plan.layout["g"] else x

    def back(self, shard: Shard, x: jax.Array) -> jax.Array:
        """Moves rows back to where they were."""
        return jnp.roll(x, self.first, axis=0) if shard.plan.layout["g"] else x


def _local_dot(
    bind: _Bind, shard: Shard, spec: RaggedSpec, *operands: jax.Array
) -> list[jax.Array]:
    lhs, rhs, group_sizes, *bias = operands
    groups = Groups.of(shard, group_sizes)
    lhs = groups.to_front(shard, lhs)
    epilogue, out_dtype = spec.epilogue, spec.out_dtype
    is_sum = bool(shard.plan.layout["k"])
    if is_sum:
        # Only one part of a sum gets the bias. The activation applies to the whole sum.
        lhs = shard.without_padding(lhs, 1, "k")
        rhs = shard.without_padding(rhs, 2 if spec.transpose_rhs else 1, "k")
        bias = [jnp.where(shard.start("k") == 0, x, jnp.zeros_like(x)) for x in bias]
        epilogue, out_dtype = PLAIN, _travelling_dtype(spec)
    product = ragged.dot(
        *(out_dtype, spec.precision, spec.config),
        transpose_b=spec.transpose_rhs,
        has_bias=bool(bias),
        epilogue=epilogue,
    )
    results = bind(Operands(lhs, rhs, groups.sizes, bias=next(iter(bias), None)), product)
    results = [shard.total(groups.back(shard, x)) for x in results]
    return _finished(shard, spec, results[0], group_sizes) if is_sum else results


def _travelling_dtype(spec: RaggedSpec) -> Any:
    if spec.epilogue.activation is None or spec.out_dtype == jnp.bfloat16:
        return spec.out_dtype
    return accumulator_dtype(spec.out_dtype, spec.out_dtype, spec.out_dtype)


def _finished(
    shard: Shard, spec: RaggedSpec, z: jax.Array, group_sizes: jax.Array
) -> list[jax.Array]:
    """Returns the results for pre-activations that were summed over devices."""
    d = z = z.astype(accumulator_dtype(z.dtype, z.dtype, spec.out_dtype))
    if spec.epilogue.activation is not None:
        _, ends = group_bounds(group_sizes, shard.plan.work.extents["m"])
        rows = shard.start("m", after_sum=True) + lax.broadcasted_iota(jnp.int32, (len(z), 1), 0)
        d = jnp.where(rows < ends[-1], resolve(spec.epilogue.activation).reference(z), 0)
    return [reference.convert(x, spec.out_dtype) for x in spec.epilogue.picked((d, z))]


def _local_contraction(
    bind: _Bind, shard: Shard, spec: RaggedSpec, *operands: jax.Array
) -> list[jax.Array]:
    lhs, rhs, group_sizes = operands
    groups = Groups.of(shard, group_sizes)
    lhs, rhs = (groups.to_front(shard, x) for x in (lhs, rhs))
    product = ragged.contraction(spec.out_dtype, spec.precision, spec.config)
    return [shard.total(x) for x in bind(Operands(lhs, rhs, groups.sizes), product)]
