"""Random products of quantized, float32 and complex operands, compared with float64 on a GPU.

    python tests/random_arithmetic.py --kind eight --count 2000 --jobs 12
    python tests/random_arithmetic.py --kind precise --count 500 --jobs 12

``eight``: 8-bit operands with scales and epilogues. ``precise``: float32 by bfloat16 planes, and
complex64. The tolerance is a multiple of ``|A| |B|``, as in the documentation of ``gemm``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import os
import secrets
import sys
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


@dataclasses.dataclass
class Outcome:
    """The result of a problem: a word for the summary, and what is wrong, if anything is."""

    family: str
    wrong: str | None = None


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


def _stored(x: Any, letter: str) -> Any:
    return jnp.swapaxes(x, -1, -2) if letter == "t" else x


# 8-bit operands


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
    activation = [None, "relu", "gelu", "silu"][rng.integers(4)]
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
        f"{name}_scale": _stored(jnp.asarray(scale), layout["ab".index(name)])
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
    found = call(_stored(a, layout[0]), _stored(b, layout[1]))
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


# float32 by planes, complex64


def _float32(rng: np.random.Generator, shape: tuple[int, int], sort: str, along: int) -> np.ndarray:
    x = rng.normal(size=shape)
    other = [1, 1]
    other[along] = shape[along]
    if sort == "scaled":  # rows of A, columns of B
        x = x * 10.0 ** rng.uniform(-10, 10, other)
    if sort == "scaled along k":
        x = x * 2.0 ** rng.integers(-12, 12, [1 if i == along else e for i, e in enumerate(shape)])
    if sort == "denormal" and along == 0:
        x = x * 1e-38 * 10.0 ** rng.uniform(-4, 0, shape)
    if sort == "large":
        x = x * 1e17
    if sort == "positive":
        x = np.abs(x)
    return x.astype(np.float32)


_PRESETS = (
    "highest",
    "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
    "TF32_TF32_F32_X3",
)
# The factor of XLA's error by the same name, and the error that is always allowed by that name.
_LIMITS = {
    "highest": (1.5, 2.0**-23),
    "default": (3.0, 2.0**-14),
    "BF16_BF16_F32_X3": (2.0, 2.0**-17),
    "BF16_BF16_F32_X6": (2.0, 2.0**-22),
    "BF16_BF16_F32_X9": (1.5, 2.0**-23),
    "TF32_TF32_F32_X3": (2.0, 2.0**-22),
}
_CHECKED_ROWS = 32


def _large_shape(rng: np.random.Generator) -> tuple[int, int, int]:
    """Draws extents; kernels multiply most of them, and XLA some."""
    while True:
        m, n, k = (int(np.exp(rng.uniform(np.log(least), np.log(most)))) for least, most in _LARGE)
        if rng.random() < 0.6:
            n, k = -(-n // 16) * 16, -(-k // 16) * 16
        if m * n * k <= 4e9:
            return m, n, k


_LARGE = ((200, 2000), (200, 2000), (100, 65536))


def precise(seed: int, index: int) -> Outcome:
    """Draws and checks one product of float32 or complex64 operands."""
    rng = np.random.default_rng([seed, index])
    m, n, k = _large_shape(rng)
    layout = str(rng.choice(["nn", "nt", "tn", "tt"]))
    is_complex = rng.random() < 0.3
    sort = str(rng.choice(["normal", "scaled", "scaled along k", "denormal", "large", "positive"]))
    preset = "highest" if is_complex else str(rng.choice(_PRESETS))
    if is_complex and rng.random() < 0.5:
        preset = "default"
    if is_complex and sort == "denormal":
        sort = "normal"
    a, b = _float32(rng, (m, k), sort, 0), _float32(rng, (k, n), sort, 1)
    if is_complex:
        a = a + 1j * _float32(rng, (m, k), sort, 0)
        b = b + 1j * _float32(rng, (k, n), sort, 1)
    if rng.random() < 0.3:  # sums that cancel
        half = k // 2
        a[:, half : 2 * half] = -a[:, :half]
        b[half : 2 * half] = b[:half] * np.float32(1 + 2**-12)
    is_named = preset in ("highest", "default")
    precision: Any = preset if is_named else jax.lax.DotAlgorithmPreset[preset]
    conjugate = bool(is_complex and rng.random() < 0.3)
    described = f"{a.dtype} {layout} {m}x{n}x{k} {sort} {preset} conjugate_a {conjugate}"
    options = {"conjugate_a": True} if conjugate else {}
    ours = jax.jit(
        lambda a, b: gemm(
            *(a, b),
            transpose_a=layout[0] == "t",
            transpose_b=layout[1] == "t",
            precision=precision,
            **options,
        )
    )
    stored = [_stored(jnp.asarray(x), letter) for x, letter in zip((a, b), layout, strict=True)]
    y = np.asarray(ours(*stored))
    # The name of XLA's x9 promises more accuracy than it has.
    rival = "highest" if preset == "BF16_BF16_F32_X9" else precision
    left = a.conj() if conjugate else a
    theirs = np.asarray(jax.jit(lambda a, b: jnp.matmul(a, b, precision=rival))(left, b))
    family = f"{a.dtype} {preset} {'kernel' if _has_call(ours, stored) else 'XLA'}"
    if not np.isfinite(y[np.isfinite(theirs)]).all():
        at = tuple(np.argwhere(np.isfinite(theirs) & ~np.isfinite(y))[0])
        return Outcome(family, f"{described}: {y[at]} at {at}, XLA {theirs[at]}")
    rows = rng.choice(m, _CHECKED_ROWS, replace=False)
    wide = np.complex128 if is_complex else np.float64
    exact = left[rows].astype(wide) @ b.astype(wide)
    sizes = np.abs(left[rows]).astype(np.float64) @ np.abs(b).astype(np.float64)
    limit, least = _LIMITS[preset]
    for part in ("real", "imag") if is_complex else ("real",):
        errors = []
        for found in (y, theirs):
            off = np.abs(getattr(found, part)[rows] - getattr(exact, part))
            off = np.maximum(off - 2.0**-149 * k, 0) / (sizes + 1e-300)
            errors.append(np.max(np.where(sizes < 3e38, off, 0)))
        if errors[0] > limit * errors[1] + least:
            error, reference = errors
            return Outcome(family, f"{described}: {part} error {error:.2e}, XLA's {reference:.2e}")
    return Outcome(family)


def _has_call(function: Any, operands: list[Any]) -> bool:
    return "custom_call @jax_tcgemm" in function.lower(*operands).as_text()


_KINDS = {"eight": eight, "precise": precise}


def _run(task: tuple[str, int, int]) -> Outcome:
    kind, seed, index = task
    try:
        outcome = _KINDS[kind](seed, index)
    except Exception:
        outcome = Outcome("raised", traceback.format_exc())
    if outcome.wrong:
        outcome.wrong = f"--kind {kind} --seed {seed} --start {index} --count 1: {outcome.wrong}"
    return outcome


def main(argv: list[str] | None = None) -> int:
    """Runs the problems; returns 1 if any is wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=_KINDS, required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    arguments = parser.parse_args(argv)
    tasks = [
        (arguments.kind, arguments.seed, i)
        for i in range(arguments.start, arguments.start + arguments.count)
    ]
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    done, begin = 0, time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for outcome in pool.imap_unordered(_run, tasks):
            counts[outcome.family] += 1
            done += 1
            if outcome.wrong:
                wrong.append(outcome.wrong)
                print(outcome.wrong, flush=True)
            if time.perf_counter() - begin > arguments.seconds:
                break
    for family, count in sorted(counts.items()):
        print(f"{family}: {count}")
    print(f"{done} {arguments.kind} problems of seed {arguments.seed}, {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_autotune_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0"
    for library in ("OPENBLAS", "OMP", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    sys.exit(main())
