"""Plain products of 8-bit operands, whose kernels are all compiled with a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from jax_tcgemm.epilogue import function
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.lowering import fallback
from jax_tcgemm.lowering.custom_call import shapes_of
from jax_tcgemm.lowering.jit_epilogue import cuda_compiled
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.spec import GemmSpec


def cuda_product(
    operands: Sequence[jax.Array],
    spec: GemmSpec,
    described: str,
    reference: Callable[..., list[jax.Array]],
) -> list[jax.Array]:
    """Computes a product whose accumulators a function rounds.

    A device's part of a divided product is computed here: its scales are applied after the sum.

    Args:
        operands: operands of the product.
        spec: the product. XLA computes one that has an epilogue.
        described: the product in messages.
        reference: computes the product from the operands and ``spec`` if there is no kernel.
    """
    x = spec.unflatten(operands)
    if spec.work != "none":
        strict = fallback.is_strict(spec.config)
        fallback.report(described, "more than a product of 8-bit operands", strict=strict)
        return reference(*operands, spec=spec)
    dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
    sums = jax.ShapeDtypeStruct(spec.result_shape(shapes_of(x)), dtype)
    rounded, _ = function.trace(lambda acc: [acc.astype(spec.out_dtype)], [sums], 1)

    def composed(*operands: jax.Array, **_: CompiledSpec) -> list[jax.Array]:
        return reference(*operands, spec=spec)

    return cuda_compiled(*operands, spec=CompiledSpec(spec, rounded), composed=composed)
