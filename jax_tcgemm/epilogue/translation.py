"""From an epilogue as a jaxpr to a program in C++.

What is asked for is followed from the results back to the operands. On the way an operand's axes
are found out: where ``broadcast_in_dim``, ``reshape`` and ``transpose`` take it from, not what its
shape looks like. What does not depend on the accumulators and has no translation is computed before
the product and read as an operand.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_tcgemm.epilogue import operations
from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.epilogue.operations import NotTranslatableError, element
from jax_tcgemm.epilogue.program import BLOCK, JOINS, Index, Leaf, Program, Reduction
from jax_tcgemm.problem.strides import row_major

# As kMaxCompiledOperands and kMaxCompiledResults of cuda/compiled_params.h.
MAX_OPERANDS = 12
MAX_RESULTS = 6

# Sums of narrower types would be rounded at each step.
_REDUCED = (jnp.dtype(jnp.float32), jnp.dtype(jnp.int32), jnp.dtype(jnp.uint32))


@functools.lru_cache(maxsize=256)
def translate(function: EpilogueFunction) -> Program | str:
    """Translates an epilogue, or says why it cannot be."""
    try:
        return _Translation(function).run()
    except NotTranslatableError as error:
        return str(error)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


class _Translation:
    """The state of one translation."""

    def __init__(self, function: EpilogueFunction):
        self.flat = function.flat
        jaxpr = self.flat.jaxpr
        self.made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.accumulators: list[Any] = list(jaxpr.invars[: function.accumulators])
        self.given = set(jaxpr.invars) | set(jaxpr.constvars)
        self.shape = self.accumulators[0].aval.shape
        self.results = function.results
        self.leaves: list[Leaf] = []
        self.reductions: list[Reduction] = []
        self.lines: list[str] = []
        self.names: dict[tuple[Any, Index], str] = {}
        self.dependent = self._dependent(jaxpr)
        self.effects = bool(jaxpr.effects)

    def _dependent(self, jaxpr: Any) -> set[Any]:
        """Returns the variables that depend on the accumulators."""
        dependent = set(self.accumulators)
        for eqn in jaxpr.eqns:
            if any(not _is_literal(x) and x in dependent for x in eqn.invars):
                dependent.update(eqn.outvars)
        return dependent

    def run(self) -> Program:
        """Translates what the results need."""
        if self.effects:
            raise NotTranslatableError("effects")
        if not all(isinstance(extent, int) for extent in self.shape):
            raise NotTranslatableError("symbolic shapes")
        matrices: dict[int, str] = {}
        outvars: list[Any] = list(self.flat.jaxpr.outvars)
        for i, atom in enumerate(outvars):
            depends = not _is_literal(atom) and atom in self.dependent
            if depends and self.spans(atom):
                element(atom.aval.dtype)
                matrices[i] = self.unrounded(self.value(atom, self.every), atom.aval.dtype)
            elif depends:
                self.reduce_for(atom)
        results = len(matrices) + len(self.reductions)
        if not 0 < results <= MAX_RESULTS or not matrices:
            raise NotTranslatableError(
                f"{len(matrices)} results of the product's shape of {results}"
            )
        if len(self.leaves) > MAX_OPERANDS:
            raise NotTranslatableError(f"{len(self.leaves)} operands, more than {MAX_OPERANDS}")
        return Program(
            tuple(self.leaves),
            tuple(self.results[i] for i in matrices),
            tuple(self.reductions),
            tuple(self.lines),
            tuple(matrices.values()),
            tuple(matrices),
            self.flat,
        )

    @property
    def every(self) -> Index:
        """Each dimension of the results."""
        return tuple(range(len(self.shape)))

    def reduce_for(self, atom: Any) -> None:
        """Has the kernel make the reductions that a value follows from."""
        if _is_literal(atom) or atom not in self.dependent:
            return
        if atom in self.accumulators:
            raise NotTranslatableError("a result of another shape that is no reduction")
        eqn = self.made[atom]
        if any(each.made is eqn for each in self.reductions):
            return
        operand = eqn.invars[0] if eqn.invars else None
        if eqn.primitive.name in JOINS and operand is not None and self.spans(operand):
            self.reductions.append(self.reduction(eqn, operand))
            return
        for each in eqn.invars:
            self.reduce_for(each)

    def spans(self, atom: Any) -> bool:
        """Whether a value has the product's shape."""
        return atom.aval.shape == self.shape

    def reduction(self, eqn: Any, operand: Any) -> Reduction:
        """Returns a reduction of values that the kernel makes."""
        dtype, axes, rank = operand.aval.dtype, eqn.params["axes"], len(self.shape)
        if rank - 2 not in axes and rank - 1 not in axes:
            raise NotTranslatableError(f"{eqn.primitive.name} over a batch")
        is_sum = JOINS[eqn.primitive.name] == "Sum"
        if jnp.dtype(dtype) not in _REDUCED if is_sum else not operations.is_float(dtype):
            raise NotTranslatableError(f"{eqn.primitive.name} of {dtype}")
        shape = tuple(
            -(-extent // BLOCK) if axis in axes and axis >= rank - 2 else extent
            for axis, extent in enumerate(self.shape)
        )
        return Reduction(eqn, self.value(operand, self.every), shape, dtype)

    def unrounded(self, name: str, dtype: Any) -> str:
        """Returns what a result was before it was rounded to its type, as storing it will."""
        begin = f"{name} = {operations.rounded('', dtype)[:-1]}"
        for line in self.lines:
            if f" {begin}" in line and begin.endswith("("):
                return line.partition(begin)[2].removesuffix(");")
        return name

    def value(self, atom: Any, index: Index) -> str:
        """Returns the C++ of a value of the jaxpr, taken from there."""
        if _is_literal(atom):
            if atom.aval.shape:
                raise NotTranslatableError("an array as a literal")
            return operations.constant(atom.val, atom.aval.dtype)
        index = tuple(
            None if extent == 1 else where
            for extent, where in zip(atom.aval.shape, index, strict=True)
        )
        key = atom, index
        if key not in self.names:
            self.names[key] = self._made_value(atom, index)
        return self.names[key]

    def _made_value(self, atom: Any, index: Index) -> str:
        if atom in self.accumulators:
            return f"io.acc[{self.accumulators.index(atom)}][i]"
        if atom in self.given:
            return self.leaf(atom, index)
        lines, leaves, names = len(self.lines), len(self.leaves), dict(self.names)
        eqn = self.made[atom]
        try:
            return self._result(eqn, eqn.outvars.index(atom), index)
        except NotTranslatableError:
            # Known before the product: read instead, if it is no matrix that was not there before.
            if atom in self.dependent or math.prod(atom.aval.shape) >= math.prod(self.shape) > 1:
                raise
            del self.lines[lines:], self.leaves[leaves:]
            self.names = names
            return self.leaf(atom, index)

    def leaf(self, atom: Any, index: Index, word: int | None = None) -> str:
        """Returns the C++ of what is read."""
        if word is None:
            element(atom.aval.dtype)
        used = [where for where in index if where is not None]
        extents = {where: self.shape[where] for where in used}
        for extent, where in zip(atom.aval.shape, index, strict=False):
            if where is not None and extent != extents[where]:
                raise NotTranslatableError(f"a part of an operand of shape {atom.aval.shape}")
        if word is None:
            leaf = Leaf(atom, None, index, atom.aval.shape, atom.aval.dtype)
        else:
            leaf = Leaf(atom, word, (), (), jnp.dtype(jnp.uint32))
        if leaf not in self.leaves:
            self.leaves.append(leaf)
        return f"x{self.leaves.index(leaf)}[i]"

    def _result(self, eqn: Any, position: int, index: Index) -> str:
        name = eqn.primitive.name
        special = getattr(self, f"_{name}", None)
        if special is not None:
            return special(eqn, index)
        if name in JOINS:
            raise NotTranslatableError(f"{name} within what has the product's shape")
        if position != 0 or len(eqn.outvars) != 1:
            raise NotTranslatableError(name)
        tangent = self._tanh_beside_one(eqn)
        if tangent is not None:  # no cancellation, and no branch
            twice = f"2.f * logistic(2.f * {self._operand(tangent, eqn.outvars[0], index)})"
            return self.named(twice, eqn.outvars[0].aval.dtype)
        values = [self._operand(atom, eqn.outvars[0], index) for atom in eqn.invars]
        dtypes = [atom.aval.dtype for atom in eqn.invars]
        return self.named(
            operations.translated(name, values, dtypes, eqn.params), eqn.outvars[0].aval.dtype
        )

    def _tanh_beside_one(self, eqn: Any) -> Any:
        """Returns what the tanh is of in ``1 + tanh(x)``, as gelu has it, ``None`` elsewhere."""
        if eqn.primitive.name != "add" or eqn.outvars[0].aval.dtype != jnp.float32:
            return None
        for one, other in (eqn.invars, eqn.invars[::-1]):
            is_one = _is_literal(one) and one.val == 1
            made = None if _is_literal(other) else self.made.get(other)
            if is_one and made is not None and made.primitive.name == "tanh":
                return made.invars[0]
        return None

    def _operand(self, atom: Any, result: Any, index: Index) -> str:
        """Returns an operand of an elementwise operation, which may be a scalar."""
        shape = atom.aval.shape
        if shape and len(shape) != len(result.aval.shape):
            raise NotTranslatableError(f"an operand of shape {shape} for {result.aval.shape}")
        return self.value(atom, index if shape else ())

    def named(self, expression: str, dtype: Any) -> str:
        """Returns the name of a new variable of that value."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"const {element(dtype).value} {name} = {expression};")
        return name

    # Operations that say where a value is taken from.

    def _broadcast_in_dim(self, eqn: Any, index: Index) -> str:
        atom = eqn.invars[0]
        taken = tuple(index[axis] for axis in eqn.params["broadcast_dimensions"])
        return self.value(atom, taken)

    def _squeeze(self, eqn: Any, index: Index) -> str:
        atom, dropped = eqn.invars[0], eqn.params["dimensions"]
        remaining = iter(index)
        rank = len(atom.aval.shape)
        dropped = {axis % rank for axis in dropped}
        taken = (None if axis in dropped else next(remaining) for axis in range(rank))
        return self.value(atom, tuple(taken))

    def _expand_dims(self, eqn: Any, index: Index) -> str:
        return self._reshape(eqn, index)

    def _reshape(self, eqn: Any, index: Index) -> str:
        atom = eqn.invars[0]
        new, old = eqn.outvars[0].aval.shape, atom.aval.shape
        if [x for x in new if x != 1] != [x for x in old if x != 1]:
            raise NotTranslatableError(f"reshape of {old} to {new}")
        kept = iter([where for extent, where in zip(new, index, strict=True) if extent != 1])
        return self.value(atom, tuple(None if extent == 1 else next(kept) for extent in old))

    def _transpose(self, eqn: Any, index: Index) -> str:
        permutation = eqn.params["permutation"]
        taken: list[int | None] = [None] * len(index)
        for position, axis in enumerate(permutation):
            taken[axis] = index[position]
        return self.value(eqn.invars[0], tuple(taken))

    # Operations on the index itself.

    def place(self, where: int | None) -> str:
        """Returns the C++ of the index along a dimension of the results."""
        rank = len(self.shape)
        if where is None:
            return "0u"
        if where < rank - 2:
            raise NotTranslatableError("an index along a batch")
        return f"static_cast<uint32_t>(io.{'m' if where == rank - 2 else 'n'}(i))"

    def _iota(self, eqn: Any, index: Index) -> str:
        dtype = eqn.params["dtype"]
        place = f"static_cast<int32_t>({self.place(index[eqn.params['dimension']])})"
        return self.named(operations.converted(place, jnp.int32, dtype), dtype)

    def _random_bits(self, eqn: Any, index: Index) -> str:
        """As ``jax.random.bits`` has them, of each element apart (threefry_partitionable)."""
        (key,), shape, width = eqn.invars, eqn.params["shape"], eqn.params["bit_width"]
        partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore
        if key.aval.shape or width not in (8, 16, 32) or not partitionable:
            raise NotTranslatableError(f"random_bits of {width} bits")
        if "fry" not in str(key.aval.dtype):
            raise NotTranslatableError(f"random_bits of {key.aval.dtype}")
        if _is_literal(key) or key in self.dependent:
            raise NotTranslatableError("random_bits of a key that depends on the product")
        if math.prod(shape) >= 2**32:
            raise NotTranslatableError("random_bits of more than 2^32 numbers")
        terms = [
            f"{self.place(where)} * {stride}u"
            for stride, where in zip(row_major(shape), index, strict=True)
            if where is not None
        ]
        words = [self.leaf(key, (), word) for word in (0, 1)]
        count = self.named(" + ".join(terms) or "0u", jnp.uint32)
        dtype = eqn.outvars[0].aval.dtype
        bits = f"random_bits({words[0]}, {words[1]}, {count})"
        return self.named(f"static_cast<{element(dtype).value}>({bits})", dtype)
