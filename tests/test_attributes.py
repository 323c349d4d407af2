"""All attributes of the custom call: exported programs contain the same attributes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import bf16

from jax_tcgemm import _compat, gated_gemm, gemm, softcap
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

# Attributes of a plain product (80, 64) @ (64, 48) in bfloat16.
PLAIN = {
    "m": 80,
    "n": 48,
    "k": 64,
    "batch_shape": [],
    "a_strides": [64, 1],
    "b_strides": [48, 1],
    "c_strides": [0, 0],
    "bias_strides": [0],
    "alpha_strides": [],
    "beta_strides": [],
    "row_scale_strides": [0],
    "column_scale_strides": [0],
    "bias2_strides": [0],
    "has_c": False,
    "has_bias": False,
    "has_alpha": False,
    "has_beta": False,
    "has_row_scale": False,
    "has_column_scale": False,
    "has_b2": False,
    "has_bias2": False,
    "has_c2": False,
    "has_aux": False,
    "has_workspace": False,
    "padding_bytes": 0,
    "alpha": 1.0,
    "beta": 1.0,
    "c_role": "add",
    "activation": "",
    "activation_p0": 0.0,
    "activation_p1": 0.0,
    "gated": False,
    "beside_collectives": False,
    "pairs_of_b": False,
    "b2_offset": 0,
    "algorithm": "BF16_BF16_F32",
    "config": "",
}
X, W, C, VECTOR = bf16(80, 64), bf16(64, 48), bf16(80, 48), bf16(48)


def by_primitive(epilogue, *values, **names):
    """Binds the primitive to epilogue operands that no public function takes."""
    x = Operands(X, W, None, *values, **names)
    axes = Operands(*(None if o is None else tuple(range(o.ndim)) for o in x))
    spec = GemmSpec(axes, X.dtype, _compat.canonicalize_precision(None), epilogue)
    return gemm_primitive.bind(x, spec)


def everything(x, w):
    return gemm(
        jnp.stack([x, x]),
        w,
        C,
        bias=VECTOR,
        alpha=0.5,
        beta=jnp.float32(2),
        activation=softcap(2),
        row_scale=jnp.ones(80),
        column_scale=jnp.ones((2, 48)),
    )


def both_derivatives():
    return by_primitive(Epilogue("gated_derivative", "silu"), C, c2=C)


GATED_DERIVATIVE = {
    "c_role": "gated_derivative",
    "activation": "Silu",
    "has_c": True,
    "has_c2": True,
    "has_aux": True,
    "c_strides": [48, 1],
}
GATED = {"gated": True, "activation": "Silu"}


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (lambda: gemm(X, W), {}),
        (
            lambda: gemm(X.T, W, transpose_a=True, preferred_element_type=jnp.float32),
            {"a_strides": [1, 80]},
        ),
        (
            lambda: everything(X, W),
            {
                "batch_shape": [2],
                "a_strides": [5120, 64, 1],
                "b_strides": [0, 48, 1],
                "has_c": True,
                "c_strides": [0, 48, 1],
                "has_bias": True,
                "bias_strides": [0, 1],
                "bias2_strides": [0, 0],
                "has_beta": True,
                "alpha_strides": [0],
                "beta_strides": [0],
                "alpha": 0.5,
                "has_row_scale": True,
                "row_scale_strides": [0, 1],
                "has_column_scale": True,
                "column_scale_strides": [48, 1],
                "activation": "Softcap",
                "activation_p0": 2.0,
            },
        ),
        (
            lambda: gemm(X, W, bias=VECTOR, residual=C, activation="relu"),
            {
                "has_c": True,
                "c_strides": [48, 1],
                "c_role": "residual",
                "has_bias": True,
                "bias_strides": [1],
                "activation": "Relu",
            },
        ),
        (
            lambda: jax.vjp(functools.partial(gemm, activation="gelu"), X, W),
            {"has_aux": True, "activation": "Gelu"},
        ),
        (
            lambda: by_primitive(Epilogue("factor", "silu"), C),
            {"c_role": "factor", "activation": "Silu", "has_c": True, "c_strides": [48, 1]},
        ),
        (
            lambda: by_primitive(Epilogue("derivative", "tanh"), C),
            {"c_role": "derivative", "activation": "Tanh", "has_c": True, "c_strides": [48, 1]},
        ),
        (both_derivatives, GATED_DERIVATIVE),
        # The kernel writes both results, even if one is needed.
        (lambda: both_derivatives()[1], GATED_DERIVATIVE),
        (lambda: gated_gemm(X, W, W), {**GATED, "has_b2": True}),
        (
            lambda: gated_gemm(X, W, W, bias_gate=VECTOR, bias_up=VECTOR),
            {
                **GATED,
                "has_b2": True,
                "has_bias": True,
                "has_bias2": True,
                "bias_strides": [1],
                "bias2_strides": [1],
            },
        ),
        (
            lambda: gated_gemm(X, bf16(64, 96)),
            {**GATED, "b_strides": [96, 1], "b2_offset": 48},
        ),
        (
            lambda: jax.vjp(gated_gemm, X, W, W),
            {**GATED, "has_b2": True, "has_aux": True},
        ),
    ],
)
def test_every_attribute(cuda_module, function, changes):
    _, (call,) = cuda_module(lambda: jax.tree.leaves(function()))
    assert {key: call[key] for key in call if key not in ("operands", "results")} == {
        **PLAIN,
        **changes,
    }
