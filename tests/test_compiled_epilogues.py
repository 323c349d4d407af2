"""User functions as epilogues: their meaning under JAX's transformations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import gated_gemm, gemm
from jax_tcgemm.epilogue import function
from jax_tcgemm.lowering import fallback
from jax_tcgemm.lowering import jit_epilogue as lowering

pytestmark = pytest.mark.any_jax

BF16 = jnp.bfloat16
M, N, K = 40, 48, 24


def _drawn(seed, shape, dtype=BF16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


X, W = _drawn(0, (M, K)), _drawn(1, (K, N))
BIAS, RESIDUAL = _drawn(2, (N,), jnp.float32), _drawn(3, (M, N))


def _gate(acc, gain, bias, residual):
    return (jax.nn.silu(acc * gain + bias) + residual).astype(BF16)


def _ours(x, w, *operands, f=_gate):
    return gemm(x, w, epilogue=f, epilogue_operands=operands)


def _theirs(x, w, *operands, f=_gate):
    return f(jnp.matmul(x, w, preferred_element_type=jnp.float32), *operands)


OPERANDS = (X, W, 2.0, BIAS, RESIDUAL)


def _close(actual, expected, tolerance=2**-7):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.abs(x - y).max() <= tolerance * (np.abs(y).max() + 1e-30)


def test_value():
    _close(_ours(*OPERANDS), _theirs(*OPERANDS), 0)
    _close(jax.jit(_ours)(*OPERANDS), jax.jit(_theirs)(*OPERANDS), 2**-8)


def test_closed_over_arrays_are_operands():
    def loss(f, bias):
        y = f(X, W, f=lambda acc: jnp.tanh(acc + bias))
        return jnp.sum(y)

    actual = jax.grad(functools.partial(loss, _ours))(BIAS)
    _close(actual, jax.grad(functools.partial(loss, _theirs))(BIAS))


def test_closed_over_python_numbers_are_differentiated():
    def loss(f, factor):
        x, w = X.astype(jnp.float32), W.astype(jnp.float32)
        return jnp.sum(f(x, w, f=lambda acc: jnp.tanh(acc * factor)))

    ours, theirs = (functools.partial(loss, each) for each in (_ours, _theirs))
    _close(jax.grad(ours)(0.5), jax.grad(theirs)(0.5))
    _close(jax.jvp(ours, (0.5,), (1.0,)), jax.jvp(theirs, (0.5,), (1.0,)))
    _close(jax.hessian(ours)(0.5), jax.hessian(theirs)(0.5))


def test_several_results_and_reductions():
    def f(acc, bias):
        y = jax.nn.hard_swish(acc + bias)
        return {
            "y": y.astype(jnp.float8_e4m3fn),
            "amax": jnp.max(jnp.abs(y)),
            "sums": y.sum(0),
            "rows": y.min(-1, keepdims=True) * 2,
        }

    actual, expected = (each(X, W, BIAS, f=f) for each in (_ours, _theirs))
    assert actual.keys() == expected.keys()
    _close(actual, expected, 1e-6)


def test_preferred_element_type_converts():
    y, count = gemm(
        X,
        W,
        epilogue=lambda acc: (acc + 1, (acc > 0).astype(jnp.int8)),
        preferred_element_type=jnp.float16,
    )
    assert (y.dtype, count.dtype) == (jnp.float16, jnp.int8)


def test_two_accumulators():
    w2 = _drawn(4, (K, N))
    f = lambda g, u, b: (jnp.clip(jax.nn.silu(g + b), -1, 1) * u).astype(BF16)  # noqa: E731
    actual = gated_gemm(X, W, w2, epilogue=f, epilogue_operands=(BIAS,))
    wide = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    _close(actual, f(wide(X, W), wide(X, w2), BIAS), 2**-8)
    both = jnp.concatenate([W, w2], 1)
    _close(gated_gemm(X, both, epilogue=f, epilogue_operands=(BIAS,)), actual, 2**-8)


def test_dropout_is_that_of_jax_random():
    def f(acc, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, acc.shape), acc, 0.0)

    y = jax.jit(functools.partial(_ours, f=f))(X, W, jax.random.key(1))
    _close(y, _theirs(X, W, jax.random.key(1), f=f), 1e-6)
    grad = jax.grad(lambda x: _ours(x, W, jax.random.key(1), f=f).sum())(X)
    assert grad.shape == X.shape


def test_a_small_product_of_a_function_that_draws_is_left_to_xla(cuda_module):
    """XLA draws in less time, and multiplies no slower."""

    def f(*products):
        return jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, products[0].shape), *products)

    x, w = jnp.zeros((512, 256), BF16), jnp.zeros((256, 1024), BF16)
    text, _ = cuda_module(lambda x, w: gemm(x, w, epilogue=lambda p: f(p, -p)), x, w)
    assert "custom_call @jax_tcgemm" not in text
    text, _ = cuda_module(lambda x, w: gemm(x[:, 1:], w[1:], epilogue=lambda p: f(p, -p)), x, w)
    assert "custom_call @jax_tcgemm_gemm" in text
    text, _ = cuda_module(lambda x, w: gated_gemm(x, w, w, epilogue=f), x, w)
    assert "custom_call @jax_tcgemm_gemm" in text
    config = "sm90_bf16_128x128x64_s6_c2x1_pingpong"
    text, _ = cuda_module(lambda x, w: gemm(x, w, epilogue=lambda p: f(p, -p), config=config), x, w)
    assert f'config = "{config}"' in text


def test_draws_over_a_batch_that_goes_on_where_rows_end(cuda_module, monkeypatch):
    """The kernel treats the batch as one matrix; several matrices would draw separately."""
    monkeypatch.setattr(fallback.functions, "_FEW_DRAWN", 0)
    monkeypatch.setattr(lowering.compiler, "obstacle", lambda *_: None)

    def f(product):
        return jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, product.shape), product, 0)

    x, w = jnp.zeros((4, 128, 256), BF16), jnp.zeros((256, 512), BF16)
    text, _ = cuda_module(lambda x, w: gemm(x, w, epilogue=f), x, w)
    assert text.count("custom_call @jax_tcgemm_compiled") == 1
    assert "m = 512" in text
    several = jnp.zeros((4, 256, 512), BF16)
    text, _ = cuda_module(lambda x, w: gemm(x, w, epilogue=f), x, several)
    assert "custom_call @jax_tcgemm_compiled" not in text


def test_masks_are_kept_for_the_derivative():
    def f(acc, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, acc.shape), jax.nn.gelu(acc), 0.0)

    key = jax.random.key(2)
    types = jax.ShapeDtypeStruct((M, N), jnp.float32), jax.ShapeDtypeStruct((), key.dtype)
    traced, _ = function.trace(lambda *x: [f(*x)], [*types], 1)
    assert len(traced.masks) == 1
    program = jax.jit(lambda x: jax.vjp(lambda x: _ours(x, W, key, f=f), x)[1]).lower(X)
    kept = jax.eval_shape(lambda x: jax.vjp(lambda x: _ours(x, W, key, f=f), x)[1], X)
    assert any(x.dtype == bool and x.shape == (M, N) for x in jax.tree.leaves(kept)), program
    actual, expected = (
        jax.grad(lambda x, each=each: each(x, W, key, f=f).sum())(X) for each in (_ours, _theirs)
    )
    _close(actual, expected)


@pytest.mark.parametrize(
    "beside", [{"bias": BIAS}, {"activation": "relu"}, {"alpha": 2.0}, {"c": RESIDUAL}]
)
def test_nothing_goes_beside_it(beside):
    with pytest.raises(ValueError, match=f"got {next(iter(beside))} as well"):
        gemm(X, W, epilogue=lambda acc: acc, **beside)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"of shape \(7,\)"):
        gemm(X, W, epilogue=lambda acc: jnp.ones(7))
    with pytest.raises(TypeError, match="must be a function"):
        gemm(X, W, epilogue="gelu")
    with pytest.raises(TypeError, match="must be an array"):
        gemm(X, W, epilogue=lambda acc, x: acc, epilogue_operands=("gelu",))
