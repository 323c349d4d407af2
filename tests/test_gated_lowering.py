"""The CUDA lowering of `gated_gemm` and its derivatives. Without a GPU."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import assert_nothing_moves, bf16, picked

import jax_tcgemm
from jax_tcgemm import _extension, gated_gemm
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels import table as kernel_table


def fused(x, w_gate, w_up, bias_gate=None, bias_up=None):
    return gated_gemm(x, w_gate, w_up, bias_gate=bias_gate, bias_up=bias_up)


@pytest.mark.parametrize("transpose_w", [False, True])
def test_one_custom_call(cuda_module, transpose_w):
    w = bf16(24, 16) if transpose_w else bf16(16, 24)

    def f(x, w, v, bias, bias2):
        return gated_gemm(x, w, v, bias_gate=bias, bias_up=bias2, transpose_w=transpose_w)

    text, (call,) = cuda_module(f, bf16(2, 40, 16), w, w, bf16(24), jnp.zeros(24))
    assert_nothing_moves(text)
    assert picked(call, "m", "n", "k", "batch_shape", "gated") == (80, 24, 16, [], True)
    assert picked(call, "has_b2", "b2_offset", "has_bias", "has_bias2") == (True, 0, True, True)
    assert picked(call, "has_aux", "activation", "bias2_strides") == (False, "Silu", [1])
    assert call["b_strides"] == ([1, 16] if transpose_w else [24, 1])
    shape = "24x16xbf16" if transpose_w else "16x24xbf16"
    assert call["operands"] == ["2x40x16xbf16", shape, "24xbf16", shape, "24xf32"]
    assert call["results"] == ["2x40x24xbf16"]
    assert not call["has_workspace"]


@pytest.mark.parametrize(
    ("transpose_w", "strides", "offset"), [(False, [48, 1], 24), (True, [1, 16], 24 * 16)]
)
def test_packed_weight_is_read_in_place(cuda_module, transpose_w, strides, offset):
    w = bf16(48, 16) if transpose_w else bf16(16, 48)
    f = functools.partial(gated_gemm, transpose_w=transpose_w, activation=None)
    text, (call,) = cuda_module(f, bf16(80, 16), w)
    assert_nothing_moves(text)
    assert picked(call, "n", "b_strides", "b2_offset", "has_b2") == (24, strides, offset, False)
    assert picked(call, "activation", "results") == ("", ["80x24xbf16"])


def test_derivative_takes_three_results_of_one_pass(cuda_module):
    x, w = bf16(80, 16), bf16(16, 24)

    def pullback(x, w, v, g):
        y, vjp = jax.vjp(fused, x, w, v)
        return y, vjp(g)

    text, calls = cuda_module(pullback, x, w, w, bf16(80, 24))
    forward, *rest = calls
    assert picked(forward, "gated", "has_aux") == (True, True)
    assert forward["results"] == ["80x24xbf16"] * 3
    assert len(rest) == 4
    # The second product adds the two parts of x's cotangent.
    first, second = (call for call in rest if call["results"] == ["80x16xbf16"])
    assert picked(first, "has_c", "c_role") == (False, "add")
    assert picked(second, "has_c", "c_role", "beta", "c_strides") == (True, "add", 1.0, [16, 1])
    assert text.count("operand_index = 2") == 1  # in place
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize("transpose_w", [False, True])
def test_gradients_of_a_packed_weight_are_two_products(cuda_module, transpose_w):
    w = bf16(48, 16) if transpose_w else bf16(16, 48)

    def pullback(x, w, g):
        f = functools.partial(gated_gemm, transpose_w=transpose_w)
        return jax.vjp(f, x, w)[1](g)

    text, calls = cuda_module(pullback, bf16(8, 16), w, bf16(8, 24))
    shape = "48x16xbf16" if transpose_w else "16x48xbf16"
    assert sorted(call["results"][0] for call in calls[1:]) == sorted(["8x16xbf16", shape])
    # XLA detects that both products read the same concatenated cotangent.
    compiled = jax.jit(pullback).lower(bf16(8, 16), w, bf16(8, 24)).compile().as_text()
    assert len(re.findall(r" concatenate\(", compiled)) == 1
    assert "stablehlo.transpose" not in text
    # The forward pass needs the pre-activations only: one product with the packed weight.
    assert picked(calls[0], "gated", "n", "results") == (False, 48, ["8x48xbf16"])


@pytest.mark.parametrize("saves", [False, True])
def test_few_rows_are_two_products(cuda_module, saves):
    """The second product reads the first, rounded, as a factor."""
    x, w = bf16(64, 16), bf16(16, 24)

    def f(x, w, v, bias):
        function = functools.partial(gated_gemm, bias_gate=bias, bias_up=bias)
        return jax.vjp(function, x, w, v) if saves else function(x, w, v)

    text, (up, gate) = cuda_module(lambda *args: jax.tree.leaves(f(*args)), x, w, w, bf16(24))
    assert_nothing_moves(text)
    assert picked(up, "c_role", "activation", "has_bias", "gated") == ("add", "", True, False)
    assert picked(gate, "c_role", "activation", "has_c") == ("factor", "Silu", True)
    assert gate["has_aux"] == saves


def test_vmap_is_strides(cuda_module):
    x, w = bf16(80, 3, 16), bf16(16, 3, 24)
    f = jax.vmap(fused, in_axes=(1, 1, 1))
    text, (call,) = cuda_module(f, x, w, w)
    assert_nothing_moves(text)
    assert picked(call, "batch_shape", "a_strides", "b_strides") == (
        *([3], [16, 48, 1], [24, 72, 1]),
    )


@pytest.mark.parametrize(
    ("why", "x", "w", "v", "axes"),
    [
        ("nothing to multiply", bf16(8, 0), bf16(0, 24), bf16(0, 24), None),
        ("float32", jnp.zeros((4, 6)), jnp.zeros((6, 5)), jnp.zeros((6, 5)), None),
        ("unaligned", bf16(8, 16), bf16(16, 23), bf16(16, 23), None),
        ("k unaligned", bf16(8, 9), bf16(9, 24), bf16(9, 24), None),
        ("two layouts", bf16(8, 16), bf16(16, 3, 24), bf16(3, 16, 24), (None, 1, 0)),
        ("no contiguous axis", bf16(8, 16, 3), bf16(16, 24), bf16(16, 24), (2, None, None)),
    ],
)
def test_reference_where_there_is_no_gated_kernel(cuda_module, why, x, w, v, axes):
    f = fused if axes is None else jax.vmap(fused, axes)
    text, calls = cuda_module(f, x, w, v)
    assert not calls, why
    assert text.count("dot_general") == 2


def test_packed_halves_off_16_bytes_take_the_reference(cuda_module):
    text, calls = cuda_module(gated_gemm, bf16(8, 16), bf16(16, 24))
    assert not calls
    assert text.count("dot_general") == 1


def test_config_is_the_primal_calls(cuda_module):
    rows = kernel_names.for_algorithm("BF16_BF16_F32")
    name = next(row.name for row in rows if row.gated)

    def loss(x, w):
        return gated_gemm(x, w, w, config=name).sum().astype(jnp.float32)

    _, calls = cuda_module(jax.value_and_grad(loss, (0, 1)), bf16(16, 16), bf16(16, 16))
    assert [call["config"] for call in calls] == [name, *[""] * 4]
    with pytest.raises(ValueError, match="not a kernel configuration"):
        jax_tcgemm.gemm(bf16(16, 16), bf16(16, 16), config=name)
    plain = next(row.name for row in rows if not row.gated)
    with pytest.raises(ValueError, match=r"for gated products in BF16_BF16_F32") as raised:
        gated_gemm(bf16(16, 16), bf16(16, 16), config=plain)
    assert name in str(raised.value)


def test_builds_without_gated_kernels_take_the_reference(cuda_module, monkeypatch):
    plain = frozenset(row.name for row in kernel_table.CONFIGS if not row.gated)
    monkeypatch.setattr(_extension, "KERNEL_NAMES", plain)
    _, calls = cuda_module(fused, bf16(16, 16), bf16(16, 16), bf16(16, 16))
    assert not calls
