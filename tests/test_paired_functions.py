"""Functions that differ in one thing only, through every wrapper: each has its own results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs
from function_pairs import SLOPES, VALUES, simplified_constants
from fused_call import assert_trees_close
from jax.sharding import PartitionSpec
from nightly import slow
from paired_calls import PRODUCT, WAYS, WRAPPERS, wrong_slopes, wrong_values
from sharded_program import mesh_of

from jax_tcgemm import fuse, gemm
from jax_tcgemm.epilogue import function as functions

pytestmark = pytest.mark.any_jax

# Integer results have no derivatives.
SMOOTH = {name: make for name, make in VALUES.items() if name != "the bits of NaN"} | SLOPES
# Each wrapper compiles in the cheapest way, and `gemm` in every way.
CALLS = [(wrapper, "in one program") for wrapper in WRAPPERS]
CALLS += [("gemm", way) for way in WAYS if ("gemm", way) not in CALLS]


@pytest.mark.parametrize(("wrapper", "way"), CALLS)
def test_each_has_its_own_values(wrapper, way):
    assert wrong_values(wrapper, way, VALUES) == []


def test_each_has_its_own_values_where_numbers_are_printed_short():
    with np.printoptions(precision=1, suppress=True, threshold=1, edgeitems=1):
        assert wrong_values("gemm", "in one program", VALUES) == []
        assert wrong_values("fuse", "in a program each", VALUES) == []


@pytest.mark.parametrize("way", [slow("eagerly"), "in one program"])
def test_each_has_its_own_values_with_hidden_constants(way):
    with simplified_constants():
        assert wrong_values("gemm", way, VALUES) == []


@pytest.mark.parametrize("is_jitted", [slow(False), True])
def test_each_has_its_own_slopes(is_jitted):
    assert wrong_slopes(is_jitted, SMOOTH) == []


def test_each_has_its_own_slopes_with_hidden_constants():
    with simplified_constants():
        assert wrong_slopes(True, SMOOTH) == []


def test_numbers_in_64_bits():
    """Their literals differ after the digits of float32."""
    with jax.enable_x64(True):
        x = jnp.ones((8, 8), jnp.float32)

        def program(x):
            return [
                gemm(x, x, epilogue=lambda z, c=c: z.astype(jnp.float64) * c)
                for c in (3.14159265, np.pi, np.nextafter(np.pi, 4))
            ]

        for found in (jax.jit(program)(x), program(x)):
            for got, c in zip(found, (3.14159265, np.pi, np.nextafter(np.pi, 4)), strict=True):
                np.testing.assert_array_equal(got, np.full((8, 8), 8 * c))


def test_a_table_in_a_call_is_an_operand_that_compiles_once(normal):
    x = normal(8, 8)
    tables = normal(3, 8)

    def program(x, tables):
        return [gemm(x, x, epilogue=jax.jit(lambda z, t=t: z * t)) for t in tables]

    equations = jax.make_jaxpr(program)(x, list(tables)).eqns
    specs = {eqn.params["spec"] for eqn in equations if "tcgemm" in eqn.primitive.name}
    assert len(specs) == 1
    concrete = jax.make_jaxpr(lambda x: program(x, list(tables)))(x).eqns
    assert {eqn.params["spec"] for eqn in concrete if "tcgemm" in eqn.primitive.name} == specs
    for got, table in zip(program(x, list(tables)), tables, strict=True):
        np.testing.assert_allclose(got, (x @ x) * table, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_arrays_within_calls_have_derivatives(normal, is_jitted):
    """This includes traced arrays, by which the caller differentiates."""
    x, w, t = normal(8, 8), normal(8, 8), normal(8)

    def ours(w, t):
        epilogue = jax.jit(lambda z: jnp.tanh(jax.jit(lambda y: y * t)(z)) * t)
        return gemm(x, w, epilogue=epilogue, precision="highest").sum()

    def plain(w, t):
        return (jnp.tanh(jnp.matmul(x, w, precision="highest") * t) * t).sum()

    found, wanted = (jax.grad(f, (0, 1)) for f in (ours, plain))
    assert_trees_close((jax.jit(found) if is_jitted else found)(w, t), wanted(w, t), 1e-4)


def test_rules_that_close_over_traced_arrays(normal):
    x, w, t = normal(8, 8), normal(8, 8), normal(8)

    def forward(z, t):
        function = jax.custom_jvp(lambda z: z * 2)
        function.defjvp(lambda p, u: (function(*p), u[0] * t))
        return function(z)

    def backward(z, t):
        function = jax.custom_vjp(lambda z: z * 2)
        function.defvjp(lambda z: (z * 2, None), lambda _, g: (g * t,))
        return function(z)

    for ruled in (forward, backward):

        def gradient(w, t, ruled=ruled):
            return jax.grad(lambda w: gemm(x, w, epilogue=lambda z: ruled(z, t)).sum())(w)

        wanted = x.T @ jnp.broadcast_to(t, (8, 8))
        np.testing.assert_allclose(gradient(w, t), wanted, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(jax.jit(gradient)(w, t), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check_vma", [False, True])
def test_arrays_within_calls_by_shards(normal, check_vma):
    """Another array varies over the mesh; it has no type without the mesh."""
    x, w, rows, column = normal(64, 8), normal(8, 8), normal(64, 1), normal(8)
    column_on_host = np.asarray(normal(8))

    def epilogue_of(rows):
        return jax.jit(lambda z: jax.jit(lambda y: jnp.tanh(y + column))(z) * rows + column_on_host)

    def body(x, w, rows):
        return gemm(x, w, epilogue=epilogue_of(rows), precision="highest")

    specs = (PartitionSpec("x"), PartitionSpec(), PartitionSpec("x"))
    program = jax.shard_map(
        body, mesh=mesh_of(), in_specs=specs, out_specs=specs[0], check_vma=check_vma
    )
    for run in (program, jax.jit(program)):
        wanted = epilogue_of(rows)(jnp.matmul(x, w, precision="highest"))
        np.testing.assert_allclose(run(x, w, rows), wanted, rtol=1e-4, atol=1e-4)


def test_rules_for_batches_that_close_over_arrays(normal):
    x, w, t = normal(3, 8, 8), normal(8, 8), normal(8)

    def ruled(t):
        function = jax.custom_batching.custom_vmap(lambda z: z * 2)
        function.def_vmap(lambda size, is_mapped, z: (z * t, True))
        return function

    def program(x, t):
        return jax.vmap(lambda x: gemm(x, w, epilogue=ruled(t)))(x)

    wanted = jnp.matmul(x, w) * t
    np.testing.assert_allclose(program(x, t), wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.jit(lambda x: program(x, t))(x), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="closes over traced values"):
        jax.jit(program)(x, t)


def test_layers_with_rates_of_their_own():
    """Under ``fuse``, two regions differ in a small number that prints as 0."""
    x = jnp.asarray(PRODUCT, jnp.bfloat16)
    w = jnp.zeros(PRODUCT.shape, jnp.float32)

    def step(w1, w2, x):
        product = jnp.matmul(x.T, x, preferred_element_type=jnp.float32)
        other = jnp.matmul(x, x, preferred_element_type=jnp.float32)
        return w1 - 1e-5 * product, w2 - 2e-5 * other

    with np.printoptions(precision=3, suppress=True):
        found = jax.jit(fuse(step))(w, w, x)
    wanted = -1e-5 * PRODUCT.T @ PRODUCT, -2e-5 * PRODUCT @ PRODUCT
    for got, own in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, own, rtol=1e-4, atol=1e-7)


def test_a_scale_of_8_bit_products():
    x = jnp.asarray(PRODUCT, jnp.int8)
    one = jnp.float32(1)
    scales = (0.001, 0.001000004, 1e-5, 2e-5)

    def program(x):
        options = {"a_scale": one, "preferred_element_type": jnp.float32}
        return [gemm(x, x, alpha=alpha, **options) for alpha in scales]

    product = (PRODUCT @ PRODUCT).astype(np.float32)
    for found in (jax.jit(program)(x), program(x)):
        for got, alpha in zip(found, scales, strict=True):
            np.testing.assert_allclose(got, product * np.float32(alpha), rtol=3e-7)


class Layer:
    """A layer whose bias a user changes."""

    bias: object = None

    def after(self, z):
        return z + self.bias


def test_methods_are_looked_at_again(normal):
    x = normal(8, 8)
    bias = normal(8)
    layer = Layer()

    def program(x, b):
        layer.bias = b
        first = gemm(x, x, epilogue=layer.after)
        layer.bias = 10 * b
        return first, gemm(x, x, epilogue=layer.after)

    for _ in range(2):
        for run in (program, jax.jit(program), jax.jit(program)):
            first, second = run(x, bias)
            np.testing.assert_allclose(first, x @ x + bias, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(second, x @ x + 10 * bias, rtol=1e-4, atol=1e-4)
        bias = bias + 1


def test_closures_are_looked_at_again(normal):
    x = normal(8, 8)
    scale = 2.0

    def epilogue(z):
        return z * scale

    first = gemm(x, x, epilogue=epilogue)
    scale = -3.0
    np.testing.assert_allclose(gemm(x, x, epilogue=epilogue), first * -1.5, rtol=1e-5)


def test_functions_that_compute_the_same_are_compiled_once(normal, monkeypatch):
    """Outside ``jit``, each call traces its function, so its rules are new objects."""
    x = normal(8, 8)
    lowered = []
    original = functions.EpilogueFunction.computed
    monkeypatch.setattr(
        functions.EpilogueFunction,
        "computed",
        lambda self, *values: (lowered.append(self), original(self, *values))[1],
    )

    def call(slope):
        return gemm(x, x, epilogue=lambda z: jax.nn.leaky_relu(jax.nn.relu(z) - 1, slope))

    for slope, count in ((0.1, 1), (0.1, 1), (0.2, 2), (0.1, 2)):
        call(slope)
        assert len(lowered) == count


def test_random_pairs(rng):
    """Tries a few of the pairs that ``tests/random_pairs.py`` draws."""
    for i in range(40):
        assert random_pairs.check(int(rng.integers(2**31)), is_computed=i % 20 == 0) is None
