"""Gated products, layers and their gradients on the GPU, against float64."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import (
    EVERY_ACTIVATION,
    FLOATS,
    LAYOUTS,
    accumulation_slack,
    in_float64,
    poison,
    residues,
    some,
    units,
)
from kernel_rows import by_config

from jax_tcgemm import _compat, gated_gemm, gated_mlp, mlp
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.primitives.epilogue_derivative import activation_tangent
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

pytestmark = pytest.mark.gpu


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
    unit_n = 8 if packed and config.copies_whole_chunks else unit_n
    all_m = residues(config.tile_m, 1, 3 * config.tile_m)
    all_n = residues(config.output_n, unit_n, config.tile_n)
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
    """Checks the result alone and with the pre-activations, with and without biases."""
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

    # The tolerance of the kernels' own sums, visible in a float32 result.
    k = shape[2]
    slack = 30 * accumulation_slack(config, out_dtype, k, 5.0)
    if config.rounds_sums:  # these sums are in another order
        slack += float(jnp.finfo(jnp.float32).eps) * k**0.5 * 5.0
    compare(ours, formula, args, out_dtype, config.algorithm, slack)

    def with_preactivations(x, *args):
        weights, vectors = args[: 2 - packed], args[2 - packed :]
        w_axes = (1, 0) if transpose_w else (0, 1)
        names = ["a", "b", "b2"][: 3 - packed] + ["bias", "bias2"][: len(vectors)]
        axes = [(0, 1), *[w_axes] * len(weights), *[(0,)] * len(vectors)]
        spec = GemmSpec(
            Operands(None, None)._replace(**dict(zip(names, axes, strict=True))),
            jnp.dtype(dtype),
            _compat.canonicalize_precision(None),
            Epilogue("gated", activation, results=(True, True, True)),
            config=config.name,
            packed=packed,
        )
        values = dict(zip(names, (x, *weights, *vectors), strict=True))
        return gemm_primitive.bind(Operands(None, None)._replace(**values), spec)

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
    expected = in_float64(jax.vmap(formula, in_axes), *args)
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
    expected = in_float64(functools.partial(step, formula), *args)
    for x, y, wanted in zip(got, baseline, expected, strict=True):
        assert x.dtype == dtype
        assert_accurate(x, y, wanted)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", [None, *EVERY_ACTIVATION], ids=str)
def test_activation_gradients(request, normal, rng, compare, activation, dtype, biased):
    """Uses the pass for every size, unless there is nothing to compute."""
    if activation is not None or biased:
        request.getfixturevalue("never_apart")
    derivative = resolve(activation).derivative

    def ours(z, g):
        def tangent(*linear):
            return activation_tangent(activation, z, *linear)

        bias = [jnp.zeros(z.shape[-1], dtype)] * biased
        return jax.linear_transpose(tangent, z, *bias)(g)

    def formula(matmul, z, g):
        dz = derivative(z) * g
        return [dz, dz.sum((0, 1))][: 1 + biased]

    for batch, rows in some(rng, [(1, 1), (2, 7), (3, 64), (1, 129), (2, 1000)]):
        n = int(rng.integers(1, 300)) * int(rng.choice([1, 8]))
        z, g = normal(batch, rows, n, dtype=dtype), normal(batch, rows, n, dtype=dtype)
        compare(ours, formula, (z, g), dtype)


@pytest.mark.usefixtures("never_apart")
def test_float32_sums_of_an_activation_gradient(normal):
    z, g = normal(3000, 264, dtype=jnp.bfloat16), normal(3000, 264, dtype=jnp.bfloat16)

    def sums(z, g):
        def tangent(t, bias):
            return activation_tangent("gelu", z, t, bias)

        return jax.linear_transpose(tangent, z, jnp.zeros(264))(g)[1]

    expected = resolve("gelu").derivative(z.astype(jnp.float32)) * g.astype(jnp.float32)
    got = jax.jit(sums)(z, g)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected.sum(0), atol=1e-5 * np.abs(expected).sum(0).max())


def test_second_derivatives(normal):
    """Forward over reverse: our kernels use TF32, XLA float32."""
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
