"""Products of 16-bit activations and quantized weights: operands, ours, and the natural JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm import Quantized, fuse, gemm, pack
from jax_tcgemm.problem.packed import BITS
from jax_tcgemm.transforms.numbers import Numbers

DTYPES = {"s4": jnp.dtype(jnp.int4)}
# Rows of B that share a scale, by the field `scale`; None means all rows.
GROUPS: dict[str, int | None] = {"group128": 128, "columns": None, "unpacked128": 128}
# Nobody has packed the weight before: ours is the natural JAX under `fuse`.
_UNPACKED = "unpacked128"
# Normal numbers are multiplied by this before they are rounded to a type.
_SIZES = {"int4": 3.0, "int8": 40.0, "float8_e4m3fn": 1.0}

Arrays = dict[str, Any]


def _group(case: Any) -> int:
    return GROUPS[case.scale] or case.k


def scale_shape(case: Any) -> tuple[int, int]:
    """Returns the shape ``(groups, n)`` of the weight's scales."""
    return case.k // _group(case), case.n


def size(case: Any) -> int:
    """Returns the bytes of the operands and the result, each read or written once."""
    types = case.types
    bits = BITS[types["b"].dtype.name]
    others = types["a"].size * types["a"].dtype.itemsize
    others += types["b_scale"].size * types["b_scale"].dtype.itemsize
    return others + types["b"].size * bits // 8 + case.m * case.n * case.out_dtype.itemsize


def types(case: Any, dtypes: dict[str, Any]) -> Arrays:
    """Returns the types of the operands by name; ``packed`` is ``b`` and ``b_scale``, if packed.

    Args:
        case: the case.
        dtypes: types by their names in cases.
    """
    dtype = dtypes[case.dtype]
    made: Arrays = {
        "a": jax.ShapeDtypeStruct(case.shapes["a"], dtype),
        "b": jax.ShapeDtypeStruct(case.shapes["b"], dtypes[case.dtype_b]),
        "b_scale": jax.ShapeDtypeStruct(case.shapes["b_scale"], dtype),
    }
    if case.scale != _UNPACKED:
        made["packed"] = jax.eval_shape(_packed, made["b"], made["b_scale"])
    return made


def drawn(case: Any, numbers: Numbers) -> Arrays:
    """Returns new operands whose product's elements are about 1."""
    made: Arrays = {}
    for name, x in case.types.items():
        if name == "packed":
            made[name] = _packed(made["b"], made["b_scale"])
            continue
        values = numbers.take(jax.ShapeDtypeStruct(x.shape, jnp.float32))
        if name == "b":
            values = values * _SIZES[x.dtype.name]
            if jnp.issubdtype(x.dtype, jnp.integer):
                most = jnp.iinfo(x.dtype).max
                values = jnp.clip(jnp.round(values), -most - 1, most)
        elif name == "b_scale":
            size = _SIZES[case.types["b"].dtype.name]
            values = jnp.exp(0.1 * values) * (case.k**-0.5 / size)
        made[name] = values.astype(x.dtype)
    return made


def _packed(values: Any, scale: Any) -> Any:
    return pack(Quantized(values, scale))


def ours(case: Any, config: str | None) -> Callable[[Arrays], Any]:
    """Returns the product computed by this package."""
    if case.scale == _UNPACKED:
        return fuse(next(iter(forms(case).values())))
    return lambda arrays: gemm(arrays["a"], arrays["packed"], config=config)


def forms(case: Any) -> dict[str, Callable[[Arrays], Any]]:
    """Returns the natural JAX expressions of a case by name."""
    listed: dict[str, Callable[[Arrays], Any]] = {
        "dequantized": lambda arrays: arrays["a"] @ _dequantized(arrays),
        "dequantized first": lambda arrays: (
            arrays["a"] @ lax.optimization_barrier(_dequantized(arrays))
        ),
    }
    if case.k == _group(case):
        listed["scaled result"] = _scaled_result
    else:
        listed["repeated scales"] = lambda arrays: arrays["a"] @ _by_repeated_scales(arrays)
    return listed


def _dequantized(arrays: Arrays) -> jax.Array:
    values, scale = arrays["b"].astype(arrays["a"].dtype), arrays["b_scale"]
    groups = values.reshape(scale.shape[0], -1, scale.shape[1])
    return (groups * scale[:, None]).reshape(values.shape)


def _by_repeated_scales(arrays: Arrays) -> jax.Array:
    values, scale = arrays["b"].astype(arrays["a"].dtype), arrays["b_scale"]
    return values * jnp.repeat(scale, values.shape[0] // scale.shape[0], axis=0)


def _scaled_result(arrays: Arrays) -> jax.Array:
    return (arrays["a"] @ arrays["b"].astype(arrays["a"].dtype)) * arrays["b_scale"]
