"""The CUDA lowering, checked without a GPU: one custom call, its attributes, nothing around it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import assert_nothing_moves, bf16, picked

from jax_tcgemm import _compat, _extension, clip, gemm, softcap
from jax_tcgemm.lowering import custom_call, reference
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.problem.strides import Operands

ATTRIBUTES = {
    *("m", "n", "k", "batch_shape", "a_strides", "b_strides", "c_strides", "bias_strides"),
    *("alpha_strides", "beta_strides", "row_scale_strides", "column_scale_strides"),
    *("bias2_strides", "has_c", "has_bias", "has_alpha", "has_beta", "has_row_scale"),
    *("has_column_scale", "has_b2", "has_bias2", "has_c2", "has_aux", "has_workspace"),
    *("padding_bytes", "alpha", "beta", "c_role", "activation", "activation_p0"),
    *("activation_p1", "gated", "beside_collectives", "pairs_of_b", "b2_offset", "algorithm"),
    *("config", "operands", "results"),
}


def test_plain(cuda_module):
    text, (call,) = cuda_module(lambda a, b: gemm(a, b), bf16(4, 6), bf16(6, 5))
    assert_nothing_moves(text)
    assert set(call) == ATTRIBUTES
    assert picked(call, "m", "n", "k", "batch_shape") == (4, 5, 6, [])
    assert picked(call, "a_strides", "b_strides", "c_strides") == ([6, 1], [5, 1], [0, 0])
    assert picked(call, "alpha", "beta", "activation", "config") == (1.0, 1.0, "", "")
    assert call["algorithm"] == "BF16_BF16_F32"
    assert picked(call, "c_role", "gated", "b2_offset") == ("add", False, 0)
    assert call["beside_collectives"] is False
    assert not any(call[name] for name in call if name.startswith("has_"))
    assert picked(call, "operands", "results") == (["4x6xbf16", "6x5xbf16"], ["4x5xbf16"])


@pytest.mark.parametrize(
    ("transpose_a", "transpose_b", "a_strides", "b_strides"),
    [
        (False, False, [6, 1], [5, 1]),
        (True, False, [1, 4], [5, 1]),
        (False, True, [6, 1], [1, 6]),
        (True, True, [1, 4], [1, 6]),
    ],
)
def test_layouts_are_strides(cuda_module, transpose_a, transpose_b, a_strides, b_strides):
    a = bf16(6, 4) if transpose_a else bf16(4, 6)
    b = bf16(5, 6) if transpose_b else bf16(6, 5)

    def f(a, b):
        return gemm(a, b, transpose_a=transpose_a, transpose_b=transpose_b)

    text, (call,) = cuda_module(f, a, b)
    assert_nothing_moves(text)
    assert picked(call, "a_strides", "b_strides") == (a_strides, b_strides)


def test_epilogue_attributes(cuda_module):
    def f(a, b, c, bias, alpha, beta):
        return gemm(a, b, c, bias=bias, alpha=alpha, beta=beta, activation="gelu_exact")

    args = (bf16(4, 6), bf16(6, 5), bf16(4, 1), bf16(5), jnp.float32(2), jnp.float32(3))
    text, (call,) = cuda_module(f, *args)
    assert_nothing_moves(text)
    assert picked(call, "has_c", "has_bias", "has_alpha", "has_beta") == (True,) * 4
    assert picked(call, "c_strides", "bias_strides", "alpha_strides") == ([1, 0], [1], [])
    assert call["activation"] == "GeluExact"
    assert call["operands"] == ["4x6xbf16", "6x5xbf16", "4xbf16", "5xbf16", "f32", "f32"]
    _, (call,) = cuda_module(functools.partial(f, alpha=0.5, beta=-2), *args[:4])
    assert picked(call, "alpha", "beta", "has_alpha", "has_beta") == (0.5, -2.0, False, False)


def test_scales_are_operands(cuda_module):
    def f(a, b, row_scale, column_scale):
        return gemm(a, b, row_scale=row_scale, column_scale=column_scale)

    args = (bf16(2, 3, 4, 6), bf16(6, 5), jnp.zeros((2, 3, 4)), jnp.zeros(5))
    text, (call,) = cuda_module(f, *args)
    assert_nothing_moves(text)
    assert picked(call, "has_row_scale", "has_column_scale", "has_alpha") == (True, True, False)
    assert picked(call, "m", "row_scale_strides", "column_scale_strides") == (24, [1], [1])
    assert call["operands"][2:] == ["2x3x4xf32", "5xf32"]
    # The scale is not one for each row of the folded batch, so the batch stays.
    _, (call,) = cuda_module(f, *args[:2], bf16(4), bf16(2, 3, 5))
    assert picked(call, "batch_shape", "row_scale_strides") == ([6], [0, 1])
    assert call["column_scale_strides"] == [5, 1]
    assert call["operands"][2:] == ["4xf32", "2x3x5xf32"]


@pytest.mark.parametrize(
    ("activation", "name", "parameters"),
    [
        ("relu_squared", "ReluSquared", (0.0, 0.0)),
        (softcap(30), "Softcap", (30.0, 0.0)),
        (clip(-0.1, 6), "Clip", (np.float32(-0.1), 6.0)),
    ],
)
def test_parameters_are_attributes(cuda_module, activation, name, parameters):
    _, (call,) = cuda_module(lambda a, b: gemm(a, b, activation=activation), bf16(4, 6), bf16(6, 5))
    assert call["activation"] == name
    assert tuple(np.float32(call[f"activation_p{i}"]) for i in (0, 1)) == parameters


def test_residual_takes_the_place_of_c(cuda_module):
    def f(a, b, residual, activation="gelu"):
        return gemm(a, b, residual=residual, activation=activation, beta=3.0)

    args = (bf16(4, 6), bf16(6, 5), bf16(4, 5))
    text, (call,) = cuda_module(f, *args)
    assert_nothing_moves(text)
    assert picked(call, "c_role", "has_c", "beta", "c_strides") == ("residual", True, 1.0, [5, 1])
    # Without an activation both roles are the same.
    _, (call,) = cuda_module(functools.partial(f, activation=None), *args)
    assert picked(call, "c_role", "has_c", "beta") == ("add", True, 1.0)

    def both(a, b, residual):
        return gemm(a, b, residual, residual=residual, activation="gelu", beta=3.0)

    text, (call,) = cuda_module(both, *args)
    assert picked(call, "c_role", "has_c", "beta") == ("add", True, 3.0)
    assert text.count("stablehlo.add") == 1


def _derivative(form, c2=None, activation="gelu"):
    present = (0, 1)
    axes = Operands(present, present, c=present, c2=c2)
    precision = _compat.canonicalize_precision(None)
    dtype = jnp.dtype(jnp.bfloat16)
    spec = GemmSpec(axes, dtype, precision, Epilogue(form, activation))
    return lambda a, b, c, c2=None: gemm_primitive.bind(Operands(a, b, c=c, c2=c2), spec)


def test_derivatives_of_activations_are_epilogues(cuda_module):
    args = (bf16(4, 6), bf16(6, 5), bf16(4, 5), bf16(4, 5))
    text, (call,) = cuda_module(_derivative("derivative"), *args[:3])
    assert_nothing_moves(text)
    assert picked(call, "c_role", "activation", "has_c", "has_c2", "has_aux") == (
        *("derivative", "Gelu", True, False, False),
    )
    text, (call,) = cuda_module(_derivative("gated_derivative", (0, 1)), *args)
    assert_nothing_moves(text)
    assert picked(call, "c_role", "has_c", "has_c2", "has_aux") == (
        *("gated_derivative", True, True, True),
    )
    assert call["operands"][2:] == call["results"] == ["4x5xbf16"] * 2
    # The addends share one dtype and one layout.
    _, (call,) = cuda_module(_derivative("gated_derivative", (0, 1)), *args[:3], jnp.zeros((4, 5)))
    assert call["operands"][2:] == ["4x5xf32"] * 2
    _, calls = cuda_module(_derivative("gated_derivative", (1, 0)), *args[:3], bf16(5, 4))
    assert not calls


def test_float32_addends_are_not_rounded(cuda_module):
    def f(a, b, c, bias):
        return gemm(a, b, c, bias=bias)

    args = (bf16(4, 6), bf16(6, 5), jnp.zeros((4, 5)), jnp.zeros(5))
    text, (call,) = cuda_module(f, *args)
    assert_nothing_moves(text)
    assert call["operands"][2:] == ["4x5xf32", "5xf32"]
    # An addend type that the kernel does not take is converted to float32, not to the result's
    # type.
    _, (call,) = cuda_module(f, *args[:2], args[2].astype(jnp.float16), args[3].astype(jnp.int8))
    assert call["operands"][2:] == ["4x5xf32", "5xf32"]


@pytest.mark.parametrize(
    ("dtype", "options", "algorithm", "operand", "result", "converts"),
    [
        (jnp.bfloat16, {"preferred_element_type": jnp.float32}, "BF16_BF16_F32", "bf16", "f32", 0),
        (jnp.bfloat16, {"preferred_element_type": jnp.float16}, "BF16_BF16_F32", "bf16", "f32", 1),
        (
            *(jnp.bfloat16, {"preferred_element_type": jnp.float8_e5m2}),
            *("BF16_BF16_F32", "bf16", "f32", 1),
        ),
        (jnp.float16, {"precision": "highest"}, "F16_F16_F32", "f16", "f16", 0),
        (jnp.float16, {"precision": "F16_F16_F16"}, "F16_F16_F16", "f16", "f16", 0),
        (jnp.float32, {}, "TF32_TF32_F32", "f32", "f32", 0),
        (jnp.float32, {"preferred_element_type": jnp.bfloat16}, "TF32_TF32_F32", "f32", "f32", 1),
        (jnp.float32, {"precision": "BF16_BF16_F32"}, "BF16_BF16_F32", "bf16", "f32", 2),
    ],
)
def test_dtypes(cuda_module, dtype, options, algorithm, operand, result, converts):
    a, b = jnp.zeros((4, 6), dtype), jnp.zeros((6, 5), dtype)
    text, (call,) = cuda_module(lambda a, b: gemm(a, b, **options), a, b)
    assert call["algorithm"] == algorithm
    assert picked(call, "operands", "results") == (
        [f"4x6x{operand}", f"6x5x{operand}"],
        [f"4x5x{result}"],
    )
    assert text.count("stablehlo.convert") == converts


def test_rows_of_a_batch_are_one_product(cuda_module):
    x, w, bias = bf16(2, 3, 4, 6), bf16(6, 5), bf16(5)

    def dense(x):
        return gemm(x, w, bias=bias, activation="relu")

    for f in (dense, jax.vmap(dense), jax.vmap(jax.vmap(dense))):
        text, (call,) = cuda_module(f, x)
        assert_nothing_moves(text)
        assert picked(call, "m", "batch_shape", "bias_strides") == (24, [], [1])

    def row(x):
        return gemm(x[None], w)[0]

    _, (call,) = cuda_module(jax.vmap(row), bf16(7, 6))
    assert picked(call, "m", "batch_shape", "a_strides") == (7, [], [6, 1])


def test_vmap_moves_nothing(cuda_module):
    a, b = bf16(6, 3, 8), bf16(8, 3, 5)
    text, (call,) = cuda_module(jax.vmap(gemm, in_axes=(1, 1)), a, b)
    assert_nothing_moves(text)
    assert call["batch_shape"] == [3]
    assert picked(call, "a_strides", "b_strides") == ([8, 24, 1], [5, 15, 1])
    text, (call,) = cuda_module(jax.vmap(gemm, in_axes=(None, 0)), bf16(6, 8), bf16(3, 8, 5))
    assert_nothing_moves(text)
    assert picked(call, "a_strides", "b_strides") == ([0, 8, 1], [40, 5, 1])


def test_innermost_batch_axis_is_moved(cuda_module):
    text, (call,) = cuda_module(jax.vmap(gemm, in_axes=(2, 0)), bf16(6, 8, 3), bf16(3, 8, 5))
    assert text.count("stablehlo.transpose") == 1
    assert picked(call, "a_strides", "b_strides") == ([48, 8, 1], [40, 5, 1])
    # One row per example: the batch becomes the rows of a transposed operand, and nothing moves.
    text, (call,) = cuda_module(jax.vmap(gemm, in_axes=(2, None)), bf16(1, 8, 3), bf16(8, 5))
    assert_nothing_moves(text)
    assert picked(call, "m", "batch_shape", "a_strides") == (3, [], [1, 3])


def test_batch_dimensions_that_do_not_fold(cuda_module, normal):
    a, b, alpha = normal(1, 2, 1, 3, 1, 4, 6), normal(2, 1, 3, 1, 2, 6, 5), normal(2)
    c, bias = normal(3, 1, 4, 1), normal(5)

    def f(alpha):
        return gemm(a, b, c, bias=bias, alpha=alpha)

    text, (call,) = cuda_module(lambda a, b: gemm(a[:, 0], b[:, 0]), a, b)
    assert call["batch_shape"] == [6, 3, 2]
    assert "broadcast_in_dim" not in text
    text, (call,) = cuda_module(f, alpha[0])
    assert call["batch_shape"] == [2 * 2 * 3 * 3 * 2]
    assert "broadcast_in_dim" in text


def test_dense_batch_means_the_same(monkeypatch, normal):
    """The reference computes what the custom call would receive."""
    a, b, alpha = normal(1, 2, 1, 3, 1, 4, 6), normal(2, 1, 3, 1, 2, 6, 5), normal(2)
    c, bias = normal(3, 1, 4, 1), normal(5)

    def dense(*operands, spec):
        x, spec = custom_call.with_dense_batch(spec.unflatten(operands), spec)
        return reference.reference_gemm(*flatten(x), spec=spec)

    def f(alpha):
        (spec,) = (
            eqn.params["spec"]
            for eqn in jax.make_jaxpr(lambda s: gemm(a, b, c, bias=bias, alpha=s))(alpha).eqns
            if eqn.primitive is gemm_primitive.gemm_p
        )
        x = Operands(a[0, :, 0, :, 0], b[:, 0, :, 0], None, c[:, 0, :, 0], bias, alpha)
        return dense(*flatten(x), spec=spec)[0]

    for scale in alpha:
        expected = scale * (a @ b) + c + bias
        np.testing.assert_allclose(f(scale), expected, rtol=1e-4, atol=1e-5)


def test_gradients_come_out_in_the_operands_layout(cuda_module):
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            a = bf16(6, 4) if transpose_a else bf16(4, 6)
            b = bf16(5, 6) if transpose_b else bf16(6, 5)

            def pullback(a, b, g, flags=(transpose_a, transpose_b)):
                f = lambda a, b: gemm(a, b, transpose_a=flags[0], transpose_b=flags[1])  # noqa: E731
                return jax.vjp(f, a, b)[1](g)

            text, calls = cuda_module(pullback, a, b, bf16(4, 5))
            assert_nothing_moves(text)
            results = sorted(call["results"][0] for call in calls)
            assert results == sorted(f"{'x'.join(map(str, x.shape))}xbf16" for x in (a, b))


def test_weight_gradient_is_one_product_over_all_rows(cuda_module):
    x, w, g = bf16(2, 3, 4, 6), bf16(6, 5), bf16(2, 3, 4, 5)
    text, (call,) = cuda_module(lambda w, g: jax.vjp(lambda w: gemm(x, w), w)[1](g), w, g)
    assert_nothing_moves(text)
    assert picked(call, "m", "n", "k", "batch_shape") == (6, 5, 24, [])
    assert "reduce" not in text


def test_configuration_is_the_primal_calls(cuda_module):
    name = next(name for name in sorted(_extension.KERNEL_NAMES) if "_bf16_" in name)

    def loss(a, b):
        return gemm(a, b, config=name).sum().astype(jnp.float32)

    _, calls = cuda_module(jax.value_and_grad(loss, (0, 1)), bf16(16, 16), bf16(16, 16))
    assert [call["config"] for call in calls] == [name, "", ""]


def test_static_scalars_are_float32_attributes(cuda_module):
    _, (call,) = cuda_module(lambda a, b: gemm(a, b, alpha=1 / 3), bf16(4, 6), bf16(6, 5))
    assert np.float32(call["alpha"]) == np.float32(1 / 3)
