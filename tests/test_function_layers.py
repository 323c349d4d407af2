"""Two layers, the first with a user function as its epilogue; functions on meshes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_tcgemm import gated_mlp, gemm, mlp
from jax_tcgemm.epilogue import translation
from jax_tcgemm.primitives import epilogue_derivative
from jax_tcgemm.primitives import jit_epilogue as compiled_primitive

pytestmark = pytest.mark.any_jax


def _layer_operands(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape) / 4, jnp.float32) for shape in shapes]


def _equations(jaxpr, primitive):
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitive:
            yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner, primitive)


def _dropout(acc, bias, slope):
    kept = jax.random.bernoulli(jax.random.key(0), 0.75, acc.shape)
    return jnp.where(kept, jax.nn.silu(acc * slope + bias) / 0.75, 0)


def _mlp(x, w1, bias, slope, w2, b2, r):
    return mlp(x, w1, None, w2, b2, residual=r, epilogue=_dropout, epilogue_operands=(bias, slope))


def _plain_mlp(x, w1, bias, slope, w2, b2, r):
    return _dropout(x @ w1, bias, slope) @ w2 + b2 + r


_MLP_SHAPES = (12, 16), (16, 24), (24,), (), (24, 8), (8,), (12, 8)


def _squares(f):
    return lambda *x: jnp.sum(jnp.sin(f(*x)))


@pytest.mark.parametrize("wanted", [tuple(range(7)), (0,), (1, 3), (2,), (4, 5, 6)])
def test_mlp_with_a_function(wanted):
    operands = _layer_operands(*_MLP_SHAPES)
    np.testing.assert_allclose(_mlp(*operands), _plain_mlp(*operands), rtol=1e-5, atol=1e-5)
    ours, theirs = (jax.grad(_squares(f), wanted)(*operands) for f in (_mlp, _plain_mlp))
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_mlp_goes_back_through_its_function_in_a_gemm():
    operands = _layer_operands(*_MLP_SHAPES)
    jaxpr = jax.make_jaxpr(jax.grad(_squares(_mlp), tuple(range(7))))(*operands).jaxpr
    assert not list(_equations(jaxpr, epilogue_derivative.pullback_p))
    forward, back = _equations(jaxpr, compiled_primitive.compiled_p)
    # The cotangent, and the sums for the bias and the slope.
    assert [x.aval.shape for x in back.outvars] == [(12, 24), (24,), ()]
    assert any(x.aval.dtype == bool for x in forward.outvars)
    made = translation.translate(back.params["spec"].function)
    assert not isinstance(made, str), made
    assert len(made.reductions) == 2


def test_mlp_with_a_function_under_transformations():
    operands = _layer_operands(*_MLP_SHAPES)
    batched = [jnp.stack([x, x * 0.5]) for x in operands[:2]] + operands[2:]
    dims = (0, 0, *[None] * 5)
    ours, theirs = (
        jax.vmap(jax.grad(_squares(f), (0, 1, 2)), dims)(*batched) for f in (_mlp, _plain_mlp)
    )
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    for transform in (jax.jacfwd, lambda f: jax.jacfwd(jax.grad(f))):
        ours, theirs = (transform(_squares(f))(*operands) for f in (_mlp, _plain_mlp))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    remat = jax.grad(_squares(jax.checkpoint(_mlp)), (0, 1))(*operands)
    for x, y in zip(remat, jax.grad(_squares(_plain_mlp), (0, 1))(*operands), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_gated_mlp_with_a_function():
    def gate(g, u, bias):
        return jnp.clip(jax.nn.silu(g + bias), -1, 1) * u

    def ours(x, g, u, bias, w):
        return gated_mlp(x, g, u, w, epilogue=gate, epilogue_operands=(bias,))

    def theirs(x, g, u, bias, w):
        return gate(x @ g, x @ u, bias) @ w

    operands = _layer_operands((12, 16), (16, 24), (16, 24), (24,), (24, 8))
    gradients = [jax.grad(_squares(f), tuple(range(5)))(*operands) for f in (ours, theirs)]
    for x, y in zip(*gradients, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_what_goes_with_a_function_of_mlp():
    x, w1, bias, _, w2, *_ = _layer_operands(*_MLP_SHAPES)
    with pytest.raises(ValueError, match="got b1 as well"):
        mlp(x, w1, bias, w2, epilogue=jnp.tanh)
    with pytest.raises(ValueError, match="recompute_activation"):
        mlp(x, w1, None, w2, epilogue=jnp.tanh, recompute_activation=True)
    with pytest.raises(ValueError, match="the hidden layer"):
        mlp(x, w1, None, w2, epilogue=lambda acc: (acc, acc))


def _gelu_and_bias(z, bias):
    return 2 * jax.nn.gelu(z) + bias


def _one_layer(x, w, bias, v):
    # JAX 0.8 cannot partition the sum in jnp's own gradient of the second product.
    return gemm(gemm(x, w, epilogue=_gelu_and_bias, epilogue_operands=(bias,)), v)


def _both_layers(x, w, bias, v):
    return mlp(x, w, None, v, epilogue=_gelu_and_bias, epilogue_operands=(bias,))


def _plain_layers(x, w, bias, v):
    return _gelu_and_bias(x @ w, bias) @ v


_LAYER_SHAPES = (8, 16), (16, 8), (8,), (8, 4)


@pytest.mark.parametrize("layers", [_one_layer, _both_layers])
@pytest.mark.parametrize("check_vma", [True, False])
def test_functions_within_shard_map(layers, check_vma):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("d",), auto, devices=jax.devices("cpu")[:4])
    specs = P("d"), P(), P(), P()
    options = {"mesh": mesh, "in_specs": specs, "out_specs": P("d"), "check_vma": check_vma}
    operands = _layer_operands(*_LAYER_SHAPES)
    divided = jax.shard_map(layers, **options)
    np.testing.assert_allclose(jax.jit(divided)(*operands), _plain_layers(*operands), rtol=1e-5)
    ours, theirs = (
        jax.jit(jax.grad(_squares(f), (0, 1, 2, 3)))(*operands) for f in (divided, _plain_layers)
    )
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [_one_layer, _both_layers])
def test_functions_on_a_mesh_with_explicit_axes(layers):
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("d",), explicit, devices=jax.devices("cpu")[:4])
    operands = _layer_operands(*_LAYER_SHAPES)
    wanted = jax.grad(_squares(_plain_layers), (0, 1, 2, 3))(*operands)
    with jax.set_mesh(mesh):
        x = jax.device_put(operands[0], jax.sharding.NamedSharding(mesh, P("d")))
        placed = [x, *operands[1:]]
        y = jax.jit(layers)(*placed)
        assert jax.typeof(y).sharding.spec[0] == "d"
        found = jax.jit(jax.grad(_squares(layers), (0, 1, 2, 3)))(*placed)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
