"""Quantized weights in Flax's linear layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_values import assert_close_in_norm

import jax_tcgemm
from jax_tcgemm import quantize
from jax_tcgemm.quantized.packed import PackedWeight, pack, pack_params

pytestmark = [pytest.mark.any_jax, pytest.mark.filterwarnings("default")]

nn = pytest.importorskip("flax.linen")

from flax import nnx  # noqa: E402

from jax_tcgemm.adapters.flax_dense import (  # noqa: E402
    QuantizedParam,
    dense_options,
    pack_linears,
    promote_dtype,
)

FEATURES, HIDDEN, OUT = 128, 96, 24


class Mlp(nn.Module):
    """Two Dense layers with options for both."""

    options: dict

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(HIDDEN, dtype=x.dtype, **self.options)(x))
        return nn.Dense(OUT, use_bias=False, dtype=x.dtype, **self.options)(x)


class Linears(nnx.Module):
    """The same for NNX."""

    def __init__(self, dtype, rngs):
        self.hidden = nnx.Linear(FEATURES, HIDDEN, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, OUT, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.gelu(self.hidden(x)))


def dequantized(kernel, dtype, group):
    tile = (-1 if group is None else group, 1)
    return quantize(kernel, dtype, tile=tile).dequantize(kernel.dtype)


KINDS = pytest.mark.parametrize(
    ("qtype", "group", "dtype"),
    [
        (jnp.int4, 32, jnp.bfloat16),
        (jnp.uint4, 32, jnp.float32),
        (jnp.int4, None, jnp.float32),
        (jnp.int8, None, jnp.bfloat16),
        (jnp.float8_e4m3fn, 32, jnp.bfloat16),
    ],
)


@KINDS
def test_linen(normal, qtype, group, dtype):
    x = normal(3, 5, FEATURES, dtype=dtype)
    params = Mlp({}).init(jax.random.key(0), x)
    is_kernel = lambda path: path[-1].key == "kernel"  # noqa: E731
    rounded, quantized = (
        jax.tree_util.tree_map_with_path(
            lambda path, w, f=f: f(w) if is_kernel(path) else w, params
        )
        for f in (
            lambda w: dequantized(w, qtype, group),
            lambda w: quantize(w, qtype, tile=(-1 if group is None else group, 1)),
        )
    )
    expected = Mlp({}).apply(rounded, x)
    options = dense_options(qtype, group)
    packed = pack_params(quantized)
    assert isinstance(packed["params"]["Dense_0"]["kernel"], PackedWeight)
    assert_close_in_norm(jax.jit(Mlp(options).apply)(packed, x), expected)
    del options["kernel_init"]  # Flax would compare the unpacked weight's shape with it
    assert_close_in_norm(jax.jit(Mlp(options).apply)(quantized, x), expected)


def test_linen_draws_packed_weights(normal):
    x = normal(2, FEATURES)
    model = Mlp(dense_options(jnp.int4, 32))
    params = model.init(jax.random.key(0), x)
    plain = Mlp({}).init(jax.random.key(0), x)
    for name, layer in plain["params"].items():
        expected = dequantized(layer["kernel"], jnp.int4, 32)
        np.testing.assert_array_equal(params["params"][name]["kernel"].dequantize(), expected)
    wrong = Mlp(dense_options(jnp.int4, None))
    with pytest.raises(Exception, match="kernel"):  # the scales have another shape
        wrong.apply(params, x)


@KINDS
def test_nnx(normal, qtype, group, dtype):
    x = normal(3, 5, FEATURES, dtype=dtype)
    plain, model = Linears(dtype, nnx.Rngs(0)), Linears(dtype, nnx.Rngs(0))
    for layer in (plain.hidden, plain.out):
        layer.kernel = nnx.Param(dequantized(layer.kernel[...], qtype, group))
    expected = plain(x)
    assert pack_linears(model, qtype, group) is model
    assert isinstance(model.hidden.kernel[...], PackedWeight)
    apply = nnx.jit(lambda model, x: model(x))
    assert_close_in_norm(apply(model, x), expected)
    graph, state = nnx.split(model)
    assert_close_in_norm(jax.jit(lambda state: nnx.merge(graph, state)(x))(state), expected)
    pack_linears(model, qtype, group)  # finds nothing to do
    assert_close_in_norm(apply(model, x), expected)


@pytest.mark.parametrize("is_packed", [True, False])
def test_variables_hold_weights(normal, is_packed):
    w, w2 = (quantize(normal(*shape), jnp.int4, tile=(32, 1)) for shape in ((64, 128), (128, 64)))
    w, w2 = (pack(each) if is_packed else each for each in (w, w2))
    held, held2 = map(nnx.Param, (w, w2))
    x = normal(4, 64, dtype=jnp.bfloat16)
    dims = (((1,), (0,)), ((), ()))
    for f in (
        lambda w, w2: jax_tcgemm.gemm(x, w, bias=jnp.ones(128, x.dtype)),
        lambda w, w2: jax_tcgemm.gemm(x, b=w, epilogue=jnp.tanh),
        lambda w, w2: jax_tcgemm.gated_gemm(x, w, w),
        lambda w, w2: jax_tcgemm.mlp(x, w, None, w2),
        lambda w, w2: jax_tcgemm.dot_general(x, w, dims),
    ):
        np.testing.assert_array_equal(f(held, held2), f(w, w2))
        # Within a program, a variable is a constant or, as here, of the program's arguments.
        in_program = nnx.jit(f)(held, held2)
        assert_close_in_norm(in_program, f(w, w2))


def test_nnx_packs_chosen_layers_alone(normal):
    x = normal(4, FEATURES)
    model = pack_linears(
        Linears(jnp.float32, nnx.Rngs(0)), group=32, predicate=lambda path, layer: path == ("out",)
    )
    assert isinstance(model.out.kernel, QuantizedParam)
    assert isinstance(model.hidden.kernel[...], jax.Array)
    assert model(x).shape == (4, OUT)
    with pytest.raises(ValueError, match="tile"):
        pack_linears(model, group=36)


def test_nnx_takes_unpacked_weights(normal):
    x, dtype = normal(4, FEATURES), jnp.float32
    plain, model = Linears(dtype, nnx.Rngs(0)), Linears(dtype, nnx.Rngs(0))
    kernel = model.hidden.kernel[...]
    plain.hidden.kernel = nnx.Param(dequantized(kernel, jnp.int4, 32))
    model.hidden.kernel = QuantizedParam(quantize(kernel, jnp.int4, tile=(32, 1)))
    model.hidden.dot_general = jax_tcgemm.dot_general
    model.hidden.promote_dtype = promote_dtype
    assert_close_in_norm(model(x), plain(x))


def test_gradients_reach_the_inputs(normal):
    x = normal(4, FEATURES)
    layer = nn.Dense(HIDDEN, **dense_options(jnp.int4, 32))
    params = layer.init(jax.random.key(0), x)
    weight = params["params"]["kernel"].dequantize()
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(layer.apply(params, x))))(x)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x @ weight)))(x)
    assert_close_in_norm(gradient, expected)


def test_promotion(normal):
    x, bias = normal(4, 8, dtype=jnp.bfloat16), normal(8)
    weight = pack(quantize(normal(8, 8), jnp.int4, tile=(8, 1)))
    for given in ((x, weight, bias), ((x, weight, bias),)):
        promoted = promote_dtype(*given)
        assert promoted[1] is weight
        assert [y.dtype for y in promoted[::2]] == [jnp.float32] * 2
    assert promote_dtype(x, weight, None, dtype=jnp.float16)[0].dtype == jnp.float16
