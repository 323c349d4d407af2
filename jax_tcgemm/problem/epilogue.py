"""What becomes of the accumulators of a gemm: every form that an epilogue has, in one table."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from jax_tcgemm.problem.activations import Activation
from jax_tcgemm.problem.exact import ComparedExactly

Mask = tuple[bool, ...]


class Use(enum.Enum):
    """What an operand of an epilogue is for."""

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
        uses: what each operand that it may have is for, by the name that it has in ``Operands``;
            where its axes lie is the same in every form (``strides.ROLES``).
        results: names of the results. Where the first is ``"d"``, the others are pre-activations,
            one of each accumulator.
        written: the masks of results that kernels write, the fewest first.
        c_role: what the custom call is told that ``c`` is for.
        accumulators: how many products there are.
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
    # Of d = activation(c), the cotangent of which is Z: that of c, Z * activation'(C).
    "derivative": Form({**_LINEAR, "c": Use.PRIMAL}, ("dc",), ((True,),), "derivative"),
    # Of d = activation(c) * c2, the cotangent of which is Z: those of c and c2,
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
    """What becomes of the accumulators of one gemm.

    Attributes:
        form: a key of ``FORMS``.
        activation: a key of ``ACTIVATIONS``, an ``Activation``, or ``None``.
        alpha: the factor of the product where it is no operand.
        beta: the factor of ``c`` where it is no operand.
        results: which of the form's results there are, at least one. Empty for the fewest that a
            kernel writes.
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
        """Whether the product is a cotangent, taken back through the activation at ``c``."""
        return self.row.results[0] != "d"

    @property
    def is_linear(self) -> bool:
        """Whether every result is linear in the product: pre-activations, or what is one."""
        of_pair = self.row.accumulators == 2
        return not self.results[0] if of_pair else self.form == "add" and self.activation is None

    @property
    def names_after(self) -> tuple[str, ...]:
        """Names of the operands that no pre-activation depends on."""
        after = tuple(name for name, use in self.row.uses.items() if use in _AFTER)
        return (*after, "beta") if "c" in after and "beta" in self.row.uses else after

    def names(self, use: Use) -> tuple[str, ...]:
        """Names of the operands of this use."""
        return tuple(name for name, own in self.row.uses.items() if own is use)

    def picked(self, results: Any) -> list[Any]:
        """Returns, of all results that the form has, those that there are."""
        return [x for x, is_wanted in zip(results, self.results, strict=True) if is_wanted]

    @property
    def written(self) -> Mask:
        """The results that a kernel writes, which include those that there are."""
        wanted = {i for i, is_wanted in enumerate(self.results) if is_wanted}
        return next(mask for mask in self.row.written if all(mask[i] for i in wanted))


PLAIN = Epilogue()
