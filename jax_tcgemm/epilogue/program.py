"""An epilogue in C++: its operands, its results, and the statements for one value."""

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
from jax_tcgemm.problem.strides import StridedGemm, row_major

# For each dimension of a value: the dimension of the results that indexes it, ``None`` if the value
# has only one element along it.
Index = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A value that the kernel reads; it is known before the product.

    Attributes:
        source: the value: a variable of the flat jaxpr.
        word: which word of a random-number key is read; ``None`` for other values.
        index: how the dimensions of the results index its dimensions.
        shape: its shape.
        dtype: its type.
    """

    source: Any
    word: int | None
    index: Index
    shape: tuple[int, ...]
    dtype: Any

    def strides(self, rank: int) -> tuple[int, ...]:
        """Returns the strides, in elements, along the results' dimensions."""
        strides = [0] * rank
        for stride, where in zip(row_major(self.shape), self.index, strict=True):
            if where is not None:
                strides[where] += stride
        return tuple(strides)


# Rows and columns of the blocks that a kernel reduces to one value each; XLA reduces these values.
# The first is for the epilogue of a product, the second for a pass without a product.
PRODUCT_BLOCK = (16, 16)
PASS_BLOCK = _core.PASS_BLOCK


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction of values that the kernel computes, over rows, columns or both.

    Attributes:
        made: the equation of the flat jaxpr.
        value: C++ of the reduced value.
        extents: ``(*batch, m, n)`` of the matrices.
        block: rows and columns of a block.
        dtype: dtype of the partial results; float32 for any floating-point values.
    """

    made: Any
    value: str
    extents: tuple[int, ...]
    block: tuple[int, int]
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the partial results: ``extents``, with blocks along reduced rows and columns."""
        *batch, m, n = self.extents
        rows, columns = self._reduces
        of_block = [-(-extent // size) for extent, size in zip((m, n), self.block, strict=True)]
        return (*batch, of_block[0] if rows else m, of_block[1] if columns else n)

    @property
    def _axes(self) -> set[int]:
        """The reduced axes, counted from the last one: -1 for columns, -2 for rows."""
        rank = self.made.invars[0].aval.ndim
        return {axis - rank for axis in self.made.params["axes"]}

    @property
    def _reduces(self) -> tuple[bool, bool]:
        return -2 in self._axes, -1 in self._axes

    @property
    def crosses_batches(self) -> bool:
        """Returns true if rows may be joined with those of other matrices of the batch."""
        every = range(-self.made.invars[0].aval.ndim, -1)
        return -2 not in self._axes or self._axes.issuperset(every)

    @property
    def along(self) -> str:
        """The dimensions along which the result varies, as ``Along`` names them."""
        return {
            (True, True): "kNothing",
            (True, False): "kColumns",
            (False, True): "kRows",
        }[self._reduces]

    @property
    def join(self) -> str:
        """Name of the type in ``compiled_functions.cuh`` that joins two values."""
        return JOINS[self.made.primitive.name]

    @property
    def neutral(self) -> str:
        """C++ of the join's neutral element."""
        if self.join == "Sum":
            return operations.constant(0, self.dtype)
        if operations.is_float(self.dtype):
            return operations.constant(-math.inf if self.join == "Maximum" else math.inf, "float32")
        limits = jnp.iinfo(self.dtype)
        return operations.constant(limits.min if self.join == "Maximum" else limits.max, self.dtype)

    def finished(self, partial: jax.Array) -> jax.Array:
        """Joins the partial results of the kernel."""
        reduce = {"Sum": jnp.sum, "Maximum": jnp.max, "Minimum": jnp.min}[self.join]
        of, result = self.made.invars[0].aval, self.made.outvars[0].aval
        rows, columns = self._reduces
        if rows and self.crosses_batches:
            joined = reduce(partial.reshape(-1, self.shape[-1]), axis=(0, 1) if columns else 0)
        else:
            # The folded dimensions have the same elements in the same order.
            *batch, m, _ = of.shape
            shape = (*batch, self.shape[-2] if rows else m, self.shape[-1])
            joined = reduce(partial.reshape(shape), axis=self.made.params["axes"])
        return joined.astype(result.dtype)


JOINS = {"reduce_sum": "Sum", "reduce_max": "Maximum", "reduce_min": "Minimum"}


@dataclasses.dataclass(frozen=True)
class Program:
    """An epilogue in C++.

    Attributes:
        leaves: the operands that the kernel reads, in the kernel's order.
        matrices: types of the results that the kernel writes without a reduction.
        reductions: the reductions whose partial results the kernel writes after the matrices.
        lines: statements that compute one element of each result. ``x0[i]``, ``x1[i]`` ... are
            elements of the leaves, ``io.acc[0][i]`` of the accumulators; a pass has no
            accumulators.
        written: C++ of the elements of the matrices.
        positions: positions of the matrices among the results of the function. The other results
            follow from reductions.
        flat: the jaxpr that has the leaves as variables.
        counts_rows: whether the statements use the row of an element within its matrix.
        flat_rows: whether the statements use the row among all matrices of a batch. The kernel must
            then treat the batch as more rows of one matrix.
        shows_sums: whether results may show the last bits of the accumulators.
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
    shows_sums: bool

    @property
    def keeps_rows(self) -> bool:
        """Returns true if a batch must not be treated as more rows of one matrix."""
        return self.counts_rows or not all(each.crosses_batches for each in self.reductions)

    def folded(self, gemm: StridedGemm) -> Program:
        """Returns the program for the matrices of a gemm in which a batch may have become rows."""
        extents = (*gemm.batch, gemm.m, gemm.n)
        changed = (dataclasses.replace(each, extents=extents) for each in self.reductions)
        return dataclasses.replace(self, reductions=tuple(changed))

    @property
    def draws(self) -> bool:
        """Returns true if the program draws random numbers."""
        return any("random_" in line for line in self.lines)

    @property
    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of the arrays that the kernel writes."""
        partials = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.reductions)
        return (*self.matrices, *partials)

    def finished(self, outputs: Sequence[jax.Array], operands: Sequence[Any]) -> list[jax.Array]:
        """Returns the results of the function, from the arrays that the kernel wrote."""
        matrices = dict(zip(self.positions, outputs, strict=False))
        known = _Known(self.flat, operands)
        for reduction, partial in zip(self.reductions, outputs[len(matrices) :], strict=True):
            known.give(reduction.made.outvars[0], reduction.finished(partial))
        return [
            matrices[i] if i in matrices else jnp.asarray(known.value(atom), atom.aval.dtype)
            for i, atom in enumerate(self.flat.jaxpr.outvars)
        ]

    def known(self, operands: Sequence[Any]) -> list[jax.Array]:
        """Computes the leaves with JAX operations.

        Args:
            operands: operands of the epilogue, without the accumulators.
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
        """Sets the value of a variable."""
        self._values[var] = value

    def value(self, atom: Any) -> Any:
        """Returns the value of a variable, computed with JAX operations."""
        if isinstance(atom, core.Literal):
            return atom.val
        if atom not in self._values:
            eqn = self._made[atom]
            results = evaluation.apply(eqn, [self.value(x) for x in eqn.invars])
            self._values.update(zip(eqn.outvars, results, strict=True))
        return self._values[atom]
