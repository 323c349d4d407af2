"""Invalid input raises at trace time and names the argument, its value and the accepted values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import gemm
from jax_tcgemm.kernels import names as kernel_names


def _zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


A, B = _zeros(4, 6), _zeros(6, 5)
INTS = {"a": _zeros(4, 6, dtype=jnp.int32), "b": _zeros(6, 5, dtype=jnp.int32)}
COMPLEX = {"a": _zeros(4, 6, dtype=jnp.complex64), "b": _zeros(6, 5, dtype=jnp.complex64)}
BF16 = {"a": _zeros(8, 16, dtype=jnp.bfloat16), "b": _zeros(16, 8, dtype=jnp.bfloat16)}
BF16_ROW = kernel_names.for_algorithm("BF16_BF16_F32")[0].name
TF32_ROW = kernel_names.for_algorithm("TF32_TF32_F32")[0].name
REALIGN_ROW = next(
    row.name for row in kernel_names.for_algorithm("BF16_BF16_F32") if row.loader == "realign"
)

CASES = {
    "rank of a": ({"a": _zeros(6)}, ValueError, ["a must", "(6,)", "2 dimensions"]),
    "rank of b": ({"b": _zeros(6)}, ValueError, ["b must", "(6,)"]),
    "list": ({"a": [[1.0] * 6]}, TypeError, ["a must be an array", "list"]),
    "none": ({"b": None}, TypeError, ["b must be an array", "None"]),
    "contracted": ({"b": _zeros(5, 6)}, ValueError, ["k", "6 and 5", "(5, 6)"]),
    "contracted, transposed": ({"transpose_a": True}, ValueError, ["4 and 6", "transpose_a=True"]),
    "flag": ({"transpose_b": 1}, TypeError, ["transpose_b=1", "True or False"]),
    "batch": (
        {"a": _zeros(2, 4, 6), "b": _zeros(3, 6, 5)},
        ValueError,
        ["broadcast", "(2, 4, 6)", "(3, 6, 5)"],
    ),
    "c shape": ({"c": _zeros(5, 4)}, ValueError, ["c.shape=(5, 4)", "(4, 5)"]),
    "c rank": ({"c": _zeros(1, 4, 5)}, ValueError, ["c.shape=(1, 4, 5)", "(4, 5)"]),
    "bias shape": ({"bias": _zeros(4)}, ValueError, ["bias.shape=(4,)", "(5,)"]),
    "bias of one": ({"bias": _zeros(1)}, ValueError, ["bias.shape=(1,)", "(5,)"]),
    "bias rank": ({"bias": _zeros(4, 5)}, ValueError, ["bias.shape=(4, 5)", "(5,)"]),
    "scalar bias": ({"bias": _zeros()}, ValueError, ["bias.shape=()", "(5,)"]),
    "alpha shape": ({"alpha": _zeros(1)}, ValueError, ["alpha", "(1,)", "()"]),
    "beta shape": ({"beta": _zeros(2)}, ValueError, ["beta", "(2,)", "()"]),
    "alpha type": ({"alpha": "1"}, TypeError, ["alpha", "'1'"]),
    "complex alpha": ({"alpha": 1j}, TypeError, ["alpha=1j", "float32", "floating"]),
    "complex c": (
        {"c": _zeros(4, 5, dtype=jnp.complex64)},
        TypeError,
        ["c.dtype=complex64", "float32"],
    ),
    "complex bias": ({"bias": COMPLEX["b"][0]}, TypeError, ["bias.dtype=complex64", "float32"]),
    "float alpha": ({**INTS, "alpha": 0.5}, TypeError, ["alpha=0.5", "int32", "integer"]),
    "float alpha array": (
        {**INTS, "alpha": jnp.float32(2)},
        TypeError,
        ["alpha.dtype=float32", "int32"],
    ),
    "float c": ({**INTS, "c": _zeros(4, 5)}, TypeError, ["c.dtype=float32", "int32"]),
    "activation": ({"activation": "swish"}, ValueError, ["activation='swish'", "silu"]),
    "activation type": ({"activation": jnp.tanh}, ValueError, ["activation=", "'tanh'"]),
    "activation of integers": ({**INTS, "activation": "relu"}, TypeError, ["'relu'", "int32"]),
    "activation of complex": ({**COMPLEX, "activation": "tanh"}, TypeError, ["'tanh'", "complex"]),
    "real activation of complex": (
        {**COMPLEX, "activation": "tanh", "preferred_element_type": jnp.float32},
        TypeError,
        ["'tanh'", "float32 needs real operands", "complex64"],
    ),
    "precision": ({"precision": "best"}, ValueError, ["best", "highest"]),
    "fp8 of two kinds": (
        {"a": A.astype(jnp.float8_e4m3fn), "b": B.astype(jnp.bfloat16)},
        TypeError,
        ["float8_e4m3fn", "bfloat16"],
    ),
    "narrow preferred": (
        {**INTS, "preferred_element_type": jnp.int8},
        TypeError,
        ["preferred_element_type", "int8", "int32"],
    ),
    "config type": ({"config": 3}, TypeError, ["config=3", "None"]),
    "unknown config": (
        {**BF16, "config": f"{BF16_ROW}_fast"},
        ValueError,
        [f"config='{BF16_ROW}_fast'", f"'{BF16_ROW}'", "jax_tcgemm/kernels/table.py"],
    ),
    "config of another algorithm": (
        {**BF16, "config": TF32_ROW},
        ValueError,
        [TF32_ROW, "BF16_BF16_F32", BF16_ROW],
    ),
    "config without kernel": (
        {"precision": "highest", "config": TF32_ROW},
        ValueError,
        [TF32_ROW, "HIGHEST", "config=None"],
    ),
    "config for integers": ({**INTS, "config": BF16_ROW}, ValueError, [BF16_ROW, "int32"]),
    "unaligned a": (
        {**BF16, "a": _zeros(8, 9, dtype=jnp.bfloat16), "b": BF16["b"][:9], "config": BF16_ROW},
        ValueError,
        [BF16_ROW, "a has a leading dimension of 9 elements", REALIGN_ROW],
    ),
    "unaligned b": (
        {**BF16, "b": _zeros(16, 3, dtype=jnp.bfloat16), "config": BF16_ROW},
        ValueError,
        ["b has a leading dimension of 3 elements", "16 bytes"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_raises(case):
    changes, error, parts = CASES[case]
    arguments: dict[str, Any] = {"a": A, "b": B, **changes}
    a, b, c = arguments.pop("a"), arguments.pop("b"), arguments.pop("c", None)
    with pytest.raises(error) as raised:
        gemm(a, b, c, **arguments)
    for part in parts:
        assert part in str(raised.value)


def test_raises_while_tracing():
    with pytest.raises(ValueError, match=r"a and b must agree in k, got 6 and 4"):
        jax.jit(gemm).trace(A, A)


def test_aligned_config_is_accepted():
    gemm(BF16["a"], BF16["b"], config=BF16_ROW)
    gemm(BF16["a"][:, :9], BF16["b"][:9, :3], config=REALIGN_ROW)
    # The leading dimension of a single row has no effect.
    gemm(BF16["a"][:1, :9], BF16["b"][:9].T, transpose_b=True, config=REALIGN_ROW)


def test_config_is_checked_again_under_vmap():
    x = _zeros(16, 3, 8, dtype=jnp.bfloat16)

    def f(a, b):
        return gemm(a, b, transpose_a=True, config=BF16_ROW)

    b = BF16["b"]
    f(x[:, 0], b)
    jax.vmap(f, in_axes=(1, None))(x, b)
    with pytest.raises(ValueError, match="leading dimension of 3 elements"):
        jax.vmap(f, in_axes=(0, None))(_zeros(8, 16, 3, dtype=jnp.bfloat16), b)


def test_config_outside_the_build(monkeypatch, cuda_module):
    from jax_tcgemm import _extension

    keep = frozenset({REALIGN_ROW})
    monkeypatch.setattr(_extension, "KERNEL_NAMES", keep)
    with pytest.raises(ValueError, match="not in this build"):
        cuda_module(lambda a, b: gemm(a, b, config=BF16_ROW), BF16["a"], BF16["b"])


def test_beta_without_c_has_no_effect():
    np.testing.assert_array_equal(gemm(A + 1, B + 1, beta=7.0), gemm(A + 1, B + 1))
