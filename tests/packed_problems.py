"""Random products with packed weights, each compared with float64 and with ``jax.numpy``."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from gpu_accuracy import poison
from packed_values import QTYPES, weight

from jax_tcgemm import Quantized, _extension, gemm, pack
from jax_tcgemm.kernels import packed as kernels

FLOATS = ("bfloat16", "float16", "float32")
_MOST_ELEMENTS = 2**21  # of the weights
_EDGES = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A product ``x @ W`` with a packed weight.

    Attributes:
        m: rows of each matrix of ``x``.
        n: columns of the weight.
        k: contracted extent.
        group: rows of the weight that share a scale.
        qtype: type of the weight's values.
        has_zeros: whether there are zero points.
        scale: dtype of the scales.
        activation: dtype of ``x``.
        output: dtype of the result.
        batch: leading dimensions of ``x``.
        has_own_weights: whether each matrix of ``x`` has a weight of its own.
    """

    m: int
    n: int
    k: int
    group: int
    qtype: str = "int4"
    has_zeros: bool = False
    scale: str = "bfloat16"
    activation: str = "bfloat16"
    output: str = "bfloat16"
    batch: tuple[int, ...] = ()
    has_own_weights: bool = False

    @property
    def rows(self) -> int:
        """Rows that multiply one weight."""
        return self.m if self.has_own_weights else self.m * math.prod(self.batch)

    @property
    def bits(self) -> int:
        return 4 if self.qtype.endswith("int4") else 8

    @property
    def has_kernel(self) -> bool:
        """True if a kernel must compute this on a Hopper GPU."""
        if not 0 < self.rows <= kernels.MOST_ROWS or self.k % 64:
            return False
        has_scales_of_x = self.scale == self.activation or self.activation == "bfloat16"
        fits = self.group in (32, 64, 128, self.k) or self.group % (1024 // self.bits) == 0
        return fits and (has_scales_of_x or self.rows <= 16)

    @property
    def is_exact(self) -> bool:
        """True if a kernel multiplies by exact weights and scales the sums."""
        row = None
        if self.has_kernel:
            row = kernels.choose(self.bits, self.rows, self.n, self.k, self.group)
        return row is not None and row.sums_are_scaled

    @property
    def family(self) -> str:
        return f"{self.qtype} {'by kernel' if self.has_kernel else 'by either'}"

    def operands(self, rng: np.random.Generator) -> tuple[jax.Array, Quantized]:
        """Draws ``x`` and the weight so that results are about 1 to 1000."""
        own = self.batch if self.has_own_weights else ()
        shape = (*own, self.k, self.n)
        options = {"has_zeros": self.has_zeros, "scale_dtype": "float32"}
        q = weight(rng, self.qtype, shape, self.group, **options)
        q = dataclasses.replace(q, scale=(q.scale * self.k**-0.5).astype(self.scale))
        x = rng.normal(size=(*self.batch, self.m, self.k))
        return jnp.asarray(x, self.activation), q


def draw(seed: int, index: int, kernels: str | None = None) -> Problem:
    """Draws a problem for the untuned choice, so ``kernels`` is ignored."""
    del kernels
    rng = np.random.default_rng([seed, index])
    m = int(rng.choice(_EDGES) if rng.random() < 0.5 else rng.integers(1, 65))
    if rng.random() < 0.06:
        m = int(rng.integers(65, 400))
    group = int(
        rng.choice([32, 64, 128, 256, 512, 0, 96], p=[0.15, 0.15, 0.3, 0.1, 0.1, 0.17, 0.03])
    )
    unit = math.lcm(group or 64, 64)
    k = unit * int(rng.integers(1, max(2, min(40, 6144 // unit))))
    n = int(rng.integers(1, 700))
    if rng.random() < 0.5:
        n = max(1, 64 * int(rng.integers(1, 9)) + int(rng.choice([-4, -1, 0, 1, 2, 4, 8, 36])))
    kind = rng.choice(["none", "rows", "weights"], p=[0.7, 0.15, 0.15])
    batch = () if kind == "none" else tuple(map(int, rng.integers(1, 4, int(rng.integers(1, 3)))))
    if kind == "rows" and rng.random() < 0.7:
        m = -(-m // math.prod(batch))
    while n > 1 and math.prod(batch) * n * k > _MOST_ELEMENTS:
        n = -(-n // 2)
    qtype = str(rng.choice(QTYPES, p=[0.35, 0.25, 0.2, 0.2]))
    activation = str(rng.choice(FLOATS[:2], p=[0.7, 0.3]))
    is_kept = rng.random() < 0.6
    return Problem(
        *(m, n, k, group or k, qtype),
        has_zeros=qtype.endswith("int4")
        and bool(rng.random() < (0.7 if qtype == "uint4" else 0.3)),
        scale=activation if is_kept else str(rng.choice(FLOATS)),
        activation=activation,
        output=activation if rng.random() < 0.5 else str(rng.choice(FLOATS)),
        batch=batch,
        has_own_weights=kind == "weights",
    )


def reference(x: jax.Array, q: Quantized, output: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the float64 product, the product of absolute values, and the result of ``jnp``.

    The exact weight is not rounded; ``jnp`` multiplies by the weight in the dtype of ``x``.
    """
    a, w = np.asarray(x, np.float64), exact_weight(q)
    dequantized = q.dequantize(x.dtype)
    if jax.default_backend() == "cpu":  # which lacks some 16-bit products with a float32 result
        x, dequantized = x.astype(jnp.float32), dequantized.astype(jnp.float32)
    plain = jnp.matmul(x, dequantized, preferred_element_type=jnp.float32).astype(output)
    return a @ w, np.abs(a) @ np.abs(w), np.asarray(plain, np.float64)


def exact_weight(q: Quantized) -> np.ndarray:
    """Returns the represented weight in float64."""
    value = np.asarray(q.qvalue.astype(jnp.float32), np.float64)
    repeat = value.shape[-2] // q.scale.shape[-2]
    if q.zero_point is not None:
        value = value - np.repeat(np.asarray(q.zero_point, np.float64), repeat, -2)
    return value * np.repeat(np.asarray(q.scale, np.float64), repeat, -2)


def wrong(got: jax.Array, x: jax.Array, q: Quantized, *, is_exact: bool = False) -> str | None:
    """Says how far a result is off, or returns ``None`` if it is right.

    The largest error, relative to the product of absolute values, is at most twice that of
    ``jnp``. Few elements are too few to measure an error by, so a rounding of the weights at its
    natural size is added, and one rounding of the result.

    Args:
        got: the result.
        x: the left operand.
        q: the weight.
        is_exact: whether only the rounding of float32 sums is allowed, which tensor cores
            truncate.
    """
    exact, size, plain = reference(x, q, got.dtype.name)
    if got.shape != exact.shape:
        return f"shape {got.shape}, not {exact.shape}"
    size = size + 1e-30
    error = np.abs(np.asarray(got, np.float64) - exact)
    k = x.shape[-1]
    if is_exact:
        allowed = (k / 16 + 8) * 2.0**-23
    else:
        allowed = 2 * float(np.max(np.abs(plain - exact) / size))
        allowed += 2 * float(jnp.finfo(x.dtype).eps) / math.sqrt(k) + 2.0**-22
    allowed = allowed * size + float(jnp.finfo(got.dtype).eps) / 2 * np.abs(exact)
    # Subnormal results.
    allowed = allowed + float(jnp.finfo(got.dtype).smallest_subnormal)
    bad = ~(error <= allowed)
    if not bad.any():
        return None
    worst = np.unravel_index(int(np.argmax(np.where(bad, error / allowed, 0))), error.shape)
    return (
        f"{int(bad.sum())} of {bad.size} elements are wrong, at {worst}: {got[worst]} instead of "
        f"{exact[worst]}, {error[worst] / allowed[worst]:.2f} times the allowed error"
    )


def compute(problem: Problem, x: jax.Array, q: Quantized) -> jax.Array:
    """Computes a problem by ``gemm``; where a kernel must compute it, nothing else may.

    Also not the kernel that dequantizes: it takes the place of one that does not compile.
    """
    config = "kernel" if problem.has_kernel else None
    options = {"preferred_element_type": problem.output, "config": config}
    w = pack(q)
    poison((*problem.batch, problem.m, problem.n), problem.output)
    run = jax.jit(lambda x, w: gemm(x, w, **options))
    if problem.has_kernel and jax.default_backend() == "gpu":
        assert f"@{_extension.PACKED_TARGET}(" in run.lower(x, w).as_text(), problem
    return run(x, w)


def failure(problem: Problem, rng: np.random.Generator) -> str | None:
    """Computes a problem and returns the reason why the result is wrong, or ``None``."""
    x, q = problem.operands(rng)
    got = compute(problem, x, q)
    if got.dtype != jnp.dtype(problem.output):
        return f"dtype {got.dtype}"
    return wrong(got, x, q, is_exact=problem.is_exact and jax.default_backend() == "gpu")
