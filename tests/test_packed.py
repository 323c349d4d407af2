"""Packed weights: their layout, element by element, and the transformations of the pytree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from packed_values import QTYPES, weight

from jax_tcgemm import PackedWeight, Quantized, pack, pack_params, quantize, unpack

ALL_TYPES = pytest.mark.parametrize("qtype", QTYPES)
SHAPES = [
    (128, 64, 32, "bfloat16"),
    (128, 64, 128, "float16"),
    (192, 130, 64, "float32"),
    (33, 5, 33, "bfloat16"),
    (1, 1, 1, "float32"),
]


def same_bits(x, y) -> None:
    """Checks that two arrays are equal bit for bit, NaN included."""
    x, y = np.asarray(x), np.asarray(y)
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    assert x.tobytes() == y.tobytes()


_dequantized = jax.jit(lambda q, dtype: q.dequantize(dtype), static_argnums=1)


def register_pair(tile: np.ndarray, bits: int, thread: int, block: int, r: int):
    """Returns the codes (low, high) of a thread's register, from the bytes of a tile."""
    own = tile[thread]
    if bits == 4:
        word = int.from_bytes(own[4 * block : 4 * block + 4].tobytes(), "little")
        return (word >> 4 * r) & 15, (word >> 4 * (r + 4)) & 15
    word = own[8 * block + 4 * (r // 2) :][:4]
    return int(word[r % 2]), int(word[2 + r % 2])


@ALL_TYPES
def test_layout(rng, qtype):
    """Compares each register of each thread with the element that it must hold."""
    bits = 4 if qtype.endswith("int4") else 8
    k, n = 130, 70
    q = weight(rng, qtype, (k, n), 65, has_zeros=qtype == "uint4")
    p = pack(q)
    assert p.values.shape == (2, 3, 128, 4 * bits)
    assert p.values.dtype == jnp.uint8
    codes = np.asarray(q.qvalue)
    codes = codes.astype(int) + 8 * (qtype == "int4") if bits == 4 else codes.view(np.uint8)
    full = np.full((192, 128), 8 * (qtype == "int4"), int)
    full[:k, :n] = codes
    values = np.asarray(p.values)
    for thread in range(128):
        w, g, t = thread // 32, thread % 32 // 4, thread % 4
        for block in range(4):
            for r in range(4):
                column, row = 16 * w + g + 8 * (r % 2), 16 * block + 2 * t + 8 * (r // 2)
                for i in range(2):
                    for j in range(3):
                        at = 64 * j + row, 64 * i + column
                        pair = register_pair(values[i, j], bits, thread, block, r)
                        assert pair == (full[at], full[at[0] + 1, at[1]])
    strips = np.asarray(p.scales, np.float32)
    assert strips.shape == (2, 2, 2 if qtype == "uint4" else 1, 64)
    flat = strips.transpose(2, 1, 0, 3).reshape(-1, 2, 128)
    np.testing.assert_array_equal(flat[0, :, :n], np.asarray(q.scale, np.float32))
    assert not flat[0, :, n:].any()
    if q.zero_point is not None:
        np.testing.assert_array_equal(flat[1, :, :n], 128 + np.asarray(q.zero_point, np.float32))


def test_zero_points_of_int4_are_stored_with_the_offset_of_its_codes(rng):
    q = weight(rng, "int4", (64, 64), 32, has_zeros=True)
    assert q.zero_point is not None
    stored = np.asarray(pack(q).scales[0, :, 1], np.float32)
    np.testing.assert_array_equal(stored, 136 + np.asarray(q.zero_point, np.float32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@ALL_TYPES
def test_round_trip(rng, qtype, shape):
    k, n, group, scale_dtype = shape
    has_zeros = qtype.endswith("int4") and bool(rng.integers(2))
    q = weight(rng, qtype, (2, k, n), group, has_zeros=has_zeros, scale_dtype=scale_dtype)
    p = pack(q)
    assert (p.shape, p.ndim, p.dtype, p.batch) == ((2, k, n), 3, scale_dtype, (2,))
    assert (p.matrix_shape, p.qtype, p.group) == ((k, n), qtype, group)
    assert p.has_zeros == has_zeros
    jax.tree.map(same_bits, unpack(p), q)
    dtype = (jnp.float32, jnp.bfloat16)[rng.integers(2)]
    same_bits(_dequantized(p, dtype), _dequantized(q, dtype))


def test_transposed_weights(rng):
    q = weight(rng, "uint4", (2, 70, 66), 35, has_zeros=True)
    jax.tree.map(same_bits, pack(q.mT, transpose=True), pack(q))


@ALL_TYPES
def test_all_codes(qtype):
    bits = 4 if qtype.endswith("int4") else 8
    codes = np.arange(2**bits, dtype=np.uint8).reshape(-1, 8)
    qvalue = codes.view(qtype) if bits == 8 else (codes.astype(int) - 8 * (qtype == "int4"))
    q = Quantized(jnp.asarray(qvalue).astype(qtype), jnp.ones((1, 8)), None, qtype)
    same_bits(unpack(pack(q)).qvalue, q.qvalue)


def test_special_scales(rng):
    q = weight(rng, "int4", (64, 8), 64, scale_dtype="float32")
    scale = jnp.asarray([[jnp.nan, jnp.inf, -jnp.inf, 0, -0.0, -2, 1e-45, 3e38]], jnp.float32)
    q = dataclasses.replace(q, scale=scale)
    p = pack(q)
    same_bits(unpack(p).scale, scale)
    same_bits(p.dequantize(), q.dequantize())


def test_scales_of_blocks_rows_and_of_all(rng):
    x = jnp.asarray(rng.normal(size=(2, 96, 128)), jnp.float32)
    for tile in (None, (1, 32, 64), (1, -1, -1), (1, 1, -1), (-1, 32, 1)):
        q = quantize(x, jnp.int8, tile=tile)
        same_bits(pack(q).dequantize(), q.dequantize())
    # Scales and zero points may have different blocks.
    q = weight(rng, "uint4", (96, 8), 32, has_zeros=True)
    other = weight(rng, "uint4", (96, 8), 48, has_zeros=True)
    mixed = dataclasses.replace(q, zero_point=other.zero_point)
    assert pack(mixed).group == 16
    same_bits(pack(mixed).dequantize(), mixed.dequantize())


@dataclasses.dataclass
class WithAux:
    """As in qwix."""

    array: object
    how: object


def test_models(rng):
    q = weight(rng, "int4", (3, 64, 32), 32)
    params = {
        "embedding": weight(rng, "int8", (16, 8), 1),
        "layers": {"up": WithAux(q, "how"), "bias": jnp.ones(3)},
        "integers": Quantized(jnp.ones((4, 4), jnp.int16), jnp.ones((1, 1))),
    }
    packed = pack_params(params)
    assert isinstance(packed["embedding"], PackedWeight)
    assert isinstance(packed["integers"], Quantized)
    jax.tree.map(same_bits, unpack(packed["layers"]["up"]), q)
    same_bits(packed["layers"]["bias"], jnp.ones(3))
    seen = []

    def is_layer(path, leaf):
        seen.append((path, type(leaf)))
        return "layers" in path

    packed = pack_params(params, is_layer)
    assert ("['layers']['up']", WithAux) in seen
    assert isinstance(packed["embedding"], Quantized)
    assert isinstance(packed["layers"]["up"], PackedWeight)
    with pytest.raises(TypeError, match=r"\['integers'\]: q.qvalue.dtype=int16"):
        pack_params(params, lambda path, leaf: True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qvalue": jnp.ones((4, 4), jnp.float8_e5m2)}, TypeError, "float8_e5m2 is not packed"),
        ({"qvalue": jnp.ones(4, jnp.int8)}, ValueError, "at least 2 dimensions"),
        ({"scale": jnp.ones((1, 1), jnp.float8_e8m0fnu)}, TypeError, "scale.dtype=float8_e8m0fnu"),
        ({"scale": jnp.ones((3, 1))}, ValueError, r"q.scale.shape=\(3, 1\) does not fit"),
        ({"scale": jnp.ones(1)}, ValueError, r"q.scale.shape=\(1,\) does not fit"),
        ({"zero_point": jnp.ones((1, 1), jnp.int8)}, TypeError, "zero_point.dtype=int8 of int8"),
    ],
)
def test_what_pack_refuses(changes, error, message):
    q = Quantized(jnp.ones((4, 4), jnp.int8), jnp.ones((1, 1)), None, None)
    with pytest.raises(error, match=message):
        pack(dataclasses.replace(q, **changes))


def test_what_is_no_weight():
    with pytest.raises(TypeError, match="q must be a Quantized"):
        pack(jnp.ones((4, 4)))
    with pytest.raises(TypeError, match="p must be a PackedWeight"):
        unpack(jnp.ones((4, 4)))  # pyright: ignore[reportArgumentType]
    p = pack(quantize(jnp.ones((4, 4)), jnp.int4))
    with pytest.raises(ValueError, match="layout version 2; accepted: 1"):
        dataclasses.replace(p, version=2).dequantize()


def test_transformations(rng):
    q = weight(rng, "uint4", (3, 70, 66), 35, has_zeros=True)
    whole = pack(q)
    jax.tree.map(same_bits, jax.jit(pack)(q), whole)
    jax.tree.map(same_bits, jax.vmap(pack)(q), whole)
    jax.tree.map(same_bits, jax.jit(jax.vmap(unpack))(whole), q)
    inner = dataclasses.replace(whole, values=whole.values[1], scales=whole.scales[1])
    assert inner.shape == (70, 66)

    def step(carry, p):
        assert p.shape == (70, 66)
        return carry, p.dequantize()

    same_bits(jax.lax.scan(step, 0, whole)[1], q.dequantize())
    exported = jax.export.export(jax.jit(lambda p: p.dequantize()))(whole)
    again = jax.export.deserialize(exported.serialize(vjp_order=0))
    same_bits(again.call(whole), q.dequantize())


def test_values_that_change_do_not_compile_again(rng):
    program = jax.jit(lambda p: p.dequantize().sum())
    for _ in range(3):
        program(pack(weight(rng, "int4", (64, 64), 32)))
    assert program._cache_size() == 1


@pytest.mark.parametrize("count", [2, 8])
def test_weights_divided_among_devices(rng, count):
    mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q = weight(rng, "int4", (64 * count, 64 * count), 32, has_zeros=True)
    p = pack(q)

    def parts(spec, result):
        part = lambda p: p.dequantize()  # noqa: E731
        return jax.jit(jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=result))

    for spec in (P("x"), P(None, "x")):
        divided = jax.device_put(p, NamedSharding(mesh, spec))
        same_bits(jax.jit(lambda p: p.dequantize())(divided), q.dequantize())
        program = jax.jit(pack, out_shardings=NamedSharding(mesh, spec))
        jax.tree.map(same_bits, program(q), p)

        turned = P(None, "x") if spec == P("x") else P("x")
        same_bits(parts(spec, turned)(divided), q.dequantize())
    odd = pack(weight(rng, "int4", (64, 64 * count - 1), 64))
    with pytest.raises(ValueError, match="accepted: multiples of 64"):
        parts(P("x"), P(None, "x"))(odd)


@pytest.mark.parametrize("zero", [-9, 17, 300])
def test_zero_points_out_of_range_are_refused(zero):
    q = Quantized(jnp.zeros((64, 1), jnp.int4), jnp.ones((1, 1)), jnp.full((1, 1), zero, jnp.int32))
    with pytest.raises(ValueError, match=f"from {zero} to {zero}; accepted: integers from -8 to"):
        pack(q)
