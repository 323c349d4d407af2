"""Products with weights in 4 bits that the program packs itself, on CPUs and lowered for CUDA."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from packed_values import check, drawn, weight, wide

import jax_tcgemm
from jax_tcgemm import _extension, dot_general, gated_gemm, gemm, quantize
from jax_tcgemm.lowering import fallback, unpacked
from jax_tcgemm.lowering.packed_layout import pack_values

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")

M, K, N = 8, 192, 96
BF16 = jnp.bfloat16
PACK, PACKED = _extension.PACK_TARGET, _extension.PACKED_TARGET


def in_4_bits(rng, qtype="int4", group=64, *, k=K, n=N, has_zeros=False, scale="bfloat16"):
    options = {"has_zeros": has_zeros, "scale_dtype": scale, "narrow_zeros": True}
    return weight(rng, qtype, (k, n), group, **options)


def count(f, *args):
    """Returns the number of products with weights that the program packs."""
    return str(jax.make_jaxpr(f)(*args)).count("tcgemm_unpacked[")


def as_dot_general(a, w, *, transpose_b=False, **options):
    return dot_general(a, w, (((1,), (1 if transpose_b else 0,)), ((), ())), **options)


def on_the_left(a, w, *, transpose_b=False):
    return dot_general(w, a, (((1 if transpose_b else 0,), (1,)), ((), ()))).T


@pytest.mark.parametrize("f", [gemm, as_dot_general, on_the_left])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("qtype", ["int4", "uint4"])
def test_values(rng, f, qtype, transposed):
    q = in_4_bits(
        rng,
        qtype,
        int(rng.choice([32, 64, K])),
        has_zeros=bool(rng.integers(2)),
        scale=str(rng.choice(["bfloat16", "float32"])),
    )
    x = drawn(rng, M, K, dtype=str(rng.choice(["bfloat16", "float16"])))
    if x.dtype == jnp.float16:
        q = dataclasses.replace(q, scale=q.scale.astype("float16"))
    f = functools.partial(f, transpose_b=transposed)
    w = q.T if transposed else q
    assert count(f, x, w) == 1
    check(q, x, f(x, w))


def test_values_and_epilogues(rng, normal):
    n = 128
    q, x, bias = in_4_bits(rng, n=n), drawn(rng, M, K), normal(n, dtype=BF16)

    down = in_4_bits(rng, k=n, n=K)

    def ours(x, q, bias, down):
        return (
            gemm(x, q, bias=bias, activation="gelu"),
            gemm(x.T, q, transpose_a=True, epilogue=lambda z: jnp.tanh(z).astype(BF16)),
            gated_gemm(x, q, q, bias_up=bias),
            jax_tcgemm.mlp(x, q, None, down, None),
        )

    def formula(x, w, bias, down):
        z = x @ w
        gated = jax.nn.silu(z) * (z + bias)
        return jax.nn.gelu(z + bias), jnp.tanh(z), gated, jax.nn.gelu(z) @ down

    assert count(ours, x, q, bias, down) == 6
    exact = (x, q.dequantize(), bias, down.dequantize())
    expected = formula(*(jnp.asarray(wide(y)) for y in exact))
    for got, y in zip(ours(x, q, bias, down), expected, strict=True):
        assert got.dtype == x.dtype
        difference = np.linalg.norm(wide(got) - np.asarray(y, np.float64))
        assert difference <= 2**-6 * np.linalg.norm(y)


def test_derivative_by_the_scales(rng):
    q, x = in_4_bits(rng, scale="float32"), drawn(rng, M, K)

    def loss(product, x, scale):
        y = product(x, dataclasses.replace(q, scale=scale))
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    ours = jax.grad(functools.partial(loss, gemm), (0, 1))(x, q.scale)
    by_jax = functools.partial(loss, lambda x, w: x @ w.dequantize(x.dtype))
    for got, expected in zip(ours, jax.grad(by_jax, (0, 1))(x, q.scale), strict=True):
        assert got.dtype == expected.dtype
        got, expected = wide(got), wide(expected)
        assert np.linalg.norm(got - expected) <= 2**-6 * np.linalg.norm(expected)


REFUSED = {
    "float32 rows": lambda x, q: (x.astype(jnp.float32), q),
    "many rows": lambda x, q: (jnp.ones((257, K), x.dtype), q),
    "a stack of weights": lambda x, q: (x, jax.tree.map(lambda y: y[None], q)),
    "zero points of 8 bits": lambda x, q: (
        x,
        dataclasses.replace(q, zero_point=jnp.ones((1, N), jnp.int8)),
    ),
    "k": lambda x, q: (x[:, :-32], jax.tree.map(lambda y: y[:-32], q.mT.mT)),
    "n": lambda x, q: (x, jax.tree.map(lambda y: y[:, 1:], q)),
    "scales of 16 rows": lambda x, q: (x, dataclasses.replace(q, scale=jnp.ones((12, N), BF16))),
    "8 bits": lambda x, q: (x, dataclasses.replace(q, qvalue=q.qvalue.astype(jnp.int8))),
}


@pytest.mark.any_jax
@pytest.mark.parametrize("name", REFUSED)
def test_other_products_are_dequantized(rng, name):
    x, q = REFUSED[name](drawn(rng, M, K), in_4_bits(rng, group=K if name == "k" else 64))
    if name == "k":
        q = dataclasses.replace(q, scale=jnp.ones((1, N), BF16))
    assert count(gemm, x, q) == 0
    got, w = wide(gemm(x, q)), wide(q.dequantize(x.dtype))
    expected = wide(x) @ w
    assert np.linalg.norm(got - expected) <= 2**-6 * np.linalg.norm(expected)


@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("config", "xla"),
        ("precision", "BF16_BF16_F32_X3"),
        ("precision", jax.lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32)),
        ("preferred_element_type", jnp.float8_e4m3fn),
    ],
)
def test_arguments_that_dequantize(rng, name, value):
    q, x = in_4_bits(rng), drawn(rng, M, K)
    for f in (gemm, as_dot_general):
        if name != "config" or f is gemm:
            assert count(functools.partial(f, **{name: value}), x, q) == 0


@pytest.mark.any_jax
def test_float64_results(rng):
    q, x = in_4_bits(rng), drawn(rng, M, K)
    with jax.enable_x64(True):
        got = dot_general(x, q, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float64)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, wide(x) @ wide(q.dequantize(BF16)), rtol=1e-12, atol=1e-12)


def test_strict_promotion_of_dtypes(rng):
    q, x = in_4_bits(rng, scale="float32"), drawn(rng, M, K)
    with jax.numpy_dtype_promotion("strict"):
        check(q, x, gemm(x, q))


@pytest.mark.any_jax
def test_symbolic_and_empty_extents(rng):
    (k,) = jax.export.symbolic_shape("64*k")
    q, x = in_4_bits(rng, group=1), drawn(rng, M, K)
    types = jax.tree.map(lambda y: jax.ShapeDtypeStruct((k, N), y.dtype), q)
    rows = jax.ShapeDtypeStruct((M, k), x.dtype)
    checks = jax_tcgemm.export_disabled_checks()
    exported = jax.export.export(jax.jit(gemm), disabled_checks=checks)(rows, types)
    check(q, x, exported.call(x, q))
    empty = jax_tcgemm.Quantized(q.qvalue[:0], q.scale[:0])
    np.testing.assert_array_equal(gemm(x[:, :0], empty), jnp.zeros((M, N)))


@pytest.mark.parametrize("name", ["qvalue", "scale", "zero_point"])
def test_explicitly_sharded_weights_are_dequantized(rng, name):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    q, x = in_4_bits(rng, has_zeros=True), drawn(rng, M, K)
    with jax.set_mesh(mesh):
        part = jax.device_put(getattr(q, name), NamedSharding(mesh, P(None, "x")))
        divided = dataclasses.replace(q, **{name: part})
        assert count(gemm, x, divided) == 0


@pytest.mark.any_jax
def test_small_weights_are_dequantized(rng, monkeypatch):
    n = 160  # no other test has traced this product
    monkeypatch.setattr(unpacked, "LEAST_VALUES", K * n + 1)
    assert count(gemm, drawn(rng, M, K), in_4_bits(rng, n=n)) == 0


# Lowering


def targets(module):
    text, _ = module
    return re.findall(r"custom_call @(jax_tcgemm_\w+)\(", text)


def test_lowered_calls(rng, cuda_module, said):
    q, x = in_4_bits(rng, "uint4", has_zeros=True), drawn(rng, M, K)
    assert targets(cuda_module(gemm, x, q)) == [PACK, PACKED]
    assert any("tcgemm_unpacked uint4" in line and "packed by a kernel" in line for line in said)


def test_a_batch_of_many_rows_is_dequantized(rng, cuda_module, said):
    q, x = in_4_bits(rng), drawn(rng, 40, M, K)
    mapped = jax.vmap(gemm, (0, None))
    assert count(mapped, x, q) == 1
    # XLA drops the packed values, which nothing reads.
    assert targets(cuda_module(mapped, x, q)) == [PACK]
    assert any("dequantized: 320 rows" in line for line in said)


@pytest.mark.parametrize("is_strict", [False, True])
def test_other_gpus_dequantize(rng, cuda_module, monkeypatch, said, is_strict):
    monkeypatch.setenv(fallback.SETTING, "1" if is_strict else "0")
    monkeypatch.setattr(unpacked.few_rows, "unfit", lambda *_: "no kernel on this GPU")
    new = lambda x, q: gemm(x, q)  # noqa: E731 (JAX keeps what it has lowered)
    found = targets(cuda_module(new, drawn(rng, M, K), in_4_bits(rng)))
    assert found == [PACK, *[_extension.GEMM_TARGET] * is_strict]
    assert any("dequantized: no kernel on this GPU" in line for line in said)


def test_strict_programs_have_kernels(rng, cuda_module, monkeypatch):
    """The gradient, and a stack of weights, are multiplied after the dequantization."""
    monkeypatch.setenv(fallback.SETTING, "1")
    n = 224
    q, x = in_4_bits(rng, n=n), drawn(rng, M, K)
    loss = lambda x, q: gemm(x, q).astype(jnp.float32).sum()  # noqa: E731
    assert targets(cuda_module(jax.grad(loss), x, q))[-1] == _extension.GEMM_TARGET
    stack = jax.tree.map(lambda y: jnp.stack([y] * 2), q)
    mapped = jax.vmap(gemm, (None, 0))
    assert targets(cuda_module(mapped, x, stack))[-1] == _extension.GEMM_TARGET


@pytest.mark.parametrize("axis", [0, 1])
def test_divided_weights_are_dequantized(rng, axis):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q, x = in_4_bits(rng, k=256, n=128), drawn(rng, M, 256)
    spec = P("x") if axis == 0 else P(None, "x")
    put = lambda y: jax.device_put(y, NamedSharding(mesh, spec))  # noqa: E731
    f = jax.jit(gemm)
    got = f(x, jax.tree.map(put, q))
    check(q, x, got)


def test_each_device_packs_its_part(rng):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q, x = in_4_bits(rng, k=256, n=128), drawn(rng, M, 256)
    columns = jax.shard_map(gemm, mesh=mesh, in_specs=(P(), P(None, "x")), out_specs=P(None, "x"))
    assert count(columns, x, q) == 1
    check(q, x, columns(x, q))


@pytest.mark.any_jax
def test_one_layout():
    """The pass and ``pack`` have one description; the kernel is compared with it on a GPU."""
    q = quantize(jnp.ones((64, 64)), jnp.int4, tile=(64, 1))
    assert pack_values(q.qvalue).shape == (1, 1, 128, 16)
