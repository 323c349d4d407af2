"""User functions as epilogues: their meaning under JAX's transformations, and their C++."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_epilogues
from jax import lax
from nightly import slow

from jax_tcgemm import gated_gemm, gemm
from jax_tcgemm.epilogue import compiler, cubins, function, nvrtc, operations, translation
from jax_tcgemm.kernels import table
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
    assert len(_traced(f, key, shape=(M, N)).masks) == 1
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


# Translation


def _traced(f, *operands, shape=(64, 64), accumulators=1):
    products = [jax.ShapeDtypeStruct(shape, jnp.float32)] * accumulators
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    made, _ = function.trace(lambda *x: jax.tree.leaves(f(*x)), [*products, *types], accumulators)
    return made


def _leaves(f, *operands, **options):
    made = translation.translate(_traced(f, *operands, **options))
    assert not isinstance(made, str), made
    return [leaf.index for leaf in made.leaves]


def test_axes_come_from_broadcasting_not_from_shapes():
    vector = jnp.ones(64)
    assert _leaves(lambda acc, x: acc + x, vector) == [(1,)]
    assert _leaves(lambda acc, x: acc + x[:, None], vector) == [(0,)]
    assert _leaves(lambda acc, x: acc + x.T, jnp.ones((64, 64))) == [(1, 0)]
    assert _leaves(lambda acc, x: acc + x + x[:, None], vector) == [(1,), (0,)]
    assert _leaves(lambda acc, x: acc + x.reshape(1, 64), vector) == [(1,)]


def test_equal_functions_are_one_key():
    def make():
        return _traced(lambda acc, x: jax.nn.gelu(acc + x), jnp.ones(64))

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != _traced(lambda acc, x: jax.nn.gelu(acc - x), jnp.ones(64))


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda acc: jax.nn.softmax(acc), "reduce_max within"),
        (lambda acc: jnp.sort(acc), "sort"),
        (lambda acc: acc[::-1], "rev"),
        (lambda acc: jnp.cumsum(acc, 0), "cumsum"),
        (lambda acc: acc.sum(0), "0 results of the product's shape"),
        (lambda acc: lax.complex(acc, acc), "complex64"),
    ],
)
def test_what_is_not_translated_says_so(f, reason):
    made = translation.translate(_traced(f))
    assert isinstance(made, str)
    assert reason in made


def test_what_is_known_before_is_computed_before():
    def f(acc, x):
        return acc * jnp.sort(x)

    made = translation.translate(_traced(f, jnp.arange(64.0)))
    assert not isinstance(made, str)
    (sorted_,) = made.known([jnp.arange(64.0)[::-1]])
    np.testing.assert_array_equal(sorted_, np.arange(64.0))


def _lines(function):
    made = translation.translate(_traced(lambda acc: [function(acc)]))
    assert not isinstance(made, str), made
    return "\n".join(made.lines)


def test_half_of_one_and_tanh_is_a_logistic_function():
    lines = _lines(jax.nn.gelu)
    assert lines.count("logistic(") == 1
    assert "tanh" not in lines
    assert "2.f *" not in lines
    both = _lines(lambda x: 0.5 * (1 + jnp.tanh(x)) + (1 - jnp.tanh(x)))
    assert both.count("beside_tanh(") == 1
    assert "logistic(" not in both


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: jax.nn.gelu(x).astype(BF16), "coarse_logistic"),
        (lambda x: jnp.exp(x).astype(jnp.float8_e4m3fn), "coarse_exp"),
        (lambda x: jax.nn.sigmoid(x.astype(BF16)), "coarse_logistic"),
        (lambda x: ((1 + jnp.tanh(x)) * (1 - jnp.tanh(x))).astype(BF16), "coarse_beside_tanh"),
        # Rounded between two operations.
        (lambda x: jax.nn.silu(x).astype(BF16).astype(jnp.float32), "coarse_logistic"),
        # In full precision, since a float32 value is a result or decides another result.
        (jax.nn.gelu, "logistic"),
        (lambda x: (y := jnp.exp(x), y.astype(BF16), y.max()), "fast_exp"),
        (lambda x: (y := jax.nn.gelu(x), y.astype(BF16)), "logistic"),
        (lambda x: jnp.where(jnp.exp(x) > 2, x, 0), "fast_exp"),
    ],
)
def test_what_16_bits_do_not_show_is_computed_more_quickly(function, wanted):
    made = translation.translate(_traced(lambda acc: jax.tree.leaves(function(acc))))
    assert not isinstance(made, str), made
    assert re.findall(r"(\w*(?:exp|logistic|tanh))\(", "\n".join(made.lines)) == [wanted]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (1 + lax.tanh(0.5)),
        lambda x: x + x * lax.tanh(0.1),
        lambda x: x * (0.5 * (1 + lax.tanh(0.5))),
        lambda x: x * (1 - lax.tanh(0.5)),
    ],
)
def test_tanh_of_a_number(function):
    assert "tanhf" in _lines(function)


def test_every_operation_of_the_table_compiles():
    """NVRTC compiles each operation separately, on floats or on integers."""
    found = nvrtc.find()
    assert not isinstance(found, str), found
    names = sorted({*operations.NAMES} - {"add_any", "clamp"})
    lines = []
    for i, name in enumerate(names):
        for dtype in (jnp.float32, BF16, jnp.int32, jnp.uint8, jnp.bool_):
            values = [operations.constant(1, dtype)] * 2
            try:
                texts = {
                    operations.translated(name, values, [dtype] * 2, {}, coarse=coarse)
                    for coarse in (False, True)
                }
            except operations.NotTranslatableError:
                continue
            for number, text in enumerate(sorted(texts)):
                lines.append(f"  const auto v{i}_{jnp.dtype(dtype).name}_{number} = {text};")
    source = (
        '#include "epilogue/compiled_rounding.cuh"\n'
        "namespace jax_tcgemm {\n__global__ void f() {\n" + "\n".join(lines) + "\n}\n}\n"
    )
    assert len(lines) > 60
    assert found.compile(source, "sm_90a", cubins.include_folders())


@pytest.mark.parametrize("part", [0, slow(1), slow(2)])
def test_random_functions_translate_and_compile(part, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    rng = np.random.default_rng()
    for seed in rng.integers(2**31, size=10):
        epilogue = random_epilogues.draw(int(seed))
        what = random_epilogues.compiles(epilogue, "sm90_bf16_128x128x64_s6_c2x1_pingpong")
        assert what is None, (part, epilogue, what)


def _programs_of(row):
    """Returns the C++ of an epilogue: for plain operands and batches, and with block scales."""
    accumulator = jax.ShapeDtypeStruct((96, 64), jnp.int32 if row.tag == "s8" else jnp.float32)
    weights = 2 if row.gated else 1
    operands = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((96, 64), (96, 1), (64,), ())]
    types = [accumulator] * weights + operands
    made, _ = function.trace(lambda *x: [sum(x[1:], x[0]).astype(BF16)], types, weights)
    translated = translation.translate(made)
    assert not isinstance(translated, str), translated
    strides = [(0, *leaf.strides(2)) for leaf in translated.leaves]
    has_blocks = row.promote and not (row.gated or row.streams_b or row.grouped != "none")
    for scaled in (False, True)[: 1 + has_blocks]:
        yield lowering.source_of(translated, strides, 64, batched=not scaled, scaled=scaled)


_ROWS = [row for row in table.RUN_TIME_CONFIGS if row.algorithm in ("E4M3_E4M3_F32", "S8_S8_S32")]


@pytest.mark.parametrize(
    "row", [slow(row) if i % 3 else row for i, row in enumerate(_ROWS)], ids=lambda row: row.name
)
def test_rows_of_8_bits_compile(row, tmp_path, monkeypatch):
    """The programs use both accumulators; the build compiles no quantized rows."""
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    layout = "nn" if row.streams_b else "nt"
    assert all(compiler.compile_kernel(text, row.name, layout) for text in _programs_of(row))
