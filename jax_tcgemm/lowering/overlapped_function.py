"""The custom call of a product with a function, beside which rows of A are gathered.

The product runs in parts by rows, so the function may not depend on the row of an element, and may
not reduce anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from jax_tcgemm import _extension
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.lowering.jit_call import Call
from jax_tcgemm.lowering.jit_epilogue import kernel_call
from jax_tcgemm.lowering.overlapped import Exchange, buffer_of, groups_of, new_number
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES
from jax_tcgemm.problem.log import log


def gathered_function(
    own: Sequence[jax.Array], others: Sequence[jax.Array], spec: CompiledSpec, exchange: Exchange
) -> list[jax.Array] | str:
    """Computes a product of all rows and its function, each device having its rows of A.

    Args:
        own: operands of the product; ``a`` has the rows of this device.
        others: operands of the function.
        spec: the primitive's parameters, of all rows.
        exchange: the devices.

    Returns:
        The results of all rows, or why there is no such call.
    """
    shard, role = own[0], exchange.role
    if spec.product.axes.a != tuple(range(shard.ndim)) or math.prod(shard.shape[:role]) != 1:
        return "rows of a device that do not follow each other"
    extent = exchange.peers * shard.shape[role]
    shape = (*shard.shape[:role], extent, *shard.shape[role + 1 :])
    types = [jax.ShapeDtypeStruct(shape, shard.dtype), *own[1:]]
    # XLA's product may be faster, but nothing runs beside it.
    found = kernel_call(types, others, spec)
    if isinstance(found, str):
        return found
    spec, call = found
    reason = _obstacle(call, shard, exchange)
    if reason is not None:
        return reason
    log(f"m={call.gemm.m} n={call.gemm.n} k={call.gemm.k}, {exchange.peers} parts, with a function")
    return call.emit(
        [buffer_of(shard, shape, exchange), *own[1:]],
        others,
        spec,
        target=_extension.OVERLAPPED_FUNCTION_TARGET,
        last=[shard, exchange.number],
        more={"call": new_number(), **groups_of(exchange)},
    )


def _obstacle(call: Call, shard: Any, exchange: Exchange) -> str | None:
    gemm = call.gemm
    program = call.program
    if program.counts_rows or program.flat_rows or program.reductions:
        return "a function that depends on the row"
    # A conversion of the buffer would read it before it is filled.
    if shard.dtype != INPUT_DTYPES[call.algorithm] or call.factors or call.scale_strides:
        return "operands of another type"
    if gemm.batch or gemm.m % exchange.peers or gemm.strides.a != (gemm.k, 1):
        return "parts that are not contiguous"
    aligned = gemm.n % 8 == 0 and gemm.k % 8 == 0
    return None if aligned else "rows that are no multiples of 16 bytes"
