"""Models that qwix quantizes, with the products of this package."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tcgemm
from jax_tcgemm.quantized.packed import PackedWeight

pytestmark = [pytest.mark.any_jax, pytest.mark.filterwarnings("default")]

qwix = pytest.importorskip("qwix")

from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

from jax_tcgemm.adapters import qwix_ptq  # noqa: E402

FEATURES, HIDDEN, OUT = 128, 96, 8


class Linen(nn.Module):
    """A Dense layer, an einsum, a DenseGeneral with two free dimensions of the weight."""

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(HIDDEN, dtype=x.dtype)(x))
        x = nn.Einsum((HIDDEN, HIDDEN), "bi,ij->bj", use_bias=False, dtype=x.dtype)(x)
        x = nn.DenseGeneral((2, 64), dtype=x.dtype)(x)
        return nn.Dense(OUT, dtype=x.dtype, name="out")(x.reshape(-1, 128))


class Nnx(nnx.Module):
    """Two linear layers."""

    def __init__(self, dtype, rngs):
        self.hidden = nnx.Linear(FEATURES, HIDDEN, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, OUT, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.gelu(self.hidden(x)))


def rules(weight, tile=32, activation=None):
    return [
        qwix.QuantizationRule(weight_qtype=weight, tile_size=tile, act_qtype=activation),
    ]


OF_LINEN = [("int4", 32, None), ("int8", None, None), ("int4", 32, "int8")]
OF_NNX = [
    ("int3", 32, None),
    ("int6", None, None),
    ("int4", 32, None),
    ("float8_e4m3fn", None, None),
    ("int8", None, "int8"),
]


def assert_close(found, expected, dtype):
    """Checks against qwix's own products, which round other intermediate values."""
    assert found.dtype == expected.dtype
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    tolerance = 5e-2 if dtype == jnp.bfloat16 else 1e-4
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.fixture
def packed_products(monkeypatch):
    """Collects, for each product, whether one of its operands is packed."""
    found = []
    right = qwix_ptq.dot_general_of_arrays

    def recorded(lhs, rhs, *rest, **options):
        found.append(any(isinstance(x, PackedWeight) for x in (lhs, rhs)))
        return right(lhs, rhs, *rest, **options)

    monkeypatch.setattr(qwix_ptq, "dot_general_of_arrays", recorded)
    return found


@pytest.mark.parametrize(("weight", "tile", "activation"), OF_LINEN)
def test_linen(normal, packed_products, weight, tile, activation):
    dtype = jnp.bfloat16
    x = normal(5, FEATURES, dtype=dtype)
    own = rules(weight, tile, activation)
    params = Linen().init(jax.random.key(0), x)
    theirs = qwix.quantize_model(Linen(), qwix.PtqProvider(own))
    ours = qwix.quantize_model(Linen(), qwix_ptq.PtqProvider(own))
    abstract = jax.eval_shape(ours.init, jax.random.key(0), x)
    packed_products.clear()
    quantized = {"params": qwix.quantize_params(params["params"], abstract["params"])}
    expected = theirs.apply(quantized, x)
    assert not packed_products
    assert_close(jax.jit(ours.apply)(quantized, x), expected, dtype)
    assert len(packed_products) == 4
    packed_products.clear()
    packed = qwix_ptq.pack_params(quantized)
    assert_close(jax.jit(ours.apply)(packed, x), expected, dtype)
    assert sum(packed_products) == 3
    # The DenseGeneral's weight is no matrix.
    assert not isinstance(packed["params"]["DenseGeneral_0"]["kernel"].array, PackedWeight)


@pytest.mark.parametrize(("weight", "tile", "activation"), OF_NNX)
def test_nnx(normal, packed_products, weight, tile, activation):
    x = normal(5, FEATURES)
    own = rules(weight, tile, activation)
    theirs, ours = (
        qwix.quantize_model(Nnx(jnp.float32, nnx.Rngs(0)), provider(own), x)
        for provider in (qwix.PtqProvider, qwix_ptq.PtqProvider)
    )
    expected = theirs(x)
    packed_products.clear()
    assert_close(nnx.jit(lambda model, x: model(x))(ours, x), expected, jnp.float32)
    assert len(packed_products) == 2
    packed_products.clear()
    assert qwix_ptq.pack_params(ours, lambda x: x.shape[1] != OUT) is ours
    assert_close(nnx.jit(lambda model, x: model(x))(ours, x), expected, jnp.float32)
    assert packed_products == [True, False]
    graph, state = nnx.split(ours)
    again = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    assert_close(again(x), expected, jnp.float32)


def test_values_of_a_table_are_dequantized_by_qwix(normal):
    x, own = normal(5, FEATURES), rules("nf4")
    expected, found = (
        qwix.quantize_model(Nnx(jnp.float32, nnx.Rngs(0)), provider(own), x)
        for provider in (qwix.PtqProvider, qwix_ptq.PtqProvider)
    )
    assert_close(found(x), expected(x), jnp.float32)
    assert_close(qwix_ptq.pack_params(found)(x), expected(x), jnp.float32)
    weight = qwix.quantize(normal(FEATURES, HIDDEN), "nf4", channelwise_axes=[1])
    dims = (((1,), (0,)), ((), ()))
    assert_close(
        qwix_ptq.dot_general(x, weight, dims), qwix.dot_general(x, weight, dims), jnp.float32
    )
    for refused in (
        lambda: jax_tcgemm.gemm(x, weight),
        lambda: jax_tcgemm.gated_gemm(x, weight, weight),
        lambda: jax_tcgemm.dot_general(x, weight, dims),
        lambda: jax_tcgemm.pack(weight),
    ):
        with pytest.raises(TypeError, match=r"'nf4': the values are places in a table"):
            refused()


def test_a_fault_would_be_seen(normal, monkeypatch):
    x, own = normal(5, FEATURES), rules("int4")
    right = qwix_ptq.dot_general_of_arrays
    monkeypatch.setattr(
        qwix_ptq, "dot_general_of_arrays", lambda *x, **options: right(*x, **options) * 1.05
    )
    expected, found = (
        qwix.quantize_model(Nnx(jnp.float32, nnx.Rngs(0)), provider(own), x)(x)
        for provider in (qwix.PtqProvider, qwix_ptq.PtqProvider)
    )
    with pytest.raises(AssertionError):
        assert_close(found, expected, jnp.float32)


def test_other_options_go_to_qwix():
    provider = qwix_ptq.PtqProvider(rules("int8"), _einsum_fn=qwix.einsum)
    assert provider._einsum_fn is qwix.einsum
    assert provider._dot_general_fn is qwix_ptq.dot_general
    assert jax_tcgemm.dot_general is qwix_ptq.dot_general_of_arrays
