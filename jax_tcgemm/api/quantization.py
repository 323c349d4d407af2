"""``quantize``: makes 4-bit and 8-bit values with a scale for each block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm.api import arguments, eager
from jax_tcgemm.problem.arithmetic import at_least_float32
from jax_tcgemm.problem.strides import Shape
from jax_tcgemm.quantized.arrays import Quantized, split

# The largest magnitude of each quantized type. Signed integers use symmetric ranges.
_LARGEST = {
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "int8": 127.0,
    "int4": 7.0,
    "uint4": 15.0,
}
_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_WHOLE = (None, -1)


@eager.one_program("dtype", "tile", "scale_dtype", "power_of_two")
def _quantize(
    x: ArrayLike,
    *,
    dtype: DTypeLike,
    tile: Sequence[int | None] | None,
    scale_dtype: DTypeLike,
    power_of_two: bool,
) -> Quantized:
    """Implements ``quantize``, whose ``dtype`` may be positional."""
    x = arguments.array("x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise TypeError(
            f"x must hold floating-point numbers of 16 bits or more, got x.dtype={x.dtype}"
        )
    target = _one_of("dtype", dtype, _LARGEST)
    scale_type = _one_of("scale_dtype", scale_dtype, _SCALE_DTYPES)
    counts = _counts(x.shape, tile)
    wide = at_least_float32(x.dtype)
    shape = [extent for pair in split(counts, x.shape) for extent in pair]
    blocks = x.reshape(shape).astype(wide)  # (blocks, extent of a block) for each axis
    axes = tuple(range(1, len(shape), 2))
    if target == jnp.uint4:
        low = jnp.min(blocks, axes, keepdims=True, initial=0)
        high = jnp.max(not_nan(blocks), axes, keepdims=True, initial=0)
        span = jnp.minimum(high - low, float(jnp.finfo(wide).max))  # finite for finite blocks
        span = jnp.where(jnp.isfinite(high) & jnp.isfinite(low), span, jnp.inf)
        scale = _scale(span, target, scale_type, power_of_two)
        zero = saturated(-low, scale.astype(wide), target)
        qvalue = saturated(blocks, scale.astype(wide), target, zero.astype(wide))
        zero = zero.reshape(counts)
    else:
        amax = jnp.max(not_nan(jnp.abs(blocks)), axes, keepdims=True, initial=0)
        scale = _scale(amax, target, scale_type, power_of_two)
        qvalue, zero = saturated(blocks, scale.astype(wide), target), None
    return Quantized(qvalue.reshape(x.shape), scale.reshape(counts), zero, target)


def quantize(
    x: ArrayLike,
    dtype: DTypeLike,
    *,
    tile: Sequence[int | None] | None = None,
    scale_dtype: DTypeLike = jnp.float32,
    power_of_two: bool = False,
) -> Quantized:
    """Quantizes an array to 4 or 8 bits, with one scale per block from its largest magnitude.

    ``scale = max|block| / largest(dtype)``, or 1 for a block of zeros. ``qvalue = x / scale``,
    rounded to nearest (halves to even) and clipped to ``[-largest, largest]``: 448 for
    float8_e4m3fn, 57344 for float8_e5m2, 127 for int8, 7 for int4. The computation is in float32
    (float64 for float64). It is one reduction and one elementwise operation, which XLA fuses.

    uint4 has a zero point in each block: ``scale = (max(block, 0) - min(block, 0)) / 15``,
    ``zero_point = round(-min(block, 0) / scale)`` and ``qvalue = round(x / scale) + zero_point``,
    clipped to ``[0, 15]``.

    A block that holds a NaN or an infinity has a NaN scale, so all of it is NaN after
    dequantization. Other scales are normal, finite numbers of their type; values that would need a
    larger scale are clipped.

    Args:
        x: floating-point array of any shape.
        dtype: ``float8_e4m3fn``, ``float8_e5m2``, ``int8``, ``int4`` or ``uint4``.
        tile: extent of a block along each axis; ``-1`` or ``None`` means the whole axis.
            ``(1, 128)`` and ``(128, 128)`` give blocks, ``(1, -1)`` rows, ``(-1, 1)`` columns.
            4-bit weights ``(k, n)`` usually have ``(128, 1)``.
            ``tile=None`` gives one scale for the whole array.
        scale_dtype: ``float32``, ``bfloat16``, ``float16`` or ``float8_e8m0fnu``. Scales of
            ``float8_e8m0fnu`` are powers of two. Values are divided by the rounded scale.
        power_of_two: whether to round scales up to powers of two.

    Returns:
        A ``Quantized``. The extents of its scale are the numbers of blocks. Only uint4 has a
        ``zero_point``, of dtype uint4 and the scale's shape.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: ``tile`` does not fit the shape.

    Example:
        >>> q = quantize(w, jnp.int4, tile=(64, 1))  # a scale for 64 rows of a column
        >>> q.qvalue.shape, q.scale.shape
        ((128, 256), (2, 256))
    """
    return _quantize(
        x,
        dtype=dtype,
        tile=tuple(tile) if isinstance(tile, list) else tile,
        scale_dtype=scale_dtype,
        power_of_two=power_of_two,
    )


def largest(dtype: DTypeLike) -> float:
    """Returns the largest magnitude of a quantized type."""
    return _LARGEST[jnp.dtype(dtype).name]


def saturated(
    x: jax.Array, scale: jax.Array, dtype: DTypeLike, zero: jax.Array | None = None
) -> jax.Array:
    """Returns ``x / scale + zero`` in ``dtype``, rounded to nearest and clipped to its range."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    values = jnp.round(x / scale) if is_integer else x / scale
    bound = largest(dtype)
    low = 0.0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -bound
    return jnp.clip(values if zero is None else values + zero, low, bound).astype(dtype)


def not_nan(x: jax.Array) -> jax.Array:
    """Replaces NaN by infinity, because XLA's maximum may ignore NaN on CPUs."""
    return jnp.where(jnp.isnan(x), jnp.inf, x)


def _scale(amax: jax.Array, target: Any, dtype: np.dtype, power_of_two: bool) -> jax.Array:
    """Returns scales of type ``dtype`` for blocks whose largest magnitudes are ``amax``."""
    limits = jnp.finfo(dtype)
    # float32 holds all values of the scale types, except the smallest of e8m0.
    low = max(float(limits.smallest_normal), float(jnp.finfo(jnp.float32).smallest_normal))
    scale = (amax / largest(target)).astype(jnp.float32)
    scale = jnp.clip(scale, low, float(limits.max))
    if power_of_two or dtype.itemsize == 1:
        highest = 2.0 ** np.floor(np.log2(float(limits.max)))
        scale = jnp.minimum(_round_up_to_power_of_two(scale), float(highest))
    scale = jnp.where(amax > 0, scale, 1)
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan).astype(dtype)


def _round_up_to_power_of_two(x: jax.Array) -> jax.Array:
    """Rounds positive, finite, normal float32 numbers up to powers of two."""
    mantissa = np.uint32(2**23 - 1)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type((bits + mantissa) & ~mantissa, jnp.float32)


def _one_of(name: str, dtype: DTypeLike, accepted: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in accepted:
        raise TypeError(f"{name}={dtype!r} is not accepted; accepted: {', '.join(accepted)}")
    return found


def _counts(shape: Shape, tile: Any) -> Shape:
    """Returns the number of blocks along each axis."""
    if tile is None:
        return (1,) * len(shape)
    accepted = f"None or {len(shape)} divisors of x.shape={shape}, -1 for a whole axis"
    if not isinstance(tile, (tuple, list)) or len(tile) != len(shape):
        raise ValueError(f"tile={tile!r} does not fit; accepted: {accepted}")
    counts = []
    for extent, block in zip(shape, tile, strict=True):
        if block in _WHOLE:
            counts.append(1)
        elif isinstance(block, (int, np.integer)) and block > 0 and extent % block == 0:
            counts.append(extent // int(block))
        else:
            raise ValueError(
                f"tile={tile!r} does not fit: {block!r} does not divide {extent}; accepted: "
                f"{accepted}"
            )
    return tuple(counts)
