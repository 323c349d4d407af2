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
