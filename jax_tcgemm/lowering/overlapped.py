"""The custom calls of products beside which rows travel between devices.

- The rows of A are gathered. Each device has a shard of them, and computes all rows of the result
  for its columns of B.
- The rows of A or B are gathered along k, as for the gradient of a weight whose columns are divided
  while the activations' rows are.
- The rows of the result are scattered. Each device has a part of k, and gets its rows of the sum,
  or all rows.

A product of gathered rows takes the result of another call: a buffer, which the first of its
products fills. XLA joins these calls if their rows are equal, so several products gather rows once.
The product that gathers or scatters rows runs in as many parts as there are devices
(``cuda/overlap``). Each part runs the kernel of an ordinary product of its size.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
from jax_tcgemm.problem.strides import Operands, StridedGemm, fold, matrix_last, permuted

# The kinds of calls, by what the devices exchange: they gather rows of A or one operand along k, or
# they scatter rows of a sum D; in the last kind each device gets all rows.
ROWS_OF_A, K_OF_A, K_OF_B = "rows_of_a", "k_of_a", "k_of_b"
ROWS_OF_D, SUM_OF_D = "rows_of_d", "sum_of_d"

# The kinds that gather an operand, and which.
_GATHERED = {ROWS_OF_A: "a", K_OF_A: "a", K_OF_B: "b"}

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
    """

    devices: tuple[int, ...]
    peers: int
    role: int
    number: jax.Array


def gathered_product(x: Operands, spec: GemmSpec, exchange: Exchange) -> list[jax.Array] | str:
    """Computes a product of all rows, each device having its own.

    Args:
        x: the operands; ``a`` has the rows of this device, all others have all rows.
        spec: the primitive's parameters.
        exchange: the devices.

    Returns:
        The results of all rows, or why there is no such call.
    """
    in_order = permuted(spec.axes.a)
    if spec.axes.a != in_order:
        # The rows of all devices have to follow each other.
        x = x._replace(a=lax.transpose(x.a, matrix_last(spec.axes.a)))
        spec = spec.replace(axes=spec.axes._replace(a=in_order))
    shapes, axis = shapes_of(x), spec.axes.a[exchange.role]
    whole = shapes._replace(a=_times(shapes.a, axis, exchange.peers))
    part = Operands(
        *(
            shape if name in _WITHOUT_ROWS else _times(shape, axes and axes[exchange.role], count)
            for count in (1 / exchange.peers,)
            for name, shape, axes in zip(x._fields, whole, spec.axes, strict=True)
        )
    )
    return _called(x, spec, exchange, ROWS_OF_A, whole, part)


def scattered_product(
    x: Operands, spec: GemmSpec, exchange: Exchange, kind: str = ROWS_OF_D
) -> list[jax.Array] | str:
    """Computes this device's rows of the sum of all devices' products, or all rows.

    Args:
        x: ``a`` and ``b``, with this device's part of k.
        spec: the primitive's parameters: a product without an epilogue. Parts travel in the type of
            the result.
        exchange: the devices.
        kind: ``ROWS_OF_D``, or ``SUM_OF_D`` for all rows.

    Returns:
        The one result, or why there is no such call.
    """
    whole, axis = shapes_of(x), spec.axes.a[exchange.role]
    part = whole._replace(a=_times(whole.a, axis, 1 / exchange.peers))
    return _called(x, spec, exchange, kind, whole, part)


def gathered_along_k(
    x: Operands, spec: GemmSpec, exchange: Exchange, operand: str
) -> list[jax.Array] | str:
    """Computes a product, each device having a part of k of one operand.

    Args:
        x: ``a`` and ``b``. One has this device's part of k, the other one all of k.
        spec: the primitive's parameters: a product without an epilogue. Both operands have k first.
        exchange: the devices; their role does not matter.
        operand: the one that has a part: "a" or "b".

    Returns:
        The one result, or why there is no such call.
    """
    shapes = shapes_of(x)._asdict()
    shapes[operand] = _times(shapes[operand], 0, exchange.peers)
    whole = Operands(**shapes)
    return _called(x, spec, exchange, K_OF_A if operand == "a" else K_OF_B, whole, whole)


def _times(shape: Any, axis: int | None, factor: float) -> Any:
    """Returns a shape with one extent multiplied, if there is one."""
    if shape is None or axis is None:
        return shape
    return (*shape[:axis], round(shape[axis] * factor), *shape[axis + 1 :])


def _called(
    x: Operands, spec: GemmSpec, exchange: Exchange, kind: str, whole: Operands, part: Operands
) -> list[jax.Array] | str:
    """Emits the call for operands of these shapes, and of these in a part."""
    # XLA's product may be faster, but nothing runs beside it.
    chosen = kernel_of(_types(x, part), spec)
    if isinstance(chosen, str):
        return chosen
    spec, algorithm = chosen
    written = spec.epilogue.written
    spec = spec.replace(results=written)
    emitted = _emitted(x, spec, algorithm, exchange, kind, (whole, part))
    if isinstance(emitted, str):
        return emitted
    results = iter(emitted)
    return spec.epilogue.picked([next(results) if is_there else None for is_there in written])


def _emitted(
    x: Operands,
    spec: GemmSpec,
    algorithm: str,
    exchange: Exchange,
    kind: str,
    shapes: tuple[Operands, Operands],
) -> list[jax.Array] | str:
    in_dtype, out_dtype = INPUT_DTYPES[algorithm], written_dtype(algorithm, spec.out_dtype)
    whole, part = (fold(spec.strided(each)) for each in shapes)
    each = [workspace_bytes(strided, spec, in_dtype.itemsize, None) for strided in (whole, part)]
    padding, workspace = map(max, *each)
    reason = _obstacle(whole, part, spec, shapes, exchange, kind)
    if part.n * out_dtype.itemsize % _ALIGNMENT or part.k * in_dtype.itemsize % _ALIGNMENT:
        reason = f"rows that are no multiples of {_ALIGNMENT} bytes"
    if reason is not None or padding:
        return reason or "unaligned operands"
    x = converted(x, in_dtype, out_dtype)
    rows, gathered = [], _GATHERED.get(kind)
    if gathered is not None:
        rows = [getattr(x, gathered)]
        x = x._replace(**{gathered: buffer_of(rows[0], getattr(shapes[0], gathered), exchange)})
    result = jax.ShapeDtypeStruct(spec.result_shape(shapes[kind == ROWS_OF_D]), out_dtype)
    results = [result] * spec.result_count
    scratch = 0 if gathered else (exchange.peers - 1) * part.m * part.n * out_dtype.itemsize
    sizes = [size for size in (scratch, workspace) if size]
    call = jax.ffi.ffi_call(
        _extension.OVERLAPPED_TARGET,
        (*results, *(jax.ShapeDtypeStruct((size,), jnp.uint8) for size in sizes)),
    )
    local = whole if gathered else dataclasses.replace(whole, m=part.m)
    named = attributes(local, spec, algorithm, padding, has_workspace=workspace > 0)
    outputs = call(
        *flatten(x),
        *rows,
        exchange.number,
        **{**named, "beside_collectives": False},
        kind=kind,
        call=new_number(),
        **groups_of(exchange),
    )
    log(
        f"m={whole.m} n={whole.n} k={whole.k}, {exchange.peers} parts by {kind}: {algorithm}, "
        f"config {spec.config or 'by heuristic'}"
    )
    return [output.astype(spec.out_dtype) for output in outputs[: len(results)]]


def new_number() -> np.int64:
    """Returns a number of a call, which no call of another program or for other devices has."""
    return np.int64(secrets.randbits(62))


def groups_of(exchange: Exchange) -> dict[str, Any]:
    """Returns the attributes of calls that name the devices."""
    return {
        "group_size": np.int64(exchange.peers),
        "devices": np.asarray(exchange.devices, np.int64),
    }


def buffer_of(shard: jax.Array, shape: tuple[int, ...], exchange: Exchange) -> jax.Array:
    """Emits the call that makes a buffer for the rows of all devices."""
    # All products of the rows call it with the same shape.
    flat = shard.reshape(-1, shard.shape[-1])
    rows = jax.ShapeDtypeStruct((exchange.peers * flat.shape[0], flat.shape[1]), shard.dtype)
    call = jax.ffi.ffi_call(_extension.GATHERS_TARGET, rows)
    return call(flat, **groups_of(exchange)).reshape(shape)


def _types(x: Operands, shapes: Operands) -> Operands:
    return Operands(
        *(
            None if each is None else jax.ShapeDtypeStruct(shape, each.dtype)
            for each, shape in zip(x, shapes, strict=True)
        )
    )


def _obstacle(
    whole: StridedGemm,
    part: StridedGemm,
    spec: GemmSpec,
    shapes: tuple[Operands, Operands],
    exchange: Exchange,
    kind: str,
) -> str | None:
    """Returns why a part cannot be addressed as a product of its own."""
    if any(with_kernel_layouts(spec, each)[0] != spec for each in shapes):
        return "an operand that has to be copied first"
    for name in _WITHOUT_ROWS:
        axes = getattr(spec.axes, name)
        if axes is not None and any(axis is not None for axis in axes[: spec.batch_ndim]):
            return f"{name} differs between rows"
    parts = 1 if kind in (K_OF_A, K_OF_B) else exchange.peers
    if whole.batch or part.batch or whole.m != parts * part.m:
        return "parts that are not contiguous"
    return None
