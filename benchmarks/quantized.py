"""Products of 8-bit operands with scales: their operands, ours, and the natural JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import Quantized, gemm, ragged_dot
from jax_tcgemm.problem.activations import ACTIVATIONS

DTYPES = {
    "e4m3": jnp.dtype(jnp.float8_e4m3fn),
    "e5m2": jnp.dtype(jnp.float8_e5m2),
    "s8": jnp.dtype(jnp.int8),
}

# Shapes of the scales of A (m, k) and B (k, n), as multiplied, by the field `scale`.
SCALES: dict[str, Callable[[int, int, int], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "tensor": lambda m, n, k: ((1, 1), (1, 1)),
    "rows+columns": lambda m, n, k: ((m, 1), (1, n)),
    "blocks": lambda m, n, k: ((m, k // 128), (k // 128, n // 128)),
}
SUMS = ("fast", "promoted")

OUT_SCALE = 1 / 64
_INTEGERS = 40.0  # standard deviation of drawn integers


def scale_shapes(case: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a case's scales, stored in the operands' layouts."""
    pair = SCALES[case.scale](case.m, case.n, case.k)
    groups = (len(case.group_sizes),) if case.group_sizes else ()
    return {
        f"{name}_scale": (*outer, *(shape[::-1] if letter == "t" else shape))
        for name, outer, shape, letter in zip("ab", ((), groups), pair, case.layout, strict=True)
    }


def drawn(values: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns normal numbers in an 8-bit type."""
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.clip(jnp.round(values * _INTEGERS), -127, 127)
    return values.astype(dtype)


def scales(values: jax.Array, k: int, dtype: np.dtype) -> jax.Array:
    """Returns positive scales that make the product's elements about 1."""
    size = _INTEGERS if jnp.issubdtype(dtype, jnp.integer) else 1.0
    return jnp.exp(0.1 * values) * (k**-0.25 / size)


def ours(case: Any, config: str | None) -> Callable[[dict[str, jax.Array]], Any]:
    """Returns the case computed by this package."""
    if case.group_sizes:
        return lambda arrays: ragged_dot(
            Quantized(arrays["a"], arrays["a_scale"]),
            Quantized(arrays["b"], arrays["b_scale"]),
            jnp.asarray(case.group_sizes, jnp.int32),
            transpose_rhs=case.layout[1] == "t",
            precision="highest" if case.sums == "promoted" else None,
            preferred_element_type=case.out_dtype,
            config=config,
        )
    quantizes = case.out in DTYPES

    def run(arrays: dict[str, jax.Array]) -> Any:
        return gemm(
            arrays["a"],
            arrays["b"],
            a_scale=arrays["a_scale"],
            b_scale=arrays["b_scale"],
            bias=arrays.get("bias"),
            activation=case.activation,
            transpose_a=case.layout[0] == "t",
            transpose_b=case.layout[1] == "t",
            precision="highest" if case.sums == "promoted" else None,
            preferred_element_type=case.out_dtype,
            out_scale=OUT_SCALE if quantizes else None,
            return_amax="amax" in case.parts,
            config=config,
        )

    return run


def xla(case: Any, arrays: dict[str, jax.Array]) -> Any:
    """Computes the case by the natural JAX expression."""
    a, b, of_a, of_b = (
        arrays[name].mT if letter == "t" else arrays[name]
        for name, letter in zip(("a", "b", "a_scale", "b_scale"), case.layout * 2, strict=True)
    )
    if case.scale == "blocks":
        a = (a.astype(jnp.float32) * jnp.repeat(of_a, 128, 1)).astype(jnp.bfloat16)
        of_b = jnp.repeat(jnp.repeat(of_b, 128, 0), 128, 1)
        b = (b.astype(jnp.float32) * of_b).astype(jnp.bfloat16)
        return jnp.matmul(a, b).astype(case.out_dtype)
    if case.group_sizes:
        return _by_lax_ragged_dot(case, a, b, of_a, of_b)
    sums = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    precision = "highest" if case.sums == "promoted" else None
    z = jnp.matmul(a, b, precision=precision, preferred_element_type=sums) * (of_a * of_b)
    if "bias" in arrays:
        z = z + arrays["bias"].astype(jnp.float32)
    if case.activation:
        z = ACTIVATIONS[case.activation].reference(z)
    if case.out in DTYPES:
        limit = float(jnp.finfo(case.out_dtype).max)
        d = jnp.clip(z / OUT_SCALE, -limit, limit).astype(case.out_dtype)
    else:
        d = z.astype(case.out_dtype)
    return (d, jnp.max(jnp.abs(z))) if "amax" in case.parts else d


def _by_lax_ragged_dot(case: Any, a: jax.Array, b: jax.Array, of_a: Any, of_b: Any) -> jax.Array:
    """Uses bfloat16, which holds 8-bit values exactly and which XLA multiplies faster."""
    sizes = jnp.asarray(case.group_sizes, jnp.int32)
    a, b = (x.astype(jnp.bfloat16) for x in (a, b))
    z = jax.lax.ragged_dot(a, b, sizes, preferred_element_type=jnp.float32)
    of_rows = jnp.repeat(of_b[:, 0], sizes, axis=0, total_repeat_length=case.m)
    return (z * of_a * of_rows).astype(case.out_dtype)
