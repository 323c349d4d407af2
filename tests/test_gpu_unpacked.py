"""Weights in 4 bits that a program packs, on a Hopper GPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import poison
from packed_problems import wrong
from packed_values import drawn, weight, wide

from jax_tcgemm import _extension, fuse, gemm
from jax_tcgemm.lowering.packed_layout import pack_values
from jax_tcgemm.primitives import unpacked as primitive
from jax_tcgemm.problem.packed import LayoutSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.usefixtures("small_weights_are_packed"),
]

BF16 = jnp.bfloat16


def in_4_bits(rng, qtype, k, n, group, *, has_zeros=True, scale="bfloat16"):
    options = {"has_zeros": has_zeros, "scale_dtype": scale, "narrow_zeros": True}
    return weight(rng, qtype, (k, n), group, **options)


def well_scaled(q):
    """Returns a weight whose products with normal numbers are about 1, for functions of them."""
    scale = jnp.full_like(q.scale, 0.15 * q.shape[0] ** -0.5)
    return dataclasses.replace(q, scale=scale)


# One tile; part of a tile of columns; more than four tiles in a row; rows in several blocks.
@pytest.mark.parametrize("shape", [(64, 64), (128, 96), (64, 32), (320, 1056), (1984, 160)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("qtype", ["int4", "uint4"])
def test_the_pass_has_the_layout_of_pack(rng, qtype, transposed, shape):
    k, n = shape
    if transposed:
        n += int(rng.integers(-31, 32))
    q = weight(rng, qtype, (k, n), k).qvalue
    expected = jax.jit(pack_values)(q)
    poison((*expected.shape[:-1], 8), BF16)  # as many bytes
    stored = jax.jit(jnp.transpose)(q) if transposed else q
    spec = LayoutSpec(transposed)
    packed = jax.jit(lambda q: primitive.pack_p.bind(q, spec=spec))
    assert _extension.PACK_TARGET in packed.lower(stored).as_text()
    np.testing.assert_array_equal(packed(stored), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_stack_of_weights_is_packed_by_one_call(rng, transposed):
    q = weight(rng, "int4", (3, 192, 160), 192).qvalue
    stored = jax.jit(lambda q: jnp.swapaxes(q, -1, -2))(q) if transposed else q
    spec = LayoutSpec(transposed)
    packed = jax.jit(jax.vmap(lambda q: primitive.pack_p.bind(q, spec=spec)))
    assert packed.lower(stored).as_text().count(_extension.PACK_TARGET) == 1
    np.testing.assert_array_equal(packed(stored), jax.jit(pack_values)(q))


@pytest.mark.parametrize("m", [1, 9, 40, 200])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("qtype", ["int4", "uint4"])
def test_products(rng, said, qtype, transposed, m):
    k, n = 64 * int(rng.integers(2, 40)), 32 * int(rng.integers(1, 40))
    group = int(rng.choice([g for g in (32, 64, 128, k) if k % g == 0]))
    has_zeros = bool(rng.integers(2))
    q = in_4_bits(rng, qtype, k, n, group, has_zeros=has_zeros)
    x = drawn(rng, m, k)
    f = jax.jit(lambda x, q: gemm(x, q, transpose_b=transposed))
    assert wrong(f(x, q.T if transposed else q), x, q) is None
    assert any("packed by a kernel" in line for line in said)


def test_a_model_that_dequantizes(rng, said):
    """A loop over layers and one over steps; the weights of a layer are slices."""
    layers, k = 3, 256
    drawn_layers = [well_scaled(in_4_bits(rng, "int4", k, k, 128)) for _ in range(layers)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn_layers)

    def dequantized(x, q):
        zero, scale = (jnp.repeat(y, 128, 0) for y in (q.zero_point, q.scale))
        w = (q.qvalue.astype(jnp.int8) - zero.astype(jnp.int8)).astype(x.dtype) * scale
        return jnp.tanh(x @ w), None

    def model(x, stack):
        step = lambda x, _: (jax.lax.scan(dequantized, x, stack)[0], None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=4)[0]

    x = drawn(rng, 16, k)
    got, expected = (wide(jax.jit(f)(x, stack)) for f in (fuse(model), model))
    assert any("packed by a kernel" in line for line in said)
    assert np.linalg.norm(got - expected) <= 2**-5 * np.linalg.norm(expected)


def test_derivatives(rng):
    q, x = well_scaled(in_4_bits(rng, "int4", 512, 256, 128)), drawn(rng, 16, 512)

    def loss(product, x, scale):
        y = product(x, dataclasses.replace(q, scale=scale))
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    by_jnp = lambda x, q: x @ q.dequantize(x.dtype)  # noqa: E731
    gradients = (jax.grad(functools.partial(loss, f), (0, 1)) for f in (gemm, by_jnp))
    found = [jax.jit(gradient)(x, q.scale) for gradient in gradients]
    for ours, theirs in zip(*found, strict=True):
        assert np.linalg.norm(wide(ours) - wide(theirs)) <= 2**-5 * np.linalg.norm(wide(theirs))
