"""The gemms of `mlp`, `gated_mlp` and their derivatives on CUDA. Without a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import bf16
from mlp_forms import TWO, gated, packed, plain, transposed

CUDA_ARGS = (bf16(2, 8, 16), bf16(16, 32), bf16(32), bf16(32, 24), bf16(24))


def step(form, *args):
    y, pullback = jax.vjp(form, *args)
    return y, pullback(y)


def roles(calls):
    return [call["c_role"] for call in calls]


@pytest.mark.parametrize("form", [plain, transposed])
def test_gemms_of_a_step(cuda_module, form):
    text, calls = cuda_module(functools.partial(step, form), *CUDA_ARGS)
    assert len(calls) == 6
    first, second, *backward = calls
    assert (first["activation"], first["has_aux"], first["has_bias"]) == ("Gelu", True, True)
    assert (second["activation"], second["has_aux"], second["has_bias"]) == ("", False, True)
    assert sorted(roles(backward)) == ["add", "add", "add", "derivative"]
    fused = next(call for call in backward if call["c_role"] == "derivative")
    assert (fused["m"], fused["n"], fused["k"]) == (16, 32, 24)
    assert (fused["activation"], fused["c_strides"]) == ("Gelu", [32, 1])
    assert not any(call["has_c"] for call in backward if call is not fused)
    # Only the bias sums remain.
    assert text.count("stablehlo.reduce(") == 2
    assert not any(f"stablehlo.{op} " in text for op in ("multiply", "tanh", "select"))


@pytest.mark.parametrize(("form", "gemms"), [(gated, 8), (packed, 6)])
def test_gemms_of_a_gated_step(cuda_module, form, gemms):
    _, *weights = CUDA_ARGS
    x = bf16(2, 40, 16)  # few rows would need one more gemm
    text, calls = cuda_module(functools.partial(step, form), x, *weights)
    assert len(calls) == gemms
    first = calls[0]
    assert (first["gated"], first["has_aux"], first["n"]) == (True, True, 16)
    assert roles(calls).count("gated_derivative") == 1
    fused = next(call for call in calls if call["c_role"] == "gated_derivative")
    assert fused["results"] == ["2x40x16xbf16"] * 2
    assert (fused["has_c"], fused["has_c2"], fused["has_aux"]) == (True, True, True)
    assert "stablehlo.logistic" not in text


@TWO
def test_batched_step_is_fused_too(cuda_module, form, formula):
    axes = (0, 0, None, 0, None)
    args = [
        x if axis is None else jnp.stack([x] * 3) for x, axis in zip(CUDA_ARGS, axes, strict=True)
    ]
    role = "gated_derivative" if form is gated else "derivative"
    for f in (
        lambda *args: step(jax.vmap(form, axes), *args),
        jax.vmap(functools.partial(step, form), axes),
    ):
        _, calls = cuda_module(f, *args)
        assert roles(calls).count(role) == 1
