"""Two layers, the first with a user function as its epilogue; functions on meshes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import mlp
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


_MLP_SHAPES = (12, 16), (16, 24), (24,), (), (24, 8), (8,), (12, 8)


def _squares(f):
    return lambda *x: jnp.sum(jnp.sin(f(*x)))


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


def test_what_goes_with_a_function_of_mlp():
    x, w1, bias, _, w2, *_ = _layer_operands(*_MLP_SHAPES)
    with pytest.raises(ValueError, match="got b1 as well"):
        mlp(x, w1, bias, w2, epilogue=jnp.tanh)
    with pytest.raises(ValueError, match="recompute_activation"):
        mlp(x, w1, None, w2, epilogue=jnp.tanh, recompute_activation=True)
    with pytest.raises(ValueError, match="the hidden layer"):
        mlp(x, w1, None, w2, epilogue=lambda acc: (acc, acc))
