"""The float64 references of tests with quantized operands."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

E4M3, E5M2, INT8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
TYPES = {"e4m3": E4M3, "e5m2": E5M2, "s8": INT8}  # keys are the tags in the table of arithmetic
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (INT8, INT8)]
LARGEST = {E4M3: 448, E5M2: 57344, INT8: 127}
BF16_ROUNDING = 2**-8
MATRIX = ((1,), (0,)), ((), ())
# The loss of 8-bit float sums relative to |A| |B|: tensor cores keep 14 bits of the sums.
LOST_SUMS = 4 * 2.0**-13


def drawn(rng: np.random.Generator, shape, dtype) -> jax.Array:
    """Draws normal numbers; integers cover most of their range."""
    x = rng.normal(size=shape).astype(np.float32)
    return jnp.asarray(np.round(x * 40) if dtype == INT8 else x).astype(dtype)


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


def repeated(x, shape) -> np.ndarray:
    x = np.asarray(x, np.float64)
    for axis, extent in enumerate(shape):
        x = np.repeat(x, extent // max(x.shape[axis], 1), axis)
    return x


def dequantized(value, scale=None, zero_point=None) -> np.ndarray:
    wide = np.asarray(value, np.float64)
    wide = wide if zero_point is None else wide - repeated(zero_point, wide.shape)
    return wide if scale is None else wide * repeated(scale, wide.shape)


def product(lhs: np.ndarray, rhs: np.ndarray, dims) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(jax.lax.dot_general(jnp.asarray(lhs), jnp.asarray(rhs), dims))


def assert_close(got, lhs, rhs, dims, operand_rounding=0.0):
    """Allows rounding the result, float32 sums, and the earlier rounding of each operand."""
    wanted, size = product(lhs, rhs, dims), product(np.abs(lhs), np.abs(rhs), dims)
    k = math.prod(lhs.shape[dim] for dim in dims[0][0])
    # The roundings of the sums, the two scales and their product.
    relative = (k + 3) * 2.0**-24 + 2 * operand_rounding + operand_rounding**2
    relative += LOST_SUMS if jax.default_backend() == "gpu" else 0.0
    allowed = relative * size
    allowed = allowed + float(jnp.finfo(got.dtype).eps) / 2 * (np.abs(wanted) + allowed)
    assert got.shape == wanted.shape
    assert np.all(np.abs(np.asarray(got, np.float64) - wanted) <= allowed)
