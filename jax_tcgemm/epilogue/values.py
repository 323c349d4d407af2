"""C++ of the values of a jaxpr: statements, and the leaves that they read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jax_tcgemm.epilogue import operations, rng
from jax_tcgemm.epilogue.operations import BatchIndexError, NotTranslatableError, element
from jax_tcgemm.epilogue.program import JOINS, Index, Leaf
from jax_tcgemm.epilogue.tanh import Tanhs, is_literal
from jax_tcgemm.problem.strides import row_major


def following(variables: Iterable[Any], jaxpr: Any) -> set[Any]:
    """Returns the given variables and all variables that depend on them."""
    found = set(variables)
    for eqn in jaxpr.eqns:
        if any(not is_literal(x) and x in found for x in eqn.invars):
            found.update(eqn.outvars)
    return found


def shown_in_full(jaxpr: Any) -> set[Any]:
    """Returns variables whose last bits a result of more than 16 bits may show."""
    found = {x for x in jaxpr.outvars if not is_literal(x) and not operations.is_narrow(x)}
    for eqn in reversed(jaxpr.eqns):
        # Rounding to a narrow type on the way hides the last bits.
        if any(x in found and not operations.is_narrow(x) for x in eqn.outvars):
            found.update(x for x in eqn.invars if not is_literal(x))
    return found


class Values:
    """The translated values of a function.

    Attributes:
        flat: the function's jaxpr, without calls.
        accumulators: the function's first arguments, which the kernel has.
        shape: shape of the product, or of the matrices of a pass.
        flat_rows: whether the kernel numbers the rows of all matrices one after the other.
        made: the equation that computes each variable.
        given: the variables that are arguments.
        dependent: the variables that only the kernel can compute.
        drawn: the variables that depend on random numbers.
        in_full: the variables whose last bits a result may show.
        leaves: the values that the kernel reads.
        lines: the statements.
        counts_rows: whether the statements use the row of a value.
        names: C++ names of translated values, by variable and index.
    """

    def __init__(
        self, flat: Any, accumulators: int, shape: tuple[int, ...], flat_rows: bool = False
    ):
        jaxpr = flat.jaxpr
        self.flat = flat
        self.accumulators: list[Any] = list(jaxpr.invars[:accumulators])
        self.shape = shape
        self.flat_rows = flat_rows
        self.made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.given = set(jaxpr.invars) | set(jaxpr.constvars)
        # Values depend on the accumulators; in a pass, on any matrix.
        matrices = self.accumulators or filter(self.spans, jaxpr.invars)
        self.dependent = following(matrices, jaxpr)
        drawn = (eqn for eqn in jaxpr.eqns if eqn.primitive.name in rng.DRAWS)
        self.drawn = following((var for eqn in drawn for var in eqn.outvars), jaxpr)
        self.in_full = shown_in_full(jaxpr)
        self.leaves: list[Leaf] = []
        self.lines: list[str] = []
        self.counts_rows = False
        self.names: dict[tuple[Any, tuple[Any, ...]], str] = {}
        self._tanhs = Tanhs(self)

    def spans(self, atom: Any) -> bool:
        """Checks if a value has the product's shape."""
        return atom.aval.shape == self.shape

    def value(self, atom: Any, index: Index) -> str:
        """Returns the C++ of a value of the jaxpr at an index."""
        if is_literal(atom):
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
            here = (None if extent == 1 else i for i, extent in enumerate(self.shape))
            if index != tuple(here):
                raise NotTranslatableError("a product read at another place")
            return f"io.acc[{self.accumulators.index(atom)}][i]"
        if atom in self.given:
            return self.leaf(atom, index)
        lines, leaves, names = len(self.lines), len(self.leaves), dict(self.names)
        eqn = self.made[atom]
        try:
            return self._result(eqn, eqn.outvars.index(atom), index)
        except NotTranslatableError:
            # The value is known before the product: the kernel reads it, unless that takes a new
            # matrix.
            if atom in self.dependent or math.prod(atom.aval.shape) >= math.prod(self.shape) > 1:
                raise
            del self.lines[lines:], self.leaves[leaves:]
            self.names = names
            return self.leaf(atom, index)

    def leaf(self, atom: Any, index: Index, word: int | None = None) -> str:
        """Returns the C++ of a value that the kernel reads."""
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
        if name == "threefry2x32":
            return self._word(eqn, position, index)
        if name in JOINS:
            raise NotTranslatableError(f"{name} within what has the product's shape")
        if position != 0 or len(eqn.outvars) != 1:
            raise NotTranslatableError(name)
        beside_one = self._tanhs.translated(eqn, index)
        if beside_one is not None:
            return beside_one
        (result,) = eqn.outvars
        values = [self.operand(atom, result, index) for atom in eqn.invars]
        dtypes = [atom.aval.dtype for atom in eqn.invars]
        coarse = result not in self.in_full
        expression = operations.translated(name, values, dtypes, eqn.params, coarse=coarse)
        return self.named(expression, result.aval.dtype)

    def operand(self, atom: Any, result: Any, index: Index) -> str:
        """Returns an operand of an elementwise operation, which may be a scalar."""
        shape = atom.aval.shape
        if shape and len(shape) != len(result.aval.shape):
            raise NotTranslatableError(f"an operand of shape {shape} for {result.aval.shape}")
        return self.value(atom, index if shape else ())

    def named(self, expression: str, dtype: Any) -> str:
        """Returns the name of a new variable that holds an expression."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"const {element(dtype).value} {name} = {expression};")
        return name

    # Operations that only change the index.

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

    def _div(self, eqn: Any, index: Index) -> str:
        """Divides; multiplies by the reciprocal of a number, as XLA does."""
        x, y = eqn.invars
        (result,) = eqn.outvars
        dtype = result.aval.dtype
        number = self._number(y)
        if number is not None:
            reciprocal = operations.reciprocal(number, dtype)
            if reciprocal is not None:
                factor = operations.constant(reciprocal, dtype)
                product = f"{self.operand(x, result, index)} * {factor}"
                return self.named(operations.rounded(product, dtype), dtype)
        values = [self.operand(atom, result, index) for atom in (x, y)]
        return self.named(operations.translated("div", values, [dtype, dtype], eqn.params), dtype)

    def _number(self, atom: Any) -> Any:
        """Returns the number that every element of a value equals, ``None`` if unknown."""
        while not is_literal(atom):
            eqn = self.made.get(atom)
            if eqn is None or eqn.primitive.name != "broadcast_in_dim":
                return None
            atom = eqn.invars[0]
        return atom.val if not atom.aval.shape else None

    # Operations that use the index as a value.

    def place(self, where: int | None) -> str:
        """Returns the C++ of the index along a dimension of the results."""
        rank = len(self.shape)
        if where is None:
            return "0u"
        if where == rank - 1:
            return "static_cast<uint32_t>(io.n(i))"
        row = "static_cast<uint32_t>(io.m(i))"
        if self.flat_rows:
            rows = math.prod(self.shape[where + 1 : -1])
            return f"({row} / {rows}u % {self.shape[where]}u)"
        if where < rank - 2:
            raise BatchIndexError("an index along a batch")
        self.counts_rows = True
        return row

    def _iota(self, eqn: Any, index: Index) -> str:
        dtype = eqn.params["dtype"]
        place = f"static_cast<int32_t>({self.place(index[eqn.params['dimension']])})"
        return self.named(operations.converted(place, jnp.int32, dtype), dtype)

    def _word(self, eqn: Any, position: int, index: Index) -> str:
        """Returns one of the two words that threefry makes of two words, by a key."""
        key = eqn, (*index, "words")
        if key not in self.names:
            if any(not is_literal(x) and x in self.dependent for x in eqn.invars):
                raise NotTranslatableError("threefry2x32 of what depends on the product")
            values = ", ".join([self.operand(x, eqn.outvars[0], index) for x in eqn.invars])
            self.names[key] = f"v{len(self.lines)}"
            self.lines.append(f"const RandomWords {self.names[key]} = random_words({values});")
        return f"{self.names[key]}.{('first', 'second')[position]}"

    def _random_bits(self, eqn: Any, index: Index) -> str:
        """Draws ``jax.random.bits`` for each element separately (threefry_partitionable)."""
        (key,), shape, width = eqn.invars, eqn.params["shape"], eqn.params["bit_width"]
        if key.aval.shape or width not in (8, 16, 32) or not rng.is_partitionable(eqn):
            raise NotTranslatableError(f"random_bits of {width} bits")
        if not rng.is_key(key.aval.dtype):
            raise NotTranslatableError(f"random_bits of {key.aval.dtype}")
        if is_literal(key) or key in self.dependent:
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
