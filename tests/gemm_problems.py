"""Random problems for `gemm`: drawing, exact results and tolerances."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gpu_accuracy import poison_buffers

from jax_tcgemm import _extension, gemm
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.kernels.arithmetic import ARITHMETIC
from jax_tcgemm.kernels.config import KernelConfig
from jax_tcgemm.problem.activations import ACTIVATIONS, resolve
from jax_tcgemm.tools import selftest
from jax_tcgemm.tools.chain import default_device

_MOST_PRODUCTS, _MOST_ELEMENTS = 3e9, 3e7
_SCALES = ("row_scale", "column_scale")
_VECTORS = ("bias", *_SCALES)
_STEEPEST = 1.13  # the largest slope of the activations with bounded slope
_ACTIVATION_ERROR = 4 * 2.0**-23  # exp and reciprocal each have an error of 2 ulp


class Operand(NamedTuple):
    """An array; `vmap` maps its `axis`."""

    shape: tuple[int, ...]
    dtype: str
    axis: int | None


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of `gemm`: `operands` are arrays, `call` is the rest of its arguments."""

    algorithm: str
    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    mapped: int | None
    operands: dict[str, Operand]
    call: dict[str, Any]

    @property
    def out_dtype(self) -> np.dtype:
        return jnp.dtype(self.call["preferred_element_type"] or self.operands["a"].dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        outermost = () if self.mapped is None else (self.mapped,)
        return (*outermost, *self.batch, self.m, self.n)

    @property
    def row(self) -> KernelConfig | None:
        return kernel_names.by_name(self.call["config"]) if self.call["config"] else None

    @property
    def family(self) -> str:
        return f"{self.algorithm} {self.row.arch if self.row else 'by heuristic'}"


# Drawing


def _extent(rng: np.random.Generator, largest: int, tile: int | None) -> int:
    kind = rng.choice(["edge", "small", "tile", "eights", "any"], p=[0.03, 0.12, 0.35, 0.3, 0.2])
    if kind == "edge":
        return int(rng.integers(2))
    if kind == "small":
        return int(rng.integers(2, 40))
    if kind == "tile":
        general = [16, 64, 128, 160, 192, 256]
        unit = int(rng.choice(general if tile is None else general + 6 * [tile]))
        return unit * int(rng.integers(1, largest // unit + 1)) + int(rng.integers(-1, 2))
    size = math.exp(rng.uniform(math.log(16), math.log(largest)))
    return 8 * round(size / 8) if kind == "eights" else round(size)


def _extents(
    rng: np.random.Generator, row: KernelConfig | None, count: int
) -> tuple[int, int, int]:
    """Draws m, n and k such that `count` products can be checked quickly."""
    tiles = (row.tile_m, row.tile_n, row.tile_k) if row else (None, None, None)
    m, n, k = (_extent(rng, *x) for x in zip((1500, 1500, 4000), tiles, strict=True))
    if rng.random() < 0.06:
        m, n, k = int(rng.integers(1, 65)), min(n, 256), int(rng.integers(4000, 40000))
        m, n = (m, n) if rng.random() < 0.5 else (n, m)
    while count * m * n * k > _MOST_PRODUCTS or count * max(m * k, k * n, m * n) > _MOST_ELEMENTS:
        m, n, k = (x // 2 if x == max(m, n, k) else x for x in (m, n, k))
    return m, n, k


def _broadcastable(rng: np.random.Generator, batch: tuple[int, ...]) -> tuple[int, ...]:
    first = int(rng.integers(len(batch) + 1)) if rng.random() < 0.33 else 0
    return tuple(1 if rng.random() < 0.2 else extent for extent in batch[first:])


def _operands(
    rng: np.random.Generator, shapes: dict[str, tuple[int, ...]], mapped: int | None, dtypes: list
) -> dict[str, Operand]:
    """Draws the dtypes of all operands except `a` and `b`, and the operands that `vmap` maps."""
    chosen = [name for name in shapes if rng.random() < 0.6] or ["a"]
    operands = {}
    for name, shape in shapes.items():
        dtype = str(rng.choice(dtypes))
        dtype = {"a": dtypes[0], "b": dtypes[0]}.get(name, dtype if shape else "float32")
        axis = None
        if mapped is not None and name in chosen:
            axis = int(rng.integers(len(shape) + 1))
            shape = (*shape[:axis], mapped, *shape[axis:])
        operands[name] = Operand(shape, dtype, axis)
    return operands


def _epilogue_shapes(
    rng: np.random.Generator, batch: tuple[int, ...], m: int, n: int
) -> dict[str, tuple[int, ...]]:
    partial = (*_broadcastable(rng, batch), 1, n)
    for_c = [None, (*batch, m, n), (m, n), (n,), (m, 1), partial]
    for_bias = [None, (n,), (*_broadcastable(rng, batch), n)]
    c = for_c[rng.choice(6, p=[0.45, 0.25, 0.1, 0.1, 0.05, 0.05])]
    bias = for_bias[rng.choice(3, p=[0.4, 0.4, 0.2])]
    alpha, beta = (() if x < 0.3 else None for x in rng.random(2))
    residual = for_c[rng.choice(6, p=[0.7, 0.15, 0.05, 0.05, 0.03, 0.02])]
    row_scale, column_scale = (
        (*_broadcastable(rng, batch), extent) if rng.random() < 0.15 else None for extent in (m, n)
    )
    shapes = {"c": c, "bias": bias, "alpha": alpha, "beta": beta if c else None}
    shapes |= {"residual": residual, "row_scale": row_scale, "column_scale": column_scale}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def draw(seed: int, index: int, kernels: str | None = None) -> Problem:
    """Draws a problem; with the glob `kernels`, for one of the kernels that it names."""
    rng = np.random.default_rng([seed, index])
    algorithm, row = str(rng.choice(list(ARITHMETIC), p=[0.45, 0.2, 0.05, 0.3])), None
    if kernels or rng.random() < 0.35:
        built = _extension.KERNEL_NAMES or {row.name for row in kernel_table.CONFIGS}
        rows = kernel_table.CONFIGS if kernels else kernel_names.for_algorithm(algorithm)
        rows = [
            x
            for x in rows
            if x.name in built and x.goes_by_name and not x.gated and x.grouped == "none"
        ]
        rows = [x for x in rows if fnmatch.fnmatch(x.name, kernels or "*")]
        row = rows[rng.integers(len(rows))] if rows else None
    algorithm = row.algorithm if row else algorithm

    batch = tuple(int(x) for x in rng.integers(1, 5, rng.choice(3, p=[0.6, 0.28, 0.12])))
    a_batch, b_batch = _broadcastable(rng, batch), _broadcastable(rng, batch)
    batch = np.broadcast_shapes(a_batch, b_batch)
    mapped = int(rng.integers(1, 5)) if rng.random() < 0.15 else None
    m, n, k = _extents(rng, row, math.prod(batch) * (mapped or 1))
    transpose_a, transpose_b = bool(rng.integers(2)), bool(rng.integers(2))
    if rng.random() < (0.5 if row is None else 0.9 if row.copies_whole_chunks else 0.2):
        unit = 16 // ARITHMETIC[algorithm].a.bytes
        m = -(-m // unit) * unit if transpose_a else m
        n = n if transpose_b else -(-n // unit) * unit
        k = k if transpose_a and not transpose_b else -(-k // unit) * unit

    shapes = {
        "a": (*a_batch, *((k, m) if transpose_a else (m, k))),
        "b": (*b_batch, *((n, k) if transpose_b else (k, n))),
    }
    shapes |= _epilogue_shapes(rng, batch, m, n)
    dtype = str(selftest.INPUT_DTYPES[algorithm])
    preferred = [None, dtype, "float32"][rng.integers(3)]
    operands = _operands(rng, shapes, mapped, [dtype, preferred or dtype, "float32"])
    activation = str(rng.choice(list(ACTIVATIONS))) if rng.random() < 0.5 else None
    # An activation is curved near arguments of one.
    weights = [0.2, 0.15, 0.05, 0.6] if activation else [0.5, 0.2, 0.05, 0.25]
    alpha = rng.choice([1.0, -0.5, 0.0, max(k, 1) ** -0.5], p=weights)
    call = {
        "alpha": float(np.float32(alpha)),
        "beta": float(rng.choice([1.0, 2.0, -0.5])),
        "activation": activation,
        "transpose_a": transpose_a,
        "transpose_b": transpose_b,
        "precision": algorithm if algorithm == "F16_F16_F16" or rng.random() < 0.5 else None,
        "preferred_element_type": preferred,
        "config": row.name if row else None,
    }
    return Problem(algorithm, batch, m, n, k, mapped, operands, call)


# Checking


def _formula(
    problem: Problem, arrays: Mapping[str, Any], matmul: Callable, activate: Callable
) -> Any:
    """Computes the formula, for NumPy and JAX arrays."""
    x: dict[str, Any] = {**problem.call}
    for name, array in arrays.items():
        axis = problem.operands[name].axis
        if axis is not None:
            array = array.transpose([axis, *(i for i in range(array.ndim) if i != axis)])
            rank = len(problem.shape) - (name in _VECTORS)
            array = array.reshape(array.shape[0], *(1,) * (rank - array.ndim), *array.shape[1:])
        x[name] = array
    a = x["a"].swapaxes(-1, -2) if x["transpose_a"] else x["a"]
    b = x["b"].swapaxes(-1, -2) if x["transpose_b"] else x["b"]
    z = x["alpha"] * matmul(a, b)
    z = z * x["row_scale"][..., None] if "row_scale" in x else z
    z = z * x["column_scale"][..., None, :] if "column_scale" in x else z
    z = z + x["beta"] * x["c"] if "c" in x else z
    z = activate(z + x["bias"][..., None, :] if "bias" in x else z)
    return z + x["residual"] if "residual" in x else z


def _exact(problem: Problem, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.matmul(np.ascontiguousarray(a), np.ascontiguousarray(b))

    with np.errstate(over="ignore"):
        return _formula(problem, arrays, matmul, resolve(problem.call["activation"]).exact)


def _baseline(problem: Problem, on_cpu: bool, arrays: dict[str, jax.Array]) -> jax.Array:
    """Returns XLA's result, before it is rounded to the result's dtype."""
    # XLA's CPU compiler supports few forms of TF32 and of 16-bit products with a float32 result.
    precision = None if on_cpu or problem.algorithm != "TF32_TF32_F32" else problem.algorithm
    kept = () if on_cpu else ("a", "b")
    wide = {name: x if name in kept else x.astype(jnp.float32) for name, x in arrays.items()}
    matmul = functools.partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)
    return _formula(problem, wide, matmul, resolve(problem.call["activation"]).reference)


def _by_gemm(problem: Problem, arrays: dict[str, jax.Array]) -> jax.Array:
    def call(x: dict[str, Any]) -> jax.Array:
        return gemm(**(problem.call | x))

    axes = {name: problem.operands[name].axis for name in arrays}
    return jax.vmap(call, in_axes=(axes,))(arrays) if problem.mapped else call(arrays)


def _tolerance(problem: Problem, arrays: Mapping[str, np.ndarray]) -> float:
    """Returns the tolerance of the activation's argument, beyond the baseline's error.

    A small result has too few elements to measure an error by, and XLA has more accurate paths for
    some results. So the tolerance adds a float32 rounding of the sum at its natural scale, |A| |B|,
    and one rounding of TF32 operands.
    """
    call, scale = problem.call, abs(problem.call["alpha"])
    for name, along_k in (("a", call["transpose_a"]), ("b", not call["transpose_b"])):
        axis = problem.operands[name].axis
        x = arrays[name] if axis is None else np.moveaxis(arrays[name], axis, 0)
        scale *= math.sqrt(np.square(x).sum(-2 if along_k else -1).max(initial=0.0))
    deviation = scale / math.sqrt(max(problem.k, 1))  # deviation of an element of alpha A B
    scale += abs(call["beta"]) * np.abs(arrays.get("c", np.zeros(1))).max(initial=0.0)
    for name in ("bias", "residual"):
        scale += np.abs(arrays.get(name, np.zeros(1))).max(initial=0.0)
    eps = float(jnp.finfo(jnp.float32).eps)
    total = eps * scale
    # Tensor cores truncate sums after every 16 steps along k; promoted sums hide that. If a row
    # cannot take a problem, its replacement has the same property for float32 results of the sizes
    # drawn here.
    row = problem.row
    rounds = row is not None and row.rounds_sums
    if problem.algorithm == "TF32_TF32_F32":
        total += 4 * 2.0**-10 * deviation
        eps = 0.0
    elif problem.algorithm == "F16_F16_F16":
        eps = float(jnp.finfo(jnp.float16).eps)
    elif rounds and problem.out_dtype == jnp.float32:
        eps = 0.0
    return total + math.ceil(problem.k / 16) * eps * 5 * deviation


def failure(problem: Problem, rng: np.random.Generator) -> str | None:
    """Runs a problem twice on random arrays and describes wrong results, if there are any.

    Raises:
        ValueError: the configuration does not take the problem.
    """
    arrays = {}
    for name, (shape, dtype, _) in problem.operands.items():
        x = rng.standard_normal(shape, np.float32)
        if name in problem.call or name in _SCALES:
            x = problem.call.get(name, 1.0) * rng.uniform(0.5, 1, shape)
        arrays[name] = np.asarray(x).astype(jnp.dtype(dtype))
    operands = jax.device_put(arrays)
    compiled = jax.jit(functools.partial(_by_gemm, problem)).lower(operands).compile()
    size = math.prod(problem.shape) * problem.out_dtype.itemsize
    results = []
    for _ in range(2):
        poison_buffers([size, size, arrays["a"].nbytes + arrays["b"].nbytes])
        results.append(compiled(operands))
    got, again = (np.asarray(x) for x in results)
    if got.shape != problem.shape or got.dtype != problem.out_dtype:
        return f"got {got.dtype}{got.shape}, expected {problem.out_dtype}{problem.shape}"
    if got.tobytes() != again.tobytes():
        return "two runs differ"
    exact = {name: x.astype(np.float64) for name, x in arrays.items()}
    expected = _exact(problem, exact)
    on_cpu = default_device().platform == "cpu"
    baseline = np.asarray(jax.jit(functools.partial(_baseline, problem, on_cpu))(operands))
    lost = np.abs(baseline - expected).max(initial=0.0)
    info = jnp.finfo(problem.out_dtype)
    steepest = np.full_like(expected, _STEEPEST)
    if problem.call["activation"] == "relu_squared":
        activated = _exact(problem, {x: y for x, y in exact.items() if x != "residual"})
        steepest = np.maximum(steepest, 2 * np.sqrt(activated))
    allowed = 2 * lost + steepest * _tolerance(problem, exact) + float(info.smallest_subnormal)
    roundings = float(info.eps) + _ACTIVATION_ERROR * (problem.call["activation"] is not None)
    allowed = allowed + roundings * np.abs(expected)
    if {"c", "residual"} <= set(exact):  # the result is rounded before the residual is added, too
        allowed += roundings * np.abs(exact["residual"]).max(initial=0.0)
    wrong = ~(np.abs(got.astype(np.float64) - expected) <= allowed)  # NaN counts as wrong
    # A value beyond the range of the result's type is infinite.
    largest = float(info.max) * (1 - float(info.eps))
    wrong &= ~(np.isinf(got) & (np.sign(got) * expected + allowed >= largest))
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{wrong.sum()} of {wrong.size} elements are wrong, the first {at}: got {got[at]}, expected"
        f" {expected[at]:.9g} to {allowed[at]:.3g}; the baseline's largest error is {lost:.3g}"
    )
