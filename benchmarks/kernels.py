"""Speed of the kernels beside XLA's own, as a Markdown table: the figures of the README.

Kernel time by CUPTI, the two alternating in one process, medians; then the wall time of a chain of
small products in one jitted function, where launches count. Usage: python -P benchmarks/kernels.py
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_tcgemm import gemm
from jax_tcgemm.benchmarking import argument_set_count, time_interleaved

CHAIN_LENGTH = 100


@dataclasses.dataclass(frozen=True)
class Case:
    """One product; ``layout`` as a BLAS writes it: n as given, t stored transposed."""

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "nn"
    activation: str | None = None

    @property
    def label(self) -> str:
        """The case in a few words."""
        fused = f", bias + {self.activation}" if self.activation else ""
        return f"{self.dtype} {self.layout} {self.m} x {self.n} x {self.k}{fused}"

    @property
    def tflop(self) -> float:
        """Floating-point operations of the product, in 10^12."""
        return 2e-12 * self.m * self.n * self.k


LAYOUTS = ("nn", "nt", "tn", "tt")
CASES = (
    *(
        Case(size, size, size, dtype, layout)
        for dtype, size, layout in itertools.product(("bfloat16", "float16"), (4096, 8192), LAYOUTS)
    ),
    *(Case(4096, 4096, 4096, "float32", layout) for layout in LAYOUTS),
    Case(4096, 4096, 64, "float32", "tn"),
    *(Case(4097, 4097, 4097, "bfloat16", layout) for layout in LAYOUTS),
    *(Case(8192, 14336, 4096, "bfloat16", "nn", fused) for fused in (None, "gelu", "silu")),
    *(Case(size, size, size, "bfloat16") for size in (256, 512, 1024, 2048)),
)


def competitors(case: Case) -> dict[str, Callable]:
    """The product by ``gemm`` and by the natural JAX expression."""
    transpose_a, transpose_b = (letter == "t" for letter in case.layout)

    def ours(a, b, bias):
        bias = bias if case.activation else None
        return gemm(
            a,
            b,
            bias=bias,
            activation=case.activation,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
        )

    def xla(a, b, bias):
        product = jnp.matmul(a.T if transpose_a else a, b.T if transpose_b else b)
        return getattr(jax.nn, case.activation)(product + bias) if case.activation else product

    return {"gemm": ours, "xla": xla}


def argument_sets(case: Case) -> list[tuple[jax.Array, ...]]:
    """Fresh normal operands, enough sets of them not to stay in the L2 cache."""
    m, n, k, dtype = case.m, case.n, case.k, jnp.dtype(case.dtype)
    transpose_a, transpose_b = (letter == "t" for letter in case.layout)
    sets = argument_set_count((m * k + k * n + m * n) * dtype.itemsize)

    def operands(key):
        keys = jax.random.split(key, 3)
        shapes = ((k, m) if transpose_a else (m, k), (n, k) if transpose_b else (k, n), (n,))
        return tuple(
            jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
        )

    return [operands(key) for key in jax.random.split(jax.random.key(time.time_ns()), sets)]


def print_products() -> None:
    """One row for each case."""
    print("| product | gemm us | XLA us | gemm TFLOP/s | XLA time / gemm time |")
    print("| --- | --- | --- | --- | --- |")
    for case in CASES:
        timings = time_interleaved(competitors(case), argument_sets(case), reps=20)
        ours, xla = timings["gemm"].median, timings["xla"].median
        print(
            f"| {case.label} | {ours * 1e6:.1f} | {xla * 1e6:.1f} | {case.tflop / ours:.0f} "
            f"| {xla / ours:.2f} |",
            flush=True,
        )


def print_chains() -> None:
    """Wall time per product of a jitted chain on donated, so unmoving, buffers."""
    print(f"\n| chain of {CHAIN_LENGTH} | gemm us per op (median, best) | XLA us per op |")
    print("| --- | --- | --- |")
    for size in (16, 32, 64):
        w = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) / size**0.5
        samples = {"gemm": [], "xla": []}
        functions = {"gemm": gemm, "xla": jnp.matmul}
        chains = {name: _chain(function) for name, function in functions.items()}
        state = {name: jnp.copy(w) for name in chains}
        for _ in range(20):
            for name, chain in chains.items():
                for _ in range(25):
                    start = time.perf_counter()
                    state[name] = jax.block_until_ready(chain(state[name], w))
                    samples[name].append((time.perf_counter() - start) / CHAIN_LENGTH * 1e6)
        columns = (f"{statistics.median(s):.2f}, {min(s):.2f}" for s in samples.values())
        print(f"| bfloat16 {size} x {size} x {size} | {' | '.join(columns)} |", flush=True)


def _chain(function: Callable) -> Callable:
    def chain(x, w):
        for _ in range(CHAIN_LENGTH):
            x = function(x, w)
        return x

    return jax.jit(chain, donate_argnums=0)


if __name__ == "__main__":
    print_products()
    print_chains()
