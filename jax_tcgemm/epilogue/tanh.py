"""Computes ``1 + tanh(x)`` and ``1 - tanh(x)`` without cancellation or branches.

Gelu and the derivative of tanh contain these sums.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.extend import core

from jax_tcgemm.epilogue import operations
from jax_tcgemm.epilogue.program import Index

if TYPE_CHECKING:
    from jax_tcgemm.epilogue.values import Values


def is_literal(atom: Any) -> bool:
    """Checks if an operand is a literal of the jaxpr."""
    return isinstance(atom, core.Literal)


def _is_number(atom: Any, number: float) -> bool:
    return is_literal(atom) and not atom.aval.shape and atom.val == number


class Tanhs:
    """Translates the tanhs of a function that occur beside 1.

    Args:
        values: the values of the function.
    """

    def __init__(self, values: Values):
        self._values = values
        self._below_one = self._find_below_one()

    def _find_below_one(self) -> set[Any]:
        """Returns ``x`` of each ``1 - tanh(x)`` and ``1 - tanh(x)^2``."""
        inner = set()
        for eqn in self._values.flat.jaxpr.eqns:
            name, taken = eqn.primitive.name, eqn.invars
            if name == "one_minus_square" or (name == "sub" and _is_number(taken[0], 1)):
                inner.add(self._of(taken[-1]))
        return inner - {None}

    def translated(self, eqn: Any, index: Index) -> str | None:
        """Returns the C++ of an equation with a tanh beside 1, ``None`` for any other."""
        (result,) = eqn.outvars
        if result.aval.dtype != jnp.float32:
            return None
        name = eqn.primitive.name
        if name == "sub":
            inner = self._of(eqn.invars[1]) if _is_number(eqn.invars[0], 1) else None
            return inner and self._beside_one(inner, result, index, negated=True)
        if name in ("add", "add_any"):
            return self._sum(eqn, index)
        if name == "mul":
            return self._half(eqn, index)
        if name == "one_minus_square":
            inner = self._of(eqn.invars[0])
            if inner is not None:
                below = self._beside_one(inner, result, index, negated=True)
                above = self._beside_one(inner, result, index)
                return self._values.named(f"{below} * {above}", jnp.float32)
        return None

    def _sum(self, eqn: Any, index: Index) -> str | None:
        """Returns the C++ of ``1 + tanh(x)`` or ``y + y tanh(x)``, ``None`` for any other."""
        (result,) = eqn.outvars
        inner = self._of_above_one(result)
        if inner is not None:
            return self._beside_one(inner, result, index)
        for y, other in itertools.permutations(eqn.invars):
            inner = self._of(self._other_factor(other, y))
            if inner is not None:
                above = self._beside_one(inner, result, index)
                factor = self._values.operand(y, result, index)
                return self._values.named(f"{factor} * {above}", jnp.float32)
        return None

    def _half(self, eqn: Any, index: Index) -> str | None:
        """Returns half of ``1 + tanh(x)``, which is the logistic function of ``2 x``."""
        for factor, other in itertools.permutations(eqn.invars):
            inner = self._of_above_one(other) if _is_number(factor, 0.5) else None
            if inner is not None and inner not in self._below_one:
                return self._logistic_of_twice(inner, eqn.outvars[0], index)
        return None

    def _of_above_one(self, atom: Any) -> Any:
        """Returns ``x`` of ``1 + tanh(x)``, ``None`` for anything else."""
        if not (self._is_made_by("add", atom) or self._is_made_by("add_any", atom)):
            return None
        first, second = self._values.made[atom].invars
        tanh = second if _is_number(first, 1) else first if _is_number(second, 1) else None
        return self._of(tanh)

    def _of(self, atom: Any) -> Any:
        """Returns ``x`` of ``tanh(x)``, ``None`` for a number or anything else."""
        inner = self._values.made[atom].invars[0] if self._is_made_by("tanh", atom) else None
        return None if is_literal(inner) else inner

    def _other_factor(self, product: Any, factor: Any) -> Any:
        """Returns a product's other factor, ``None`` if ``product`` lacks ``factor``."""
        if is_literal(factor) or not self._is_made_by("mul", product):
            return None
        factors = list(self._values.made[product].invars)
        if not any(x is factor for x in factors):
            return None
        return factors[1] if factors[0] is factor else factors[0]

    def _is_made_by(self, name: str, atom: Any) -> bool:
        made = None if atom is None or is_literal(atom) else self._values.made.get(atom)
        return made is not None and made.primitive.name == name

    def _beside_one(self, x: Any, result: Any, index: Index, negated: bool = False) -> str:
        """Returns ``1 + tanh(x)`` or ``1 - tanh(x)``; one power serves both."""
        values, key = self._values, (x, (*index, "tanh"))
        if x not in self._below_one:
            if key not in values.names:
                half = self._logistic_of_twice(x, result, index)
                values.names[key] = values.named(f"2.f * {half}", jnp.float32)
            return values.names[key]
        if key not in values.names:
            value = values.operand(x, result, index)
            values.names[key] = f"v{len(values.lines)}"
            beside_tanh = "coarse_beside_tanh" if self._coarse(x) else "beside_tanh"
            values.lines.append(f"const BesideTanh {values.names[key]} = {beside_tanh}({value});")
        return f"{values.names[key]}{'.minus' if negated else '.plus'}"

    def _logistic_of_twice(self, x: Any, result: Any, index: Index) -> str:
        values, key = self._values, (x, (*index, "logistic"))
        if key not in values.names:
            factor, other = 2.0, x
            if self._is_made_by("mul", x):  # one factor replaces two
                for number, rest in itertools.permutations(values.made[x].invars):
                    if is_literal(number) and not number.aval.shape and abs(number.val) < 2.0**126:
                        factor, other = 2 * float(number.val), rest
            value = values.operand(other, result, index)
            number = operations.constant(factor, jnp.float32)
            text = f"logistic({number} * {value})"
            if self._coarse(x):
                text = f"coarse_logistic({value}, {number})"
            values.names[key] = values.named(text, jnp.float32)
        return values.names[key]

    def _coarse(self, x: Any) -> bool:
        """Checks if no result shows the last bits of a function of ``x``."""
        return x not in self._values.in_full
