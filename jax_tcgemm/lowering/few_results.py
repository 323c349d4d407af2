"""Epilogues of few rows or columns, as functions that are compiled into a kernel.

A program that runs on this process's GPUs takes them: such a kernel has code for this epilogue
alone, and takes less time than the built one with every epilogue. Programs for other GPUs keep the
built epilogues.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jax_tcgemm.epilogue import compiler, translation
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels.arithmetic import ALL_ARITHMETIC
from jax_tcgemm.kernels.names import find
from jax_tcgemm.lowering import devices, fallback, jit_epilogue, reference
from jax_tcgemm.lowering.custom_call import shapes_of
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, fold


def as_function(x: Operands, spec: GemmSpec, algorithm: str) -> CompiledSpec | None:
    """Returns a gemm as a product with a function, ``None`` if built epilogues compute it.

    Args:
        x: the operands, or their types.
        spec: the primitive's parameters.
        algorithm: name of the arithmetic.

    Returns:
        The static parameters. The operands are ``a``, ``b``, then the others in their order.
    """
    row = None if spec.config is None else find(spec.config)
    if spec.config is not None and not (row is not None and row.skinny):
        return None
    has_every = spec.work == "any" or x.c is not None
    if not has_every or spec.is_gated or spec.is_grouped:
        return None
    if ALL_ARITHMETIC[algorithm].a.bytes != 2 or not _has_kernels():
        return None
    gemm = fold(spec.strided(shapes_of(x)))
    extents = (gemm.m, gemm.n, gemm.k, *gemm.batch)
    if min(gemm.m, gemm.n) > fallback.FEW_ROWS or not math.prod(extents):
        return None
    names = spec.operand_names[2:]

    def epilogue(product: jax.Array, *values: jax.Array) -> list[jax.Array]:
        others = Operands(None, None)._replace(**dict(zip(names, values, strict=True)))
        return reference.epilogue([product], others, spec)

    product = jax.ShapeDtypeStruct(spec.result_shape(shapes_of(x)), jnp.float32)
    others = [getattr(x, name) for name in names]
    types = [product, *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in others)]
    function, _ = functions.trace(epilogue, types, 1)
    made = CompiledSpec(spec.product(config=spec.config), function)
    program = translation.translate(function)
    if isinstance(program, str):
        return None
    plan = jit_epilogue.planned([x.a, x.b], made, program)
    return None if isinstance(plan, str) else made


def _has_kernels() -> bool:
    is_here = devices.are_all(devices.HOPPER) and devices.is_program_here()
    return is_here and compiler.may_compile_rows()
