"""The custom call of a product beside which its rows travel between devices.

There are three such products:

- The rows of A are gathered. Each device has a shard of them, and computes all rows of the result
  for its columns of B.
- The rows of the result are scattered. Each device has a part of k, and gets its rows of the sum.
- One operand is gathered along k, as for the gradient of a weight whose columns are divided while
  the activations' rows are. Each part adds to a sum in float32.

The product runs in as many parts as there are devices (``cuda/overlap``). Each part runs the kernel
of an ordinary product of its size.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _extension
from jax_tcgemm.lowering import devices
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

# The kinds of calls, by what the devices exchange: they gather rows of A, scatter rows of D, or
# gather one operand along k.
ROWS_OF_A, ROWS_OF_D, K_OF_A, K_OF_B = "rows_of_a", "rows_of_d", "k_of_a", "k_of_b"

_FLOAT32 = np.dtype(np.float32)

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
    whole, axis = shapes_of(x), spec.axes.a[exchange.role]
    part = whole._replace(a=_times(whole.a, axis, 1 / exchange.peers))
    return _called(x, spec, exchange, ROWS_OF_D, whole, part)


def gathered_sum(
    x: Operands, spec: GemmSpec, exchange: Exchange, operand: str
) -> list[jax.Array] | str:
    """Computes a product, each device having a part of k of one operand.

    Args:
        x: ``a`` and ``b``. One has this device's part of k, the other one all of k.
        spec: the primitive's parameters: a product without an epilogue.
        exchange: the devices; their role does not matter.
        operand: the one that has a part: "a" or "b".

    Returns:
        The one result, or why there is no such call. The sum over k is in float32.
    """
    if spec.work != "none":
        return "an epilogue of a sum in parts"
    axes = {"a": spec.axes.a[-1], "b": spec.axes.b[-2]}
    shapes = shapes_of(x)._asdict()
    shapes[operand] = _times(shapes[operand], axes[operand], exchange.peers)
    whole = Operands(**shapes)
    parts = {name: _times(shapes[name], axes[name], 1 / exchange.peers) for name in axes}
    kind = K_OF_A if operand == "a" else K_OF_B
    return _called(x, spec.replace(config=None), exchange, kind, whole, whole._replace(**parts))


def _times(shape: Any, axis: int | None, factor: float) -> Any:
    """Returns a shape with one extent multiplied, if there is one."""
    if shape is None or axis is None:
        return shape
    return (*shape[:axis], round(shape[axis] * factor), *shape[axis + 1 :])


def _called(
    x: Operands, spec: GemmSpec, exchange: Exchange, kind: str, whole: Operands, part: Operands
) -> list[jax.Array] | str:
    """Emits the call for operands of these shapes, and of these in a part."""
    chosen = kernel_of(_types(x, part), spec)
    if isinstance(chosen, str):
        return chosen
    spec, algorithm = chosen
    if kind in (K_OF_A, K_OF_B):
        # Each part adds to the sum, so the kernel of the product alone may not do.
        spec = spec.replace(config=None)
        if not devices.has_kernel(algorithm, work="sum"):
            return "no kernel that adds to a sum"
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
    padding, workspace = workspace_bytes(part, spec, in_dtype.itemsize, None)
    reason = _obstacle(whole, part, spec, shapes, exchange, kind)
    if part.n * out_dtype.itemsize % _ALIGNMENT or part.k * in_dtype.itemsize % _ALIGNMENT:
        reason = f"rows that are no multiples of {_ALIGNMENT} bytes"
    if reason is not None or padding:
        return reason or "unaligned operands"
    x = converted(x, in_dtype, out_dtype)
    result = jax.ShapeDtypeStruct(spec.result_shape(shapes[kind == ROWS_OF_D]), out_dtype)
    results = [result] * spec.result_count
    scratch = {
        ROWS_OF_A: 0,
        ROWS_OF_D: (exchange.peers - 1) * result.size * out_dtype.itemsize,
    }.get(kind, result.size * _FLOAT32.itemsize)
    sizes = [size for size in (scratch, workspace) if size]
    call = jax.ffi.ffi_call(
        _extension.OVERLAPPED_TARGET,
        (*results, *(jax.ShapeDtypeStruct((size,), jnp.uint8) for size in sizes)),
    )
    local = _local(whole, part, kind)
    named = attributes(local, spec, algorithm, padding, has_workspace=workspace > 0)
    outputs = call(
        *flatten(x),
        exchange.number,
        **{**named, "beside_collectives": False},
        kind=kind,
        # A call of another program, or of the same program for other devices, has another number.
        call=np.int64(secrets.randbits(62)),
        group_size=np.int64(exchange.peers),
        devices=np.asarray(exchange.devices, np.int64),
    )
    log(
        f"m={whole.m} n={whole.n} k={whole.k}, {exchange.peers} parts by {kind}: {algorithm}, "
        f"config {spec.config or 'by heuristic'}"
    )
    return [output.astype(spec.out_dtype) for output in outputs[: len(results)]]


def _local(whole: StridedGemm, part: StridedGemm, kind: str) -> StridedGemm:
    """Returns a part whose operands lie in those of this device."""
    if kind == ROWS_OF_D:
        return dataclasses.replace(whole, m=part.m)
    own = "b" if kind == K_OF_B else "a"
    strides = whole.strides._replace(**{own: getattr(part.strides, own)})
    return dataclasses.replace(part, strides=strides)


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
    divided = (whole.k, part.k) if kind in (K_OF_A, K_OF_B) else (whole.m, part.m)
    if whole.batch or part.batch or divided[0] != exchange.peers * divided[1]:
        return "parts that are not contiguous"
    return None
