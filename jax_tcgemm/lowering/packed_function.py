"""Lowering of functions of products with packed weights to one custom call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _extension
from jax_tcgemm.epilogue import source, translation
from jax_tcgemm.epilogue.program import Program
from jax_tcgemm.epilogue.spec import PackedFunctionSpec
from jax_tcgemm.kernels import packed as kernels
from jax_tcgemm.kernels import packed_configs
from jax_tcgemm.kernels.names import XLA
from jax_tcgemm.lowering import packed, packed_problem
from jax_tcgemm.lowering.jit_source import folded, function_attributes, source_of
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.strides import Shape


def lower_cuda(
    *operands: jax.Array, spec: PackedFunctionSpec, composed: Callable[..., list[jax.Array]]
) -> list[jax.Array]:
    """Computes the primitive on CUDA devices.

    Args:
        *operands: operands of the products, then those of the function.
        spec: the static parameters.
        composed: computes the primitive by products and operations of JAX.
    """
    own, others = spec.split(operands)
    x = own[0]
    product = spec.product
    call = f"tcgemm_packed {product.qtype} {x.dtype}{list(x.shape)} n={product.n} with a function"
    call += " of two products" * (spec.weights > 1)
    plan, told = _planned(operands, spec)
    if isinstance(plan, str):
        log(f"{call}: the function is XLA's: {plan}{told}")
        is_config = plan in (XLA, packed_configs.DEQUANTIZED)
        return composed(*operands, spec=spec.with_config(plan) if is_config else spec)
    log(f"{call}: config {packed_configs.config_of(product.bits, plan.row)}{told}")
    return plan.emit(own, others, spec)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A custom call that is ready to be emitted.

    Attributes:
        row: the configuration of the kernel.
        made: the function in C++.
        m: number of rows.
        strides: strides of the leaves along m and n.
        source: what the kernel is compiled for.
    """

    row: kernels.PackedRow
    made: Program
    m: int
    strides: tuple[Shape, ...]
    source: str

    def emit(
        self, own: Sequence[jax.Array], others: Sequence[jax.Array], spec: PackedFunctionSpec
    ) -> list[jax.Array]:
        """Emits the call and returns the results of the function."""
        known = [jnp.asarray(value) for value in self.made.known(others)]
        call = jax.ffi.ffi_call(_extension.PACKED_FUNCTION_TARGET, self.made.outputs)
        attributes = self._attributes(own[0].dtype, own[2].dtype, spec)
        return self.made.finished(call(*own, *known, **attributes), others)

    def _attributes(
        self, activation: np.dtype, scale: np.dtype, spec: PackedFunctionSpec
    ) -> dict[str, Any]:
        """Returns the ``PackedFunctionAttributes`` of ``cuda/ffi/packed_function.cc``."""
        product = spec.product
        numbers = {"m": self.m, "n": product.n, "k": product.k, "group": product.group}
        numbers |= {"weights": spec.weights} | dataclasses.asdict(self.row)
        function = function_attributes(self.made, self.strides, product.n, self.source)
        return {name: np.int64(number) for name, number in numbers.items()} | {
            "has_zeros": product.has_zeros,
            "format": product.qtype,
            "activation": activation.name,
            "scale": scale.name,
            **function,
        }


def _planned(operands: Sequence[jax.Array], spec: PackedFunctionSpec) -> tuple[_Call | str, str]:
    """Returns the custom call, or why there is none, and a text that says who chose."""
    x, values, scales = operands[:3]
    product = spec.product
    reason = packed.unfit(x, values, scales, product)
    if reason is not None:
        return reason, ""
    if values.ndim > 4:
        return "a batch of weights", ""
    made = translation.translate(spec.function)
    if isinstance(made, str):
        return made, ""
    if made.reductions:
        return "a reduction", ""
    matrices, strides = folded((*x.shape[:-1], product.n), made)
    if matrices.batch:
        return "a batch that does not fold into rows", ""
    m = matrices.m
    function = source_of(made, strides, product.n, batched=False)
    epilogue = {
        "has": ["function"],
        "program": source.digest(function)[:16],
        "results": [each.dtype.name for each in spec.function.results],
    }
    config, told = packed_problem.measured_config(
        packed_problem.FUNCTION, operands, spec, m, epilogue=epilogue
    )
    if config == XLA:
        return XLA, told
    choose = kernels.choose_pair if spec.weights == 2 else kernels.choose
    untuned = choose(product.bits, m, product.n, product.k, product.group)
    row = packed.row_of(config, product, untuned, f"{m} rows", spec.weights)
    if isinstance(row, str):
        return row, told
    text = _program_text(row, (x.dtype, scales.dtype), spec, function)
    if isinstance(text, packed.NoProgram):
        return text.reason, told
    return _Call(row, made, m, strides, text), told


def _program_text(
    row: kernels.PackedRow,
    dtypes: tuple[np.dtype, np.dtype],
    spec: PackedFunctionSpec,
    function: str,
) -> str | packed.NoProgram:
    """Returns what the kernel is compiled for, which is compiled if that is possible now.

    Args:
        row: the configuration.
        dtypes: dtypes of ``x`` and of the scales.
        spec: the static parameters.
        function: the function in C++.
    """
    product = spec.product
    reason = packed.unfit_row(row, dtypes[0], dtypes[1], product)
    if reason is not None:
        return packed.NoProgram(reason)
    group = None if product.group == product.k else product.group
    names = (product.qtype, dtypes[0].name, dtypes[1].name, "float32")
    options = {"zeros": product.has_zeros, "group": group, "weights": spec.weights}
    text = f"{kernels.program(row, *names, **options)}\n{function}"
    reason = packed.not_compiled(text, source.PACKED_FUNCTION)
    return text if reason is None else packed.NoProgram(reason)
