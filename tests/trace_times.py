"""Measures how long ``fuse`` takes to trace programs of several depths, beside ``jax.jit``.

``python tests/trace_times.py`` prints a table and needs no GPU. The exit status is 1 if tracing
takes more than twice as long as with plain ``jit``.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_tcgemm import fuse

WIDTH, TOKENS = 256, 512
_MOST = 2.0


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and the types of its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def transformer(layers: int) -> Program:
    """Returns an AdamW training step of unrolled transformer layers without attention's softmax."""

    def layer(p: Any, h: jax.Array) -> jax.Array:
        def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
            wide = x.astype(jnp.float32)
            wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
            return wide.astype(x.dtype) * scale

        x = norm(h, p["scale"])
        q, k, v = (x @ p[name] for name in ("q", "k", "v"))
        weights = jax.nn.softmax((q @ k.T).astype(jnp.float32) * WIDTH**-0.5)
        h = h + (weights.astype(h.dtype) @ v) @ p["o"]
        x = norm(h, p["scale2"])
        return h + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            x = layer(p, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def adamw(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array, t: jax.Array) -> Any:
        g = g.astype(jnp.float32)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        step = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.95**t)) + 1e-8)
        new = p.astype(jnp.float32) * (1 - 1e-4) - 1e-3 * step
        return new.astype(p.dtype), m, v

    def step(params: Any, m: Any, v: Any, t: jax.Array, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updated = jax.tree.map(lambda *xs: adamw(*xs, t), params, grads, m, v)
        return value, updated

    square, tall = _array(WIDTH, WIDTH), _array(WIDTH, 4 * WIDTH)
    one = dict.fromkeys("qkvo", square) | {"gate": tall, "up": tall}
    one |= {"down": _array(4 * WIDTH, WIDTH), "scale": _array(WIDTH), "scale2": _array(WIDTH)}
    params = [dict(one) for _ in range(layers)]
    moments = jax.tree.map(lambda x: _array(*x.shape, dtype=jnp.float32), params)
    arguments = params, moments, moments, _array(dtype=jnp.float32), _array(TOKENS, WIDTH)
    return Program(f"transformer, {layers} layers", step, arguments)


def recurrent(steps: int) -> Program:
    """Returns the gradient of an unrolled recurrent network."""

    def loss(w: jax.Array, u: jax.Array, b: jax.Array, xs: jax.Array) -> jax.Array:
        h = jnp.zeros((TOKENS, WIDTH), xs.dtype)
        for i in range(steps):
            h = jnp.tanh(xs[i] @ w + h @ u + b)
        return h.astype(jnp.float32).sum()

    square = _array(WIDTH, WIDTH)
    arguments = square, square, _array(WIDTH), _array(steps, TOKENS, WIDTH)
    return Program(f"recurrent network, {steps} steps", jax.grad(loss, (0, 1, 2)), arguments)


def chain(products: int, operations: int = 400) -> Program:
    """Returns products that read one chain of elementwise operations."""

    def f(x: jax.Array, ws: jax.Array, c: jax.Array) -> jax.Array:
        for _ in range(operations // 2):
            c = jnp.sin(c) * 1.01
        return sum((x @ ws[i] + c for i in range(products)), c)

    arguments = _array(TOKENS, WIDTH), _array(products, WIDTH, WIDTH), _array(TOKENS, WIDTH)
    return Program(f"chain of {operations}, {products} products", f, arguments)


def programs() -> list[Program]:
    """Returns the programs in the table."""
    return [
        *(transformer(layers) for layers in (4, 32, 96)),
        *(recurrent(steps) for steps in (50, 200)),
        *(chain(products) for products in (10, 40)),
    ]


def seconds(program: Program, repeat: int = 3) -> tuple[list[float], list[float]]:
    """Returns the least CPU time that ``jit`` takes, and the least for ``jit`` with ``fuse``.

    Each is two times in seconds: tracing, and tracing plus lowering for CUDA.
    """
    found = [[float("inf")] * 2 for _ in range(2)]
    for _ in range(repeat):
        for best, transform in zip(found, (lambda f: f, fuse), strict=True):
            jax.clear_caches()
            gc.collect()
            jitted = jax.jit(lambda *xs, wrap=transform: wrap(program.function)(*xs))
            start = time.process_time()
            traced = jitted.trace(*program.arguments)
            middle = time.process_time()
            traced.lower(lowering_platforms=("cuda",))
            best[:] = map(min, best, (middle - start, time.process_time() - start))
    return found[0], found[1]


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def main() -> int:
    """Prints the table; returns the exit status."""
    most = 0.0
    print(f"{'':36} {'trace, s':>16} {'ratio':>6} {'trace + lower, s':>18} {'ratio':>6}")
    for program in programs():
        plain, ours = seconds(program)
        most = max(most, ours[0] / plain[0])
        print(
            f"{program.name:36} {plain[0]:7.2f} {ours[0]:7.2f}  {ours[0] / plain[0]:6.2f} "
            f"{plain[1]:8.2f} {ours[1]:8.2f}  {ours[1] / plain[1]:6.2f}",
            flush=True,
        )
    return int(most > _MOST)


if __name__ == "__main__":
    sys.exit(main())
