"""``CompiledSpec``, the static description of a product with an epilogue of the user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.problem.ragged import RaggedSpec
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands


@dataclasses.dataclass(frozen=True)
class CompiledSpec:
    """One product, the two of a gated one, or one over groups of rows; and what becomes of it.

    Attributes:
        product: what is multiplied; its ``out_dtype`` is that in which products are kept for
            derivatives.
        function: makes the results of the accumulators and the operands.
    """

    product: GemmSpec | RaggedSpec
    function: EpilogueFunction

    @property
    def is_gated(self) -> bool:
        """Whether there are two products."""
        return isinstance(self.product, GemmSpec) and self.product.is_gated

    @property
    def factor_count(self) -> int:
        """How many operands the product has: ``lhs``, ``rhs`` and ``group_sizes`` with groups."""
        return 3 if isinstance(self.product, RaggedSpec) else len(self.product.operand_names)

    def split(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns what belongs to the product, and what to the operands of the function."""
        return tuple(values[: self.factor_count]), tuple(values[self.factor_count :])

    def replace(self, **changes: Any) -> CompiledSpec:
        """Returns a copy of which some fields are others."""
        return dataclasses.replace(self, **changes)


def factors(values: Sequence[Any], product: GemmSpec | RaggedSpec) -> Operands:
    """Returns the two or three factors by name."""
    if isinstance(product, RaggedSpec):
        return Operands(*values[:2])
    return product.unflatten(values)
