"""Wall time of a chain of small products in one jitted function, where launches count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_tcgemm import gemm

LENGTH = 100
SIZES = (16, 32, 64)

_ROUNDS = 20
_SAMPLES_PER_ROUND = 25


def measure_chain(
    size: int, rounds: int = _ROUNDS, samples_per_round: int = _SAMPLES_PER_ROUND
) -> dict[str, Any]:
    """Times square bfloat16 products on donated buffers, which do not move.

    Returns:
        ``size``, and for each competitor the median and the best time per product.
    """
    w = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) / size**0.5
    chains = {"us": _chain(gemm), "xla_us": _chain(jnp.matmul)}
    samples: dict[str, list[float]] = {name: [] for name in chains}
    state = {name: jnp.copy(w) for name in chains}
    for _ in range(rounds):
        for name, chain in chains.items():
            for _ in range(samples_per_round):
                start = time.perf_counter()
                state[name] = jax.block_until_ready(chain(state[name], w))
                samples[name].append((time.perf_counter() - start) / LENGTH * 1e6)
    row: dict[str, Any] = {"size": size}
    for name, values in samples.items():
        row |= {name: statistics.median(values), f"best_{name}": min(values)}
    return row


def _chain(function: Callable) -> Callable:
    def chain(x, w):
        for _ in range(LENGTH):
            x = function(x, w)
        return x

    return jax.jit(chain, donate_argnums=0)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows of ``measure_chain`` as a Markdown table."""
    lines = [
        f"| chain of {LENGTH} | us per op (median, best) | XLA us per op |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| bf16 {row['size']}x{row['size']}x{row['size']} "
        f"| {row['us']:.2f}, {row['best_us']:.2f} | {row['xla_us']:.2f}, {row['best_xla_us']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)
