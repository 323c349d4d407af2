"""An epilogue in C++: what it reads, what it writes, and the statements for one value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_tcgemm import _core
from jax_tcgemm.epilogue import evaluation, operations
from jax_tcgemm.problem.strides import row_major

# Where a value is taken from, for each of its dimensions: that dimension of the results, or the one
# element that there is.
Index = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What the kernel reads: a value of the jaxpr that is known before the product.

    Attributes:
        source: the value, a variable of the flat jaxpr.
        word: which word of a key of random numbers; ``None`` of anything else.
        index: where its elements are taken from.
        shape: its shape.
        dtype: its type.
    """

    source: Any
    word: int | None
    index: Index
    shape: tuple[int, ...]
    dtype: Any

    def strides(self, rank: int) -> tuple[int, ...]:
        """Returns the steps in elements along the results' dimensions."""
        strides = [0] * rank
        for stride, where in zip(row_major(self.shape), self.index, strict=True):
            if where is not None:
                strides[where] += stride
        return tuple(strides)


# Rows and columns that a kernel reduces to one value each, of which XLA reduces the rest: in the
# epilogue of a product, and in a pass without one.
PRODUCT_BLOCK = (16, 16)
PASS_BLOCK = _core.PASS_BLOCK


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction of values that the kernel makes, over rows, columns or both.

    Attributes:
        made: the operation, of the flat jaxpr.
        value: what is reduced, in C++.
        shape: of what the kernel leaves: ``(*batch, m, n)`` with what is joined by blocks.
        dtype: of its elements; float32 of any floating-point numbers.
    """

    made: Any
    value: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def along(self) -> str:
        """Along what the result moves, in the words of ``Along``."""
        axes, rank = self.made.params["axes"], len(self.shape)
        return {
            (True, True): "kNothing",
            (True, False): "kColumns",
            (False, True): "kRows",
        }[rank - 2 in axes, rank - 1 in axes]

    @property
    def join(self) -> str:
        """Name of what joins two values in ``compiled_functions.cuh``."""
        return JOINS[self.made.primitive.name]

    @property
    def neutral(self) -> str:
        """What changes nothing, in C++."""
        if self.join == "Sum":
            return operations.constant(0, self.dtype)
        if operations.is_float(self.dtype):
            return operations.constant(-math.inf if self.join == "Maximum" else math.inf, "float32")
        limits = jnp.iinfo(self.dtype)
        return operations.constant(limits.min if self.join == "Maximum" else limits.max, self.dtype)

    def finished(self, partial: jax.Array) -> jax.Array:
        """Joins what the kernel leaves."""
        reduce = {"Sum": jnp.sum, "Maximum": jnp.max, "Minimum": jnp.min}[self.join]
        joined = reduce(partial.reshape(self.shape), axis=self.made.params["axes"])
        return joined.astype(self.made.outvars[0].aval.dtype)


JOINS = {"reduce_sum": "Sum", "reduce_max": "Maximum", "reduce_min": "Minimum"}


@dataclasses.dataclass(frozen=True)
class Program:
    """An epilogue in C++.

    Attributes:
        leaves: the operands that the kernel reads, in its order.
        matrices: types of the results that the kernel writes as they are.
        reductions: what it leaves to be joined, behind those.
        lines: statements that make the results of one value; ``x0[i]``, ``x1[i]`` ... are those of
            the leaves, ``io.acc[0][i]`` the accumulators, of which a pass has none.
        written: the variables that are the matrices.
        positions: of the matrices among the results of the function; the others follow from
            reductions.
        flat: the jaxpr whose variables the leaves are.
        counts_rows: whether the statements know which row of a matrix a value is of.
        flat_rows: whether they know which of all rows, so that the matrices of a batch have to be
            taken for more rows of one.
    """

    leaves: tuple[Leaf, ...]
    matrices: tuple[jax.ShapeDtypeStruct, ...]
    reductions: tuple[Reduction, ...]
    lines: tuple[str, ...]
    written: tuple[str, ...]
    positions: tuple[int, ...]
    flat: Any
    counts_rows: bool
    flat_rows: bool

    @property
    def keeps_rows(self) -> bool:
        """Whether matrices of a batch must not be taken for more rows of one."""
        return self.counts_rows or bool(self.reductions)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any("random_" in line for line in self.lines)

    @property
    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of what the kernel writes."""
        partials = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.reductions)
        return (*self.matrices, *partials)

    def finished(self, outputs: Sequence[jax.Array], operands: Sequence[Any]) -> list[jax.Array]:
        """Returns the results of the function, of what the kernel wrote."""
        matrices = dict(zip(self.positions, outputs, strict=False))
        known = _Known(self.flat, operands)
        for reduction, partial in zip(self.reductions, outputs[len(matrices) :], strict=True):
            known.give(reduction.made.outvars[0], reduction.finished(partial))
        return [
            matrices[i] if i in matrices else jnp.asarray(known.value(atom), atom.aval.dtype)
            for i, atom in enumerate(self.flat.jaxpr.outvars)
        ]

    def known(self, operands: Sequence[Any]) -> list[jax.Array]:
        """Computes the leaves, by operations of JAX.

        Args:
            operands: those of the epilogue, without the accumulators.
        """
        known = _Known(self.flat, operands)
        values = []
        for leaf in self.leaves:
            value = known.value(leaf.source)
            if leaf.word is not None:
                value = jax.random.key_data(value)[leaf.word]
            values.append(value)
        return values


class _Known:
    """Values that do not depend on the accumulators."""

    def __init__(self, flat: Any, operands: Sequence[Any]):
        jaxpr = flat.jaxpr
        count = len(jaxpr.invars) - len(operands)
        self._made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._values = dict(zip(jaxpr.invars[count:], operands, strict=True))
        self._values.update(zip(jaxpr.constvars, flat.consts, strict=True))

    def give(self, var: Any, value: Any) -> None:
        """Says what a variable is."""
        self._values[var] = value

    def value(self, atom: Any) -> Any:
        """Returns what it is, by operations of JAX."""
        if isinstance(atom, core.Literal):
            return atom.val
        if atom not in self._values:
            eqn = self._made[atom]
            results = evaluation.apply(eqn, [self.value(x) for x in eqn.invars])
            self._values.update(zip(eqn.outvars, results, strict=True))
        return self._values[atom]
