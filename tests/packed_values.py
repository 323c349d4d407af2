"""Quantized weights of tests, drawn anew with all codes, and the float64 reference of products."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from quantized_values import wide

from jax_tcgemm import Quantized

BF16 = jnp.bfloat16
QTYPES = ("int4", "uint4", "int8", "float8_e4m3fn")


def weight(
    rng: np.random.Generator,
    qtype: str,
    shape: tuple[int, ...],
    group: int,
    *,
    has_zeros: bool = False,
    scale_dtype: str = "bfloat16",
    narrow_zeros: bool = False,
) -> Quantized:
    """Draws all codes of a type; float8 has no NaN. Narrow zero points have the values' type."""
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
        low, high = (-8, 8) if qtype == "int4" else (0, 16 if narrow_zeros else 17)
        zero = jnp.asarray(rng.integers(low, high, scales), jnp.int8)
        zero = zero.astype(qtype) if narrow_zeros else zero
    return Quantized(qvalue, scale, zero, jnp.dtype(qtype))


def close(got, wanted, size, k, roundings=1):
    """Compares a result with a float64 one.

    Args:
        got: the result.
        wanted: the float64 result.
        size: the product of the absolute values.
        k: contracted extent.
        roundings: roundings of the dequantized weight to bfloat16.
    """
    eps = float(jnp.finfo(got.dtype).eps) / 2
    allowed = ((k + 4) * 2.0**-24 + roundings * 2.0**-8) * size
    allowed = allowed + 2 * eps * (np.abs(wanted) + allowed) + 1e-30
    assert got.shape == wanted.shape
    assert np.all(np.abs(np.asarray(got, np.float64) - wanted) <= allowed)


def assert_close_in_norm(found, expected):
    """Compares layers' results, whose elements may be sums that cancel."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    tolerance = 2e-2 if found.dtype == jnp.bfloat16 else 1e-5
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def drawn(rng, *shape, dtype=BF16):
    return jnp.asarray(rng.normal(size=shape), dtype)


def check(q, x, got):
    a, w = wide(x), wide(q.dequantize())
    close(got, a @ w, np.abs(a) @ np.abs(w), a.shape[-1])
