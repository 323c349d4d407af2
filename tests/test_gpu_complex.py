"""Products of complex64 on a Hopper GPU, compared with XLA's and float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import dot_general, gemm
from jax_tcgemm.lowering import complex_product, fallback

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

PAIRS = "simt_tf32_4x32x32_w4x1_s1_pairs"


@pytest.fixture(autouse=True)
def never_xla(monkeypatch):
    """Fails if XLA computes a product of complex numbers."""

    def made(x, spec, _inner=complex_product.by_real_product, **options):
        results, how = _inner(x, spec, **options)
        assert results is not None, how
        return results, how

    monkeypatch.setattr(fallback.planes, "_SHARE", math.inf)
    monkeypatch.setattr(fallback.planes, "_LEAST_K", 0)
    monkeypatch.setattr(fallback.planes, "_LEAST_WORK", 0)
    monkeypatch.setattr(complex_product, "by_real_product", made)


def drawn(shape):
    rng = np.random.default_rng()
    return jnp.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape), jnp.complex64)


def worst(x, exact, sizes):
    """Returns the largest error of a real or imaginary part, relative to the sum of magnitudes."""
    difference = np.asarray(x, np.complex128) - exact
    return float(np.max(np.maximum(np.abs(difference.real), np.abs(difference.imag)) / sizes))


def sizes_of(a, b):
    parts = [np.abs(np.asarray(x).real) + np.abs(np.asarray(x).imag) for x in (a, b)]
    return parts[0].astype(np.float64) @ parts[1].astype(np.float64) + 1e-30


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 256, 64), (257, 130, 71), (64, 65, 300), (300, 512, 1024)]
)
def test_every_layout_and_residue(m, n, k, layout, precision):
    a, b = drawn((m, k)), drawn((k, n))
    ta, tb = (letter == "t" for letter in layout)
    run = jax.jit(lambda a, b: gemm(a, b, transpose_a=ta, transpose_b=tb, precision=precision))
    y = run(a.T if ta else a, b.T if tb else b)
    exact = np.asarray(a, np.complex128) @ np.asarray(b, np.complex128)
    sizes = sizes_of(a, b)
    theirs = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))(a, b)
    # TF32 rounds both factors to 11 bits, also in XLA if XLA uses TF32.
    floor = 2.0**-10 if precision is None else 2.0**-22
    assert worst(y, exact, sizes) <= max(2 * worst(theirs, exact, sizes), floor)


@pytest.mark.parametrize(
    ("shape", "transpose_b", "precision"),
    [
        *(((70, 130, 66), False, p) for p in (None, "highest")),
        *(((3, 64, 62, 32), False, p) for p in (None, "highest")),
        ((5, 71, 9), False, "highest"),
        ((5, 71, 9), True, "highest"),
        ((2, 65, 33, 700), True, "highest"),
    ],
)
def test_the_kernel_of_other_gpus(shape, transpose_b, precision, monkeypatch):
    """A program exported on a Hopper GPU calls this kernel on other GPUs."""

    def of_other_gpus(*args, _inner=complex_product.attributes, **options):
        named = _inner(*args, **options)
        assert named["pairs_of_b"]
        # Other GPUs don't use planes: their precision is that of float32 in any case.
        return {**named, "algorithm": "TF32_TF32_F32", "config": PAIRS, "padding_bytes": 0}

    monkeypatch.setattr(complex_product, "attributes", of_other_gpus)
    *batch, m, n, k = shape
    a, b = drawn((*batch, m, k)), drawn((*batch, n, k) if transpose_b else (*batch, k, n))
    y = jax.jit(lambda a, b: gemm(a, b, transpose_b=transpose_b, precision=precision))(a, b)
    b = jnp.swapaxes(b, -1, -2) if transpose_b else b
    exact = np.asarray(a, np.complex128) @ np.asarray(b, np.complex128)
    assert worst(y, exact, sizes_of(a, b)) < 2.0**-21


@pytest.mark.parametrize("which", ["a", "b", "ab"])
def test_conjugates(which):
    a, b = drawn((128, 256)), drawn((256, 192))
    y = jax.jit(
        lambda a, b: gemm(
            a, b, conjugate_a="a" in which, conjugate_b="b" in which, precision="highest"
        )
    )(a, b)
    x, z = (v.conj() if name in which else v for name, v in (("a", a), ("b", b)))
    exact = np.asarray(x, np.complex128) @ np.asarray(z, np.complex128)
    assert worst(y, exact, sizes_of(a, b)) < 2.0**-21


def test_batches_sums_and_complex_factors():
    a, b, c, bias = drawn((3, 128, 96)), drawn((96, 160)), drawn((3, 128, 160)), drawn((160,))
    y = jax.jit(lambda *x: gemm(*x[:3], bias=x[3], alpha=0.5 - 2j, beta=1j, precision="highest"))(
        a, b, c, bias
    )
    a, b, c, bias = (np.asarray(x, np.complex128) for x in (a, b, c, bias))
    exact = (0.5 - 2j) * (a @ b) + 1j * c + bias
    assert np.max(np.abs(y - exact)) < 1e-4


def test_gradients_are_those_of_matmul():
    a, b, t = drawn((128, 256)), drawn((256, 128)), drawn((128, 128))

    def loss(product, a, b):
        return jnp.sum(jnp.abs(product(a, b, precision="highest") - t) ** 2)

    for i in (0, 1):
        ours, theirs = (
            jax.jit(jax.grad(lambda a, b, f=f: loss(f, a, b), i))(a, b) for f in (gemm, jnp.matmul)
        )
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize(
    "subscripts", ["bqhd,bkhd->bhqk", "bhqk,bkhd->bhqd", "bth,hio->btio", "bqhd,bqe->bhde"]
)
def test_einsum(subscripts, precision):
    extents = {"b": 2, "h": 130, "q": 66, "k": 70, "d": 34, "t": 65, "i": 6, "o": 12, "e": 96}
    x, y = (
        drawn([extents[name] for name in names]) for names in subscripts.split("->")[0].split(",")
    )
    run = jax.jit(
        lambda x, y: jnp.einsum(subscripts, x, y, precision=precision, _dot_general=dot_general)
    )
    exact = np.einsum(subscripts, *(np.asarray(v, np.complex128) for v in (x, y)))
    parts = [np.abs(np.asarray(v).real) + np.abs(np.asarray(v).imag) for v in (x, y)]
    sizes = np.einsum(subscripts, *(v.astype(np.float64) for v in parts))
    assert worst(run(x, y), exact, sizes) <= (2.0**-10 if precision is None else 2.0**-21)


def test_vmap_and_infinities():
    a, b = drawn((4, 64, 128)), drawn((128, 64))
    y = jax.jit(jax.vmap(lambda a: gemm(a, b, precision="highest")))(a)
    exact = np.asarray(a, np.complex128) @ np.asarray(b, np.complex128)
    assert np.max(np.abs(y - exact)) < 1e-3
    a = a.at[0, 3, 5].set(jnp.inf)
    bad = ~jnp.isfinite(jax.jit(lambda a: gemm(a[0], b))(a))
    assert bad[3].all()
    assert not bad[4].any()
