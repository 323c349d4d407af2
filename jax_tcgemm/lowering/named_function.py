"""Named epilogues as functions that are compiled into the kernel.

Such a kernel has code for one epilogue alone. It takes less time than a built one, which has code
for every epilogue, where nothing hides the epilogue: if each SM has few tiles. Programs for other
GPUs or processes keep the built epilogues.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tcgemm.epilogue import compiler, translation
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels.arithmetic import ALL_ARITHMETIC
from jax_tcgemm.kernels.names import by_name, is_row, read_config
from jax_tcgemm.lowering import devices, fallback, jit_epilogue, jit_rows, reference
from jax_tcgemm.lowering.custom_call import contracts_rows, shapes_of
from jax_tcgemm.lowering.jit_call import Call
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, fold

# Above this many results, 8 tiles of 128 x 128 for each SM of an H200, both kinds of kernels were
# within 1 % of each other. Below this much work, the smallest kernels are those of the build.
MOST_RESULTS = 132 * 128 * 128 * 8
_LEAST_WORK = 2**24


@dataclasses.dataclass(frozen=True)
class NamedFunction:
    """A gemm as a product with a function.

    Attributes:
        own: the operands of the product.
        others: the operands of the function.
        spec: the static parameters.
        call: the custom call.
    """

    own: list[Any]
    others: list[Any]
    spec: CompiledSpec
    call: Call

    def emit(self) -> list[jax.Array]:
        """Emits the call, and begins to compile its kernel on another thread."""
        jit_rows.begin_compiling(self.call, self.spec)
        return self.call.emit(self.own, self.others, self.spec)


def as_function(x: Operands, spec: GemmSpec, algorithm: str) -> NamedFunction | None:
    """Returns a gemm as a product with a function, ``None`` if a built epilogue is to compute it.

    Args:
        x: the operands.
        spec: the primitive's parameters.
        algorithm: name of the arithmetic.
    """
    if not _may_be_function(x, spec, algorithm):
        return None
    inner = spec.accumulators(config=spec.config)
    names = [name for name in spec.operand_names if name not in inner.operand_names]
    own = [getattr(x, name) for name in inner.operand_names]
    others = [getattr(x, name) for name in names]
    count = 1 + spec.is_gated

    def epilogue(*values: jax.Array) -> list[jax.Array]:
        given = dict(zip(names, values[count:], strict=True))
        return reference.epilogue(values[:count], Operands(None, None, **given), spec)

    product = jax.ShapeDtypeStruct(spec.result_shape(shapes_of(x)), jnp.float32)
    types = [*[product] * count, *(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in others)]
    function, held = functions.trace(epilogue, types, count)
    made = translation.translate(function)
    if held or isinstance(made, str):
        return None
    compiled = CompiledSpec(inner, function)
    call = jit_epilogue.planned(own, compiled, made)
    row = None if isinstance(call, str) else jit_rows.first_row(call, compiled)
    # The built kernels split k in more ways.
    if isinstance(call, str) or row is None or read_config(row)[1] > 1:
        return None
    if not _compiles(call, compiled):
        return None
    return NamedFunction(own, others, compiled, call)


def _may_be_function(x: Operands, spec: GemmSpec, algorithm: str) -> bool:
    has_many_parts = spec.work == "any" or x.c is not None
    is_of_numbers = spec.alpha == 1 and (x.c is None or x.beta is not None or spec.beta == 1)
    is_named = is_row(spec.config) and _takes_functions_alone(spec.config)
    if not (has_many_parts and is_of_numbers) or (spec.config is not None and not is_named):
        return False
    if spec.is_grouped or spec.packed or spec.overwrite_c:
        return False
    if ALL_ARITHMETIC[algorithm].a.bytes != 2 or not _can_compile():
        return False
    gemm = fold(spec.strided(shapes_of(x)))
    if devices.is_one_of_several() and contracts_rows(gemm):  # see "beside_collectives"
        return False
    extents: Sequence[Any] = (gemm.m, gemm.n, gemm.k, *gemm.batch)
    if not all(isinstance(extent, int) for extent in extents):
        return False
    results = gemm.m * gemm.n * math.prod(gemm.batch)
    is_few = min(gemm.m, gemm.n) <= fallback.FEW_ROWS
    if spec.is_gated and is_few and gemm.m >= gemm.n:
        return False
    return is_named or (results <= MOST_RESULTS and results * gemm.k >= _LEAST_WORK)


def _takes_functions_alone(config: str) -> bool:
    """Checks if the named row computes gated products, and has no built epilogue for them."""
    row = by_name(read_config(config)[0])
    return row.gated and row.epilogue == "none"


# True if NVRTC compiled the first named epilogue of this process; empty before that.
_OUTCOMES: list[bool] = []


def _compiles(call: Call, spec: CompiledSpec) -> bool:
    """Checks that the first kernel of this process compiles; the others are begun unseen."""
    if not _OUTCOMES:
        row = jit_rows.expected_row(call, spec)
        found = compiler.obstacle(call.source, row, devices.compute_capability())
        _OUTCOMES.append(found is None)
    return _OUTCOMES[0]


def _can_compile() -> bool:
    """Checks if the program runs on GPUs of this process for which kernels can be compiled."""
    is_here = devices.are_all(devices.HOPPER) and devices.is_program_here()
    return is_here and compiler.may_compile_rows()
