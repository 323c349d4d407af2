"""``fuse`` keeps the types of a program: rounding of float16, integers, iotas, weak types, x64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusions import operands, random_function, with_epilogues, worst, worst_of_random
from jax import lax
from sharded_program import mesh_of

from jax_tcgemm import fuse

pytestmark = pytest.mark.any_jax

N = 128


@pytest.fixture
def arrays(normal):
    """Returns operands whose products are exact in float32."""
    return tuple(jnp.round(normal(N, N, dtype=jnp.bfloat16) * 16) / 16 for _ in range(2))


def equal(f, *args):
    """Checks results to the last bit, and that the program has an epilogue."""
    for own, plain in zip(*(jax.tree.leaves(jax.jit(g)(*args)) for g in (fuse(f), f)), strict=True):
        assert own.dtype == plain.dtype
        with np.errstate(invalid="ignore"):  # because of NaN
            wide = [np.asarray(x).astype(np.float64) for x in (own, plain)]
        np.testing.assert_array_equal(*wide)


@pytest.mark.parametrize("value", [40.0, 16.0, 1.0])
def test_float16_product_as_float32_is_rounded(value):
    """Values above 65504 become infinite, and 2049 becomes 2048."""
    x = jnp.full((N, N), value, jnp.float16)
    w = jnp.full((N, N), 40, jnp.float16).at[0, 0].set(41)
    f = lambda x, w: (x @ w).astype(jnp.float32)  # noqa: E731
    equal(f, x, w)
    np.testing.assert_array_equal(jax.jit(fuse(f))(x, w), (x @ w).astype(jnp.float32))


@pytest.mark.parametrize(
    "discrete",
    [
        lambda z: z.astype(jnp.int32),
        lambda z: z.astype(jnp.int8),
        jnp.floor,
        jnp.ceil,
        jnp.round,
        lambda z: lax.rem(z, jnp.bfloat16(1)),
        lambda z: z > 2.998,
        lambda z: z == 3,
        lambda z: z <= jnp.bfloat16(-1.004),
    ],
)
def test_discrete_functions_take_the_rounded_product(arrays, discrete):
    equal(lambda x, w: discrete(x @ w), *arrays)
    equal(lambda x, w: discrete(x @ w).astype(jnp.float32) + 1, *arrays)


def test_iota_of_bfloat16(arrays):
    """The bias of ALiBi, and quotients of two iotas: these are not integer quotients."""

    def rows_and_columns():
        return (lax.broadcasted_iota(jnp.bfloat16, (N, N), axis) for axis in (0, 1))

    def alibi(x, w):
        i, j = rows_and_columns()
        return x @ w - (i - j) * 0.5

    def quotients(x, w):
        i, j = rows_and_columns()
        return jnp.where(x @ w > 1e30, x @ w, lax.div(j, lax.max(i, j)))

    assert worst(alibi, fuse(alibi), arrays) <= 1
    assert with_epilogues(alibi, *arrays) == [(2, 1)]
    equal(quotients, *arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "int8", "uint8"])
@pytest.mark.parametrize("made", ["iota", "constant", "conversion", "bits", "reduction"])
def test_values_that_operations_make(arrays, dtype, made):
    """Each value keeps its type and rounding: large iotas and integers are not exact."""
    x, w = arrays[0], jnp.zeros_like(arrays[1])
    wide = jax.random.randint(jax.random.key(1), (N, N), -(2**20), 2**20)

    def value(z):
        match made:
            case "iota":
                return lax.broadcasted_iota(dtype, (1024, N), 0)[-N:]
            case "constant":
                return jnp.full((N, N), 0.1, dtype)
            case "conversion":
                return wide.astype(dtype)
            case "bits":
                bits = jax.random.bits(jax.random.key(0), (N, N), jnp.uint16)
                return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(dtype)
            case "reduction":
                return jnp.broadcast_to(wide.astype(dtype).max(0), (N, N))

    def f(x, w):
        z = x @ w  # zeros
        return jnp.where(z == 0, value(z).astype(jnp.float32), z.astype(jnp.float32))

    equal(f, x, w)


def test_weak_types_stay(arrays):
    x, w = arrays
    for f in (lambda s: s * 2, lambda s: (s * 2, (x @ w).sum() * 0 + s)):
        for own, plain in zip(
            *(jax.make_jaxpr(g)(1.0).out_avals for g in (fuse(f), f)), strict=True
        ):
            assert own.weak_type == plain.weak_type


MODES = {
    "x64": lambda: jax.enable_x64(True),
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
    "checks": lambda: jax.enable_checks(True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["value", "gradient"])
def test_random_functions(rng, mode, dtype, kind):
    """Weak scalars and literals keep their types, in 16-bit regions and beside float32 regions."""
    function = random_function(rng)
    args = tuple(x.astype(dtype) for x in operands(rng, 80))
    with MODES[mode]():
        assert worst_of_random(function, args, gradient=kind == "gradient") <= 1, function


def test_parts_of_a_program_on_a_mesh_of_their_own(normal):
    """Within ``auto_axes``, types have another mesh than the surrounding code."""
    x, w = (normal(128, 128, dtype=jnp.bfloat16) / 8 for _ in range(2))
    spec = jax.sharding.PartitionSpec("x")

    def layer(x, w):
        return jax.sharding.auto_axes(lambda x, w: jnp.tanh(x @ w), out_sharding=spec)(x, w)

    def loss(x, w):
        return layer(x, w).astype(jnp.float32).sum()

    with jax.set_mesh(mesh_of((4,), jax.sharding.AxisType.Explicit)):
        for f in (layer, jax.grad(loss, (0, 1))):
            assert "tcgemm" in str(jax.make_jaxpr(fuse(f))(x, w))
            own, plain = (jax.tree.leaves(jax.jit(g)(x, w)) for g in (fuse(f), f))
            assert [*map(jax.typeof, own)] == [*map(jax.typeof, plain)]
            for one, other in zip(own, plain, strict=True):
                one, other = (np.asarray(y, np.float32) for y in (one, other))
                np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())


def test_results_that_are_constants_are_arrays():
    """Without ``jit``, too: the jaxpr has them as literals and as arrays of NumPy."""
    numbers = np.arange(65536, dtype=np.float32)

    def f(x):
        constants = jnp.asarray(True), jnp.asarray(3), jnp.asarray(0.1), jnp.float32(2)
        key = jax.random.key(0)
        return x @ x, constants, jnp.array([1, 2, 3]), jnp.asarray(numbers), key, None

    x = jnp.ones((8, 8))
    own, plain = fuse(f)(x), f(x)
    assert jax.tree.structure(own) == jax.tree.structure(plain)
    for each, other in zip(*map(jax.tree.leaves, (own, plain)), strict=True):
        assert isinstance(each, jax.Array)
        assert jax.typeof(each) == jax.typeof(other)
    numbers[0] = 99
    assert own[3][0] == 0
    _, auxiliary = jax.value_and_grad(fuse(lambda x: (x.sum(), jnp.asarray(True))), has_aux=True)(x)
    assert isinstance(auxiliary, jax.Array)


def test_results_without_bits_stay_what_they_are():
    def gradients(x, i):
        return jax.grad(lambda x, i: jnp.sum(x * i), (0, 1), allow_int=True)(x, i)

    x, i = jnp.ones(3), jnp.arange(3)
    for each, other in zip(fuse(gradients)(x, i), gradients(x, i), strict=True):
        assert each.dtype == other.dtype
