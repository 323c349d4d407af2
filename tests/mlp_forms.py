"""Forms of `mlp` and `gated_mlp` that take the same arguments, each with its formula."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest

from jax_tcgemm import gated_mlp, mlp
from jax_tcgemm.problem.activations import resolve


def plain(x, w1, b1, w2, b2, **options):
    return mlp(x, w1, b1, w2, b2, **options)


def transposed(x, w1, b1, w2, b2, **options):
    return mlp(x, w1.T, b1, w2.T, b2, transpose_w=True, **options)


def plain_formula(x, w1, b1, w2, b2, activation="gelu"):
    return resolve(activation).reference(x @ w1 + b1) @ w2 + b2


def gated(x, w1, b1, w2, b2, **options):
    w_gate, w_up = jnp.split(w1, 2, axis=-1)
    bias_gate, bias_up = jnp.split(b1, 2)
    biases = {"bias_gate": bias_gate, "bias_up": bias_up, "bias_down": b2}
    return gated_mlp(x, w_gate, w_up, w2[: w2.shape[0] // 2], **biases, **options)


def packed(x, w1, b1, w2, b2, transpose_w=False, **options):
    bias_gate, bias_up = jnp.split(b1, 2)
    biases = {"bias_gate": bias_gate, "bias_up": bias_up, "bias_down": b2}
    w2 = w2[: w2.shape[0] // 2]
    w1, w2 = (w1.T, w2.T) if transpose_w else (w1, w2)
    return gated_mlp(x, w1, None, w2, transpose_w=transpose_w, **biases, **options)


packed_transposed = functools.partial(packed, transpose_w=True)


def gated_formula(x, w1, b1, w2, b2, activation="silu"):
    gate, up = jnp.split(x @ w1 + b1, 2, axis=-1)
    return (resolve(activation).reference(gate) * up) @ w2[: w2.shape[0] // 2] + b2


FORMS = {
    "plain": (plain, plain_formula),
    "transposed": (transposed, plain_formula),
    "recomputing": (functools.partial(plain, recompute_activation=True), plain_formula),
    "gated": (gated, gated_formula),
    "packed": (packed, gated_formula),
    "packed transposed": (packed_transposed, gated_formula),
    "gated, recomputing": (functools.partial(gated, recompute_activation=True), gated_formula),
}
EACH = pytest.mark.parametrize(("form", "formula"), FORMS.values(), ids=FORMS)
TWO = pytest.mark.parametrize(
    ("form", "formula"), [FORMS["plain"], FORMS["gated"]], ids=["plain", "gated"]
)
