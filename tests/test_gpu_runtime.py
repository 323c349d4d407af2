"""On the GPU: programs around a gemm, moving buffers, determinism, transformations."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_rows import rank_rows

import jax_tcgemm
from jax_tcgemm import _core, _extension, gemm
from jax_tcgemm.kernels.arithmetic import ARITHMETIC
from jax_tcgemm.lowering import custom_call
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES

pytestmark = pytest.mark.gpu

TARGET = "jax_tcgemm_gemm_v1"


def compiled_text(function, *args) -> str:
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text is not None
    return text


def opcodes(text: str) -> list[str]:
    """Returns the opcodes of the entry computation."""
    entry = text[text.index("ENTRY") :]
    return re.findall(r"^\s+(?:ROOT )?\S+ = \S+ ([\w-]+)\(", entry, re.MULTILINE)


def assert_one_call(function, *args) -> None:
    text = compiled_text(function, *args)
    ops = [op for op in opcodes(text) if op not in ("parameter", "bitcast", "get-tuple-element")]
    # If XLA puts it into a command buffer, the entry calls that instead.
    assert ops in (["custom-call"], ["call"], ["custom-call", "tuple"]), text
    assert text.count(f'custom_call_target="{TARGET}"') == 1
    assert not re.search(r"= \S+ (copy|transpose|convert|fusion)\(", text), text


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_one_custom_call_and_nothing_around_it(normal, transpose_a, transpose_b):
    a, b = normal(64, 64, dtype=jnp.bfloat16), normal(64, 64, dtype=jnp.bfloat16)
    c, bias = normal(64, 64, dtype=jnp.bfloat16), normal(64, dtype=jnp.bfloat16)

    def f(a, b, c, bias):
        return gemm(
            a,
            b,
            c,
            bias=bias,
            activation="gelu",
            transpose_a=transpose_a,
            transpose_b=transpose_b,
        )

    assert_one_call(f, a, b, c, bias)


def test_batched_calls_move_nothing(normal):
    w = normal(32, 48, dtype=jnp.bfloat16)
    assert_one_call(gemm, normal(3, 5, 32, dtype=jnp.bfloat16), w)
    assert_one_call(jax.vmap(gemm, (1, None)), normal(16, 3, 32, dtype=jnp.bfloat16), w)
    assert_one_call(jax.vmap(gemm, (None, 0)), normal(16, 32), normal(3, 32, 48))


def test_buffers_may_move_between_calls(normal):
    """One executable (and its command buffer) runs with other buffer addresses each time."""

    @jax.jit
    def chain(x, w, bias):
        for _ in range(8):
            x = gemm(x, w, bias=bias, activation="tanh")
        return x

    w = 0.2 * normal(64, 64)
    kept = []
    for i in range(12):
        x, bias = normal(48, 64), normal(64)
        kept += [x, bias, jnp.zeros((i + 1, 1000)), w + 0]
        expected = functools.reduce(lambda x, _: jnp.tanh(x @ w + bias), range(8), x)
        got = chain(x, kept[-1], bias)
        kept.append(got)
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=2e-2)


def test_donated_buffers(normal):
    a, b = normal(64, 64) / 8, normal(64, 64) / 8
    step = jax.jit(lambda c, a, b: gemm(a, b, c, activation="tanh"), donate_argnums=0)
    c = jnp.zeros((64, 64))
    expected = c
    for _ in range(4):
        expected = jnp.tanh(a @ b + expected)
        c = step(c, a, b)
    np.testing.assert_allclose(c, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("shape", [(300, 200, 1000), (16, 64, 8192), (129, 131, 133)])
def test_runs_are_bit_identical(normal, dtype, shape):
    m, n, k = shape
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
    f = jax.jit(lambda a, b: gemm(a, b, activation="gelu"))
    first = np.asarray(f(a, b)).view(np.uint8)
    for _ in range(10):
        np.testing.assert_array_equal(np.asarray(f(a, b)).view(np.uint8), first)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("shape", [(128, 128, 65536), (256, 520, 16384), (27, 52, 8201)])
@pytest.mark.parametrize("fused", [True, False])
def test_long_k(normal, exact, assert_accurate, dtype, shape, fused):
    """k is split through a workspace or within a cluster: results are right and deterministic."""
    m, n, k = shape
    a, b, bias = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype), normal(n, dtype=dtype)
    alpha, bias = (0.5, bias) if fused else (1.0, jnp.zeros_like(bias))
    f = jax.jit(lambda a, b, bias: gemm(a, b, bias=bias if fused else None, alpha=alpha))
    got = f(a, b, bias)
    baseline = jax.jit(lambda a, b, bias: (alpha * jnp.matmul(a, b) + bias).astype(dtype))
    expected = alpha * (exact(a) @ exact(b)) + exact(bias)
    assert_accurate(got, baseline(a, b, bias), expected, 2e-4 * np.abs(expected).max())
    for _ in range(5):
        np.testing.assert_array_equal(
            np.asarray(f(a, b, bias)).view(np.uint8), np.asarray(got).view(np.uint8)
        )


def in_parts(algorithm: str, shape: tuple[int, int, int], layout: str, splits: int) -> str:
    """Names a row that adds up this many parts of k itself."""
    tag = ARITHMETIC[algorithm].tag
    row = f"sm90_{tag}_128x128x64_s6_c2x1_pingpong"
    if row not in _extension.KERNEL_NAMES:
        pytest.skip("not in this build")
    config = f"{row}/splits={splits}"
    device = _core.device_properties(0)
    ranked = rank_rows(
        *(algorithm, *shape, 1, True, device["sm_count"], device["shared_memory_per_block"]),
        compute_capability=90,
        layout=layout,
        workspace_bytes=2**28,
    )
    assert (config, True) in {(name, in_kernel) for name, _, in_kernel in ranked}
    return config


# Whole tiles in two and in four parts; and residues of m, n and k with a shorter last part.
@pytest.mark.parametrize(
    ("algorithm", "layout"),
    [
        ("BF16_BF16_F32", "nn"),
        ("F16_F16_F32", "nt"),
        ("F16_F16_F32", "tn"),
        ("BF16_BF16_F32", "tt"),
    ],
)
@pytest.mark.parametrize(
    ("shape", "splits"),
    [((256, 4096, 4096), 2), ((512, 512, 4096), 4), ((250, 3000, 4168), 2), ((500, 504, 4168), 4)],
)
def test_parts_of_k_added_up_by_the_kernel(
    normal, exact, assert_accurate, algorithm, layout, shape, splits
):
    """Results are deterministic, also in a loop where other data use the workspace in between."""
    m, n, k = shape
    dtype = INPUT_DTYPES[algorithm]
    config = in_parts(algorithm, shape, layout, splits)
    if layout[0] == "t":
        m += -m % 8  # TMA can address these rows
    transposes = {"transpose_a": layout[0] == "t", "transpose_b": layout[1] == "t"}
    a = normal(*((k, m) if layout[0] == "t" else (m, k)), dtype=dtype)
    b = normal(*((n, k) if layout[1] == "t" else (k, n)), dtype=dtype)
    f = jax.jit(lambda a, b: gemm(a, b, config=config, **transposes))
    got = f(a, b)
    baseline = jnp.matmul(a.T if layout[0] == "t" else a, b.T if layout[1] == "t" else b)
    x, y = (exact(value.T if t == "t" else value) for value, t in zip((a, b), layout, strict=True))
    assert_accurate(got, baseline, x @ y, 2e-4 * np.abs(x @ y).max())

    @jax.jit
    def again(a, b):
        def step(noise, scale):
            d = gemm(a * scale, b, config=config, **transposes)
            return noise * 0.5 + jnp.sum(d.astype(jnp.float32)), d

        return jax.lax.scan(step, jnp.ones((2048, 2048)), jnp.asarray([1, 2, 1, 2, 1], dtype))[1]

    expected = np.asarray(got, np.float32)
    for i, d in enumerate(np.asarray(again(a, b).astype(jnp.float32))):
        np.testing.assert_array_equal(d, expected * (1 + i % 2))


def test_two_products_with_parts_of_k_in_one_graph(normal):
    """The products are independent and may run at once, each with its own flags."""
    shapes = ((256, 4096, 4096), (500, 504, 4168))
    operands = []
    for m, n, k in shapes:
        operands += [normal(m, k, dtype=jnp.bfloat16), normal(k, n, dtype=jnp.bfloat16)]

    def product(a, b):
        shape = (a.shape[0], b.shape[1], a.shape[1])
        return gemm(a, b, config=in_parts("BF16_BF16_F32", shape, "nn", 2))

    @jax.jit
    def both(a, b, c, d):
        return product(a, b), product(c, d)

    alone = [jax.jit(product)(*operands[i : i + 2]) for i in (0, 2)]
    expected = [np.asarray(x).view(np.uint16) for x in alone]
    for i in range(300):
        results = both(*operands)
        if i % 30 == 0:  # limits how many replays are in flight
            for x, y in zip(results, expected, strict=True):
                np.testing.assert_array_equal(np.asarray(x).view(np.uint16), y)


def test_an_error_of_the_handler_is_an_exception(monkeypatch):
    """Tracing cannot exclude handmade custom calls; their errors must not end the process."""
    right = custom_call.attributes

    def wrong(*args, **options):
        return right(*args, **options) | {"activation": "NoSuchActivation"}

    monkeypatch.setattr(custom_call, "attributes", wrong)
    a = jnp.ones((64, 64), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="unknown activation 'NoSuchActivation'"):
        jax.block_until_ready(jax.jit(lambda a: gemm(a, a))(a))


def test_nan_and_infinity_stay_in_their_rows(normal):
    a = normal(130, 70, dtype=jnp.bfloat16).at[5, 3].set(jnp.nan).at[64, 0].set(jnp.inf)
    b = jnp.abs(normal(70, 90, dtype=jnp.bfloat16)) + 1
    got = np.asarray(jax.jit(gemm)(a, b).astype(jnp.float32))
    assert np.isnan(got[5]).all()
    assert np.isposinf(got[64]).all()
    assert np.isfinite(np.delete(got, (5, 64), axis=0)).all()


def test_loops_and_remat(normal):
    w, x = 0.2 * normal(4, 64, 64), normal(32, 64)

    def loss(product, w, x):
        layer = jax.checkpoint(lambda x, w: (product(x, w), None))
        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    fused = functools.partial(loss, lambda x, w: gemm(x, w, activation="tanh"))
    formula = functools.partial(loss, lambda x, w: jnp.tanh(x @ w))
    actual = jax.jit(jax.value_and_grad(fused, (0, 1)))(w, x)
    expected = jax.jit(jax.value_and_grad(formula, (0, 1)))(w, x)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=3e-2, atol=3e-2 * scale)


def test_export_round_trip(normal):
    pytest.importorskip("flatbuffers")
    a, b = normal(64, 32, dtype=jnp.bfloat16), normal(32, 48, dtype=jnp.bfloat16)
    exported = jax.export.export(
        jax.jit(gemm), disabled_checks=jax_tcgemm.export_disabled_checks()
    )(a, b)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(
        np.asarray(loaded.call(a, b)).view(np.uint16), np.asarray(gemm(a, b)).view(np.uint16)
    )


def test_highest_precision_is_xlas(normal, exact):
    a, b = normal(200, 300), normal(300, 100)
    assert TARGET not in compiled_text(lambda a, b: gemm(a, b, precision="highest"), a, b)
    got = gemm(a, b, precision="highest")
    np.testing.assert_allclose(got, exact(a) @ exact(b), rtol=1e-4, atol=1e-4)


def test_shard_map(normal):
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec("x")
    a, b = normal(8, 64, 32), normal(8, 32, 64)
    f = jax.jit(jax.shard_map(gemm, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    np.testing.assert_allclose(f(a, b), a @ b, rtol=1e-2, atol=1e-1)
