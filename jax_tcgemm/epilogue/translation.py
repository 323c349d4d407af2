"""Translates an epilogue from a jaxpr to a program in C++.

The translation follows the results back to the operands. On the way it finds each operand's axes
from ``broadcast_in_dim``, ``reshape`` and ``transpose``, not from the operand's shape. If a value
does not depend on the accumulators and has no translation, JAX computes it before the product, and
the kernel reads it as an operand.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from jax_tcgemm import _core
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.epilogue import operations
from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.epilogue.operations import BatchIndexError, NotTranslatableError, element
from jax_tcgemm.epilogue.program import (
    JOINS,
    PASS_BLOCK,
    PRODUCT_BLOCK,
    Index,
    Program,
    Reduction,
)
from jax_tcgemm.epilogue.values import Values, is_literal

MAX_OPERANDS = _core.MAX_COMPILED_OPERANDS
MAX_RESULTS = _core.MAX_COMPILED_RESULTS

# Sums of narrower integers would wrap at each step. Floating-point sums are in float32.
_SUMMED = (jnp.dtype(jnp.int32), jnp.dtype(jnp.uint32))


@functools.lru_cache(maxsize=256)
def translate(function: EpilogueFunction, shape: tuple[int, ...] | None = None) -> Program | str:
    """Translates a function, or returns why it cannot be translated.

    Args:
        function: an epilogue, or a function without accumulators for a pass of its own.
        shape: shape of the matrices that the pass goes over.
    """
    try:
        return _Translation(function, shape).run()
    except BatchIndexError as error:
        reason = str(error)
    except NotTranslatableError as error:
        return str(error)
    except RecursionError:
        return "more operations one after the other than can be translated"
    try:
        return _Translation(function, shape, flat_rows=True).run()
    except NotTranslatableError:
        return reason


class _Translation:
    """The state of one translation."""

    def __init__(
        self, function: EpilogueFunction, shape: tuple[int, ...] | None, flat_rows: bool = False
    ):
        self.function = function
        count = function.accumulators
        self.shape = shape or function.flat.jaxpr.invars[0].aval.shape
        self.block = PRODUCT_BLOCK if count else PASS_BLOCK
        self.values = Values(function.flat, count, self.shape, flat_rows)
        self.reductions: list[Reduction] = []

    def run(self) -> Program:
        """Translates the values that the results need."""
        values, flat = self.values, self.function.flat
        if flat.jaxpr.effects:
            raise NotTranslatableError("effects")
        places = {jaxprs.context_of(eqn)[0] for eqn in flat.jaxpr.eqns} - {None}
        if places:
            raise NotTranslatableError(f"operations that are computed on {', '.join(places)}")
        if not all(isinstance(extent, int) for extent in self.shape):
            raise NotTranslatableError("symbolic shapes")
        matrices: dict[int, str] = {}
        for i, atom in enumerate(flat.jaxpr.outvars):
            # The kernel also writes random results, so that XLA does not draw them again.
            depends = not is_literal(atom) and atom in values.dependent | values.drawn
            if depends and values.spans(atom) and not self.is_given(atom):
                element(atom.aval.dtype)
                matrices[i] = self.unrounded(values.value(atom, self.every), atom.aval.dtype)
            elif depends and not values.spans(atom):
                self.reduce_for(atom)
        results = len(matrices) + len(self.reductions)
        if not 0 < results <= MAX_RESULTS or (values.accumulators and not matrices):
            raise NotTranslatableError(
                f"{len(matrices)} results of the product's shape of {results}"
            )
        if values.flat_rows and self.reductions:
            raise NotTranslatableError("a reduction beside an index along a batch")
        if len(values.leaves) > MAX_OPERANDS:
            raise NotTranslatableError(f"{len(values.leaves)} operands, more than {MAX_OPERANDS}")
        return Program(
            tuple(values.leaves),
            tuple(self.function.results[i] for i in matrices),
            tuple(self.reductions),
            tuple(values.lines),
            tuple(matrices.values()),
            tuple(matrices),
            flat,
            values.counts_rows,
            values.flat_rows,
            not values.in_full.isdisjoint(values.accumulators),
        )

    @property
    def every(self) -> Index:
        """Each dimension of the results."""
        return tuple(range(len(self.shape)))

    def is_given(self, atom: Any) -> bool:
        """Checks if a result is an operand, apart from conversions that lose nothing."""
        dtype = atom.aval.dtype
        while atom not in self.values.given:
            eqn = self.values.made[atom]
            exact = atom.aval.dtype == dtype or (
                atom.aval.dtype == jnp.float32 and operations.is_float(dtype)
            )
            if eqn.primitive.name != "convert_element_type" or not exact:
                return False
            (atom,) = eqn.invars
            if is_literal(atom):
                return False
        return atom.aval.dtype == dtype and atom not in self.values.accumulators

    def reduce_for(self, atom: Any) -> None:
        """Adds the reductions that a value depends on to those of the kernel."""
        if is_literal(atom) or atom not in self.values.dependent:
            return
        if atom in self.values.given:
            raise NotTranslatableError("a result of another shape that is no reduction")
        eqn = self.values.made[atom]
        if any(each.made is eqn for each in self.reductions):
            return
        operand = eqn.invars[0] if eqn.invars else None
        if eqn.primitive.name in JOINS and operand is not None and self.values.spans(operand):
            self.reductions.append(self.reduction(eqn, operand))
            return
        for each in eqn.invars:
            self.reduce_for(each)

    def reduction(self, eqn: Any, operand: Any) -> Reduction:
        """Returns a reduction of values that the kernel computes."""
        dtype, axes, rank = operand.aval.dtype, eqn.params["axes"], len(self.shape)
        if rank - 2 not in axes and rank - 1 not in axes:
            raise NotTranslatableError(f"{eqn.primitive.name} over a batch")
        is_float = operations.is_float(dtype)
        is_sum = JOINS[eqn.primitive.name] == "Sum"
        if not is_float and not (is_sum and jnp.dtype(dtype) in _SUMMED):
            raise NotTranslatableError(f"{eqn.primitive.name} of {dtype}")
        joined = jnp.dtype(jnp.float32) if is_float else dtype
        value = self.values.value(operand, self.every)
        return Reduction(eqn, value, self.shape, self.block, joined)

    def unrounded(self, name: str, dtype: Any) -> str:
        """Returns a result before it is rounded to its type; storing it rounds it, too."""
        begin = f"{name} = {operations.rounded('', dtype)[:-1]}"
        for line in self.values.lines:
            if f" {begin}" in line and begin.endswith("("):
                return line.partition(begin)[2].removesuffix(");")
        return name
