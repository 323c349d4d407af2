"""Static descriptions of products with a user's epilogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax_tcgemm import _core
from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.problem.packed import PackedSpec
from jax_tcgemm.problem.spec import GemmSpec

SCALE_BLOCK = _core.SCALE_BLOCK


@dataclasses.dataclass(frozen=True)
class CompiledSpec:
    """A product (plain, gated, or over groups of rows) and its epilogue.

    Attributes:
        product: the product. Its ``out_dtype`` is the dtype in which products are stored for
            derivatives.
        function: computes the results from the accumulators and the operands.
        scaled: whether the 8-bit operands ``a`` and ``b`` have block scales: two more operands of
            the product, in float32, with the axes of ``a`` and ``b``. A block is 1 x
            ``SCALE_BLOCK`` (k) of ``a``, ``SCALE_BLOCK`` x ``SCALE_BLOCK`` of ``b``.
        unfused: the operations of the user's program, as a function of products in
            ``product.out_dtype``. XLA computes them if ``config`` is ``"xla"``. If this is
            ``None``, XLA computes ``function``.
    """

    product: GemmSpec
    function: EpilogueFunction
    scaled: bool = False
    unfused: EpilogueFunction | None = None

    @property
    def is_gated(self) -> bool:
        """Returns true if there are two products."""
        return self.product.is_gated

    @property
    def is_grouped(self) -> bool:
        """Returns true if the product is one over groups of rows."""
        return self.product.is_grouped

    @property
    def config(self) -> str | None:
        """The requested kernel configuration."""
        return self.product.config

    @property
    def factor_count(self) -> int:
        """Number of the product's operands."""
        return len(self.product.operand_names) + (2 if self.scaled else 0)

    @property
    def without_rules(self) -> CompiledSpec:
        """The spec without custom derivatives: see ``EpilogueFunction.without_rules``."""
        return self.changed(lambda function: function.without_rules)

    def changed(self, change: Callable[[EpilogueFunction], EpilogueFunction]) -> CompiledSpec:
        """Returns a copy whose functions were changed in the same way."""
        unfused = None if self.unfused is None else change(self.unfused)
        return self.replace(function=change(self.function), unfused=unfused)

    def split(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Splits values into those of the product and those of the function's operands."""
        return tuple(values[: self.factor_count]), tuple(values[self.factor_count :])

    def with_config(self, config: str | None) -> CompiledSpec:
        """Returns a copy with this kernel configuration for the product."""
        return self.replace(product=self.product.with_config(config))

    def replace(self, **changes: Any) -> CompiledSpec:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class PackedFunctionSpec:
    """The products of one array and one or two packed weights, and a function of them.

    Attributes:
        product: each product, in float32.
        weights: number of weights.
        function: computes the results from the products and the operands.
    """

    product: PackedSpec
    weights: int
    function: EpilogueFunction

    @property
    def config(self) -> str | None:
        """The requested kernel configuration."""
        return self.product.config

    def with_config(self, config: str | None) -> PackedFunctionSpec:
        """Returns a copy with this configuration of the products."""
        return dataclasses.replace(self, product=self.product.with_config(config))

    @property
    def without_rules(self) -> PackedFunctionSpec:
        """The spec without custom derivatives: see ``EpilogueFunction.without_rules``."""
        return dataclasses.replace(self, function=self.function.without_rules)

    def split(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Splits values into those of the products and those of the function's operands.

        The operands of the products are ``x``, then values and scales of each weight.
        """
        count = 1 + 2 * self.weights
        return tuple(values[:count]), tuple(values[count:])
