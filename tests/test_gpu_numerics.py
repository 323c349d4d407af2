"""Every kernel configuration against float64: residues, layouts, alignments, epilogues, batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import (
    LAYOUTS,
    accumulation_slack,
    baseline_precision,
    in_float64,
    luck_slack,
    orientations,
    poison,
    residues,
    some,
    units,
)
from kernel_rows import by_config

from jax_tcgemm import gemm
from jax_tcgemm.kernels.config import KernelConfig
from jax_tcgemm.problem.activations import ACTIVATIONS
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES

pytestmark = pytest.mark.gpu


# Drawn anew in each run, since compiling programs takes nearly all of the time.
_RESIDUES_PER_LAYOUT = 2


BY_CONFIG = by_config()


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `gemm`, without its arrays.

    With `roundings`, this many float32 roundings of the largest sum are allowed.
    """

    config: KernelConfig
    m: int
    n: int
    k: int
    transpose_a: bool = False
    transpose_b: bool = False
    out_dtype: Any = None
    activation: str | None = None
    alpha: Any = 1.0
    beta: Any = 1.0
    a_batch: tuple[int, ...] = ()
    b_batch: tuple[int, ...] = ()
    c_shape: tuple[int, ...] | None = None
    bias_shape: tuple[int, ...] | None = None
    roundings: float = 0.0

    @property
    def in_dtype(self):
        return INPUT_DTYPES[self.config.algorithm]

    @property
    def result_dtype(self):
        return jnp.dtype(self.out_dtype or self.in_dtype)

    def drawn(self, normal):
        """Returns a, b, c and bias."""
        m, n, k = self.m, self.n, self.k
        shapes = (
            (*self.a_batch, *((k, m) if self.transpose_a else (m, k))),
            (*self.b_batch, *((n, k) if self.transpose_b else (k, n))),
            self.c_shape,
            self.bias_shape,
        )
        dtypes = [self.in_dtype] * 2 + [self.result_dtype] * 2
        pairs = zip(shapes, dtypes, strict=True)
        return [None if shape is None else normal(*shape, dtype=dtype) for shape, dtype in pairs]

    def by_gemm(self, a, b, c, bias):
        return gemm(
            a,
            b,
            c,
            bias=bias,
            alpha=self.alpha,
            beta=self.beta,
            activation=self.activation,
            transpose_a=self.transpose_a,
            transpose_b=self.transpose_b,
            precision=self.config.algorithm,
            preferred_element_type=self.result_dtype,
            config=self.config.name,
        )

    def epilogue(self, product, c, bias):
        z = self.alpha * product
        z = z if c is None else z + self.beta * c
        z = z if bias is None else z + bias[..., None, :]
        if self.activation is None:
            return z
        reference = ACTIVATIONS[self.activation].reference
        return in_float64(reference, z) if isinstance(z, np.ndarray) else reference(z)

    def by_matmul(self, a, b, c, bias):
        a, b = a.mT if self.transpose_a else a, b.mT if self.transpose_b else b
        wide = [None if x is None else x.astype(jnp.float32) for x in (c, bias)]
        precision = baseline_precision(self.config.algorithm)
        product = jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)
        return self.epilogue(product, *wide).astype(self.result_dtype)


@pytest.fixture
def check(normal, exact, assert_accurate):
    """Returns a function that compares the errors of cases with those of `jnp.matmul`."""

    def run(*cases: Case):
        args = [case.drawn(normal) for case in cases]
        # One program for all cases: compiling takes most of the time, most of it for each program.
        baselines = jax.jit(
            lambda args: [case.by_matmul(*x) for case, x in zip(cases, args, strict=True)]
        )(args)
        for baseline in baselines:
            poison(baseline.shape, baseline.dtype)
        results = jax.jit(
            lambda args: [case.by_gemm(*x) for case, x in zip(cases, args, strict=True)]
        )(args)
        for case, x, baseline, got in zip(cases, args, baselines, results, strict=True):
            compare_one(case, x, baseline, got)

    def compare_one(case, args, baseline, got):
        assert got.dtype == case.result_dtype
        a, b, c, bias = (None if x is None else exact(x) for x in args)
        a, b = a.mT if case.transpose_a else a, b.mT if case.transpose_b else b
        product = a @ b
        expected = case.epilogue(product, c, bias)
        algorithm, k = case.config.algorithm, case.k
        largest = np.abs(product).max(initial=0.0) * abs(float(case.alpha))
        slack = accumulation_slack(case.config, case.result_dtype, k, largest)
        slack += luck_slack(algorithm, k, got.size) * abs(float(case.alpha))
        if case.roundings:
            baseline = expected
            slack = case.roundings * float(jnp.finfo(jnp.float32).eps) * largest
        if case.activation == "relu_squared":  # it amplifies the error of z
            slack *= max(1.0, 2 * np.sqrt(np.abs(expected).max(initial=0.0)))
        assert_accurate(got, baseline, expected, slack)

    return run


@pytest.mark.parametrize(("transpose_a", "transpose_b"), LAYOUTS)
@BY_CONFIG
def test_residues(check, rng, config, transpose_a, transpose_b):
    unit_m, unit_n, unit_k = units(config, transpose_a, transpose_b)
    cases = []
    for tile_m, tile_n in orientations(config):
        all_m = residues(tile_m, unit_m, 3 * tile_m)
        all_n = residues(tile_n, unit_n, 2 * tile_n)
        all_k = residues(config.tile_k, unit_k, 9 * config.tile_k)
        for each in (all_m, all_n, all_k):
            rng.shuffle(each)
        extents = itertools.islice(zip(all_m, all_n, all_k, strict=False), _RESIDUES_PER_LAYOUT)
        cases += [Case(config, *drawn, transpose_a, transpose_b) for drawn in extents]
    check(*cases)


@by_config(arch="sm75")
def test_turing(check, config):
    """The first k-tile of 32 covers 8 of k; tiles end inside the parts of warps."""
    plain = Case(config, 520, 264, 136, transpose_b=True)
    check(plain, Case(config, 520, 264, 136, transpose_a=True, activation="gelu", a_batch=(3,)))


@BY_CONFIG
def test_float32_output(check, config):
    check(
        *(
            Case(config, 2 * tile_m, tile_n + 8, 5 * config.tile_k, out_dtype=jnp.float32)
            for tile_m, tile_n in orientations(config)
        )
    )


@BY_CONFIG
def test_long_promoted_sums(check, rng, config):
    """Groups of stages are added up, longer groups for longer k; some stages remain."""
    if not config.promote:
        pytest.skip("its sums are not promoted")
    check(
        *(promoted(config, stages) for stages in some(rng, [8, 9, 10, 31, 32, 33, 34, 35, 63], 3))
    )


def promoted(config, stages):
    extents = config.tile_m + 8, config.tile_n + 8, stages * config.tile_k - 8
    # A sum is rounded once a stage, or less often. XLA may add up any number of parts.
    return Case(config, *extents, out_dtype=jnp.float32, roundings=2 + math.sqrt(stages) / 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *[(2048, 2048, 8192), (1600, 2048, 2048), (4096, 4096, 320), (1024, 16000, 1000)],
        *[(16, 4096, 4096), (512, 512, 16384), (256, 4096, 4096), (1600, 2001, 1500)],
    ],
)
def test_float32_results_are_as_accurate_as_those_of_xla(normal, assert_accurate, m, n, k, dtype):
    """Some choices add up parts of k in float32, as XLA may; tensor cores truncate sums."""
    for transpose_a, transpose_b in LAYOUTS:
        a = normal(*((k, m) if transpose_a else (m, k)), dtype=dtype)
        b = normal(*((n, k) if transpose_b else (k, n)), dtype=dtype)
        flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        ours = functools.partial(gemm, preferred_element_type=jnp.float32, **flags)
        a_t, b_t = (x.mT if flip else x for x, flip in ((a, transpose_a), (b, transpose_b)))
        first = np.s_[:64]
        expected = np.asarray(a_t[first], np.float64) @ np.asarray(b_t, np.float64)
        by_matmul = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
        assert_accurate(jax.jit(ours)(a, b)[first], jax.jit(by_matmul)(a_t, b_t)[first], expected)


@BY_CONFIG
def test_unaligned_results(check, rng, config):
    """Rows and matrices of D begin anywhere, so neither TMA nor vectors can write them whole."""
    cases = []
    for (tile_m, tile_n), out_dtype in itertools.product(orientations(config), (None, jnp.float32)):
        m, n, k = tile_m + 5, 2 * int(rng.integers(tile_n)) + 1, 2 * config.tile_k
        case = Case(config, m, n, k, transpose_b=True, out_dtype=out_dtype, alpha=0.5)
        cases.append(dataclasses.replace(case, a_batch=(3,), bias_shape=(n,)))
    check(*cases)


@by_config(skinny=True)
def test_few_rows(check, rng, config):
    """More tiles along n than run at a time, so blocks continue with further tiles."""
    n, k = 600 * config.tile_m // config.split_k + 8, (config.split_k + 1) * config.tile_k
    few = some(rng, [1, 3, 16, 17, 33, 64], 3)
    check(*(Case(config, m, n, k, activation="silu", bias_shape=(n,)) for m in few))


@BY_CONFIG
def test_epilogue(check, rng, config):
    """Rows with epilogues try some activations; other rows share a pass, which needs one."""
    count = 3 if config.epilogue == "any" else 1
    check(*(drawn_epilogue(rng, config, x) for x in some(rng, [None, *ACTIVATIONS], count)))


def drawn_epilogue(rng, config, activation):
    tile_m, tile_n = orientations(config)[-1 if rng.integers(3) else 0]
    m, n, k = tile_m + 8, tile_n + 8, 4 * config.tile_k
    out_dtype = rng.choice([None, jnp.float32])
    case = Case(config, m, n, k, out_dtype=out_dtype, activation=activation, alpha=0.125, beta=-2.0)
    # Half of the draws have c and bias as full operands.
    c_shape = [None, (m, n), (m, n), (m, n), (n,), (m, 1)][rng.integers(6)]
    bias_shape = (n,) if c_shape == (m, n) or rng.integers(2) else None
    return dataclasses.replace(case, c_shape=c_shape, bias_shape=bias_shape)


_BATCHES = [((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 1), (1, 3)), ((2, 3), (3,))]


@BY_CONFIG
def test_batches(check, rng, config):
    check(*(in_batches(config, *batches) for batches in some(rng, _BATCHES, 3)))


def in_batches(config, a_batch, b_batch):
    batch = np.broadcast_shapes(a_batch, b_batch)
    case = Case(config, 24, 40, 72, activation="relu", alpha=0.5, a_batch=a_batch, b_batch=b_batch)
    return dataclasses.replace(case, c_shape=(*batch, 24, 40), bias_shape=(batch[-1], 40))


@pytest.mark.parametrize("algorithm", INPUT_DTYPES)
@pytest.mark.parametrize("shape", [(5, 7, 9), (65, 33, 130), (127, 129, 257), (1, 1000, 513)])
def test_heuristic_takes_any_alignment(normal, exact, assert_accurate, algorithm, shape):
    """Leading dimensions and batch strides are odd, and no configuration is named."""
    m, n, k = shape
    dtype = INPUT_DTYPES[algorithm]
    for transpose_a, transpose_b in LAYOUTS:
        a = normal(3, *((k, m) if transpose_a else (m, k)), dtype=dtype)
        b = normal(3, *((n, k) if transpose_b else (k, n)), dtype=dtype)
        flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        got = jax.jit(lambda a, b, flags=flags: gemm(a, b, precision=algorithm, **flags))(a, b)
        a, b = a.mT if transpose_a else a, b.mT if transpose_b else b
        expected = exact(a) @ exact(b)
        slack = 0.0
        if algorithm == "F16_F16_F16":
            slack = math.ceil(k / 16) * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
        baseline = jnp.matmul(a, b, precision=baseline_precision(algorithm))
        assert_accurate(got, baseline, expected, slack)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_traced_scalars_and_preactivation(normal, exact, dtype):
    a, b, bias = normal(200, 136, dtype=dtype), normal(136, 72, dtype=dtype), normal(72)

    def f(a, b, alpha, beta):
        return gemm(a, b, bias, bias=bias, alpha=alpha, beta=beta, activation="gelu")

    args = (a, b, jnp.float32(0.1), jnp.float32(-0.5))
    got, tangent = jax.jit(lambda *x: jax.jvp(f, x, (a, b, *args[2:])))(*args)
    product = exact(a) @ exact(b)
    z = 0.1 * product + 0.5 * exact(bias)
    dz = 0.3 * product - 0.5 * exact(bias)
    gelu = ACTIVATIONS["gelu"].reference
    expected = in_float64(lambda z, dz: jax.jvp(gelu, (z,), (dz,)), z, dz)
    tolerance = 4 * max(float(jnp.finfo(dtype).eps), 2.0**-10)
    for x, y in zip((got, tangent), expected, strict=True):
        np.testing.assert_allclose(exact(x), y, rtol=tolerance, atol=tolerance * np.abs(y).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_gradients(normal, exact, assert_accurate, dtype):
    x, w = normal(4, 33, 80, dtype=dtype), normal(80, 48, dtype=dtype)
    bias, g = normal(48, dtype=dtype), normal(4, 33, 48, dtype=dtype)
    precision = "TF32_TF32_F32" if dtype == jnp.float32 else None
    with jax.default_matmul_precision(precision):
        ours = jax.jit(lambda *p: jax.vjp(lambda x, w, b: gemm(x, w, bias=b), *p)[1](g))
        baselines = jax.jit(lambda *p: jax.vjp(lambda x, w, b: x @ w + b, *p)[1](g))
        actual, baseline = ours(x, w, bias), baselines(x, w, bias)
    expected = (
        exact(g) @ exact(w).T,
        np.einsum("imk,imn->kn", exact(x), exact(g)),
        exact(g).sum((0, 1)),
    )
    for got, base, z in zip(actual, baseline, expected, strict=True):
        assert_accurate(got, base, z)


@pytest.mark.parametrize("in_axes", [(0, None), (1, None), (2, 0), (1, 1), (None, 2), (0, 0)])
def test_vmap(normal, exact, assert_accurate, in_axes):
    shapes = [(40, 72), (72, 24)]
    args = [
        normal(*(shape if axis is None else np.insert(shape, axis, 5)), dtype=jnp.bfloat16)
        for shape, axis in zip(shapes, in_axes, strict=True)
    ]
    f = jax.jit(jax.vmap(lambda a, b: gemm(a, b), in_axes))
    g = jax.jit(jax.vmap(jnp.matmul, in_axes))
    moved = [
        exact(x) if axis is None else np.moveaxis(exact(x), axis, 0)
        for x, axis in zip(args, in_axes, strict=True)
    ]
    assert_accurate(f(*args), g(*args), moved[0] @ moved[1])


def test_large_batch(normal, exact, assert_accurate):
    """The batch is larger than a grid dimension."""
    a, b = normal(70000, 5, 8, dtype=jnp.bfloat16), normal(70000, 8, 3, dtype=jnp.bfloat16)
    assert_accurate(jax.jit(gemm)(a, b), jnp.matmul(a, b), exact(a) @ exact(b))


def test_more_than_2_to_the_31_elements(normal, exact):
    """The last rows of a product are right if operand and result both exceed 2^31 elements."""
    m, n, k = 2**16 + 8, 2**15 + 8, 2**15 + 64
    a = jnp.zeros((m, k), jnp.bfloat16).at[-4:].set(normal(4, k, dtype=jnp.bfloat16))
    b = jnp.zeros((k, n), jnp.bfloat16).at[:, -4:].set(normal(k, 4, dtype=jnp.bfloat16))
    got = jax.jit(gemm)(a, b)
    expected = exact(a[-4:]) @ exact(b[:, -4:])
    np.testing.assert_allclose(exact(got[-4:, -4:]), expected, rtol=1e-2, atol=1)
    assert not bool(jnp.any(got[:-4]))
    assert not bool(jnp.any(got[:, :-4]))
