"""The layout of packed weights, version 1, and its conversion in ``jax.numpy``.

A weight is ``(*batch, k, n)``, and k is contracted. It is divided into tiles of 64 columns by 64 k.

``values``: uint8 ``(*batch, ceil(n / 64), ceil(k / 64), 128, 16)`` for 4 bits, and the same with 32
in place of 16 for 8 bits. The last two dimensions of a tile are 128 threads and their bytes. A
thread has the order of the operand A of ``mma.sync.m16n8k16`` and of ``wgmma``. Thread ``32 w + 4 g
+ t`` (g < 8, t < 4) has register r = 0..3 of each block b = 0..3 of 16 k: the pair of elements in
column ``16 w + g + 8 (r % 2)``, at ``k = 16 b + 2 t + 8 (r // 2)`` (low) and the next k (high).

- 4 bits: little-endian 32-bit word b is block b. Nibble r is the low element of register r, nibble
  ``r + 4`` its high element. The stored code is ``q + 8`` for int4 and ``q`` for uint4.
- 8 bits: word ``2 b + j`` has the low elements of registers ``2 j`` and ``2 j + 1``, then their
  high elements. Bytes are int8 in two's complement, or float8_e4m3fn.

``scales``: ``(*batch, ceil(n / 64), groups, c, 64)`` in bfloat16, float16 or float32. The first
of c is the scale. The second, with zero points (4 bits only), is ``128 + zero``. Here ``zero`` is
the stored code of 0: ``8 + zero_point`` for int4, ``zero_point`` for uint4. Without zero points, c
is 1, and the stored code of 0 is 8 for int4 and 0 for uint4. A weight is ``(code - zero) * scale``.

Columns beyond n have scale 0. Values at k beyond the end have the code 8 for int4, and 0 for other
types. Left operands must be read as 0 there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.problem.arithmetic import at_least_float32
from jax_tcgemm.problem.packed import BITS, TILE, PackedSpec, tiles
from jax_tcgemm.problem.strides import Shape

# Zero points are stored plus this number, as the kernels' conversion of codes yields them.
_BIAS = 128
# A tile as block, half, t, low or high (along k), and w, half, g (along n).
_K_PARTS = (4, 2, 4, 2)
_N_PARTS = (4, 2, 8)
# The same, numbered from the tile's number along k (0) and along n (5), in the order of ``values``.
# The last three dimensions are bytes of 8 bits, or bytes and nibbles.
_ORDER = {4: (5, 0, 6, 8, 3, 1, 4, 2, 7), 8: (5, 0, 6, 8, 3, 1, 2, 4, 7)}


def code_of_zero(qtype: str) -> int:
    """Returns the stored code of 0 of a type without zero points."""
    return 8 if qtype == "int4" else 0


def pack_values(qvalue: jax.Array) -> jax.Array:
    """Packs ``(*batch, k, n)`` values of 4 or 8 bits; see the file's description."""
    qtype = qvalue.dtype.name
    *batch, k, n = qvalue.shape
    bits = BITS[qtype]
    if bits == 4:
        codes = (qvalue.astype(jnp.int8) + jnp.int8(code_of_zero(qtype))).astype(jnp.uint8)
    else:
        codes = lax.bitcast_convert_type(qvalue, jnp.uint8)
    ends = (tiles(k) * TILE - k, tiles(n) * TILE - n)
    padding = [*[(0, 0, 0)] * len(batch), *((0, end, 0) for end in ends)]
    codes = lax.pad(codes, jnp.uint8(code_of_zero(qtype)), padding)
    codes = codes.reshape(*batch, tiles(k), *_K_PARTS, tiles(n), *_N_PARTS)
    codes = lax.transpose(codes, _after(batch, _ORDER[bits]))
    if bits == 4:
        codes = codes[..., 0] | (codes[..., 1] << 4)
    return codes.reshape(*batch, tiles(n), tiles(k), 128, 4 * bits)


def unpack_values(values: jax.Array, qtype: str, k: int, n: int) -> jax.Array:
    """Returns the values ``(*batch, k, n)`` in their type; the inverse of ``pack_values``."""
    batch, bits = values.shape[:-4], BITS[qtype]
    order = _ORDER[bits]
    if bits == 4:
        values = jnp.stack([values & 0xF, values >> 4], axis=-1)
    parts = (tiles(k), *_K_PARTS, tiles(n), *_N_PARTS)
    codes = values.reshape(*batch, *(parts[i] for i in order))
    inverse = [order.index(i) for i in range(len(order))]
    codes = lax.transpose(codes, _after(batch, inverse))
    codes = codes.reshape(*batch, tiles(k) * TILE, tiles(n) * TILE)[..., :k, :n]
    if bits == 8:
        return lax.bitcast_convert_type(codes, jnp.dtype(qtype))
    return (codes.astype(jnp.int8) - jnp.int8(code_of_zero(qtype))).astype(qtype)


def pack_scales(scale: jax.Array, zero_point: jax.Array | None, qtype: str) -> jax.Array:
    """Packs scales, and zero points in any type of integers, of ``(*batch, groups, n)``."""
    strips = [scale]
    if zero_point is not None:
        offset = _BIAS + code_of_zero(qtype)
        strips.append((zero_point.astype(jnp.int32) + offset).astype(scale.dtype))
    *batch, groups, n = scale.shape
    stacked = jnp.stack(strips, axis=-2)  # (*batch, groups, c, n)
    end = tiles(n) * TILE - n
    padding = [*[(0, 0, 0)] * (stacked.ndim - 1), (0, end, 0)]
    stacked = lax.pad(stacked, jnp.zeros((), scale.dtype), padding)
    stacked = stacked.reshape(*batch, groups, len(strips), tiles(n), TILE)
    return lax.transpose(stacked, _after(batch, (2, 0, 1, 3)))


def unpack_scales(scales: jax.Array, qtype: str, n: int) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scales and the zero points, int8; the inverse of ``pack_scales``."""
    *batch, count, groups, c, _ = scales.shape
    stacked = lax.transpose(scales, _after(batch, (1, 2, 0, 3)))
    stacked = stacked.reshape(*batch, groups, c, count * TILE)[..., :n]
    if c == 1:
        return stacked[..., 0, :], None
    offset = _BIAS + code_of_zero(qtype)
    return stacked[..., 0, :], (stacked[..., 1, :].astype(jnp.int32) - offset).astype(jnp.int8)


def dequantized(
    values: jax.Array, scales: jax.Array, spec: PackedSpec, dtype: DTypeLike
) -> jax.Array:
    """Returns the weight ``(*batch, k, n)``, computed in float32 (or wider) and rounded once."""
    if _compat.is_sharded(values, scales):
        batch = values.ndim - 4
        sources: list[tuple[int, int] | None] = [(0, i) for i in range(batch)]
        for extent, axis in ((spec.k, batch + 1), (spec.n, batch)):
            sources.append(None if extent % TILE else (0, axis))
        own = functools.partial(dequantized, spec=spec, dtype=dtype)
        sharding = _compat.sharding_from((values, scales), sources)
        return _compat.with_automatic_axes(own, (values, scales), sharding)
    wide = at_least_float32(jnp.dtype(dtype))
    qvalue = unpack_values(values, spec.qtype, spec.k, spec.n).astype(wide)
    scale, zero_point = unpack_scales(scales, spec.qtype, spec.n)
    if zero_point is not None:
        qvalue = qvalue - along_k(zero_point.astype(wide), spec.k)
    return (qvalue * along_k(scale.astype(wide), spec.k)).astype(dtype)


def along_k(x: jax.Array, k: int) -> jax.Array:
    """Repeats ``(*batch, groups, n)`` for each row of a group: ``(*batch, k, n)``."""
    *batch, groups, n = x.shape
    repeated = (*batch, groups, k // groups, n)
    return jnp.broadcast_to(x[..., None, :], repeated).reshape(*batch, k, n)


def _after(batch: Shape | Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Returns a permutation of the dimensions after those of a batch."""
    return (*range(len(batch)), *(len(batch) + i for i in order))
