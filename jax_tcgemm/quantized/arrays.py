"""``Quantized``: an array as quantized values and the scales of their blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_tcgemm.problem.arithmetic import at_least_float32
from jax_tcgemm.problem.strides import Shape


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["qvalue", "scale", "zero_point"],
    meta_fields=["qtype"],
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array as values of 4 or 8 bits and scales: ``x ~ (qvalue - zero_point) * scale``.

    This pytree has the fields of qwix's ``QArray``, so either can be used for the other. Each
    element of ``scale`` and ``zero_point`` applies to one block of ``qvalue``: their extents divide
    those of ``qvalue``.

    Attributes:
        qvalue: the values, of any shape.
        scale: the scales, of the rank of ``qvalue``.
        zero_point: the zero points, of the rank of ``qvalue``, or ``None`` for zero.
        qtype: the quantized type; ``None`` means that of ``qvalue``. It is not a child of the
            pytree.

    Example:
        >>> q = quantize(w, jnp.int8, tile=(-1, 1))
        >>> q.shape, q.scale.shape
        ((128, 256), (1, 256))
        >>> approximately_w = q.dequantize(jnp.bfloat16)
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


def _qtype_name(meta: Any) -> bytes:
    (qtype,) = meta
    return b"" if qtype is None else jnp.dtype(qtype).name.encode()


def _qtype_of(name: Any) -> Any:
    return (jnp.dtype(bytes(name).decode()) if name else None,)


# Exported programs may have quantized arrays as arguments.
jax.export.register_pytree_node_serialization(
    Quantized,
    serialized_name="jax_tcgemm.Quantized",
    serialize_auxdata=_qtype_name,
    deserialize_auxdata=_qtype_of,
)


# Formats of qwix whose values are places in a table of numbers.
_FORMATS_WITH_TABLES = ("nf4",)


def is_quantized(x: Any) -> bool:
    """Checks if this is a ``Quantized`` or has its fields, like qwix's ``QArray``."""
    return all(hasattr(x, field.name) for field in dataclasses.fields(Quantized))


def has_table(x: Any) -> bool:
    """Checks if the values of a quantized array are places in a table of numbers."""
    return is_quantized(x) and isinstance(x.qtype, str) and x.qtype in _FORMATS_WITH_TABLES


def why_unreadable(x: Any) -> TypeError | None:
    """Returns the error for a quantized array whose values are not multiplied by its scales."""
    if not has_table(x):
        return None
    return TypeError(
        f"qtype={x.qtype!r}: the values are places in a table of numbers; accepted: values that "
        "are multiplied by their scales. Its own library dequantizes such an array"
    )


def check_readable(x: Any) -> None:
    """Raises the error of ``why_unreadable``."""
    error = why_unreadable(x)
    if error is not None:
        raise error


def dequantize(x: Any, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns the array that a ``Quantized``, or an object with its fields, represents.

    Args:
        x: the quantized array.
        dtype: dtype of the result.

    Returns:
        ``(qvalue - zero_point) * scale``, computed in float32 (float64 for float64) and rounded
        once.

    Raises:
        TypeError: its values are places in a table of numbers.
        ValueError: the shape of the scale or of the zero point does not fit.
    """
    check_readable(x)
    wide, shape = at_least_float32(jnp.dtype(dtype)), x.qvalue.shape
    values = x.qvalue.astype(wide)
    if x.zero_point is not None:
        check_divides("zero_point", x.zero_point.shape, "qvalue", shape)
        values = values - spread(x.zero_point.astype(wide), shape)
    check_divides("scale", x.scale.shape, "qvalue", shape)
    return (values * spread(x.scale.astype(wide), shape)).astype(dtype)


def spread(scale: jax.Array, shape: Shape) -> jax.Array:
    """Repeats each element of ``scale`` over its block of an array of ``shape``."""
    # Blocks of one element get no dimension: with explicit shardings, JAX 0.8.0 cannot merge a last
    # dimension of 1 into another.
    axes = [axis if axis[1] != 1 else axis[:1] for axis in split(scale.shape, shape)]
    once = scale.reshape([extent for axis in axes for extent in (axis[0], 1)[: len(axis)]])
    return jnp.broadcast_to(once, [extent for axis in axes for extent in axis]).reshape(shape)


def divides(own: Shape, shape: Shape) -> bool:
    """Checks if a scale of shape ``own`` has a number of blocks of ``shape`` along each axis."""
    return len(own) == len(shape) and all(
        count == extent or (count > 0 and extent % count == 0)
        for count, extent in zip(own, shape, strict=True)
    )


def check_divides(name: str, own: Shape, of_name: str, shape: Shape) -> None:
    """Checks that a scale's extents divide those of the array that it scales.

    Raises:
        ValueError: an extent does not divide, or the ranks differ.
    """
    if divides(own, shape):
        return
    raise ValueError(
        f"{name}.shape={own} does not fit {of_name}.shape={shape}; accepted: one of the same rank "
        "whose extents divide those"
    )


def split(counts: Sequence[int], shape: Shape) -> list[tuple[int, int]]:
    """Returns the number of blocks and the extent of one block for each axis."""
    pairs = zip(counts, shape, strict=True)
    return [(count, extent // count if count else 1) for count, extent in pairs]
