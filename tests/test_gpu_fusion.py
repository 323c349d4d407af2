"""Fused epilogues, gated products and the gemms of derivatives on the GPU, against float64."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_rows import by_config
from test_gpu_numerics import (
    LAYOUTS,
    accumulation_slack,
    baseline_precision,
    poison,
    residues,
    units,
)

from jax_tcgemm import _compat, clip, gated, gated_gemm, gated_mlp, gemm, mlp, primitive, softcap
from jax_tcgemm.epilogues import ACTIVATIONS, resolve
from jax_tcgemm.spec import INPUT_DTYPES, GatedSpec, GemmSpec
from jax_tcgemm.strides import Operands

pytestmark = pytest.mark.gpu

EVERY_ACTIVATION = [*ACTIVATIONS, softcap(1.5), clip(-0.75, 1.25)]
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def some(rng, choices, count=2):
    """Draws a few: nearly all of the time goes into compiling a program for each."""
    return [choices[i] for i in rng.permutation(len(choices))[:count]]


@pytest.fixture
def compare(exact, assert_accurate):
    """Holds the results of a function against those of a formula, in float64 and by XLA.

    The formula takes `matmul` first, and all arrays in one type.
    """

    def run(ours, formula, args, dtype, algorithm=None, slack=0.0):
        precision = baseline_precision(algorithm) if algorithm else None
        factors = INPUT_DTYPES[algorithm] if algorithm else None

        def matmul(a, b):
            # The arrays are float32; in the products they are of the operands' type again.
            a, b = (x if factors is None else x.astype(factors) for x in (a, b))
            return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)

        def by_xla(*args):
            results = formula(matmul, *(x.astype(jnp.float32) for x in args))
            return [x.astype(dtype) for x in results]

        baselines = jax.jit(by_xla)(*args)
        for shape in {x.shape for x in baselines}:
            poison(shape, dtype)
        got = jax.jit(ours)(*args)
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            expected = formula(jnp.matmul, *(jnp.asarray(exact(x)) for x in args))
            expected = [np.asarray(x) for x in expected]
        for x, baseline, wanted in zip(got, baselines, expected, strict=True):
            assert x.dtype == dtype
            assert_accurate(x, baseline, wanted, slack)

    return run


# Epilogues of one product


@by_config()
def test_residuals_and_scales(compare, normal, rng, config):
    for activation in some(rng, [None, *EVERY_ACTIVATION]):
        check_residual_and_scales(compare, normal, rng, config, activation)


def check_residual_and_scales(compare, normal, rng, config, activation):
    m, n, k = config.tile_m + 8, config.tile_n + 8, 4 * config.tile_k
    algorithm = config.algorithm
    dtype = INPUT_DTYPES[algorithm]
    out_dtype = jnp.dtype(rng.choice([dtype, jnp.float32]))
    addend = jnp.dtype(rng.choice([out_dtype, jnp.float32]))
    residual_shape = [(m, n), (n,), (m, 1)][rng.integers(3)]
    args = (
        normal(m, k, dtype=dtype),
        normal(k, n, dtype=dtype),
        normal(n, dtype=addend),
        normal(*residual_shape, dtype=addend),
        jnp.asarray(rng.uniform(0.5, 1, m), jnp.float32),
        jnp.asarray(rng.uniform(0.5, 1, n), jnp.float32),
    )
    alpha = 2.0 ** -int(np.log2(k) / 2)

    def ours(a, b, bias, residual, row_scale, column_scale):
        result = gemm(
            a,
            b,
            alpha=alpha,
            bias=bias,
            residual=residual,
            row_scale=row_scale,
            column_scale=column_scale,
            activation=activation,
            precision=algorithm,
            preferred_element_type=out_dtype,
            config=config.name,
        )
        return [result]

    def formula(matmul, a, b, bias, residual, row_scale, column_scale):
        z = alpha * row_scale[:, None] * column_scale * matmul(a, b) + bias
        return [resolve(activation).reference(z) + residual]

    slack = 8 * accumulation_slack(config, out_dtype, k, alpha * 5 * k**0.5)
    compare(ours, formula, args, out_dtype, algorithm, slack)


@by_config()
def test_scales_alone(compare, normal, rng, config):
    """Without anything else in the epilogue, which must not count as none."""
    m, n, k = config.tile_m + 8, config.tile_n + 8, 2 * config.tile_k
    dtype = INPUT_DTYPES[config.algorithm]
    names = [["row_scale"], ["column_scale"], ["row_scale", "column_scale"]][rng.integers(3)]
    extents = {"row_scale": m, "column_scale": n}
    scales = [jnp.asarray(rng.uniform(0.5, 1, extents[name]), jnp.float32) for name in names]

    def ours(a, b, *scales):
        options = dict(zip(names, scales, strict=True))
        return [gemm(a, b, precision=config.algorithm, config=config.name, **options)]

    def formula(matmul, a, b, *scales):
        z = matmul(a, b)
        for name, scale in zip(names, scales, strict=True):
            z = z * (scale[:, None] if name == "row_scale" else scale)
        return [z]

    args = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype), *scales
    slack = accumulation_slack(config, jnp.dtype(dtype), k, 5 * k**0.5)
    compare(ours, formula, args, dtype, config.algorithm, slack)


@pytest.mark.parametrize("c_role", ["derivative", "gated_derivative"])
@by_config()
def test_derivatives_of_activations(compare, normal, rng, config, c_role):
    algorithm = config.algorithm
    dtype = INPUT_DTYPES[algorithm]
    is_gated = c_role == "gated_derivative"
    for activation in some(rng, EVERY_ACTIVATION):
        f = resolve(activation)
        m, n, k = config.tile_m + 8, 2 * config.tile_n - 8, 3 * config.tile_k
        addend = jnp.dtype(rng.choice([dtype, jnp.float32]))
        args = (
            normal(m, k, dtype=dtype) / 8,
            normal(k, n, dtype=dtype) / 8,
            *(normal(m, n, dtype=addend) for _ in range(1 + is_gated)),
        )
        axes = Operands((0, 1), (0, 1), (0, 1), c2=(0, 1) if is_gated else None)
        spec = GemmSpec(
            axes,
            jnp.dtype(dtype),
            _compat.canonicalize_precision(algorithm),
            activation=activation,
            config=config.name,
            c_role=c_role,
        )

        def ours(a, b, c, c2=None, spec=spec):
            return primitive.bind(Operands(a, b, c, c2=c2), spec)

        def formula(matmul, a, b, c, c2=None, f=f):
            z = matmul(a, b)
            if c2 is None:
                return [z * f.derivative(c)]
            return [z * c2 * f.derivative(c), z * f.reference(c)]

        slack = 40 * accumulation_slack(config, dtype, k, 5 / 64 * k**0.5)
        compare(ours, formula, args, dtype, algorithm, slack)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_results_of_any_type(compare, normal, dtype, out_dtype):
    args = normal(200, 136, dtype=dtype), normal(136, 72, dtype=dtype), normal(72)

    def ours(a, b, bias):
        options = {"preferred_element_type": out_dtype, "activation": "gelu"}
        return [gemm(a, b, bias=bias, alpha=0.125, **options)]

    def formula(matmul, a, b, bias):
        return [resolve("gelu").reference(0.125 * matmul(a, b) + bias)]

    algorithm = {2: None, 4: "TF32_TF32_F32"}[jnp.dtype(dtype).itemsize]
    compare(ours, formula, args, out_dtype, algorithm)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_over_many_rows(compare, normal, dtype):
    """The gradient of a bias, which is a product with ones where it is large."""
    args = normal(8200, 24, dtype=dtype) / 8, normal(24, 520, dtype=dtype), normal(520, dtype=dtype)

    def ours(a, b, bias):
        def loss(bias):
            return gemm(a, b, bias=bias, activation="tanh").astype(jnp.float32).sum()

        return [jax.grad(loss)(bias)]

    def formula(matmul, a, b, bias):
        return [(1 - jnp.tanh(matmul(a, b) + bias) ** 2).sum(0)]

    # Each term is rounded before it is added.
    slack = 8200**0.5 * float(jnp.finfo(dtype).eps)
    compare(ours, formula, args, dtype, slack=slack)


@pytest.mark.parametrize("donated", [False, True])
def test_gradients_are_accumulated_in_place(normal, exact, donated):
    x, dy = normal(512, 136, dtype=jnp.bfloat16), normal(512, 72, dtype=jnp.bfloat16)
    total = normal(136, 72)
    expected = exact(total)

    def accumulate(total, x, dy):
        return gemm(x, dy, total, transpose_a=True, preferred_element_type=jnp.float32)

    step = jax.jit(accumulate, donate_argnums=0 if donated else ())
    for _ in range(3):
        before, previous = total, exact(total)
        total = step(total, x, dy)
        if not donated:
            np.testing.assert_array_equal(exact(before), previous)
        expected = expected + exact(x).T @ exact(dy)
    np.testing.assert_allclose(exact(total), expected, rtol=1e-5, atol=1e-3)

    def scanned(total, x, dy):
        return jax.lax.scan(lambda t, _: (accumulate(t, x, dy), None), total, length=4)[0]

    got = jax.jit(scanned)(jnp.zeros((136, 72)), x, dy)
    np.testing.assert_allclose(exact(got), 4 * exact(x).T @ exact(dy), rtol=1e-5, atol=1e-3)


# Gated products


def gated_args(normal, m, n, k, dtype, transpose_w, packed, biases):
    shapes = [(n, k) if transpose_w else (k, n)] * 2
    if packed:
        shapes = [(2 * n, k) if transpose_w else (k, 2 * n)]
    weights = [(normal(*shape) * max(k, 1) ** -0.5).astype(dtype) for shape in shapes]
    return [normal(m, k, dtype=dtype), *weights, *(normal(n, dtype=b) for b in biases)]


def gated_formula(matmul, x, *args, transpose_w, packed, biases, activation, results=1):
    weights, vectors = args[: 2 - packed], list(args[2 - packed :])
    if packed:
        weights = jnp.split(weights[0], 2, axis=0 if transpose_w else 1)
    products = [matmul(x, w.mT if transpose_w else w) for w in weights]
    g, u = (z + vectors.pop(0) if vectors else z for z in products)
    return [resolve(activation).reference(g) * u, g, u][:results]


@pytest.mark.parametrize(("transpose_w", "packed"), LAYOUTS)
@by_config(gated=True)
def test_gated_residues(compare, normal, rng, config, transpose_w, packed):
    _, unit_n, unit_k = units(config, False, transpose_w)
    unit_n = 8 if packed else unit_n
    all_m = residues(config.tile_m, 1, 3 * config.tile_m)
    all_n = residues(config.tile_n // 2, unit_n, config.tile_n)
    all_k = residues(config.tile_k, unit_k, 9 * config.tile_k)
    for extents in (all_m, all_n, all_k):
        rng.shuffle(extents)
    for m, n, k in itertools.islice(zip(all_m, all_n, all_k, strict=False), 3):
        check_gated(compare, normal, rng, config, (m, n, k), transpose_w, packed)


@pytest.mark.parametrize("activation", [None, *EVERY_ACTIVATION], ids=str)
@by_config(gated=True)
def test_gated_activations(compare, normal, rng, config, activation):
    shape = config.tile_m + 8, config.tile_n + 8, 3 * config.tile_k
    for packed in (False, True):
        check_gated(compare, normal, rng, config, shape, False, packed, activation)


def check_gated(
    compare, normal, rng, config, shape, transpose_w=False, packed=False, activation="silu"
):
    """The result alone and with the pre-activations, with and without biases."""
    dtype = INPUT_DTYPES[config.algorithm]
    addend = jnp.dtype(rng.choice([dtype, jnp.float32]))
    biases = [addend] * 2 if rng.integers(2) else []
    args = gated_args(normal, *shape, dtype, transpose_w, packed, biases)
    out_dtype = jnp.dtype(rng.choice([dtype, jnp.float32]))
    layout = {"transpose_w": transpose_w, "packed": packed, "biases": biases}
    formula = functools.partial(gated_formula, activation=activation, **layout)

    def ours(x, *args):
        weights, vectors = args[: 2 - packed], args[2 - packed :]
        named = dict(zip(("bias_gate", "bias_up"), vectors, strict=False))
        return [
            gated_gemm(
                x,
                *weights,
                **named,
                activation=activation,
                transpose_w=transpose_w,
                preferred_element_type=out_dtype,
                config=config.name,
            )
        ]

    # The kernels' own sums, which a float32 result shows.
    k = shape[2]
    slack = 30 * accumulation_slack(config, out_dtype, k, 5.0)
    compare(ours, formula, args, out_dtype, config.algorithm, slack)

    def with_preactivations(x, *args):
        weights, vectors = args[: 2 - packed], args[2 - packed :]
        w_axes = (1, 0) if transpose_w else (0, 1)
        names = ["a", "b", "b2"][: 3 - packed] + ["bias", "bias2"][: len(vectors)]
        axes = [(0, 1), *[w_axes] * len(weights), *[(0,)] * len(vectors)]
        spec = GatedSpec(
            Operands(None, None)._replace(**dict(zip(names, axes, strict=True))),
            jnp.dtype(dtype),
            _compat.canonicalize_precision(None),
            activation=activation,
            config=config.name,
            packed=packed,
            results=(True, True, True),
        )
        values = dict(zip(names, (x, *weights, *vectors), strict=True))
        return gated.bind(Operands(None, None)._replace(**values), spec)

    three = functools.partial(formula, results=3)
    compare(with_preactivations, three, args, dtype, config.algorithm)


@pytest.mark.parametrize("in_axes", [(0, None, None), (1, 1, 1), (None, 0, 0), (0, 1, 1)])
def test_gated_vmap(normal, exact, assert_accurate, in_axes):
    shapes = [(40, 72), (72, 24), (72, 24)]
    args = [
        normal(*(shape if axis is None else np.insert(shape, axis, 5)), dtype=jnp.bfloat16)
        for shape, axis in zip(shapes, in_axes, strict=True)
    ]

    def formula(x, w, v):
        return jax.nn.silu(x @ w) * (x @ v)

    got = jax.jit(jax.vmap(gated_gemm, in_axes))(*args)
    baseline = jax.jit(jax.vmap(formula, in_axes))(*args)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(exact(x)) for x in args]
        expected = np.asarray(jax.vmap(formula, in_axes)(*wide))
    assert_accurate(got, baseline, expected)


# Layers and their gradients


def plain_mlp(x, w1, b1, w2, b2):
    return jax.nn.gelu(x @ w1 + b1) @ w2 + b2


def plain_gated(x, w1, b1, w2, b2):
    gate, up = jnp.split(x @ w1 + b1, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ w2[: w2.shape[0] // 2] + b2


def two_weights(x, w1, b1, w2, b2, **options):
    (w_gate, w_up), (gate, up) = jnp.split(w1, 2, axis=-1), jnp.split(b1, 2)
    biases = {"bias_gate": gate, "bias_up": up, "bias_down": b2}
    return gated_mlp(x, w_gate, w_up, w2[: w2.shape[0] // 2], **biases, **options)


def one_weight(x, w1, b1, w2, b2, **options):
    gate, up = jnp.split(b1, 2)
    biases = {"bias_gate": gate, "bias_up": up, "bias_down": b2}
    return gated_mlp(x, w1, None, w2[: w2.shape[0] // 2], **biases, **options)


@pytest.mark.parametrize(
    ("shape", "recompute"), [((3, 40, 72, 128, 56), True), ((1, 257, 264, 400, 136), False)]
)
@pytest.mark.parametrize(
    ("form", "formula"),
    [(mlp, plain_mlp), (two_weights, plain_gated), (one_weight, plain_gated)],
    ids=["mlp", "gated", "packed"],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_values_and_gradients_of_layers(
    normal, exact, assert_accurate, form, formula, dtype, shape, recompute
):
    batch, m, k, f, n = shape
    shapes = ((batch, m, k), (k, f), (f,), (f, n), (n,))
    args = [(normal(*s) * (s[0] ** -0.5 if len(s) == 2 else 1)).astype(dtype) for s in shapes]
    g = normal(batch, m, n, dtype=dtype)

    def step(function, *args):
        y, pullback = jax.vjp(function, *args)
        return [y, *pullback(g.astype(y.dtype))]

    ours = functools.partial(form, recompute_activation=recompute)
    precision = "TF32_TF32_F32" if dtype == jnp.float32 else None
    with jax.default_matmul_precision(precision):
        baseline = jax.jit(functools.partial(step, formula))(*args)
        for x in args:
            poison(x.shape, x.dtype)
        got = jax.jit(functools.partial(step, ours))(*args)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        expected = step(formula, *(jnp.asarray(exact(x)) for x in args))
        expected = [np.asarray(x) for x in expected]
    for x, y, wanted in zip(got, baseline, expected, strict=True):
        assert x.dtype == dtype
        assert_accurate(x, y, wanted)


def test_second_derivatives(normal):
    """Forward over reverse, by kernels in TF32 and by XLA in float32."""
    shapes = ((40, 72), (72, 128), (128,), (128, 56), (56,))
    args = [normal(*s) * (s[0] ** -0.5 if len(s) == 2 else 1) for s in shapes]
    tangents = [normal(*x.shape) for x in args]

    def second(function):
        grad = jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), range(5))
        return jax.jit(lambda *a: jax.jvp(grad, a, tuple(tangents))[1])(*args)

    for form, formula in ((mlp, plain_mlp), (two_weights, plain_gated)):
        with jax.default_matmul_precision("highest"):
            expected = second(formula)
        for x, y in zip(second(form), expected, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-2 * np.abs(y).max())
