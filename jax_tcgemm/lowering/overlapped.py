"""The custom call of a product whose rows travel between devices beside it.

There are two such products:

- The rows of A are gathered. Each device has a shard of them, and computes all rows of the result
  for its columns of B.
- The rows of the result are scattered. Each device has a part of k, and gets its rows of the sum.

The product runs in as many parts as there are devices (``cuda/overlap``). Each part runs the kernel
of an ordinary product of its size.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _extension
from jax_tcgemm.lowering.custom_call import (
    attributes,
    converted,
    shapes_of,
    workspace_bytes,
)
from jax_tcgemm.lowering.gemm import kernel_of
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, written_dtype
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.spec import GemmSpec, flatten, with_kernel_layouts
from jax_tcgemm.problem.strides import Operands, StridedGemm, fold

# The operands that are the same for all rows.
_WITHOUT_ROWS = ("b", "b2", "bias", "bias2", "alpha", "beta", "column_scale")

# Parts begin at multiples of so many bytes, as TMA requires.
_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The devices that exchange rows.

    Attributes:
        devices: the devices of each group, by their numbers in the program, one group after the
            other. The i-th device of a group has the i-th part of the rows.
        peers: number of devices in a group.
        role: the position of the divided rows among ``(*batch, m)``.
        number: the number of this device in the program, int32.
        token: a number that XLA gets from all devices of the group, int32. XLA locks the group
            while the hosts enqueue a program with such a collective. So no other program with
            collectives of these devices is enqueued in between, on some devices before a call and
            on others after it, which could make both wait for ever.
    """

    devices: tuple[int, ...]
    peers: int
    role: int
    number: jax.Array
    token: jax.Array


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The whole product and one part, as a kernel sees them."""

    whole: StridedGemm
    part: StridedGemm

    def of_rows(self) -> StridedGemm:
        """Returns a part whose operands lie in those of the whole, except for A."""
        strides = self.whole.strides._replace(a=self.part.strides.a)
        return dataclasses.replace(self.part, strides=strides)


def gathered_product(x: Operands, spec: GemmSpec, exchange: Exchange) -> list[jax.Array] | str:
    """Computes a product of all rows, each device having its own.

    Args:
        x: the operands; ``a`` has the rows of this device, all others have all rows.
        spec: the primitive's parameters.
        exchange: the devices.

    Returns:
        The results of all rows, or why there is no such call.
    """
    shapes = shapes_of(x)
    rows = [*shapes.a]
    rows[spec.axes.a[exchange.role]] *= exchange.peers
    whole = shapes._replace(a=tuple(rows))
    return _called(x, spec, exchange, whole, gathers=True)


def scattered_product(x: Operands, spec: GemmSpec, exchange: Exchange) -> list[jax.Array] | str:
    """Computes this device's rows of the sum of all devices' products.

    Args:
        x: ``a`` and ``b``, with this device's part of k.
        spec: the primitive's parameters: a product without an epilogue. Parts travel in the type of
            the result.
        exchange: the devices.

    Returns:
        The one result, or why there is no such call.
    """
    return _called(x, spec, exchange, shapes_of(x), gathers=False)


def _called(
    x: Operands, spec: GemmSpec, exchange: Exchange, whole: Operands, *, gathers: bool
) -> list[jax.Array] | str:
    part = _part_shapes(whole, spec, exchange)
    chosen = kernel_of(_types(x, part), spec)
    if isinstance(chosen, str):
        return chosen
    spec, algorithm = chosen
    written = spec.epilogue.written
    shapes, spec = (whole, part), spec.replace(results=written)
    emitted = _emitted(x, spec, algorithm, exchange, shapes, gathers)
    if isinstance(emitted, str):
        return emitted
    results = iter(emitted)
    return spec.epilogue.picked([next(results) if is_there else None for is_there in written])


def _emitted(
    x: Operands,
    spec: GemmSpec,
    algorithm: str,
    exchange: Exchange,
    shapes: tuple[Operands, Operands],
    gathers: bool,
) -> list[jax.Array] | str:
    in_dtype, out_dtype = INPUT_DTYPES[algorithm], written_dtype(algorithm, spec.out_dtype)
    whole, part = shapes
    parts = _Parts(fold(spec.strided(whole)), fold(spec.strided(part)))
    local = parts.of_rows() if gathers else dataclasses.replace(parts.whole, m=parts.part.m)
    padding, workspace = workspace_bytes(parts.part, spec, in_dtype.itemsize, None)
    reason = _obstacle(parts, spec, shapes, exchange, in_dtype, out_dtype)
    if reason is None and padding:
        reason = "unaligned operands"
    if reason is not None:
        return reason
    x = converted(x, in_dtype, out_dtype)
    shape = spec.result_shape(whole if gathers else part)
    results = [jax.ShapeDtypeStruct(shape, out_dtype)] * spec.result_count
    scratch = 0 if gathers else (exchange.peers - 1) * math.prod(shape) * out_dtype.itemsize
    sizes = [size for size in (scratch, workspace) if size]
    call = jax.ffi.ffi_call(
        _extension.OVERLAPPED_TARGET,
        (*results, *(jax.ShapeDtypeStruct((size,), jnp.uint8) for size in sizes)),
    )
    named = attributes(local, spec, algorithm, padding, has_workspace=workspace > 0)
    outputs = call(
        *flatten(x),
        exchange.number,
        **{**named, "beside_collectives": False},
        gathers=gathers,
        # A call of another program, or of the same program for other devices, has another number.
        call=np.int64(secrets.randbits(62)),
        group_size=np.int64(exchange.peers),
        devices=np.asarray(exchange.devices, np.int64),
    )
    kind = "all-gather, then" if gathers else "reduce-scatter after"
    log(
        f"{kind} m={parts.whole.m} n={local.n} k={local.k}, {exchange.peers} parts: {algorithm}, "
        f"config {spec.config or 'by heuristic'}"
    )
    made = [_after(outputs[0], exchange.token), *outputs[1 : len(results)]]
    return [output.astype(spec.out_dtype) for output in made]


def _after(x: jax.Array, token: jax.Array) -> jax.Array:
    """Returns ``x`` itself, once there is a token.

    The token's collective runs beside the product. As an operand of the product it would take 20 us
    before it.
    """
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(_extension.AFTER_TARGET, result, input_output_aliases={0: 0})
    return call(x, token)


def _part_shapes(whole: Operands, spec: GemmSpec, exchange: Exchange) -> Operands:
    """Returns the shapes of the operands of a part."""
    shapes = {}
    for name, shape in whole._asdict().items():
        axes = getattr(spec.axes, name)
        has_rows = shape is not None and name not in _WITHOUT_ROWS
        axis = axes[exchange.role] if has_rows else None
        if axis is not None:
            shape = (*shape[:axis], shape[axis] // exchange.peers, *shape[axis + 1 :])
        shapes[name] = shape
    return Operands(**shapes)


def _types(x: Operands, shapes: Operands) -> Operands:
    return Operands(
        *(
            None if each is None else jax.ShapeDtypeStruct(shape, each.dtype)
            for each, shape in zip(x, shapes, strict=True)
        )
    )


def _obstacle(
    parts: _Parts,
    spec: GemmSpec,
    shapes: tuple[Operands, Operands],
    exchange: Exchange,
    in_dtype: Any,
    out_dtype: Any,
) -> str | None:
    """Returns why the rows of a part cannot be addressed as a product of their own."""
    if any(with_kernel_layouts(spec, each)[0] != spec for each in shapes):
        return "an operand that has to be copied first"
    whole, part = parts.whole, parts.part
    for name in _WITHOUT_ROWS:
        axes = getattr(spec.axes, name)
        if axes is not None and any(axis is not None for axis in axes[: spec.batch_ndim]):
            return f"{name} differs between rows"
    if whole.batch or part.batch or whole.m != exchange.peers * part.m:
        return "parts that are no contiguous rows"
    if part.n * out_dtype.itemsize % _ALIGNMENT or part.k * in_dtype.itemsize % _ALIGNMENT:
        return f"rows that are no multiples of {_ALIGNMENT} bytes"
    return None
