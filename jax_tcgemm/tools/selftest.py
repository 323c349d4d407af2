"""Checks every row of the kernel table on random problems against NumPy in float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.api.gated_gemm import gated_gemm
from jax_tcgemm.api.gemm import gemm
from jax_tcgemm.api.ragged_dot import ragged_dot
from jax_tcgemm.kernels import config as kernel_config
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem import activations, ragged
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, sum_dtype
from jax_tcgemm.problem.strides import Operands
from jax_tcgemm.tools.chain import default_device

PROBLEMS_PER_CONFIG = 3

# Without kernels, XLA computes all rows of an algorithm in the same way.
_PROBLEMS_WITHOUT_KERNELS = 12


def _is_gemm(config: kernel_config.KernelConfig) -> bool:
    """Returns true if ``gemm`` accepts the row by name, with any epilogue.

    The epilogue may run in a separate pass. Rows that swap operands are excluded: they support only
    sums without C, and other rows replace them for any other epilogue.
    """
    return not config.gated and config.grouped == "none" and not config.swap_ab


@dataclasses.dataclass(frozen=True)
class Problem:
    """One random problem for one row of the kernel table."""

    config: kernel_config.KernelConfig
    batch: int
    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    activation: str | None
    has_alpha: bool
    has_c: bool
    has_bias: bool
    float32_output: bool
    seed: int

    beta: ClassVar[float] = 0.5

    @property
    def alpha(self) -> float:
        return self.k**-0.5

    @property
    def out_dtype(self) -> np.dtype:
        outputs = self.config.arithmetic.outputs
        return jnp.dtype("float32" if self.float32_output else outputs[0].name)

    def describe(self) -> str:
        """Returns one line that identifies the problem."""
        fields = dataclasses.asdict(self) | {"config": self.config.name}
        return ", ".join(f"{name}={value}" for name, value in fields.items())


def draw_problem(
    config: kernel_config.KernelConfig, rng: np.random.Generator, *, plain: bool
) -> Problem:
    """Draws a problem that ``config`` supports.

    Args:
        config: a row of the kernel table.
        rng: the random number generator.
        plain: whether to use whole tiles and no epilogue, instead of random extents, layouts and
            epilogue.

    Returns:
        The problem; equal generators give equal problems.
    """
    # Some rows need leading dimensions that are a multiple of 16 bytes.
    unit = 16 // config.element_bytes if config.copies_whole_chunks else 1

    def extent(tile: int) -> int:
        if plain:
            return tile
        # At least 16: XLA computes very small products without TF32, so jnp.matmul would be no
        # reference for them.
        return unit * int(rng.integers(16 // unit, max(32, 2 * tile) // unit + 1))

    # Gated and grouped rows support bias and activation; rows with groups of k have no epilogue.
    is_gemm = _is_gemm(config)
    # The plain problem and about half of the problems of "sum" rows have no activation, so the
    # kernel itself computes their epilogue.
    activates = not config.swap_ab and (config.epilogue != "sum" or bool(rng.integers(2)))
    has_epilogue = not plain and config.grouped != "k"
    # The other rows truncate their sums, which would be visible in a float32 result.
    rounds_sums = config.rounds_sums or config.element_bytes == 4
    has_few_rows = config.gated and config.skinny  # fewer than columns, in all of the batch
    is_turned = config.swap_ab or has_few_rows  # tile_m goes along n
    batch = 1 if plain else int(rng.integers(1, 4))
    m = extent(config.tile_n if is_turned else config.tile_m)
    n = extent(config.tile_m if is_turned else config.tile_n)
    return Problem(
        config=config,
        batch=batch,
        m=m,
        n=max(n, unit * (batch * m // unit + 1)) if has_few_rows else n,
        k=extent(4 * config.tile_k),
        # Groups of k are groups of rows of both operands.
        transpose_a=config.grouped == "k" or (not plain and is_gemm and bool(rng.integers(2))),
        transpose_b=config.grouped != "k" and not plain and bool(rng.integers(2)),
        activation=(
            str(rng.choice(sorted(activations.ACTIVATIONS))) if has_epilogue and activates else None
        ),
        has_alpha=not plain
        if config.swap_ab
        else is_gemm and not (plain and config.epilogue == "none"),
        has_c=not plain and is_gemm and bool(rng.integers(2)),
        has_bias=has_epilogue and bool(rng.integers(2)),
        float32_output=not plain and rounds_sums and bool(rng.integers(2)),
        seed=int(rng.integers(2**31)),
    )


def draw_problems(
    configs: Sequence[kernel_config.KernelConfig], rng: np.random.Generator, *, use_config: bool
) -> list[Problem]:
    """Draws some problems for each row; without kernels, a dozen for each algorithm."""
    if use_config:
        rows = [(config, index) for config in configs for index in range(PROBLEMS_PER_CONFIG)]
    else:
        rows = []
        for algorithm in INPUT_DTYPES:
            kinds: dict[tuple[bool, str], list[kernel_config.KernelConfig]] = {}
            for config in configs:
                if config.algorithm == algorithm:
                    kinds.setdefault((config.gated, config.grouped), []).append(config)
            turns = itertools.cycle(kinds.values()) if kinds else ()
            for index, kind in zip(range(_PROBLEMS_WITHOUT_KERNELS), turns, strict=False):
                rows.append((kind[int(rng.integers(len(kind)))], index // len(kinds)))
    return [draw_problem(config, rng, plain=index == 0) for config, index in rows]


def _draw_operands(problem: Problem) -> dict[str, jax.Array | None]:
    dtype = INPUT_DTYPES[problem.config.algorithm]
    rng = np.random.default_rng(problem.seed)
    batch, m, n, k = problem.batch, problem.m, problem.n, problem.k

    def normal(*shape: int, dtype: Any = dtype) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    b = (n, k) if problem.transpose_b else (k, n)
    # If alpha is no argument, the weights are scaled by it.
    scale = 1.0 if problem.has_alpha else problem.alpha
    return {
        "a": normal(batch, k, m) if problem.transpose_a else normal(batch, m, k),
        "b": normal(*b) * jnp.asarray(scale, dtype),
        "b2": normal(*b) * jnp.asarray(scale, dtype) if problem.config.gated else None,
        "c": normal(batch, m, n, dtype=problem.out_dtype) if problem.has_c else None,
        "bias": normal(n, dtype=problem.out_dtype) if problem.has_bias else None,
    }


def _by_gemm(problem: Problem, use_config: bool, a, b, b2, c, bias):
    options = {
        "activation": problem.activation,
        "precision": getattr(jax.lax.DotAlgorithmPreset, problem.config.algorithm, None),
        "preferred_element_type": problem.out_dtype,
        "config": problem.config.name if use_config else None,
    }
    if problem.config.grouped != "none":
        return _by_groups(problem, a, b, bias, options)
    if problem.config.gated:
        biases = {"bias_gate": bias, "bias_up": bias}
        return gated_gemm(a, b, b2, transpose_w=problem.transpose_b, **biases, **options)
    return gemm(
        a,
        b,
        c,
        bias=bias,
        alpha=problem.alpha if problem.has_alpha else 1.0,
        beta=problem.beta,
        transpose_a=problem.transpose_a,
        transpose_b=problem.transpose_b,
        **options,
    )


def _by_groups(problem: Problem, a, b, bias, options: dict[str, Any]) -> jax.Array:
    """Computes the batch as groups of rows or as groups of k."""
    groups = problem.batch

    def repeated(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (groups, *x.shape))

    if problem.config.grouped == "m":
        d = ragged_dot(
            a.reshape(groups * problem.m, problem.k),
            repeated(b),
            jnp.full(groups, problem.m),
            bias=None if bias is None else repeated(bias),
            transpose_rhs=problem.transpose_b,
            **options,
        )
        return d.reshape(groups, problem.m, problem.n)
    spec = ragged.contraction(problem.out_dtype, options["precision"], options["config"])
    rows = (a, repeated(b))
    lhs, rhs = (x.reshape(groups * problem.k, -1) for x in rows)
    return gemm_primitive.bind(Operands(lhs, rhs, jnp.full(groups, problem.k)), spec)[0]


def _formula(problem: Problem, matmul: Callable, activate: Callable, a, b, b2, c, bias):
    """Returns the result and the pre-activation, for NumPy's or JAX's arrays."""
    a = a.mT if problem.transpose_a else a

    def product(b):
        z = matmul(a, b.mT if problem.transpose_b else b)
        z = problem.alpha * z if problem.has_alpha else z
        z = z if c is None else z + problem.beta * c
        return z if bias is None else z + bias

    z = product(b)
    return activate(z) if b2 is None else activate(z) * product(b2), z


def _groups_of_depth(matmul: Callable, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns ``a @ b`` for groups of k, over all rows with the other groups' rows set to zero."""
    groups, _, k = a.shape
    lhs, rhs = a.mT.reshape(groups * k, -1), jnp.tile(b, (groups, 1))
    group = jnp.arange(groups * k)[:, None] // k

    def product(own: int) -> jax.Array:
        x, y = (jnp.where(group == own, factor, 0) for factor in (lhs, rhs))
        return matmul(x.T, y)

    return jnp.stack([product(own) for own in range(groups)])


def _by_jnp(problem: Problem, on_cpu: bool, a, b, b2, c, bias):
    matmul = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    if problem.config.grouped == "k":
        matmul = functools.partial(_groups_of_depth, matmul)
    if on_cpu:
        # XLA's CPU compiler lacks bfloat16 products with a float32 result for some layouts. In
        # float32 the same products are exact and accumulated in the same way.
        a, b, b2 = (None if x is None else x.astype(jnp.float32) for x in (a, b, b2))
    c, bias = (None if x is None else x.astype(jnp.float32) for x in (c, bias))
    activate = activations.resolve(problem.activation).reference
    return _formula(problem, matmul, activate, a, b, b2, c, bias)[0].astype(problem.out_dtype)


def _exact(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def check(problem: Problem, *, use_config: bool) -> str | None:
    """Checks one problem against float64.

    The largest error may be at most twice the error of ``jnp.matmul`` with the same epilogue in the
    same dtypes, plus one rounding of the output.

    Args:
        problem: the problem to run.
        use_config: whether to request the problem's configuration by name.

    Returns:
        None if the result is right, else a description of the error.
    """
    operands = _draw_operands(problem)
    got = jax.jit(functools.partial(_by_gemm, problem, use_config))(**operands)
    shape = (problem.batch, problem.m, problem.n)
    if got.shape != shape or got.dtype != problem.out_dtype:
        return f"got {got.dtype}{got.shape}, expected {problem.out_dtype}{shape}"
    on_cpu = default_device().platform == "cpu"
    # Autotuning is off: it would take most of the time, and XLA's fastest kernel is not needed.
    options = None if on_cpu else {"xla_gpu_autotune_level": 0}
    by_jnp = functools.partial(_by_jnp, problem, on_cpu)
    baseline = jax.jit(by_jnp, compiler_options=options)(**operands)
    exact = {name: None if x is None else _exact(x) for name, x in operands.items()}
    activate = activations.resolve(problem.activation).exact
    expected, z = _formula(problem, np.matmul, activate, **exact)

    error = np.abs(_exact(got) - expected).max()
    allowed = 2 * np.abs(_exact(baseline) - expected).max()
    allowed += float(jnp.finfo(problem.out_dtype).eps) * np.abs(expected).max()
    if sum_dtype(problem.config.algorithm) == jnp.float16:
        # jnp.matmul accumulates in float32; a float16 accumulator is rounded by each instruction.
        roundings = -(-problem.k // problem.config.instruction_k) * float(
            jnp.finfo(jnp.float16).eps
        )
        allowed += roundings * np.abs(z).max()
    # The comparison is false for a NaN, so a NaN fails as well.
    return None if error <= allowed else f"error {error:.2e} is above {allowed:.2e}"
