"""Calls the extension's handlers without XLA: builds the call frames of XLA's C API by ctypes.

A handler checks a call's attributes against its buffers and then asks CUDA for the device. Without
a GPU, an accepted call ends there with an internal error, so it reads and writes nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_void_p
from typing import Any

from jaxlib.mlir import ir

from jax_tcgemm import _core

INVALID_ARGUMENT = 3  # XLA_FFI_Error_Code
_EXECUTE = 3  # XLA_FFI_ExecutionStage
_ARRAY, _SCALAR, _STRING = 1, 3, 4  # XLA_FFI_AttrType

# XLA_FFI_DataType
TYPES = {
    "pred": 1,
    "s8": 2,
    "s32": 4,
    "s64": 5,
    "u8": 6,
    "u32": 8,
    "f16": 10,
    "f32": 11,
    "f64": 12,
    "c64": 15,
    "bf16": 16,
    "f8e4m3fn": 20,
    "s4": 21,
    "u4": 22,
}


def _structure(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


_HEAD = (("struct_size", c_size_t), ("extension_start", c_void_p))
_Buffer = _structure(
    "_Buffer",
    *_HEAD,
    ("dtype", c_int),
    ("data", c_void_p),
    ("rank", c_int64),
    ("dims", POINTER(c_int64)),
)
_ByteSpan = _structure("_ByteSpan", ("ptr", c_char_p), ("len", c_size_t))
_Scalar = _structure("_Scalar", ("dtype", c_int), ("value", c_void_p))
_Array = _structure("_Array", ("dtype", c_int), ("size", c_size_t), ("data", c_void_p))
_Buffers = _structure(
    "_Buffers", *_HEAD, ("size", c_int64), ("types", POINTER(c_int)), ("each", POINTER(c_void_p))
)
_Attrs = _structure(
    "_Attrs",
    *_HEAD,
    ("size", c_int64),
    ("types", POINTER(c_int)),
    ("names", POINTER(POINTER(_ByteSpan))),
    ("attrs", POINTER(c_void_p)),
)
_ErrorArgs = _structure("_ErrorArgs", *_HEAD, ("message", c_char_p), ("errc", c_int))
_StreamArgs = _structure("_StreamArgs", *_HEAD, ("ctx", c_void_p), ("stream", c_void_p))
_OrdinalArgs = _structure("_OrdinalArgs", *_HEAD, ("ctx", c_void_p), ("ordinal", c_int32))
_Frame = _structure(
    "_Frame",
    *_HEAD,
    ("api", c_void_p),
    ("ctx", c_void_p),
    ("stage", c_int),
    ("args", _Buffers),
    ("rets", _Buffers),
    ("attrs", _Attrs),
    ("future", c_void_p),
)
# The order is that of XLA_FFI_Api.
_FUNCTIONS = (
    *("error_create", "error_get_message", "error_destroy", "handler_register", "stream_get"),
    *("type_register", "context_get", "state_set", "state_get", "allocate", "free", "schedule"),
    *("threads", "future_create", "future_available", "future_error", "run_get", "ordinal_get"),
)
_Version = _structure("_Version", *_HEAD, ("major", c_int), ("minor", c_int))
_Api = _structure(
    "_Api",
    *_HEAD,
    ("version", _Version),
    ("internal", c_void_p),
    *((name, c_void_p) for name in _FUNCTIONS),
)

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = c_void_p, (ctypes.py_object, c_char_p)

Buffer = tuple[str, Sequence[int]]  # a key of TYPES, and extents


class Handler:
    """The execution handler of a target.

    Args:
        target: its name.
        stream: the CUDA stream that the calls get.
    """

    def __init__(self, target: str, stream: int | None = None):
        found: Any = _core.registrations()[target]
        capsule = found["execute"] if isinstance(found, dict) else found
        pointer = _get_pointer(capsule, b"xla._CUSTOM_CALL_TARGET")
        self._call = ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))(pointer)
        self._errors: list[tuple[int, str]] = []
        self._stream = stream
        self._callbacks = {
            "error_create": ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArgs))(self._create),
            "error_destroy": ctypes.CFUNCTYPE(None, c_void_p)(lambda args: None),
            "stream_get": ctypes.CFUNCTYPE(c_void_p, POINTER(_StreamArgs))(self._give_stream),
            "ordinal_get": ctypes.CFUNCTYPE(c_void_p, POINTER(_OrdinalArgs))(lambda args: None),
            "run_get": ctypes.CFUNCTYPE(c_void_p, c_void_p)(lambda args: None),
        }
        self._api = _Api(struct_size=ctypes.sizeof(_Api))
        for name, function in self._callbacks.items():
            setattr(self._api, name, ctypes.cast(function, c_void_p))

    def _give_stream(self, args: Any) -> None:
        args.contents.stream = self._stream

    def _create(self, args: Any) -> int:
        self._errors.append((args.contents.errc, args.contents.message.decode()))
        return 1

    def __call__(
        self,
        attributes: Mapping[str, Any],
        operands: Sequence[Buffer],
        results: Sequence[Buffer],
        offsets: Sequence[int] = (),
    ) -> tuple[int, str]:
        """Returns the code of the error, 0 for none, and its message.

        Args:
            attributes: integers, booleans, floats, strings and sequences of integers.
            operands: the operands of the call.
            results: the results of the call.
            offsets: the distance of each buffer's address from a multiple of 256, operands first;
                missing offsets are 0.
        """
        kept: list[Any] = []  # objects that must live until the call has ended
        at = iter([*offsets, *[0] * (len(operands) + len(results))])
        frame = _Frame(
            struct_size=_Frame.future.offset,
            api=ctypes.addressof(self._api),
            stage=_EXECUTE,
            args=_buffers(operands, at, kept),
            rets=_buffers(results, at, kept),
            attrs=_attributes(attributes, kept),
        )
        self._errors.clear()
        failed = self._call(ctypes.byref(frame))
        assert bool(failed) == bool(self._errors)
        return self._errors[-1] if failed else (0, "")


def _buffers(buffers: Sequence[Buffer], offsets: Any, kept: list[Any]) -> Any:
    made = []
    for number, (dtype, extents) in enumerate(buffers, 1):
        dims = (c_int64 * len(extents))(*extents)
        made.append(
            _Buffer(
                struct_size=ctypes.sizeof(_Buffer),
                dtype=TYPES[dtype],
                data=number * 2**40 + next(offsets),  # an address without memory
                rank=len(extents),
                dims=dims,
            )
        )
    types = (c_int * len(made))(*([1] * len(made)))
    each = (c_void_p * len(made))(*(ctypes.addressof(x) for x in made))
    kept += [made, types, each]
    return _Buffers(struct_size=ctypes.sizeof(_Buffers), size=len(made), types=types, each=each)


def _attributes(attributes: Mapping[str, Any], kept: list[Any]) -> Any:
    names, types, values = [], [], []
    for name, value in sorted(attributes.items()):
        text = name.encode()
        names.append(ctypes.pointer(_ByteSpan(text, len(text))))
        kind, made = _attribute(value, kept)
        types.append(kind)
        values.append(made)
    count = len(names)
    arrays = (
        (c_int * count)(*types),
        (POINTER(_ByteSpan) * count)(*names),
        (c_void_p * count)(*(ctypes.addressof(value) for value in values)),
    )
    kept += [names, values, arrays]
    size = ctypes.sizeof(_Attrs)
    return _Attrs(struct_size=size, size=count, types=arrays[0], names=arrays[1], attrs=arrays[2])


def _attribute(value: Any, kept: list[Any]) -> tuple[int, Any]:
    if isinstance(value, str):
        text = value.encode()
        return _STRING, _ByteSpan(text, len(text))
    if isinstance(value, bool):
        kept.append(c_uint8(value))
        return _SCALAR, _Scalar(TYPES["pred"], ctypes.addressof(kept[-1]))
    if isinstance(value, int):
        kept.append(c_int64(value))
        return _SCALAR, _Scalar(TYPES["s64"], ctypes.addressof(kept[-1]))
    if isinstance(value, float):
        kept.append(ctypes.c_float(value))
        return _SCALAR, _Scalar(TYPES["f32"], ctypes.addressof(kept[-1]))
    kept.append((c_int64 * len(value))(*value))
    return _ARRAY, _Array(TYPES["s64"], len(value), ctypes.addressof(kept[-1]))


# --- Calls of lowered programs ---------------------------------------------------------------

# The MLIR types that have other names in TYPES.
_MLIR_TYPES = {
    "i1": "pred",
    "i4": "s4",
    "ui4": "u4",
    "i8": "s8",
    "ui8": "u8",
    "i32": "s32",
    "ui32": "u32",
    "i64": "s64",
    "f8E4M3FN": "f8e4m3fn",
    "complex<f32>": "c64",
}


def calls_of(module: ir.Module) -> list[tuple[str, dict[str, Any], list[Buffer], list[Buffer]]]:
    """Returns target, attributes, operands and results of each custom call of the extension.

    Args:
        module: a lowered program in StableHLO.
    """
    return [
        (
            target,
            {each.name: _value(each.attr) for each in config},
            [_buffer(each.type) for each in operation.operands],
            [_buffer(each.type) for each in operation.results],
        )
        for target, config, operation in _operations_of(module)
    ]


def custom_calls_of(module: ir.Module) -> list[tuple[str, ir.DictAttr]]:
    """Returns target and attributes of each custom call of the extension, as MLIR objects."""
    return [(target, config) for target, config, _ in _operations_of(module)]


def _operations_of(module: ir.Module) -> list[tuple[str, ir.DictAttr, Any]]:
    found = []

    def visit(operation: Any) -> None:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target in _core.registrations():
                config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
                found.append((target, config, operation))
        for region in operation.regions:
            for block in region:
                for inner in block:
                    visit(inner.operation)

    visit(module.operation)
    return found


def _buffer(type_: ir.Type) -> Buffer:
    tensor = ir.RankedTensorType(type_)
    name = str(tensor.element_type)
    return _MLIR_TYPES.get(name, name), list(tensor.shape)


def _value(attribute: Any) -> Any:
    if isinstance(attribute, ir.StringAttr):
        return attribute.value
    if isinstance(attribute, ir.BoolAttr):
        return bool(attribute.value)
    if isinstance(attribute, ir.IntegerAttr):
        return int(attribute.value)
    if isinstance(attribute, ir.FloatAttr):
        return float(attribute.value)
    return [int(each) for each in attribute]
