"""The epilogues of a gemm: every form, in one table."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from jax_tcgemm.problem.activations import Activation
from jax_tcgemm.problem.exact import ComparedExactly

Mask = tuple[bool, ...]


class Use(enum.Enum):
    """The purpose of an operand of an epilogue."""

    SCALE = "multiplies the product"
    ADDEND = "is added to the product, before the activation"
    SECOND_ADDEND = "is added to the second product"
    COEFFICIENT = "multiplies c, wherever that is added"
    RESIDUAL = "is added to what the activation returns"
    FACTOR = "multiplies what the activation returns"
    PRIMAL = "is what the activation was of; the product is a cotangent of what it returned"
    SECOND_PRIMAL = "is what the activation's result was multiplied by"


# The pre-activations do not depend on these.
_AFTER = (Use.RESIDUAL, Use.FACTOR, Use.PRIMAL, Use.SECOND_PRIMAL)


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of epilogue.

    Attributes:
        uses: the purpose of each operand that the form may have, by its name in ``Operands``. An
            operand has the same axes in every form (``strides.ROLES``).
        results: names of the results. If the first is ``"d"``, the others are pre-activations, one
            for each accumulator.
        written: masks of the results that kernels write, the fewest first.
        c_role: the purpose of ``c`` in the custom call's attributes.
        accumulators: number of products.
    """

    uses: dict[str, Use]
    results: tuple[str, ...]
    written: tuple[Mask, ...]
    c_role: str
    accumulators: int = 1


_LINEAR = {
    "alpha": Use.SCALE,
    "row_scale": Use.SCALE,
    "column_scale": Use.SCALE,
    "bias": Use.ADDEND,
}
_D_OR_BOTH = ((True, False), (True, True))

# With Z = alpha * row_scale * column_scale * (A @ B) + bias, or G = A @ B + bias and
# U = A @ B2 + bias2:
FORMS = {
    # D = activation(Z), where Z includes beta * C.
    "add": Form(
        {**_LINEAR, "c": Use.ADDEND, "beta": Use.COEFFICIENT}, ("d", "z"), _D_OR_BOTH, "add"
    ),
    # D = activation(Z) + beta * C
    "residual": Form(
        {**_LINEAR, "c": Use.RESIDUAL, "beta": Use.COEFFICIENT}, ("d", "z"), _D_OR_BOTH, "residual"
    ),
    # D = activation(Z) * C
    "factor": Form({**_LINEAR, "c": Use.FACTOR}, ("d", "z"), _D_OR_BOTH, "factor"),
    # D = activation(G) * U
    "gated": Form(
        {"bias": Use.ADDEND, "bias2": Use.SECOND_ADDEND},
        ("d", "g", "u"),
        ((True, False, False), (True, True, True)),
        "add",
        accumulators=2,
    ),
    # For d = activation(c) with cotangent Z: the cotangent of c, Z * activation'(C).
    "derivative": Form({**_LINEAR, "c": Use.PRIMAL}, ("dc",), ((True,),), "derivative"),
    # For d = activation(c) * c2 with cotangent Z: the cotangents of c and c2,
    # Z * C2 * activation'(C) and Z * activation(C).
    "gated_derivative": Form(
        {**_LINEAR, "c": Use.PRIMAL, "c2": Use.SECOND_PRIMAL},
        ("dc", "dc2"),
        ((True, True),),
        "gated_derivative",
    ),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Epilogue(ComparedExactly):
    """The epilogue of one gemm.

    Attributes:
        form: a key of ``FORMS``.
        activation: a key of ``ACTIVATIONS``, an ``Activation``, or ``None``.
        alpha: the factor of the product if it is no operand.
        beta: the factor of ``c`` if it is no operand.
        results: mask of the form's results that the epilogue has, at least one. An empty mask
            selects the fewest results that a kernel writes.
    """

    form: str = "add"
    activation: str | Activation | None = None
    alpha: complex = 1.0
    beta: complex = 1.0
    results: Mask = ()

    def __post_init__(self) -> None:
        """Fills in the default, which depends on the form."""
        if not self.results:
            object.__setattr__(self, "results", self.row.written[0])
        assert len(self.results) == len(self.row.results), self

    @property
    def row(self) -> Form:
        """The form's row of the table."""
        return FORMS[self.form]

    @property
    def is_derivative(self) -> bool:
        """Returns true if the epilogue applies the activation's derivative at ``c``.

        The product is then a cotangent.
        """
        return self.row.results[0] != "d"

    @property
    def is_linear(self) -> bool:
        """Returns true if every result is linear in the product.

        Such results are pre-activations, or equal one.
        """
        of_pair = self.row.accumulators == 2
        return not self.results[0] if of_pair else self.form == "add" and self.activation is None

    @property
    def names_after(self) -> tuple[str, ...]:
        """Names of the operands on which no pre-activation depends."""
        after = tuple(name for name, use in self.row.uses.items() if use in _AFTER)
        return (*after, "beta") if "c" in after and "beta" in self.row.uses else after

    def names(self, use: Use) -> tuple[str, ...]:
        """Names of the operands with this use."""
        return tuple(name for name, own in self.row.uses.items() if own is use)

    def picked(self, results: Any) -> list[Any]:
        """Returns the results that the epilogue has, from all results of the form."""
        return [x for x, is_wanted in zip(results, self.results, strict=True) if is_wanted]

    @property
    def written(self) -> Mask:
        """Mask of the results that a kernel writes, which include the epilogue's results."""
        wanted = {i for i, is_wanted in enumerate(self.results) if is_wanted}
        return next(mask for mask in self.row.written if all(mask[i] for i in wanted))


PLAIN = Epilogue()
