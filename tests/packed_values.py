"""Quantized weights of tests, drawn anew, with codes and scales at the ends of their ranges."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_tcgemm import Quantized

QTYPES = ("int4", "uint4", "int8", "float8_e4m3fn")


def weight(
    rng: np.random.Generator,
    qtype: str,
    shape: tuple[int, ...],
    group: int,
    *,
    has_zeros: bool = False,
    scale_dtype: str = "bfloat16",
) -> Quantized:
    """Draws all codes of a type; float8 has no NaN."""
    bits = 4 if qtype.endswith("int4") else 8
    codes = rng.integers(0, 2**bits, shape).astype(np.uint8)
    if qtype == "float8_e4m3fn":
        codes[(codes & 0x7F) == 0x7F] = 0
        qvalue = jnp.asarray(codes.view(jnp.float8_e4m3fn))
    elif qtype == "uint4":
        qvalue = jnp.asarray(codes).astype(qtype)
    else:
        qvalue = jnp.asarray(codes.astype(np.int16) - 2 ** (bits - 1)).astype(qtype)
    *batch, k, n = shape
    scales = (*batch, k // group, n)
    scale = jnp.asarray(rng.lognormal(-3, 1, scales), scale_dtype)
    zero = None
    if has_zeros:
        low, high = (-8, 8) if qtype == "int4" else (0, 17)
        zero = jnp.asarray(rng.integers(low, high, scales), jnp.int8)
    return Quantized(qvalue, scale, zero, jnp.dtype(qtype))
