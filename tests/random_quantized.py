"""Random products of 8-bit operands, compared with float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from random_outcome import Outcome, stored

from jax_tcgemm import gemm
from jax_tcgemm.problem.activations import resolve

E4M3, E5M2, S8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
_PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (S8, S8)]
_LARGEST = {E4M3: 448.0, E5M2: 57344.0, S8: 127.0}

# Tensor cores keep 14 bits in a sum.
_STEP = 2.0**-13
_MOST_PRODUCTS = 1.5e8

_ACTIVATIONS = (None, "relu", "gelu", "silu")
_STEEPEST = 1.13  # largest derivative


def _extent(rng: np.random.Generator, most: int) -> int:
    return int(np.exp(rng.uniform(0, np.log(most + 1))))


def _shape(rng: np.random.Generator) -> tuple[int, int, int]:
    while True:
        m, n, k = _extent(rng, 900), _extent(rng, 900), _extent(rng, 65536)
        if rng.random() < 0.5:  # prefers whole vectors, as most operands have
            n, k = -(-n // 16) * 16, -(-k // 16) * 16
        if m * n * k <= _MOST_PRODUCTS:
            return m, n, k


def _wide(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32)).astype(np.float64)


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, sort: str) -> Any:
    x = rng.normal(size=shape)
    if sort == "positive":
        x = np.abs(x)
    if sort == "cancelling":
        x = x * rng.choice([1.0, 1e-2, 16.0], size=shape)
    if sort == "largest":
        x = rng.choice([-1.0, 0.0, 1.0], size=shape) * _LARGEST[dtype]
    elif dtype == S8:
        x = np.clip(np.round(x * 40), -128, 127)
    return jnp.asarray(x.astype(np.float32)).astype(dtype)


def _scales(rng: np.random.Generator, sort: str, m: int, n: int, k: int) -> dict[str, np.ndarray]:
    shapes = {
        "none": {},
        "tensor": {"a": (1, 1), "b": (1, 1)},
        "rows": {"a": (m, 1)},
        "columns": {"b": (1, n)},
        "both": {"a": (m, 1), "b": (1, n)},
        "blocks": {"a": (m, k // 128), "b": (k // 128, n // 128)},
    }[sort]
    return {name: rng.uniform(0.25, 2, shape).astype(np.float32) for name, shape in shapes.items()}


def _spread(scale: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    if scale is None:
        return np.ones(shape)
    wide = scale.astype(np.float64)
    for axis, extent in enumerate(shape):
        wide = np.repeat(wide, extent // wide.shape[axis], axis)
    return wide


def eight(seed: int, index: int) -> Outcome:
    """Draws and checks one product of 8-bit operands."""
    rng = np.random.default_rng([seed, index])
    types = _PAIRS[rng.integers(len(_PAIRS))]
    m, n, k = _shape(rng)
    sort = str(rng.choice(["none", "tensor", "rows", "columns", "both", "blocks"]))
    if sort == "blocks":
        if types[0] == S8:
            sort = "both"
        else:
            n, k = -(-n // 128) * 128, -(-min(k, 8192) // 128) * 128
    numbers = str(rng.choice(["normal", "positive", "cancelling", "largest"]))
    layout = str(rng.choice(["nn", "nt", "tn", "tt"]))
    a, b = _numbers(rng, (m, k), types[0], numbers), _numbers(rng, (k, n), types[1], numbers)
    scales = _scales(rng, sort, m, n, k)
    precision = "highest" if rng.random() < 0.6 or types[0] == S8 else None
    activation = _ACTIVATIONS[rng.integers(4)]
    bias = rng.normal(size=n).astype(np.float32) if rng.random() < 0.5 else None
    residual = rng.normal(size=(m, n)).astype(np.float32) if rng.random() < 0.2 else None
    out = [jnp.float32, jnp.bfloat16, jnp.float16, E4M3, E5M2, S8][rng.integers(6)]
    is_raw = types[0] == S8 and sort == "none"
    if is_raw:
        out, activation, bias, residual = jnp.int32, None, None, None
    described = (
        f"{types[0].__name__} {types[1].__name__} {layout} {m}x{n}x{k} {numbers} scales {sort} "
        f"precision {precision} {activation} bias {bias is not None} residual "
        f"{residual is not None} -> {out.__name__}"
    )
    wide = [
        _wide(a) * _spread(scales.get("a"), (m, k)),
        _wide(b) * _spread(scales.get("b"), (k, n)),
    ]
    z, sizes = wide[0] @ wide[1], np.abs(wide[0]) @ np.abs(wide[1])
    quantizes = out in (E4M3, E5M2, S8)
    # Scales the results so that most fit the type, even float16.
    fit = 2.0 ** -np.floor(np.log2(max(np.abs(z).max(), 1e-9)) - 2)
    if not is_raw and sort != "none":
        name = "a" if "a" in scales else "b"
        scales[name] = (scales[name] * np.float32(fit)).astype(np.float32)
        z, sizes = z * fit, sizes * fit
    elif out == jnp.float16:
        out = jnp.bfloat16
    if bias is not None:
        z = z + bias
    exact = resolve(activation).exact(z) + (0 if residual is None else residual)
    options: dict[str, Any] = {
        f"{name}_scale": stored(jnp.asarray(scale), layout["ab".index(name)])
        for name, scale in scales.items()
    }
    options |= {"precision": precision, "preferred_element_type": out, "activation": activation}
    options["bias"] = None if bias is None else jnp.asarray(bias)
    options["residual"] = None if residual is None else jnp.asarray(residual)
    out_scale = (
        np.float32(max(np.abs(exact).max() / _LARGEST[out] * 1.1, 1e-20)) if quantizes else 1
    )
    if quantizes:
        options |= {"out_scale": jnp.float32(out_scale), "return_amax": True}
    call = jax.jit(
        lambda a, b: gemm(
            a, b, transpose_a=layout[0] == "t", transpose_b=layout[1] == "t", **options
        )
    )
    found = call(stored(a, layout[0]), stored(b, layout[1]))
    y, amax = found if quantizes else (found, None)
    family = f"{types[0].__name__} scales {sort} -> {out.__name__}"
    if is_raw:
        wrong = None if np.array_equal(np.asarray(y, np.int64), exact) else "not exact"
        return Outcome(family, wrong and f"{described}: {wrong}")
    lost = 0.0 if types[0] == S8 else 16 * _STEP
    if types[0] != S8 and precision is None and sort != "blocks":
        lost += 2 * _lost_by_xla(a, b)
        if numbers == "positive":  # all truncation errors have one sign: they grow with k
            lost += k * _STEP / 2
    allowed = _STEEPEST * (lost + 2.0**-22) * sizes + 4e-6 * (1 + np.abs(exact))
    if amax is not None:
        error = abs(float(amax) - np.abs(exact).max())
        if error > allowed.max():
            return Outcome(family, f"{described}: amax {float(amax)}, {np.abs(exact).max()}")
    return Outcome(family, _beyond(described, y, exact / out_scale, allowed / out_scale, out))


def _lost_by_xla(a: Any, b: Any) -> float:
    """Returns the error of XLA's sums, which grows with k if XLA uses tensor cores."""
    m, k = a.shape
    whole = [(0, -m % 16), (0, -b.shape[1] % 16), (0, -k % 16)]
    a, b = jnp.pad(a, [whole[0], whole[2]]), jnp.pad(b.T, [whole[1], whole[2]])
    along_k = (((1,), (1,)), ((), ()))
    theirs = jax.jit(
        lambda a, b: jax.lax.dot_general(a, b, along_k, preferred_element_type=jnp.float32)
    )(a, b)
    wide = [_wide(a), _wide(b).T]
    error = np.abs(np.asarray(theirs, np.float64) - wide[0] @ wide[1])
    return float(np.max(error / (np.abs(wide[0]) @ np.abs(wide[1]) + 1e-30)))


def _beyond(described: str, y: Any, exact: np.ndarray, allowed: np.ndarray, out: Any) -> str | None:
    """Says where a result differs by more than the tolerance and its rounding."""
    if out == S8:
        exact, rounding = np.clip(exact, -128, 127), 0.5
    else:
        info = jnp.finfo(out)
        largest = float(info.max)
        exact = np.clip(exact, -largest, largest) if out in (E4M3, E5M2) else exact
        least = float(info.smallest_subnormal)
        rounding = float(info.eps) / 2 * (np.abs(exact) + allowed) + least
    error = np.abs(_wide(y) - exact)
    if y.shape == exact.shape and np.all(error <= allowed + rounding):
        return None
    at = np.unravel_index(np.argmax(error - allowed - rounding), exact.shape)
    return f"{described}: {_wide(y)[at]} at {at}, {exact[at]} is right to {allowed[at]:.2e}"
