"""The sharding of a hidden layer that a caller asks for."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, square_sum
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_checks import kinds, moved, put, spec_of
from sharded_program import mesh_of

import jax_tcgemm as tc

pytestmark = pytest.mark.usefixtures("divided_everywhere")

# Rows that take more memory than the weights, which the partitioner therefore gathers.
ROWS, FEATURES, HIDDEN = 1024, 32, 64
SPECS = (P("x"), P(None, "x"), P("x"))
COLUMNS = P(None, "x")


def _mlp(x, w, v, **options):
    return tc.mlp(x, w, None, v, activation="silu", **options)


def _function(x, w, v, **options):
    return tc.mlp(x, w, None, v, epilogue=jax.nn.silu, **options)


def _gated(x, w, v, **options):
    return tc.gated_mlp(x, w, 2 * w, v, **options)


def _second(hidden, v, sharding):
    return (hidden if sharding is None else jax.lax.with_sharding_constraint(hidden, sharding)) @ v


def _formula(x, w, v, hidden_sharding=None):
    return _second(jax.nn.silu(x @ w), v, hidden_sharding)


def _gated_formula(x, w, v, hidden_sharding=None):
    return _second(jax.nn.silu(x @ w) * (x @ (2 * w)), v, hidden_sharding)


LAYERS = {
    "mlp": (_mlp, _formula),
    "mlp with a function": (_function, _formula),
    "gated_mlp": (_gated, _gated_formula),
}


def _drawn(mesh, normal):
    shapes = ((ROWS, FEATURES), (FEATURES, HIDDEN), (HIDDEN, FEATURES))
    pairs = zip(shapes, SPECS, strict=True)
    return [put(mesh, normal(*shape) / 4, *spec) for shape, spec in pairs]


def _by_rows(function, mesh):
    rows = NamedSharding(mesh, P("x"))
    return lambda *x: jax.lax.with_sharding_constraint(function(*x), rows)


@pytest.mark.parametrize("name", LAYERS)
def test_products_are_divided_by_columns_and_k(normal, name):
    """The rows are gathered and the sums scattered, instead of two gathers of weights."""
    mesh = mesh_of((4,))
    operands = _drawn(mesh, normal)
    sharding = NamedSharding(mesh, COLUMNS)
    ours, formula = (
        _by_rows(functools.partial(f, hidden_sharding=sharding), mesh) for f in LAYERS[name]
    )
    assert_trees_close(jax.jit(ours)(*operands), jax.jit(formula)(*operands), 1e-3)
    assert {*kinds(_by_rows(LAYERS[name][0], mesh), *operands)} == {"all-gather"}
    assert kinds(ours, *operands) == ["all-gather", "reduce-scatter"]
    own, other = (jax.grad(square_sum(f), (0, 1, 2)) for f in (ours, formula))
    assert_trees_close(jax.jit(own)(*operands), jax.jit(other)(*operands), 1e-3)
    sizes = [sum(size for _, size in moved(f, *operands)) for f in (own, other)]
    assert sizes[0] <= sizes[1]


@pytest.mark.parametrize("recompute", [False, True])
def test_the_reverse_pass_of_named_activations(normal, recompute):
    mesh = mesh_of((4,))
    operands = _drawn(mesh, normal)
    options = {"hidden_sharding": NamedSharding(mesh, COLUMNS), "recompute_activation": recompute}
    own = jax.grad(square_sum(_by_rows(functools.partial(_mlp, **options), mesh)), (0, 1, 2))
    text = jax.jit(own).lower(*operands).compile().as_text()
    assert f"f32[{ROWS // 4},{HIDDEN}]" not in text  # no rows of the whole hidden layer
    assert_trees_close(
        jax.jit(own)(*operands), jax.grad(square_sum(_formula), (0, 1, 2))(*operands), 1e-3
    )


def test_quantized_weights(normal):
    mesh = mesh_of((4,))
    x, w, v = _drawn(mesh, normal)
    w = tc.quantize(w, jnp.int8, tile=(-1, 1))
    with jax.set_mesh(mesh):
        hidden = tc.gemm(x, w, activation="silu")
        expected = tc.gemm(jax.lax.with_sharding_constraint(hidden, COLUMNS), v)
        result = jax.jit(lambda x: _mlp(x, w, v, hidden_sharding=COLUMNS))(x)
    assert_trees_close(result, expected, 1e-3)


def test_under_transformations(normal):
    mesh = mesh_of((4,))
    x, w, v = _drawn(mesh, normal)
    expected = _formula(x, w, v)
    with jax.set_mesh(mesh):
        assert_trees_close(_mlp(x, w, v, hidden_sharding=COLUMNS), expected, 1e-3)
        layer = lambda x: _mlp(x, w, v, hidden_sharding=COLUMNS)  # noqa: E731
        batched = jax.jit(jax.vmap(layer))(jnp.stack([x, 2 * x]))
        assert_trees_close(batched[0], expected, 1e-3)
        rolled = jax.jit(lambda x: jax.lax.scan(lambda y, _: (layer(y), None), x, None, 2)[0])(x)
        assert_trees_close(rolled, _formula(expected, w, v), 1e-3)


@pytest.mark.parametrize("name", LAYERS)
def test_on_explicit_axes(normal, name):
    mesh = mesh_of((4,), AxisType.Explicit)
    layer, formula = LAYERS[name]
    for given in (COLUMNS, NamedSharding(mesh, COLUMNS)):
        with jax.set_mesh(mesh):
            operands = _drawn(mesh, normal)
            options = {"hidden_sharding": given, "out_sharding": P("x")}
            ours = functools.partial(layer, **options)
            assert kinds(ours, *operands) == ["all-gather", "reduce-scatter"]
            result = jax.jit(ours)(*operands)
            assert spec_of(result) == P("x", None)
        plain = map(np.asarray, operands)
        assert_trees_close(result, formula(*plain), 1e-3)


@pytest.mark.parametrize(
    ("specs", "has_context"),
    [((P(), P(), P()), True), ((P(), P(), P()), False), ((P("x"), P(), P()), True)],
)
@pytest.mark.parametrize("name", [*LAYERS, "quantized"])
def test_layers_on_explicit_axes(normal, name, specs, has_context):
    """Layers that get no automatic axes: replicated operands, functions, quantized weights."""
    mesh = mesh_of((4,), AxisType.Explicit)
    sharding = COLUMNS if has_context else NamedSharding(mesh, COLUMNS)
    shapes = ((ROWS, FEATURES), (FEATURES, HIDDEN), (HIDDEN, FEATURES))
    plain = [np.asarray(normal(*shape) / 4) for shape in shapes]
    ours, formula = LAYERS.get(name, LAYERS["mlp"])

    def run(x, w, v):
        if name == "quantized":
            w = tc.quantize(w, jnp.int8, tile=(-1, 1))
        return ours(x, w, v, hidden_sharding=sharding)

    with jax.set_mesh(mesh) if has_context else contextlib.nullcontext():
        operands = [put(mesh, x, *spec) for x, spec in zip(plain, specs, strict=True)]
        result = jax.jit(run)(*operands)
    assert_trees_close(result, formula(*plain), 3e-2 if name == "quantized" else 1e-3)


def test_mixed_axes(normal):
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        x, w, v = (put(mesh, normal(*shape) / 4) for shape in ((64, 32), (32, 64), (64, 32)))
        expected = _formula(*map(np.asarray, (x, w, v)))
        for sharding in (P(None, "y"), P("x"), P()):
            for layer in (_mlp, _function):
                result = jax.jit(functools.partial(layer, hidden_sharding=sharding))(x, w, v)
                assert_trees_close(result, expected, 1e-3)


def test_what_is_no_sharding(normal):
    x, w, v = normal(8, 16), normal(16, 32), normal(32, 16)
    with pytest.raises((TypeError, ValueError)):
        _mlp(x, w, v, hidden_sharding="x")
