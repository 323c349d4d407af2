"""User functions inside kernels, on a Hopper GPU, compared with XLA after the product."""

from __future__ import annotations

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_epilogues
from gpu_accuracy import in_float64
from kernel_rows import rank_rows

import jax_tcgemm
from jax_tcgemm import gated_gemm, gemm, ragged_dot
from jax_tcgemm.epilogue import cubins, nvrtc, translation

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("never_apart")]

BF16 = jnp.bfloat16
wide = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


def _drawn(seed, shape, dtype=BF16, scale=1.0):
    x = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(x.astype(np.float32)).astype(dtype)


def _factors(m, n, k, layout="nn", dtype=BF16):
    a = _drawn(0, (k, m) if layout[0] == "t" else (m, k), dtype)
    b = _drawn(1, (n, k) if layout[1] == "t" else (k, n), dtype, k**-0.5)
    product = wide(a.T if layout[0] == "t" else a, b.T if layout[1] == "t" else b)
    return a, b, product


def _close(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        step = {1: 2**-2, 2: 2**-7}.get(x.dtype.itemsize, 1e-5)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert (np.isnan(x) == np.isnan(y)).all()
        y_scale = np.nanmean(np.abs(y)) + 1e-6
        assert np.nanmax(np.abs(x - y) / (np.abs(y) + y_scale)) < step


def _everything(acc, scalar, row, column, matrix, wide_matrix):
    z = acc * scalar + row
    y = jax.nn.gelu(z) * column + matrix
    return {
        "y": y.astype(BF16),
        "z": z.astype(jnp.float16),
        "half": (y + wide_matrix).astype(jnp.float8_e4m3fn),
        "sign": jnp.sign(z).astype(jnp.int8),
    }


_OF_ANY_SIZE = {
    "exp": jnp.exp,
    "logistic": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "mish": jax.nn.mish,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
    "expm1": jnp.expm1,
    "exp2": jnp.exp2,
}


@pytest.mark.parametrize("dtype", [jnp.float32, BF16, jnp.float16])
@pytest.mark.parametrize("name", _OF_ANY_SIZE)
def test_functions_from_end_to_end_of_their_range(name, dtype):
    def f(x):
        return _OF_ANY_SIZE[name](x).astype(dtype)

    sizes = np.concatenate([np.linspace(0, 200, 8191), [3e38]]).astype(np.float32)
    a = jnp.asarray(np.concatenate([sizes, -sizes]).reshape(128, 128)).astype(BF16)
    y = jax.jit(lambda a: gemm(a, jnp.eye(128, dtype=BF16), epilogue=f))(a)
    expected = jax.jit(f)(a.astype(jnp.float32))
    assert (jnp.isnan(y) == jnp.isnan(expected)).all()
    assert (jnp.isinf(y) == jnp.isinf(expected)).all()
    exact = in_float64(_OF_ANY_SIZE[name], a)
    finite = np.isfinite(np.asarray(expected)) & np.isfinite(exact)

    def worst(x, least):
        error = np.abs(np.asarray(x, np.float64)[finite] - exact[finite])
        return np.max(error / (np.abs(exact[finite]) + least))

    # A value near 0 results from cancellation, also in float64, or is a multiple of the least
    # number. XLA's value may be entirely wrong there.
    for least in (max(1e-9, float(jnp.finfo(dtype).tiny)), 1):
        assert worst(y, least) <= 2 * worst(expected, least) + 2e-6


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 256, 64), (200, 136, 72), (333, 264, 520), (1000, 1008, 256)]
)
def test_every_kind_of_operand_and_result(m, n, k, layout):
    if layout[0] == "t" and m % 8:
        m += 8 - m % 8
    a, b, product = _factors(m, n, k, layout)
    operands = (
        jnp.float32(1.5),
        _drawn(2, (n,)),
        _drawn(3, (m, 1), jnp.float32),
        _drawn(4, (m, n)),
        _drawn(5, (m, n), jnp.float32),
    )
    ours = jax.jit(
        lambda a, b, *x: gemm(
            a,
            b,
            transpose_a=layout[0] == "t",
            transpose_b=layout[1] == "t",
            epilogue=_everything,
            epilogue_operands=x,
        )
    )(a, b, *operands)
    _close(ours, jax.jit(_everything)(product, *operands))


@pytest.mark.parametrize("n", [72, 100, 131, 256])
def test_columns_that_are_no_whole_vectors(n):
    k, m = 64, 150
    a = _drawn(0, (m, k))
    b = _drawn(1, (n, k), BF16, k**-0.5)
    f = lambda acc, r, x: (acc + r + x, (acc * 3).astype(jnp.int8), acc.astype(BF16))  # noqa: E731
    operands = (_drawn(2, (n,)), _drawn(3, (m, n)))
    ours = jax.jit(lambda a, b, *x: gemm(a, b, transpose_b=True, epilogue=f, epilogue_operands=x))(
        a, b, *operands
    )
    x, _, z = jax.jit(f)(wide(a, b.T), *operands)
    _close((ours[0], ours[2]), (x, z))
    assert (
        np.abs(np.asarray(ours[1], np.int32) - np.trunc(np.asarray(x - sum(operands)) * 3)).max()
        <= 1
    )


def test_float16_and_every_row():
    from jax_tcgemm import _core

    m, n, k = 512, 512, 256
    a, b, product = _factors(m, n, k, dtype=jnp.float16)
    f = lambda acc, r: (jnp.tanh(acc) + r).astype(jnp.float16)  # noqa: E731
    r = _drawn(2, (m, n), jnp.float16)
    facts = _core.device_properties(0)
    rows = rank_rows(
        "F16_F16_F32", m, n, k, 1, True, facts["sm_count"], facts["shared_memory_per_block"],
        compute_capability=90, epilogue="any", compiled=True,
    )  # fmt: skip
    assert len(rows) > 5
    for name, _, _ in rows:
        ours = jax.jit(
            lambda a, b, r, name=name: gemm(a, b, epilogue=f, epilogue_operands=(r,), config=name)
        )(a, b, r)
        _close(ours, f(product, r))


def test_reductions():
    m, n, k = 300, 264, 128
    a, b, product = _factors(m, n, k)

    def f(acc, r):
        z = acc + r
        return (
            z.astype(BF16),
            z.sum(0),
            z.max(-1, keepdims=True),
            jnp.abs(z).max(),
            z.min(),
            z.mean(),
        )

    r = _drawn(2, (n,))
    ours = jax.jit(lambda a, b, r: gemm(a, b, epilogue=f, epilogue_operands=(r,)))(a, b, r)
    theirs = f(product, r)
    _close(ours[0], theirs[0])
    for x, y in zip(ours[1:], theirs[1:], strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-3)
    again = jax.jit(lambda a, b, r: gemm(a, b, epilogue=f, epilogue_operands=(r,)))(a, b, r)
    np.testing.assert_array_equal(ours[1], again[1])


def test_batches():
    a, b = _drawn(0, (3, 2, 130, 64)), _drawn(1, (3, 1, 64, 264))
    bias, r = _drawn(2, (3, 1, 1, 264)), _drawn(3, (130, 264))

    def f(acc, bias, r):
        return (jax.nn.silu(acc + bias) + r).astype(BF16), acc.max((-1, -2))

    ours = jax.jit(lambda a, b, *x: gemm(a, b, epilogue=f, epilogue_operands=x))(a, b, bias, r)
    theirs = f(wide(a, b), bias, r)
    _close(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)
    shared = jax.jit(lambda a, b, r: gemm(a, b, epilogue=lambda acc, r: acc + r,
                                          epilogue_operands=(r,)))  # fmt: skip
    _close(shared(a[:, 0], b[0, 0], r), wide(a[:, 0], b[0, 0]) + r)


def test_reductions_over_a_batch():
    """The batch becomes rows, so that blocks of rows are joined across its matrices."""
    a, b, r = _drawn(0, (2, 3, 101, 64)), _drawn(1, (64, 264)), _drawn(2, (264,))

    def f(acc, r):
        z = acc + r
        return z.astype(BF16), z.sum((0, 1, 2)), z.max(), z.min((0, 3)), z.sum(-1)

    ours = jax.jit(lambda a, b, r: gemm(a, b, epilogue=f, epilogue_operands=(r,)))(a, b, r)
    theirs = f(wide(a, b), r)
    _close(ours[0], theirs[0])
    for x, y in zip(ours[1:], theirs[1:], strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-3)


def test_gated():
    m, n, k = 384, 256, 192
    a, b, g = _factors(m, n, k)
    b2 = _drawn(5, (k, n), BF16, k**-0.5)
    f = lambda g, u, x: (jnp.clip(jax.nn.silu(g + x), -1, 1) * u).astype(BF16)  # noqa: E731
    x = _drawn(2, (n,))
    ours = jax.jit(lambda *v: gated_gemm(*v[:3], epilogue=f, epilogue_operands=v[3:]))
    expected = f(g, wide(a, b2), x)
    _close(ours(a, b, b2, x), expected)
    packed = jax.jit(lambda a, b, x: gated_gemm(a, b, epilogue=f, epilogue_operands=(x,)))
    _close(packed(a, jnp.concatenate([b, b2], 1), x), expected)


@pytest.mark.parametrize("sizes", [(100, 0, 212, 37, 163), (512, 0, 0, 0, 0), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("transpose", [False, True])
def test_groups(sizes, transpose):
    m, n, k = 512, 640, 128
    lhs, rhs = _drawn(0, (m, k)), _drawn(1, (5, k, n), BF16, k**-0.5)
    sizes = jnp.asarray(sizes)
    scale = jnp.repeat(jnp.arange(1.0, 6), sizes, total_repeat_length=m)[:, None]
    r = _drawn(2, (m, n))
    f = lambda acc, s, r: ((jax.nn.silu(acc) * s + r).astype(BF16), acc)  # noqa: E731
    ours = jax.jit(
        lambda lhs, rhs, *x: ragged_dot(
            lhs, rhs, sizes, transpose_rhs=transpose, epilogue=f, epilogue_operands=x
        )
    )(lhs, rhs.swapaxes(1, 2) if transpose else rhs, scale, r)
    product = jax.lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32)
    _close(ours, f(product, scale, r))


def test_gradients():
    m, n, k = 256, 384, 128
    a, b, _ = _factors(m, n, k)
    bias, r = _drawn(2, (n,)), _drawn(3, (m, n))
    f = lambda acc, bias, r: (jax.nn.mish(acc + bias) * jax.nn.sigmoid(r)).astype(BF16)  # noqa: E731

    def loss(product, *x):
        return jnp.sum(f(product(*x[:2]), *x[2:]).astype(jnp.float32) * jnp.cos(jnp.arange(n)))

    def ours(*x):
        y = gemm(*x[:2], epilogue=f, epilogue_operands=x[2:])
        return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(n)))

    actual = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3)))(a, b, bias, r)
    expected = jax.grad(functools.partial(loss, wide), argnums=(0, 1, 2, 3))(a, b, bias, r)
    for x, y in zip(actual, expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) < 2**-6 * np.linalg.norm(y)


def test_dropout_is_bit_for_bit_that_of_jax_random():
    m, n, k = 256, 272, 64
    a, b, product = _factors(m, n, k)

    def f(acc, key):
        return jax.random.bits(key, acc.shape), jax.random.uniform(key, acc.shape), acc

    ours = jax.jit(lambda a, b, key: gemm(a, b, epilogue=f, epilogue_operands=(key,)))
    bits, uniform, _ = ours(a, b, jax.random.key(3))
    expected = f(product, jax.random.key(3))
    np.testing.assert_array_equal(bits, expected[0])
    np.testing.assert_array_equal(uniform, expected[1])


def test_a_function_is_compiled_once(monkeypatch):
    a, b, _ = _factors(256, 256, 64)
    f = lambda acc: jnp.tanh(acc * 1.25).astype(BF16)  # noqa: E731
    first = jax.jit(lambda a, b: gemm(a, b, epilogue=f))(a, b)

    def refuse(*arguments):
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", refuse)
    again = jax.jit(lambda a, b: gemm(a, b, epilogue=lambda acc: f(acc)))(a, b)
    np.testing.assert_array_equal(first, again)
    # Runs many times in a CUDA graph.
    looped = jax.jit(lambda a, b: [gemm(a + i, b, epilogue=f) for i in range(5)])
    for _ in range(4):
        results = looped(a, b)
    np.testing.assert_array_equal(results[0], first)


def test_exported_program_runs_where_the_function_was_never_traced(tmp_path):
    a, b, _ = _factors(256, 256, 64)
    f = jax.jit(lambda a, b: gemm(a, b, epilogue=lambda acc: jnp.tanh(acc * 1.5).astype(BF16)))
    checks = jax_tcgemm.export_disabled_checks()
    exported = jax.export.export(f, disabled_checks=checks)(a, b)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.save(tmp_path / "a.npy", np.asarray(a, np.float32))
    np.save(tmp_path / "b.npy", np.asarray(b, np.float32))
    np.save(tmp_path / "d.npy", np.asarray(f(a, b), np.float32))
    program = f"""
import jax, jax.numpy as jnp, numpy as np, jax_tcgemm
from jax_tcgemm.epilogue import function
def refuse(*arguments): raise AssertionError("traced")
function.trace = refuse
folder = {str(tmp_path)!r}
call = jax.export.deserialize(bytearray(open(folder + "/program", "rb").read())).call
a, b = (jnp.asarray(np.load(f"{{folder}}/{{name}}.npy"), jnp.bfloat16) for name in "ab")
np.testing.assert_array_equal(np.asarray(call(a, b), np.float32), np.load(folder + "/d.npy"))
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=300)


@pytest.mark.parametrize("part", range(8))
def test_random_functions(part, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    cubins.clear_memory()
    rng = np.random.default_rng()
    for seed in rng.integers(2**31, size=4):
        m, n = int(rng.integers(65, 400)), 8 * int(rng.integers(9, 50))
        epilogue = random_epilogues.draw(int(seed))
        what = random_epilogues.wrong(epilogue, m, n, str(rng.choice(["nn", "nt"])))
        assert what is None, (part, what)
    translation.translate.cache_clear()
