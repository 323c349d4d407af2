"""C++ of each JAX operation, on values as ``compiled_values.cuh`` holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np


class NotTranslatableError(Exception):
    """An operation, or a type, that has no translation; the message names it."""


class BatchIndexError(NotTranslatableError):
    """An index along a batch dimension has no translation.

    It has one if the batch continues the rows, because it is then an index of rows.
    """


@dataclasses.dataclass(frozen=True)
class Element:
    """An element type: its name in C++, and the C++ type that holds its values."""

    cpp: str
    value: str


_ELEMENTS = {
    np.dtype(np.float32): Element("float", "float"),
    np.dtype(ml_dtypes.bfloat16): Element("__nv_bfloat16", "float"),
    np.dtype(np.float16): Element("__half", "float"),
    np.dtype(ml_dtypes.float8_e4m3fn): Element("__nv_fp8_e4m3", "float"),
    np.dtype(ml_dtypes.float8_e5m2): Element("__nv_fp8_e5m2", "float"),
    np.dtype(np.int32): Element("int32_t", "int32_t"),
    np.dtype(np.int16): Element("int16_t", "int16_t"),
    np.dtype(np.int8): Element("int8_t", "int8_t"),
    np.dtype(np.uint32): Element("uint32_t", "uint32_t"),
    np.dtype(np.uint16): Element("uint16_t", "uint16_t"),
    np.dtype(np.uint8): Element("uint8_t", "uint8_t"),
    np.dtype(np.bool_): Element("bool", "bool"),
}


def element(dtype: Any) -> Element:
    """Returns the element type of a dtype.

    Raises:
        NotTranslatableError: the dtype has no element type.
    """
    try:
        return _ELEMENTS[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise NotTranslatableError(f"values of {dtype}") from None


def is_float(dtype: Any) -> bool:
    """Checks if values of a dtype are held in float32."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_narrow(atom: Any) -> bool:
    """Checks if values are rounded to 16 bits or fewer."""
    dtype = atom.aval.dtype
    return is_float(dtype) and dtype.itemsize <= 2


def constant(value: Any, dtype: Any) -> str:
    """Returns a number as C++; floating-point numbers are given by their bits."""
    scalar = np.asarray(value).astype(dtype)
    if is_float(dtype):
        bits = int(np.asarray(scalar, np.float32).view(np.uint32))
        return f"__uint_as_float({bits:#010x}u)"
    if np.dtype(dtype) == np.bool_:
        return str(bool(scalar)).lower()
    # C++ has no literal for the least integer.
    return f"static_cast<{element(dtype).value}>({int(scalar)}ll)"


def reciprocal(number: Any, dtype: Any) -> np.ndarray | None:
    """Returns 1 / number rounded to a floating-point type, ``None`` if it is no normal number."""
    if not is_float(dtype):
        return None
    with np.errstate(all="ignore"):
        inverse = np.ones((), dtype) / np.asarray(number, dtype)
    is_normal = jnp.finfo(dtype).tiny <= abs(inverse) <= jnp.finfo(dtype).max
    return inverse if is_normal else None


def rounded(expression: str, dtype: Any) -> str:
    """Returns a float32 expression rounded to a narrower floating-point type."""
    kind = element(dtype)
    return expression if kind.cpp == kind.value else f"rounded<{kind.cpp}>({expression})"


def converted(x: str, old: Any, new: Any) -> str:
    """Returns ``convert_element_type`` of a value."""
    kind = element(new)
    if np.dtype(old) == np.dtype(new):
        return x
    if np.dtype(new) == np.bool_:
        return f"({x} != {constant(0, old)})"
    if is_float(new):
        if jnp.issubdtype(old, jnp.integer) and kind.cpp != kind.value:
            return f"nearest_to<{kind.cpp}>({x})"
        return rounded(x if is_float(old) else f"static_cast<float>({x})", new)
    return f"integer_of<{kind.value}>({x})" if is_float(old) else f"static_cast<{kind.value}>({x})"


# Operations on floating-point values. {0}, {1} and so on are the operands, {element} is their type.
_OF_FLOATS: Mapping[str, str] = {
    "add": "{0} + {1}",
    "add_any": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "rem": "fmodf({0}, {1})",
    "max": "maximum({0}, {1})",
    "min": "minimum({0}, {1})",
    "pow": "powf({0}, {1})",
    "atan2": "atan2f({0}, {1})",
    "nextafter": "next_after<{element}>({0}, {1})",
    "neg": "-{0}",
    "abs": "fabsf({0})",
    "sign": "sign({0})",
    "floor": "floorf({0})",
    "ceil": "ceilf({0})",
    "square": "{0} * {0}",
    "one_minus_square": "one_minus_square<{element}>({0})",
    "sqrt": "sqrtf({0})",
    "rsqrt": "rsqrtf({0})",
    "cbrt": "cbrtf({0})",
    "exp": "fast_exp({0})",
    "exp2": "exp2f({0})",
    "expm1": "expm1f({0})",
    "log": "logf({0})",
    "log1p": "log1pf({0})",
    "logistic": "logistic({0})",
    "tanh": "tanhf({0})",
    "sin": "sinf({0})",
    "cos": "cosf({0})",
    "tan": "tanf({0})",
    "asin": "asinf({0})",
    "acos": "acosf({0})",
    "atan": "atanf({0})",
    "sinh": "sinhf({0})",
    "cosh": "coshf({0})",
    "asinh": "asinhf({0})",
    "acosh": "acoshf({0})",
    "atanh": "atanhf({0})",
    "erf": "erff({0})",
    "erfc": "erfcf({0})",
    "erf_inv": "erfinvf({0})",
    "clamp": "clamped({0}, {1}, {2})",
}

# Replacements of those for results of 16 bits or fewer.
_COARSE: Mapping[str, str] = {"exp": "coarse_exp({0})", "logistic": "coarse_logistic({0})"}

# Operations on integers, which wrap around.
_OF_INTEGERS: Mapping[str, str] = {
    "add": "static_cast<uint32_t>({0}) + static_cast<uint32_t>({1})",
    "add_any": "static_cast<uint32_t>({0}) + static_cast<uint32_t>({1})",
    "sub": "static_cast<uint32_t>({0}) - static_cast<uint32_t>({1})",
    "mul": "static_cast<uint32_t>({0}) * static_cast<uint32_t>({1})",
    "square": "static_cast<uint32_t>({0}) * static_cast<uint32_t>({0})",
    "one_minus_square": "1u - static_cast<uint32_t>({0}) * static_cast<uint32_t>({0})",
    "neg": "0u - static_cast<uint32_t>({0})",
    "abs": "{0} < 0 ? 0u - static_cast<uint32_t>({0}) : static_cast<uint32_t>({0})",
    "sign": "sign({0})",
    "div": "quotient({0}, {1})",
    "rem": "remainder_of({0}, {1})",
    "max": "maximum({0}, {1})",
    "min": "minimum({0}, {1})",
    "clamp": "clamped({0}, {1}, {2})",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
    "shift_left": "shifted_left({0}, {1})",
    "shift_right_logical": "shifted_right_logical({0}, {1})",
    "shift_right_arithmetic": "shifted_right_arithmetic({0}, {1})",
    "population_count": "bits_set({0})",
}

_OF_TRUTHS: Mapping[str, str] = {
    "and": "{0} && {1}",
    "or": "{0} || {1}",
    "xor": "{0} != {1}",
    "not": "!{0}",
    "max": "{0} || {1}",
    "min": "{0} && {1}",
}

_COMPARISONS: Mapping[str, str] = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}

# Names of the operations that are translated by a table, for the documentation and its test.
NAMES = frozenset({*_OF_FLOATS, *_OF_INTEGERS, *_COMPARISONS})


def _from_table(name: str, values: list[str], dtype: Any) -> str:
    truths = np.dtype(dtype) == np.bool_
    table = _OF_FLOATS if is_float(dtype) else _OF_TRUTHS if truths else _OF_INTEGERS
    if name not in table:
        raise NotTranslatableError(f"{name} of {dtype}")
    kind = element(dtype)
    text = table[name].format(*values, element=kind.cpp)
    if is_float(dtype):
        return rounded(text, dtype)
    return text if truths else f"static_cast<{kind.value}>({text})"


def _integer_pow(values: list[str], dtypes: list[Any], params: Mapping[str, Any]) -> str:
    power = params["y"]
    if not is_float(dtypes[0]):
        raise NotTranslatableError(f"integer_pow of {dtypes[0]}")
    return f"integer_power<{element(dtypes[0]).cpp}, {power}>({values[0]})"


def _polynomial(values: list[str], dtypes: list[Any], params: Mapping[str, Any]) -> str:
    """Evaluates a polynomial by Horner's rule; the coefficients follow the lowest degree first."""
    x, *coefficients, total = values
    if not is_float(dtypes[0]):
        raise NotTranslatableError(f"polynomial of {dtypes[0]}")
    for coefficient in reversed(coefficients):
        product = rounded(f"({total}) * {x}", dtypes[0])
        total = rounded(f"{product} + {coefficient}", dtypes[0])
    return total


def _round(values: list[str], dtypes: list[Any], params: Mapping[str, Any]) -> str:
    to_even = int(params["rounding_method"]) == 1
    return rounded(f"{'rintf' if to_even else 'roundf'}({values[0]})", dtypes[0])


def _select_n(values: list[str], dtypes: list[Any], params: Mapping[str, Any]) -> str:
    if np.dtype(dtypes[0]) != np.bool_ or len(values) != 3:
        raise NotTranslatableError("select_n among more than two")
    return f"{values[0]} ? {values[2]} : {values[1]}"


def _convert(values: list[str], dtypes: list[Any], params: Mapping[str, Any]) -> str:
    return converted(values[0], dtypes[0], params["new_dtype"])


def _bitcast(values: list[str], dtypes: list[Any], params: Mapping[str, Any]) -> str:
    old, new = np.dtype(dtypes[0]), np.dtype(params["new_dtype"])
    (value,) = values
    if old == new:
        return value
    if old.itemsize != new.itemsize or np.bool_ in (old, new):
        raise NotTranslatableError(f"bitcast_convert_type of {old} to {new}")
    if is_float(old):
        value = f"exact_element<{element(old).cpp}>({value})"
    bits = f"bits_as<{element(new).cpp}>({value})"
    return f"value_of({bits})"


def _reduce_precision(values: list[str], dtypes: list[Any], params: Mapping[str, Any]) -> str:
    exponent, mantissa = params["exponent_bits"], params["mantissa_bits"]
    info = jnp.finfo(dtypes[0])
    if exponent >= info.nexp and mantissa >= info.nmant:
        return values[0]
    if np.dtype(dtypes[0]).itemsize == 1:
        raise NotTranslatableError(f"reduce_precision of {dtypes[0]} to {exponent, mantissa}")
    return f"reduced_precision<{element(dtypes[0]).cpp}, {exponent}, {mantissa}>({values[0]})"


def _is_finite(values: list[str], dtypes: list[Any], params: Mapping[str, Any]) -> str:
    return f"isfinite({values[0]})"


_Special = Callable[[list[str], list[Any], Mapping[str, Any]], str]

_SPECIAL: Mapping[str, _Special] = {
    "integer_pow": _integer_pow,
    "polynomial": _polynomial,
    "round": _round,
    "select_n": _select_n,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "reduce_precision": _reduce_precision,
    "is_finite": _is_finite,
    "copy": lambda values, dtypes, params: values[0],
    "copy_p": lambda values, dtypes, params: values[0],
    "stop_gradient": lambda values, dtypes, params: values[0],
    "optimization_barrier": lambda values, dtypes, params: values[0],
    "name": lambda values, dtypes, params: values[0],
}

# All elementwise operations. Their operands have one shape or are scalars.
ELEMENTWISE = NAMES | _SPECIAL.keys()


def translated(
    name: str,
    values: list[str],
    dtypes: list[Any],
    params: Mapping[str, Any],
    *,
    coarse: bool = False,
) -> str:
    """Returns the C++ expression of an elementwise operation.

    Args:
        name: name of the primitive.
        values: the operands, as C++.
        dtypes: dtypes of the operands.
        params: parameters of the primitive.
        coarse: whether the result may lose accuracy beyond 16 bits.

    Raises:
        NotTranslatableError: the operation has no translation.
    """
    for dtype in dtypes:
        element(dtype)
    if name in _SPECIAL:
        return _SPECIAL[name](values, dtypes, params)
    if coarse and name in _COARSE and is_float(dtypes[0]):
        return rounded(_COARSE[name].format(*values), dtypes[0])
    if name in _COMPARISONS:
        return f"{values[0]} {_COMPARISONS[name]} {values[1]}"
    if name == "clamp":  # a bound comes first, and may be a scalar
        return _from_table(name, values, dtypes[1])
    return _from_table(name, values, dtypes[0])
