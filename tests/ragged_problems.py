"""Products over groups: problems and their expected results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_accuracy import in_float64

from jax_tcgemm import ragged_dot
from jax_tcgemm.problem.activations import ACTIVATIONS

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def bounds(sizes: Any, rows: int) -> np.ndarray:
    """Returns where the groups begin and where the last one ends."""
    ends = np.cumsum(np.clip(np.asarray(sizes, np.int64), 0, rows))
    return np.concatenate([[0], np.minimum(ends, rows)])


def looped(lhs: Any, rhs: Any, sizes: Any, bias: Any = None, activation: str | None = None) -> Any:
    """Computes the definition in float64, one group at a time; rhs is (g, k, n)."""
    lhs, rhs = (np.asarray(x, np.float64) for x in (lhs, rhs))
    at = bounds(sizes, len(lhs))
    d = np.zeros((len(lhs), rhs.shape[2]))
    for group in range(len(rhs)):
        rows = slice(at[group], at[group + 1])
        d[rows] = lhs[rows] @ rhs[group]
        if bias is not None:
            d[rows] += np.asarray(bias, np.float64)[group]
    if activation is not None:
        used = slice(at[0], at[-1])
        d[used] = in_float64(ACTIVATIONS[activation].reference, d[used])
    return d


def contracted(lhs: Any, rhs: Any, sizes: Any) -> np.ndarray:
    lhs, rhs = (np.asarray(x, np.float64) for x in (lhs, rhs))
    at = bounds(sizes, len(lhs))
    return np.stack([lhs[i:j].T @ rhs[i:j] for i, j in itertools.pairwise(at)])


def drawn_sizes(rng: np.random.Generator, groups: int, rows: int) -> np.ndarray:
    """Draws sizes of many kinds: even, uneven, empty, negative, fewer or more than the rows."""
    mean = rows // max(groups, 1)
    kind = rng.integers(6)
    if kind == 0:
        return np.full(groups, mean)
    sizes = rng.integers(0, 2 * mean + 2, groups)
    if kind == 1:
        sizes[rng.random(groups) < 0.5] = 0
    elif kind == 2:
        sizes //= 2
    elif kind == 3:
        sizes = mean - sizes
    elif kind == 4:
        sizes[rng.integers(groups)] = 2**31 - 1
    return sizes


def random_problem(rng: np.random.Generator, normal: Callable, dtype: Any) -> dict[str, Any]:
    groups = int(rng.choice([1, 2, 3, 5, 8, 33, 70]))
    m, n, k = (int(x) for x in rng.integers(1, (300, 150, 150)))
    transposed = bool(rng.integers(2))
    return {
        "lhs": normal(m, k, dtype=dtype),
        "rhs": normal(groups, *((n, k) if transposed else (k, n)), dtype=dtype),
        "group_sizes": jnp.asarray(drawn_sizes(rng, groups, m), jnp.int32),
        "bias": normal(groups, n, dtype=dtype) if rng.integers(2) else None,
        "activation": [None, "silu", "gelu", "relu"][rng.integers(4)],
        "transpose_rhs": transposed,
    }


def check_problem(p: dict[str, Any], assert_accurate: Callable) -> None:
    rhs = jnp.swapaxes(p["rhs"], 1, 2) if p["transpose_rhs"] else p["rhs"]
    sizes = np.diff(bounds(p["group_sizes"], p["lhs"].shape[0])).astype(np.int32)
    d = ragged_dot(**p)
    assert d.dtype == p["lhs"].dtype
    z = jax.lax.ragged_dot(p["lhs"], rhs, jnp.asarray(sizes), preferred_element_type=F32)
    if p["bias"] is not None:
        rows = jnp.repeat(p["bias"], sizes, axis=0, total_repeat_length=sizes.sum())
        z = z.at[: sizes.sum()].add(rows.astype(F32))
    function = ACTIVATIONS[p["activation"]].reference if p["activation"] else lambda x: x
    baseline = function(z).at[sizes.sum() :].set(0).astype(d.dtype)
    exact = looped(p["lhs"], rhs, sizes, p["bias"], p["activation"])
    # The kernel adds float32 sums in another order.
    order = float(jnp.finfo(F32).eps) * p["lhs"].shape[1] ** 0.5 * np.abs(exact).max()
    assert_accurate(d, baseline, exact, slack=order)
    assert not np.asarray(d[sizes.sum() :]).any()
