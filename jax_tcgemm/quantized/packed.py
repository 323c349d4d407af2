"""``PackedWeight``: a quantized weight in the order in which the kernels read it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.lowering import packed_layout
from jax_tcgemm.problem.packed import BITS, TILE, VERSION, PackedSpec, tiles
from jax_tcgemm.problem.strides import Shape
from jax_tcgemm.quantized.arrays import (
    Quantized,
    check_divides,
    is_quantized,
    spread,
    why_unreadable,
)

_SCALE_DTYPES = ("bfloat16", "float16", "float32")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["matrix_shape", "qtype", "group", "has_zeros", "version"],
)
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A weight ``(*batch, k, n)`` in 4 or 8 bits, laid out for the kernels by ``pack``.

    It is the right operand of a product. It is a pytree of two arrays, which ``jit``, ``vmap``,
    ``scan``, ``jax.export`` and checkpoints accept. ``vmap`` and ``scan`` map leading dimensions.
    ``jax.device_put`` divides a weight among devices along the dimensions after the batch: n
    first, then k. n must be a multiple of 64 times the number of parts. k must be a multiple of 64
    and of the group, times the number of parts.

    A weight has no derivative: its gradient is zero.

    Attributes:
        values: uint8 ``(*batch, ceil(n / 64), ceil(k / 64), 128, 16)``, or 32 in place of 16 for 8
            bits.
        scales: bfloat16, float16 or float32 ``(*batch, ceil(n / 64), groups, c, 64)``. c is 2 with
            zero points, else 1.
        matrix_shape: ``(k, n)`` when the weight was packed. Inside ``shard_map`` a device has a
            part of it; ``shape`` is the shape of the part.
        qtype: ``"int4"``, ``"uint4"``, ``"int8"`` or ``"float8_e4m3fn"``.
        group: number of rows that share a scale, when the weight was packed.
        has_zeros: whether there are zero points.
        version: version of the layout.

    Example:
        >>> p = pack(quantize(w, jnp.int4, tile=(128, 1)))
        >>> p.shape, p.values.shape
        ((128, 256), (4, 2, 128, 16))
        >>> y = jax.jit(gemm)(x, p)
    """

    values: Any
    scales: Any
    matrix_shape: tuple[int, int]
    qtype: str
    group: int
    has_zeros: bool
    version: int = VERSION

    @property
    def shape(self) -> Shape:
        """The shape ``(*batch, k, n)`` of the weight, or of a device's part of it."""
        n_tiles, k_tiles = self.values.shape[-4:-2]
        k, n = self.matrix_shape
        return (*self.batch, _extent("k", k, k_tiles), _extent("n", n, n_tiles))

    @property
    def batch(self) -> Shape:
        return self.values.shape[:-4]

    @property
    def ndim(self) -> int:
        return self.values.ndim - 2

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the represented numbers, which is that of their scales."""
        return self.scales.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def spec(self, out_dtype: DTypeLike, config: str | None = None) -> PackedSpec:
        """Returns the static parameters of a product with this weight.

        Raises:
            ValueError: the layout has another version, or the weight was divided within a tile or
                a group.
        """
        if self.version != VERSION:
            raise ValueError(
                f"a packed weight has layout version {self.version}; accepted: {VERSION}; pack the "
                "weight again"
            )
        k, n = self.shape[-2:]
        groups = self.scales.shape[-3]
        group = k if groups == 1 else self.group
        if groups != 1 and group * groups != k:
            raise ValueError(
                f"a packed weight has {groups} groups of {group} in scales.shape="
                f"{self.scales.shape}, which do not fit k={k}; divide values and scales alike"
            )
        dtype = jnp.dtype(out_dtype)
        return PackedSpec(self.qtype, group, self.has_zeros, n, k, dtype, config)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Returns the represented array, computed in float32 (or wider) and rounded once."""
        return packed_layout.dequantized(self.values, self.scales, self.spec(dtype), dtype)


def _to_json(meta: Any) -> bytes:
    return json.dumps(meta).encode()


def _from_json(text: Any) -> Any:
    shape, *others = json.loads(bytes(text))
    return (tuple(shape), *others)


# Exported programs may have packed weights as arguments.
jax.export.register_pytree_node_serialization(
    PackedWeight,
    serialized_name="jax_tcgemm.PackedWeight",
    serialize_auxdata=_to_json,
    deserialize_auxdata=_from_json,
)


def _extent(name: str, extent: int, count: int) -> int:
    """Returns the extent of a dimension of which a device has ``count`` tiles."""
    if tiles(extent) == count:
        return extent
    if extent % TILE:
        raise ValueError(
            f"a packed weight of {name}={extent} is divided; accepted: multiples of {TILE}"
        )
    return count * TILE


def pack(q: Any, *, transpose: bool = False) -> PackedWeight:
    """Lays out a quantized weight for the kernels.

    Packing costs one pass over the weight, so pack once, when the model is loaded. The function may
    be called within ``jit``.

    Args:
        q: the weight, ``(*batch, k, n)``: a ``Quantized``, qwix's ``QArray``, or qwix's ``WithAux``
            of one. Leading dimensions are experts or layers. Values are int4, uint4, int8 or
            float8_e4m3fn. Scales are bfloat16, float16 or float32, for any blocks. Only 4-bit
            values may have zero points, which are integers from -8 to 16.
        transpose: whether ``q`` is ``(*batch, n, k)``.

    Returns:
        The packed weight ``(*batch, k, n)``. ``unpack`` returns the same values, scales and zero
        points, spread to ``(*batch, groups, n)``. Exception: a group that holds a float8 NaN gets
        a NaN scale, which leaves products as they are.

    Raises:
        TypeError: ``q`` is not a quantized array, or a dtype is not accepted.
        ValueError: a shape is not accepted, or a zero point, if its value is known.

    Example:
        >>> p = pack(quantize(w, jnp.int4, tile=(128, 1)))  # once
        >>> y = gemm(x, p)
        >>> y.shape
        (8, 256)
    """
    given, q = q, quantized_of(q)
    if q is None:
        raise TypeError(
            f"q must be a Quantized or an object with its fields (qvalue, scale, zero_point, "
            f"qtype), got {type(given)}; jax_tcgemm.quantize makes one of an array"
        )
    reason = why_unpackable(q)
    if reason is not None:
        raise reason
    _check_zero_points(q.zero_point)
    parts = (q.qvalue, q.scale, q.zero_point)
    values, scales = _packed(*parts, transpose=bool(transpose))
    k, n = q.qvalue.shape[-2:][::-1] if transpose else q.qvalue.shape[-2:]
    group = k // scales.shape[-3]
    has_zeros = q.zero_point is not None
    return PackedWeight(values, scales, (k, n), q.qvalue.dtype.name, group, has_zeros)


def _check_zero_points(zero: Any) -> None:
    """Checks the range of zero points whose values are known."""
    if zero is None or isinstance(zero, Tracer) or not getattr(zero, "is_fully_addressable", True):
        return
    values = np.asarray(zero).astype(np.float32)
    if values.size and not (values.min() >= -8 and values.max() <= 16):
        raise ValueError(
            f"q.zero_point has values from {values.min():g} to {values.max():g}; accepted: "
            "integers from -8 to 16"
        )


def unpack(p: PackedWeight) -> Quantized:
    """Returns the quantized array of a packed weight; the inverse of ``pack``.

    Args:
        p: the packed weight.

    Returns:
        A ``Quantized`` ``(*batch, k, n)``. Its scales, and its zero points in int8, are ``(*batch,
        groups, n)``.

    Raises:
        TypeError: ``p`` is not a ``PackedWeight``.
        ValueError: the layout has another version.

    Example:
        >>> q = quantize(w, jnp.int4, tile=(128, 1))
        >>> bool((unpack(pack(q)).qvalue == q.qvalue).all())
        True
    """
    if not isinstance(p, PackedWeight):
        raise TypeError(f"p must be a PackedWeight, got {type(p)}")
    spec = p.spec(p.dtype)
    qvalue, scale, zero_point = _unpacked(p.values, p.scales, spec=spec)
    return Quantized(qvalue, scale, zero_point, jnp.dtype(p.qtype))


def pack_params(params: Any, predicate: Callable[[str, Any], bool] | None = None) -> Any:
    """Packs the quantized weights of a model.

    Args:
        params: a pytree of arrays and quantized arrays (``Quantized``, qwix's ``QArray`` or
            ``WithAux``).
        predicate: a function of a leaf's path (such as ``"['layers']['up']['kernel']"``) and the
            quantized array; returns whether to pack it. ``None`` packs all weights that ``pack``
            accepts. Exclude weights that are used other than as right operands of products, such
            as embeddings.

    Returns:
        The pytree with a ``PackedWeight`` in the place of each weight that was packed.

    Raises:
        TypeError: ``predicate`` chose a weight whose dtype ``pack`` does not accept.
        ValueError: ``predicate`` chose a weight whose shape ``pack`` does not accept.

    Example:
        >>> q = quantize(w, jnp.int4, tile=(128, 1))
        >>> params = pack_params({"kernel": q, "bias": b})
        >>> y = gemm(x, params["kernel"], bias=params["bias"])
    """

    def packed(path: Any, leaf: Any) -> Any:
        q = quantized_of(leaf)
        if q is None:
            return leaf
        name = jax.tree_util.keystr(path)
        is_wanted = why_unpackable(q) is None if predicate is None else predicate(name, leaf)
        if not is_wanted:
            return leaf
        try:
            return pack(q)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error

    is_leaf = lambda x: quantized_of(x) is not None  # noqa: E731
    return jax.tree_util.tree_map_with_path(packed, params, is_leaf=is_leaf)


def is_weight(x: Any) -> bool:
    """Checks if this is a quantized or packed weight."""
    return isinstance(x, PackedWeight) or is_quantized(x)


def quantized_of(x: Any) -> Any:
    """Returns a quantized array, also that in qwix's ``WithAux``; ``None`` for all else."""
    if not is_quantized(x) and hasattr(x, "array") and hasattr(x, "how"):
        x = x.array
    return x if is_quantized(x) else None


def why_unpackable(q: Any) -> Exception | None:
    """Returns the error that ``pack`` raises for a quantized array, or ``None``."""
    if (error := why_unreadable(q)) is not None:
        return error
    shape, name = q.qvalue.shape, q.qvalue.dtype.name
    if name not in BITS:
        return TypeError(f"q.qvalue.dtype={name} is not packed; accepted: {', '.join(BITS)}")
    if len(shape) < 2:
        return ValueError(f"q must have at least 2 dimensions, got q.shape={shape}")
    if q.scale.dtype.name not in _SCALE_DTYPES:
        return TypeError(
            f"q.scale.dtype={q.scale.dtype} is not packed; accepted: {', '.join(_SCALE_DTYPES)}"
        )
    zero_point = q.zero_point
    if zero_point is not None and not (
        BITS[name] == 4 and jnp.issubdtype(zero_point.dtype, jnp.integer)
    ):
        return TypeError(
            f"q.zero_point.dtype={zero_point.dtype} of {name} values is not packed; accepted: "
            "integers, for int4 and uint4 values"
        )
    for field in ("scale", "zero_point"):
        if getattr(q, field) is not None:
            try:
                check_divides(f"q.{field}", getattr(q, field).shape, "q.qvalue", shape)
            except ValueError as error:
                return error
    return None


@functools.partial(jax.jit, static_argnames=("transpose",), inline=_compat.INLINE)
def _packed(
    qvalue: Any, scale: Any, zero_point: Any, *, transpose: bool
) -> tuple[jax.Array, jax.Array]:
    parts = [None if x is None else jnp.asarray(x) for x in (qvalue, scale, zero_point)]
    if transpose:
        parts = [None if x is None else jnp.swapaxes(x, -1, -2) for x in parts]
    q, s, z = parts
    assert q is not None
    assert s is not None
    *batch, k, n = q.shape
    groups = s.shape[-2] if z is None else math.lcm(s.shape[-2], z.shape[-2])
    shape = (*batch, groups, n)
    s, z = spread(s, shape), None if z is None else spread(z, shape)
    if q.dtype == jnp.float8_e4m3fn:
        # The kernels read NaN as 480; the scale makes its group, and so every sum with it, NaN.
        has_nan = jnp.isnan(q).reshape(*batch, groups, k // groups, n).any(-2)
        s = jnp.where(has_nan, jnp.asarray(jnp.nan, s.dtype), s)
    return packed_layout.pack_values(q), packed_layout.pack_scales(s, z, q.dtype.name)


@functools.partial(jax.jit, static_argnames=("spec",), inline=_compat.INLINE)
def _unpacked(values: Any, scales: Any, *, spec: PackedSpec) -> tuple[Any, Any, Any]:
    qvalue = packed_layout.unpack_values(values, spec.qtype, spec.k, spec.n)
    return qvalue, *packed_layout.unpack_scales(scales, spec.qtype, spec.n)
