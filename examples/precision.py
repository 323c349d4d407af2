"""Newton-Schulz iterations for a matrix inverse, in three precisions: residuals and times.

X <- X (2 I - A X) squares the residual I - A X in every step, until rounding of the products limits
it. TF32, the default on a GPU, stops at three digits. ``precision="highest"`` reaches float32's
limit, in ``jnp.matmul`` and in ``jax_tcgemm.gemm``. The latter multiplies bfloat16 planes on tensor
cores (docs/precision.md) and adds 2 X in the kernel. The script fails if our final residual is over
one and a half times that of jnp's.

Run it with ``python examples/precision.py``; ``--help`` lists the arguments. The defaults are small
on a CPU.
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import gemm
from jax_tcgemm.tools.benchmarking import time_chains
from jax_tcgemm.tools.chain import compile_chain, default_device

Inverse = Callable[[jax.Array], jax.Array]


def matrix(size: int, condition: float) -> jax.Array:
    """Returns a symmetric matrix with eigenvalues from 1 down to 1 / condition."""
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.standard_normal((size, size)))
    eigenvalues = np.geomspace(1 / condition, 1, size)
    return jnp.asarray(basis * eigenvalues @ basis.T, jnp.float32)


def by_jnp(a: jax.Array, steps: int, precision: str | None) -> jax.Array:
    """Returns the inverse after ``steps`` steps, in plain ``jnp``."""
    matmul = functools.partial(jnp.matmul, precision=precision)

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return 2 * x - matmul(x, matmul(a, x)), None

    return jax.lax.scan(step, a, length=steps)[0]


def by_gemm(a: jax.Array, steps: int, precision: str | None) -> jax.Array:
    """Does the same; the second product adds 2 X to its negative."""

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        ax = gemm(a, x, precision=precision)
        return gemm(x, ax, x, alpha=-1.0, beta=2.0, precision=precision), None

    return jax.lax.scan(step, a, length=steps)[0]


def residual(a: jax.Array, x: jax.Array) -> float:
    """Returns the norm of I - A X divided by that of I, in float64."""
    size = a.shape[0]
    product = np.asarray(a, np.float64) @ np.asarray(x, np.float64)
    return float(np.linalg.norm(np.eye(size) - product) / size**0.5)


def main(arguments: list[str] | None = None) -> None:
    """Runs the example."""
    on_gpu = default_device().platform == "gpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096 if on_gpu else 256)
    parser.add_argument("--condition", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=14)
    options = parser.parse_args(arguments)

    a = matrix(options.size, options.condition)
    methods: dict[str, Inverse] = {
        "jnp, default": lambda a: by_jnp(a, options.steps, None),
        "gemm, default": lambda a: by_gemm(a, options.steps, None),
        "jnp, highest": lambda a: by_jnp(a, options.steps, "highest"),
        "gemm, highest": lambda a: by_gemm(a, options.steps, "highest"),
    }
    residuals = {name: residual(a, jax.jit(f)(a)) for name, f in methods.items()}
    chains = {name: compile_chain(f, [(a,)]) for name, f in methods.items()}
    times = time_chains(chains, reps=5)
    products = 2 * options.steps
    print(f"{options.size} x {options.size}, condition {options.condition:g}, {products} products")
    for name, timing in times.items():
        print(f"{name:14} {1e3 * timing.median:9.2f} ms   |I - A X| {residuals[name]:.1e}")
    if residuals["gemm, highest"] > 1.5 * residuals["jnp, highest"]:
        raise SystemExit("ours is less accurate than jnp's at the highest precision")
    print("OK: as accurate as jnp at the highest precision")


if __name__ == "__main__":
    main()
