"""Programs with packed weights on a Hopper GPU: memory, special values, transformations."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_problems import Problem, exact_weight, wrong
from packed_values import QTYPES, weight, wide

import jax_tcgemm
from jax_tcgemm import _extension, gemm, pack

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

BF16 = jnp.bfloat16

by_kernel = functools.partial(gemm, config="kernel")


def bits_of(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def operands(rng, problem: Problem):
    """Returns ``x``, the quantized weight and the packed weight."""
    x, q = problem.operands(rng)
    return x, q, pack(q)


def assert_right(got, x, q) -> None:
    what = wrong(got, x, q)
    assert what is None, what


# Values


@pytest.mark.parametrize("m", [6, 40])
@pytest.mark.parametrize("qtype", QTYPES)
def test_nan_and_infinity_of_x_go_where_jnp_has_them(rng, qtype, m):
    x, q, w = operands(rng, Problem(m, 100, 320, 64, qtype))
    k = x.shape[1]
    x = x.at[0, k - 1].set(jnp.inf).at[1, 3].set(-jnp.inf).at[1, 70].set(jnp.inf)
    x = x.at[2, 130].set(jnp.nan)
    got = wide(jax.jit(by_kernel)(x, w))
    expected = wide(jax.jit(jnp.matmul)(x, q.dequantize(BF16)))
    for is_so in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(is_so(got), is_so(expected))
    assert np.isnan(got[2]).all()
    assert_right(jnp.asarray(got[3:], BF16), x[3:], q)


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("m", [3, 40])
def test_special_scales_stay_in_their_columns(rng, m, scale_dtype):
    x, q, _ = operands(rng, Problem(m, 70, 256, 64, scale=scale_dtype))
    special = {1: jnp.nan, 30: jnp.inf, 66: 0.0}
    scale = q.scale
    for column, value in special.items():
        scale = scale.at[2, column].set(value)
    q = dataclasses.replace(q, scale=scale)
    got = jax.jit(by_kernel)(x, pack(q))
    assert np.isnan(wide(got)[:, 1]).all()
    assert not np.isfinite(wide(got)[:, 30]).any()
    finite = [column for column in range(70) if column not in (1, 30)]
    kept = jax.tree.map(lambda y: y[:, np.asarray(finite)], q)
    assert_right(got[:, np.asarray(finite)], x, kept)


@pytest.mark.parametrize(("qtype", "largest"), [("int8", 127), ("float8_e4m3fn", 448)])
def test_scaled_weights_are_rounded_once(rng, qtype, largest):
    """A scale rounded to bfloat16 would be 2**-8.4 off; roundings of its products cancel."""
    x, q, _ = operands(rng, Problem(40, 100, 4096, 4096, qtype, scale="float32"))
    codes = jnp.abs(q.qvalue.astype("float32")).clip(max=largest).astype(qtype)
    q = dataclasses.replace(q, qvalue=codes, scale=jnp.full_like(q.scale, 1 + 75 / 256))
    x = abs(x)
    got = jax.jit(functools.partial(by_kernel, preferred_element_type="float32"))(x, pack(q))
    exact = np.asarray(x, np.float64) @ exact_weight(q)
    assert np.max(np.abs(np.asarray(got, np.float64) / exact - 1)) < 2.0**-11


# Memory


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["slice", "dynamic slice"])
@pytest.mark.parametrize("m", [3, 11, 20, 50])
def test_neighbours_in_memory_do_not_leak(rng, m, is_dynamic):
    """The rows around ``x`` and the weights around the weight hold NaN."""
    qtype = QTYPES[rng.integers(4)]
    x, q, w = operands(rng, Problem(m, 100, 320, 64, qtype))
    around = jnp.full((4, *x.shape), jnp.nan, x.dtype).at[2].set(x)
    bad = dataclasses.replace(
        w, values=jnp.full_like(w.values, 0x7F), scales=jnp.full_like(w.scales, jnp.nan)
    )
    weights = jax.tree.map(lambda *each: jnp.stack(each), bad, w, bad)

    @jax.jit
    def run(around, weights, i):
        if is_dynamic:
            take = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
            return by_kernel(take(around, i + 1), jax.tree.map(lambda y: take(y, i), weights))
        return by_kernel(around[2], jax.tree.map(lambda y: y[1], weights))

    assert_right(run(around, weights, jnp.int32(1)), x, q)
    # The rows of a longer x, in one buffer.
    rows = around[1:].reshape(-1, x.shape[1])
    assert_right(jax.jit(lambda y: by_kernel(y[m : 2 * m], w))(rows), x, q)


@pytest.mark.parametrize("m", [5, 33])
def test_all_of_a_donated_buffer_is_written(rng, m):
    x, q, w = operands(rng, Problem(m, 131, 256, 128))
    run = jax.jit(lambda d, x, w: by_kernel(x, w), donate_argnums=0, keep_unused=True)
    for _ in range(3):
        poisoned = jax.device_put(np.full((m, 131), np.nan, jnp.bfloat16))
        assert_right(run(poisoned, x, w), x, q)
        assert poisoned.is_deleted()


@pytest.mark.parametrize("m", [1, 16, 32, 64])
def test_runs_are_bit_identical(rng, m):
    """Also where blocks divide k."""
    x, q, w = operands(rng, Problem(m, 256, 4096, 128))
    run = jax.jit(by_kernel)
    first = run(x, w)
    assert_right(first, x, q)
    for _ in range(10):
        np.testing.assert_array_equal(bits_of(run(x, w)), bits_of(first))


# Programs


@pytest.mark.parametrize("m", [1, 64])
def test_the_program_calls_the_kernel_alone(rng, m):
    x, _, w = operands(rng, Problem(m, 256, 512, 128))
    text = str(jax.jit(lambda x, w: gemm(x, w)).lower(x, w).compile().as_text())
    assert text.count(f'custom_call_target="{_extension.PACKED_TARGET}"') == 1
    assert " dot(" not in text
    assert "fusion(" not in text


def test_other_values_do_not_recompile(rng):
    problem = Problem(9, 130, 384, 128, "uint4", has_zeros=True)
    traces = []
    run = jax.jit(lambda x, w: traces.append(None) or by_kernel(x, w))
    for _ in range(4):
        x, q, w = operands(rng, problem)
        assert_right(run(x, w), x, q)
    assert len(traces) == 1


def test_several_calls_in_a_graph_whose_buffers_move(rng):
    groups = zip((32, 64, 128, 256), QTYPES, strict=True)
    problems = [Problem(16, 256, 256, group, qtype) for group, qtype in groups]
    weights = [operands(rng, each)[1:] for each in problems]

    @jax.jit
    def chain(x, weights):
        results = []
        for w in weights:
            results.append(by_kernel(x, w, preferred_element_type=jnp.float32))
            x = jnp.tanh(results[-1]).astype(BF16)
        return results

    kept = []
    for i in range(6):
        x = jnp.asarray(rng.normal(size=(16, 256)), BF16)
        kept += [x, jnp.zeros((i + 1, 1000)), [pack(q) for q, _ in weights]]
        results = chain(x, kept[-1])
        kept.append(results)
        for got, (q, _) in zip(results, weights, strict=True):
            assert_right(got, x, q)
            x = jnp.tanh(got).astype(BF16)


@pytest.mark.parametrize("m", [4, 48])
def test_scan_over_layers(rng, m):
    q = weight(rng, "int4", (5, 256, 256), 64)
    q = dataclasses.replace(q, scale=q.scale / 16)
    x = jnp.asarray(rng.normal(size=(m, 256)), BF16)

    def layer(x, w):
        y = jnp.tanh(by_kernel(x, w))
        return y, y

    ys = jax.jit(lambda x, w: jax.lax.scan(layer, x, w)[1])(x, pack(q))
    for i, y in enumerate(ys):
        each = jax.tree.map(lambda z, i=i: z[i], q)
        z = jax.jit(by_kernel)(x, pack(each))
        np.testing.assert_allclose(wide(y), np.tanh(wide(z)), atol=2.0**-7)
        assert_right(z, x, each)
        x = y


def test_vmap(rng):
    x, q, w = operands(rng, Problem(4, 100, 256, 128, batch=(3,), has_own_weights=True))
    run = jax.jit(jax.vmap(by_kernel))
    assert run.lower(x, w).as_text().count(_extension.PACKED_TARGET) == 1
    assert_right(run(x, w), x, q)
    one = jax.tree.map(lambda y: y[0], q)
    run = jax.jit(jax.vmap(by_kernel, (1, None), 1))
    assert run.lower(x, pack(one)).as_text().count(_extension.PACKED_TARGET) == 1
    assert_right(run(x, pack(one)), x, one)


@pytest.mark.parametrize("m", [7, 64])
def test_gradients_of_x(rng, m):
    x, q, w = operands(rng, Problem(m, 136, 256, 128, "uint4", has_zeros=True))
    t = jnp.asarray(rng.normal(size=(m, 136)), BF16)
    y, pullback = jax.vjp(jax.jit(lambda x: by_kernel(x, w)), x)
    assert_right(y, x, q)
    (dx,) = pullback(t)
    w64 = exact_weight(q)
    exact, size = wide(t) @ w64.T, np.abs(wide(t)) @ np.abs(w64.T)
    error = np.abs(wide(dx) - exact)
    assert dx.dtype == BF16
    assert np.all(error <= 2.0**-7 * size / np.sqrt(136) * 4 + 2.0**-8 * np.abs(exact))
    tangent = jax.jvp(lambda x: by_kernel(x, w), (x,), (x,))[1]
    np.testing.assert_array_equal(bits_of(tangent), bits_of(y))


def test_export_round_trip(rng):
    pytest.importorskip("flatbuffers")
    x, q, w = operands(rng, Problem(16, 100, 320, 64))
    checks = jax_tcgemm.export_disabled_checks()
    exported = jax.export.export(jax.jit(by_kernel), disabled_checks=checks)(x, w)
    assert _extension.PACKED_TARGET in exported.mlir_module()
    loaded = jax.export.deserialize(exported.serialize())
    got = jax.jit(loaded.call)(x, w)
    assert_right(got, x, q)
    np.testing.assert_array_equal(bits_of(got), bits_of(jax.jit(by_kernel)(x, w)))


def test_threads(rng):
    """Threads compile kernels at once, the same one and others, and run them."""
    same = Problem(5, 100, 448, 64, "int8")
    problems = [same, same, Problem(24, 72, 256, 32), Problem(1, 68, 1024, 128, "uint4")]
    given = [operands(rng, each) for each in problems]
    begin = threading.Barrier(len(problems))

    def work(x, q, w):
        begin.wait()
        run = jax.jit(lambda x, w: by_kernel(x, w))
        results = [run(x, w) for _ in range(50)]
        return [wrong(results[i], x, q) for i in (0, 49)]

    with concurrent.futures.ThreadPoolExecutor(len(problems)) as pool:
        for found in pool.map(lambda each: work(*each), given):
            assert found == [None, None]
