"""NaN, infinities and the limits of a type in every activation, by every API.

The product is 0, and the addend holds the special values. Kernels compute two neighbours together,
so each value stands beside each other value, on either side.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import FLOATS, in_float64

from jax_tcgemm import clip, fuse, gated_gemm, gemm, mlp, softcap
from jax_tcgemm.lowering import jit_pass
from jax_tcgemm.problem.activations import ACTIVATIONS, Activation, resolve

pytestmark = pytest.mark.any_jax

M, K = 128, 64
EVERY = [*ACTIVATIONS, softcap(2.5), clip(-0.5, 1.25), clip(0, 6)]

# In float32, the formulas subtract from 1 and use an exponential that is exact to 2 ulp.
_SLACK = 2 * 2.0**-23


def special_values(dtype: Any) -> np.ndarray:
    """Returns the values that each test tries."""
    info = jnp.finfo(dtype)
    positive = [np.inf, 0.0, info.max, info.tiny, 3 * float(info.smallest_subnormal), 88.8, 104]
    values = [np.nan, *positive, *(-float(x) for x in positive), 1.25, -3.5, 0.75, -0.5]
    return np.array([float(x) for x in values]).astype(dtype)


def in_pairs(dtype: Any) -> np.ndarray:
    """Returns a row in which each value is first and second in a pair with each other value."""
    values = special_values(dtype)
    pairs = itertools.product(range(len(values)), repeat=2)
    row = values[list(itertools.chain(*pairs))]
    return np.concatenate([row, np.ones(-len(row) % 64, dtype)])


def in_rows(dtype: Any) -> np.ndarray:
    """Returns a matrix whose neighbouring rows differ, for kernels that compute D^T."""
    row = in_pairs(dtype)
    return np.stack([np.roll(row, 2 * i + i % 2) for i in range(M)])


# The ways to request an activation of `x @ w + added`.


def by_name(activation, x, w, added):
    return gemm(x, w, bias=added, activation=activation)


def by_name_with_c(activation, x, w, added):
    return gemm(x, w, added, activation=activation)


def by_function(activation, x, w, added):
    def epilogue(product, added):
        return resolve(activation).reference(product + added).astype(x.dtype)

    return gemm(x, w, epilogue=epilogue, epilogue_operands=(added,))


def by_gate(activation, x, w, added):
    up = jnp.ones_like(added)
    return gated_gemm(x, w, w, activation=activation, bias_gate=added, bias_up=up)


def by_gate_function(activation, x, w, added):
    def epilogue(gate, up, added):
        return (resolve(activation).reference(gate + added) * (up + 1)).astype(x.dtype)

    return gated_gemm(x, w, w, epilogue=epilogue, epilogue_operands=(added,))


def in_mlp(activation, x, w, added):
    """Computes two layers; the gradient takes the slope in a gemm. NaN spreads in their results."""
    down = jnp.zeros((len(added), K), x.dtype).at[:, 0].set(1)
    return mlp(x, w, added, down, activation=activation)[:, :1]


def plainly(activation, x, w, added):
    return resolve(activation).reference(x @ w + added)


def _value_and_slope(f: Callable[..., jax.Array], *args: jax.Array) -> tuple[jax.Array, jax.Array]:
    y, pullback = jax.vjp(lambda added: f(*args[:-1], added), args[-1])
    return y, pullback(jnp.ones_like(y))[0]


def ours(way: Callable[..., jax.Array] | None, x, w, added) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the value and the slope of every activation; without ``way``, by ``fuse``."""
    results = []
    for activation in EVERY:
        if way is None:
            of_plain = functools.partial(_value_and_slope, functools.partial(plainly, activation))
            results.append(fuse(of_plain)(x, w, added))
        else:
            results.append(_value_and_slope(functools.partial(way, activation), x, w, added))
    return results


def _in_float32(activation: str | Activation, z: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the reference of all ways except ``fuse``: float32, rounded once."""
    row, wide = resolve(activation), z.astype(jnp.float32)
    # The row is added to M rows, whose cotangents add up.
    count = M if z.ndim == 1 else 1
    backward = jax.vjp(row.reference, wide)[1](jnp.ones_like(wide))[0]
    value = row.reference(wide).astype(z.dtype)
    return [(value, (x * count).astype(z.dtype)) for x in (row.derivative(wide), backward)]


def theirs(way: Callable[..., jax.Array] | None, x, w, added) -> list[Any]:
    """Returns the results of ``jax.numpy``, with forward and reverse slopes.

    The slopes differ: the slope of ``square(relu(x))`` at NaN is NaN forward, and 0 in reverse.
    """
    if way is not None:
        return [_in_float32(activation, added + x[0, 0]) for activation in EVERY]
    plain = [functools.partial(plainly, activation) for activation in EVERY]
    return [[_value_and_slope(f, x, w, added)] * 2 for f in plain]


def exactly(added: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    def of_all(z):
        rows = M if z.ndim == 1 else 1
        return [(resolve(a).reference(z), resolve(a).derivative(z) * rows) for a in EVERY]

    return in_float64(of_all, added)


def _wrong(
    got: np.ndarray, expected: np.ndarray, exact: np.ndarray, added: np.ndarray, slack: Any
) -> np.ndarray:
    """Returns where an array exceeds the tolerance of another."""
    info = jnp.finfo(got.dtype)
    eps, tiny = float(info.eps), float(info.tiny)
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        error, baseline = np.abs(got - exact), np.abs(expected - exact)
        far = error > 2 * baseline + eps * np.abs(exact) + tiny + slack
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    is_known = np.isfinite(expected) & np.isfinite(exact)
    signs = (got == 0) & (expected == 0) & (np.signbit(got) != np.signbit(expected))
    signs &= (np.abs(added) >= tiny) | (added == 0)  # a CPU flushes subnormal numbers to 0
    return np.where(is_known & np.isfinite(got), far, ~same) | signs


def _report(what: str, added: np.ndarray, wrong: np.ndarray, *arrays: np.ndarray) -> list[str]:
    """Lists each wrong value once, with its neighbours."""
    lines = {}
    added = np.broadcast_to(added, wrong.shape)
    for at in map(tuple, np.argwhere(wrong)):
        z, beside = float(added[at]), float(added[(*at[:-1], at[-1] ^ 1)])
        got, *expected = (float(x[at]) for x in arrays)
        line = f"{what} at {z} beside {beside}: {got}, jax.numpy {set(expected)}"
        lines.setdefault(str(z), line)
    return list(lines.values())


def _operands(name: str, dtype: Any) -> tuple[Any, Any, np.ndarray]:
    added = in_rows(dtype) if WAYS[name] is by_name_with_c else in_pairs(dtype)
    return np.zeros((M, K), dtype), np.zeros((K, added.shape[-1]), dtype), added


def _failures(name: str, dtype: Any) -> list[str]:
    way, operands = WAYS[name], _operands(name, dtype)
    added = operands[-1]
    got = jax.jit(functools.partial(ours, way))(*operands)
    expected = jax.jit(functools.partial(theirs, way))(*operands)
    lines = []
    for activation, mine, others, true in zip(EVERY, got, expected, exactly(added), strict=True):
        for i, kind in enumerate(("value", "slope")):
            if kind == "value" and way is in_mlp:
                continue
            shape = (M, added.shape[-1]) if kind == "value" else added.shape
            array, exact, *allowed = (
                np.broadcast_to(each[i], shape) for each in (mine, true, *others)
            )
            slack = _SLACK
            if way is None:  # roundings may vary: the tests of `fuse` state the limits
                size = np.where(np.isfinite(added), np.abs(added.astype(np.float64)), 0) + 1
                slack = 4 * float(jnp.finfo(dtype).eps) * size
            if kind == "slope":  # a sum of M terms in float32
                slack = slack * M + M * 2.0**-24 * np.abs(np.nan_to_num(exact, posinf=0, neginf=0))
            wrong = [_wrong(array, each, exact, added, slack) for each in allowed]
            what = f"{name:18} {np.dtype(dtype).name:9} {f'{activation} {kind}':25}"
            lines += _report(what, added, np.logical_and(*wrong), array, *allowed)
    return lines


WAYS = {
    "name": by_name,
    "name, with c": by_name_with_c,
    "function": by_function,
    "fuse": None,
    "gated_gemm": by_gate,
    "gated, function": by_gate_function,
    "mlp": in_mlp,
}
# The ways whose activations a Hopper GPU compiles.
COMPILED = ("function", "fuse", "gated, function")
EACH_WAY = pytest.mark.parametrize("way", WAYS)
EACH_TYPE = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)


@EACH_TYPE
@EACH_WAY
def test_without_a_kernel(way, dtype):
    failures = _failures(way, dtype)
    assert not failures, "\n".join(["", *failures])


@pytest.mark.gpu
@EACH_TYPE
@EACH_WAY
def test_on_a_gpu(request, monkeypatch, way, dtype):
    monkeypatch.setattr(jit_pass, "LARGE_MATRIX", 0)
    if way in COMPILED and dtype != jnp.float32 and jax.devices()[0].compute_capability == "9.0":
        request.getfixturevalue("never_apart")
        text = jax.jit(functools.partial(ours, WAYS[way])).lower(*_operands(way, dtype)).as_text()
        assert text.count("custom_call @jax_tcgemm_compiled_gemm") >= len(EVERY)
    failures = _failures(way, dtype)
    assert not failures, "\n".join(["", *failures])
