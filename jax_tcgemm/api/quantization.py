"""``quantize`` and ``Quantized``: arrays of 8-bit values and the scales of their blocks."""

from __future__ import annotations

import dataclasses
import functools
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

# The largest magnitude of each quantized type. int8 uses the symmetric range from -127 to 127.
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_WHOLE = (None, -1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["qvalue", "scale", "zero_point"],
    meta_fields=["qtype"],
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array as 8-bit values and scales: ``x ~ (qvalue - zero_point) * scale``.

    This pytree has the fields of qwix's ``QArray``, so either can be used for the other. Each
    element of ``scale`` and ``zero_point`` applies to one block of ``qvalue``: their extents divide
    those of ``qvalue``.

    Attributes:
        qvalue: the values, of any shape.
        scale: the scales, of the rank of ``qvalue``.
        zero_point: the zero points, of the rank of ``qvalue``, or ``None`` for zero.
        qtype: the quantized type; ``None`` means that of ``qvalue``. It is not a child of the
            pytree.
    """

    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: Any = None

    @property
    def shape(self) -> Shape:
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the represented numbers, which is that of their scales."""
        return self.scale.dtype

    @property
    def T(self) -> Quantized:  # noqa: N802 (as in NumPy)
        return self.transpose()

    @property
    def mT(self) -> Quantized:  # noqa: N802 (as in NumPy)
        return self.transpose(*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)

    def transpose(self, *axes: Any) -> Quantized:
        """Returns the array with permuted axes; without ``axes``, with reversed axes."""
        return jax.tree.map(lambda x: x.transpose(*axes), self)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Returns the represented array; see ``dequantize``."""
        return dequantize(self, dtype)


def is_quantized(x: Any) -> bool:
    """Checks if this is a ``Quantized`` or has its fields, like qwix's ``QArray``."""
    return all(hasattr(x, field.name) for field in dataclasses.fields(Quantized))


def dequantize(x: Any, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns the array that a ``Quantized``, or an object with its fields, represents.

    Args:
        x: the quantized array.
        dtype: dtype of the result.

    Returns:
        ``(qvalue - zero_point) * scale``, computed in float32 (float64 for float64) and rounded
        once.

    Raises:
        ValueError: the shape of the scale or of the zero point does not fit.
    """
    wide, shape = at_least_float32(jnp.dtype(dtype)), x.qvalue.shape
    values = x.qvalue.astype(wide)
    if x.zero_point is not None:
        check_divides("zero_point", x.zero_point.shape, "qvalue", shape)
        values = values - spread(x.zero_point.astype(wide), shape)
    check_divides("scale", x.scale.shape, "qvalue", shape)
    return (values * spread(x.scale.astype(wide), shape)).astype(dtype)


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
    shape = [extent for pair in _split(counts, x.shape) for extent in pair]
    blocks = x.reshape(shape).astype(wide)  # (blocks, extent of a block) for each axis
    amax = jnp.max(jnp.abs(blocks), tuple(range(1, len(shape), 2)), keepdims=True, initial=0)
    scale = _scale(amax, target, scale_type, power_of_two)
    qvalue = saturated(blocks, scale.astype(wide), target)
    return Quantized(qvalue.reshape(x.shape), scale.reshape(counts), None, target)


def quantize(
    x: ArrayLike,
    dtype: DTypeLike,
    *,
    tile: Sequence[int | None] | None = None,
    scale_dtype: DTypeLike = jnp.float32,
    power_of_two: bool = False,
) -> Quantized:
    """Quantizes an array to 8 bits, with one scale per block from its largest magnitude.

    ``scale = max|block| / largest(dtype)``, or 1 for a block of zeros. ``qvalue = x / scale``,
    rounded to nearest (halves to even) and clipped to ``[-largest, largest]``: 448 for
    float8_e4m3fn, 57344 for float8_e5m2, 127 for int8. The computation is in float32 (float64 for
    float64). It is one reduction and one elementwise operation, which XLA fuses.

    A block that holds a NaN or an infinity has a NaN scale, so all of it is NaN after
    dequantization. Other scales are normal, finite numbers of their type; values that would need a
    larger scale are clipped.

    Args:
        x: floating-point array of any shape.
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        tile: extent of a block along each axis; ``-1`` or ``None`` means the whole axis.
            ``(1, 128)`` and ``(128, 128)`` give blocks, ``(1, -1)`` rows, ``(-1, 1)`` columns.
            ``tile=None`` gives one scale for the whole array.
        scale_dtype: ``float32``, ``bfloat16``, ``float16`` or ``float8_e8m0fnu``. Scales of
            ``float8_e8m0fnu`` are powers of two. Values are divided by the rounded scale.
        power_of_two: whether to round scales up to powers of two.

    Returns:
        A ``Quantized`` without a zero point. The extents of its scale are the numbers of blocks.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: ``tile`` does not fit the shape.
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


def saturated(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns ``x / scale`` in ``dtype``, rounded to nearest and clipped to its range."""
    bound = largest(dtype)
    values = jnp.clip(x / scale, -bound, bound)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return (jnp.round(values) if is_integer else values).astype(dtype)


def spread(scale: jax.Array, shape: Shape) -> jax.Array:
    """Repeats each element of ``scale`` over its block of an array of ``shape``."""
    pairs = _split(scale.shape, shape)
    once = scale.reshape([extent for count, _ in pairs for extent in (count, 1)])
    return jnp.broadcast_to(once, [extent for pair in pairs for extent in pair]).reshape(shape)


def check_divides(name: str, own: Shape, of_name: str, shape: Shape) -> None:
    """Checks that a scale's extents divide those of the array that it scales.

    Raises:
        ValueError: an extent does not divide, or the ranks differ.
    """
    if len(own) == len(shape) and all(
        count == extent or (count > 0 and extent % count == 0)
        for count, extent in zip(own, shape, strict=True)
    ):
        return
    raise ValueError(
        f"{name}.shape={own} does not fit {of_name}.shape={shape}; accepted: one of the same rank "
        "whose extents divide those"
    )


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


def _split(counts: Sequence[int], shape: Shape) -> list[tuple[int, int]]:
    """Returns the number of blocks and the extent of one block for each axis."""
    pairs = zip(counts, shape, strict=True)
    return [(count, extent // count if count else 1) for count, extent in pairs]
