"""``CompiledSpec``, the static description of a product with an epilogue of the user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_tcgemm import _core
from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.problem.ragged import RaggedSpec
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

SCALE_BLOCK = _core.SCALE_BLOCK


@dataclasses.dataclass(frozen=True)
class CompiledSpec:
    """One product, the two of a gated one, or one over groups of rows; and what becomes of it.

    Attributes:
        product: what is multiplied; its ``out_dtype`` is that in which products are kept for
            derivatives.
        function: makes the results of the accumulators and the operands.
        scaled: whether ``a`` and ``b``, of 8 bits, have scales by blocks: two more operands of the
            product, in float32, with the axes of ``a`` and ``b``. A block is 1 x ``SCALE_BLOCK``
            (k) of ``a``, ``SCALE_BLOCK`` x ``SCALE_BLOCK`` of ``b``.
    """

    product: GemmSpec | RaggedSpec
    function: EpilogueFunction
    scaled: bool = False

    @property
    def is_gated(self) -> bool:
        """Whether there are two products."""
        return isinstance(self.product, GemmSpec) and self.product.is_gated

    @property
    def factor_count(self) -> int:
        """How many operands the product has: ``lhs``, ``rhs`` and ``group_sizes`` with groups."""
        if isinstance(self.product, RaggedSpec):
            return 3
        return len(self.product.operand_names) + (2 if self.scaled else 0)

    @property
    def without_rules(self) -> CompiledSpec:
        """The same without custom derivatives: see ``EpilogueFunction.without_rules``."""
        return self.replace(function=self.function.without_rules)

    def split(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns what belongs to the product, and what to the operands of the function."""
        return tuple(values[: self.factor_count]), tuple(values[self.factor_count :])

    def with_config(self, config: str | None) -> CompiledSpec:
        """Returns a copy whose product is computed by that configuration."""
        return self.replace(product=dataclasses.replace(self.product, config=config))

    def replace(self, **changes: Any) -> CompiledSpec:
        """Returns a copy of which some fields are others."""
        return dataclasses.replace(self, **changes)


def factors(values: Sequence[Any], product: GemmSpec | RaggedSpec) -> Operands:
    """Returns the two or three factors by name."""
    if isinstance(product, RaggedSpec):
        return Operands(*values[:2])
    return product.unflatten(values)
