"""The natural JAX of each case, compiled by XLA: the rival of ``jax_tcgemm``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import quantized
import weight_only
from cases import Case
from functions import FUNCTIONS
from ours import ALPHA, BETA, FACTORS
from steps import STEPS, Arrays, value_and_gradients

from jax_tcgemm.problem.activations import ACTIVATIONS


def forms(case: Case) -> dict[str, Callable[[Arrays], Any]]:
    """Returns the natural JAX expressions of a case by name; the fastest one is the rival."""
    return weight_only.forms(case) if case.is_packed else {"": functools.partial(xla, case)}


def xla(case: Case, arrays: Arrays) -> Any:
    """Computes the case by the natural JAX expression."""
    if case.is_packed:
        return next(iter(weight_only.forms(case).values()))(arrays)
    if case.scale:
        return quantized.xla(case, arrays)
    if case.step:
        return value_and_gradients(STEPS[case.step].xla, arrays)
    preferred = case.out_dtype if case.out else None
    a, *weights = (
        jnp.swapaxes(arrays[name], -1, -2) if letter == "t" else arrays[name]
        for name, letter in zip(FACTORS, (*case.layout, case.layout[1]), strict=True)
        if name in arrays
    )
    if case.group_sizes:
        return _by_lax_ragged_dot(case, arrays, a, weights[0], preferred)
    if case.conjugate:
        a, weights = (a.conj(), weights) if case.conjugate == "a" else (a, [weights[0].conj()])
    options = {"precision": case.precision, "preferred_element_type": preferred}
    z, *up = (jnp.matmul(a, b, **options) for b in weights)
    if case.function:
        products = (each.astype(jnp.float32) for each in (z, *up))
        others = case.function_operands(arrays)
        return FUNCTIONS[case.function].apply(*products, *others)
    if case.is_gated:
        return jax.nn.silu(z) * up[0]
    if "alpha" in case.parts:
        z = ALPHA * z
    if case.has_c:
        z = z + (BETA * arrays["c"] if "beta_c" in case.parts else arrays["c"])
    if "bias" in case.parts:
        z = z + arrays["bias"]
    d = ACTIVATIONS[case.activation].reference(z) if case.activation else z
    return [d, z] if "aux" in case.parts else d


def _by_lax_ragged_dot(
    case: Case, arrays: Arrays, a: jax.Array, b: jax.Array, preferred: np.dtype | None
) -> jax.Array:
    sizes = jnp.asarray(case.group_sizes, jnp.int32)
    z = jax.lax.ragged_dot(a, b, sizes, preferred_element_type=preferred)
    if case.function:
        others = case.function_operands(arrays)
        return FUNCTIONS[case.function].apply(z.astype(jnp.float32), *others)
    # The cases whose groups contain all rows.
    if "bias" in case.parts:
        z = z + jnp.repeat(arrays["bias"], sizes, axis=0, total_repeat_length=case.m)
    return ACTIVATIONS[case.activation].reference(z) if case.activation else z
