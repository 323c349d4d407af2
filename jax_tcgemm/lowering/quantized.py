"""Plain products of 8-bit operands, whose kernels are all compiled with a function."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jax_tcgemm.epilogue import function
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.lowering.jit_epilogue import cuda_compiled
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Shape


def cuda_product(
    *operands: jax.Array,
    spec: GemmSpec,
    shape: Shape,
    reference: Callable[..., list[jax.Array]],
) -> list[jax.Array]:
    """Computes a product whose accumulators a function rounds.

    A device's part of a divided product is computed here: its scales are applied after the sum.

    Args:
        *operands: operands of the product.
        spec: the product.
        shape: shape of the result.
        reference: computes the product from the operands and ``spec`` if there is no kernel.
    """
    a, b = operands[:2]
    sums = jax.ShapeDtypeStruct(shape, accumulator_dtype(a.dtype, b.dtype, spec.out_dtype))
    rounded, _ = function.trace(lambda acc: [acc.astype(spec.out_dtype)], [sums], 1)

    def composed(*operands: jax.Array, **_: CompiledSpec) -> list[jax.Array]:
        return reference(*operands, spec=spec)

    return cuda_compiled(*operands, spec=CompiledSpec(spec, rounded), composed=composed)
