"""A custom call whose operands begin some bytes into their buffers, which XLA never does.

A wrapper handler moves each operand's address before it calls the package's handler. The structures
are those of `xla/ffi/api/c_api.h`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tcgemm import _core

_shift = 0  # in bytes
_kept: list[Any] = []  # objects that ctypes must not free


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
    )


class _Args(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("args", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),  # set if XLA asks for the handler's traits
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("args", _Args),
    )


_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))


@functools.cache
def _shifted_target(target: str) -> str:
    """Registers the handler that moves operands by ``_shift`` bytes, and returns its name."""
    stages = _core.registrations()[target]
    capsule = stages["execute"] if isinstance(stages, dict) else stages
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    handler = _Handler(pointer(capsule, b"xla._CUSTOM_CALL_TARGET"))

    @_Handler
    def shifted(frame: Any) -> Any:
        args = frame.contents.args
        buffers = [] if frame.contents.extension else [args.args[i] for i in range(args.size)]
        for buffer in buffers:
            buffer.contents.data += _shift
        error = handler(frame)
        for buffer in buffers:
            buffer.contents.data -= _shift
        return error

    _kept.append((handler, shifted))
    address = ctypes.cast(shifted, ctypes.c_void_p)
    jax.ffi.register_ffi_target(
        f"{target}_shifted", jax.ffi.pycapsule(address), platform="CUDA", api_version=1
    )
    return f"{target}_shifted"


def shifted_call(
    target: str,
    results: Sequence[Any],
    operands: Sequence[jax.Array],
    shift: int,
    **attributes: Any,
) -> list[jax.Array]:
    """Makes a custom call whose operands begin ``shift`` bytes into their buffers.

    The bytes around floating-point operands are NaN, so that reads beyond an operand show.
    """
    global _shift
    padded = []
    for x in operands:
        assert shift % x.dtype.itemsize == 0
        before = shift // x.dtype.itemsize
        filler = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else -1
        padded.append(jnp.pad(x.ravel(), (before, 64), constant_values=filler))
    call: Callable[..., Any] = jax.ffi.ffi_call(_shifted_target(target), results)
    _shift = shift
    try:
        return jax.block_until_ready(jax.jit(lambda *args: call(*args, **attributes))(*padded))
    finally:
        _shift = 0
