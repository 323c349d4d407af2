"""Random products of float32 by bfloat16 planes, and of complex64, compared with float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from random_outcome import Outcome, stored

from jax_tcgemm import gemm


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
    operands = [stored(jnp.asarray(x), letter) for x, letter in zip((a, b), layout, strict=True)]
    y = np.asarray(ours(*operands))
    # The name of XLA's x9 promises more accuracy than it has.
    rival = "highest" if preset == "BF16_BF16_F32_X9" else precision
    left = a.conj() if conjugate else a
    theirs = np.asarray(jax.jit(lambda a, b: jnp.matmul(a, b, precision=rival))(left, b))
    family = f"{a.dtype} {preset} {'kernel' if _has_call(ours, operands) else 'XLA'}"
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
