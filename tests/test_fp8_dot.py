"""``fp8_dot``: values, gradients and state, against float64 of the dequantized operands."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_values import E4M3, E5M2, LARGEST, MATRIX, assert_close, dequantized

from jax_tcgemm.api.delayed_scaling import DelayedScale, Fp8State
from jax_tcgemm.api.fp8 import fp8_dot, fp8_dot_general
from jax_tcgemm.api.quantization import quantize

pytestmark = pytest.mark.any_jax

DTYPES = [(jnp.bfloat16, jnp.float32), (jnp.float16, jnp.float16), (jnp.float32, jnp.bfloat16)]
RECIPES = pytest.mark.parametrize("recipe", ["current", "block", "delayed"])


def rounded(x, dtype, *tile, power_of_two=False) -> np.ndarray:
    q = quantize(x, dtype, tile=tile or None, power_of_two=power_of_two)
    return dequantized(q.qvalue, q.scale)


def filled(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, jnp.zeros((-len(x) % 128, x.shape[1]), x.dtype)])


def scale_of(history, dtype) -> np.float32:
    return np.float32(np.max(np.asarray(history)) / LARGEST[dtype])


def by_history(x, history, dtype) -> np.ndarray:
    scale = scale_of(history, dtype)
    scaled = np.clip(np.asarray(x, np.float32) / scale, -LARGEST[dtype], LARGEST[dtype])
    return scaled.astype(dtype).astype(np.float64) * np.float64(scale)


def some_state(rng) -> Fp8State:
    """Returns a state whose histories clip some normally distributed numbers."""
    scales = [
        DelayedScale(jnp.ones(1), jnp.asarray(2.0 ** rng.integers(0, 2, 3), jnp.float32))
        for _ in range(3)
    ]
    return Fp8State(*scales)


@pytest.mark.parametrize("draw", range(2))
@RECIPES
def test_values_and_gradients(normal, rng, recipe, draw):
    dtypes = DTYPES[(rng.integers(3) + draw) % 3]
    k, n = (256, 128) if recipe == "block" else (40, 24)
    x, w = normal(2, 70, k, dtype=dtypes[0]), normal(k, n, dtype=dtypes[1])
    dy = normal(2, 70, n, dtype=dtypes[0])
    state = some_state(rng) if recipe == "delayed" else None
    # Scales are powers of two, so that no value depends on how XLA divides.
    options = {"recipe": recipe, "power_of_two": True}

    @jax.jit
    def run(x, w, state, dy):
        y, pull = jax.vjp(lambda *args: fp8_dot(*args[:2], state=args[2], **options), x, w, state)
        return y, *pull(dy)

    y, dx, dw, new = run(x, w, state, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (x.dtype, x.dtype, w.dtype)
    rows, slopes = x.reshape(-1, k), dy.reshape(-1, n)
    if state is None:
        both = functools.partial(rounded, power_of_two=True)
        if recipe == "block":
            qx, qw, qdy = (
                both(rows, E4M3, 1, 128),
                both(w, E4M3, 128, 128),
                both(slopes, E5M2, 1, 128),
            )
            qx_t, qdy_t = both(filled(rows), E4M3, 128, 1), both(filled(slopes), E5M2, 128, 128)
        else:
            qx, qw, qdy = both(rows, E4M3), both(w, E4M3), both(slopes, E5M2)
            qx_t, qdy_t = qx, qdy
    else:
        qx, qw, qdy = (
            by_history(value, own.amax_history, dtype)
            for value, own, dtype in (
                (rows, state.x, E4M3),
                (w, state.w, E4M3),
                (slopes, state.gradient, E5M2),
            )
        )
        qx_t, qdy_t = qx, qdy
        assert new.gradient.amax_history[0] == jnp.abs(dy).max()
    assert_close(y.reshape(-1, n), qx, qw, MATRIX)
    assert_close(dx.reshape(-1, k), qdy, qw.T, MATRIX)
    assert_close(dw, qx_t.T, qdy_t, MATRIX)


def test_scales_are_those_of_quantize(normal):
    x, w = normal(3, 128), normal(128, 128)
    got = fp8_dot(x, w, recipe="block")
    assert_close(got, rounded(x, E4M3, 1, 128), rounded(w, E4M3, 128, 128), MATRIX)


def test_the_result_may_be_wider(normal):
    x, w = normal(3, 40, dtype=jnp.bfloat16), normal(40, 8, dtype=jnp.bfloat16)
    got, slopes = jax.value_and_grad(
        lambda x: fp8_dot(x, w, preferred_element_type=jnp.float32).sum()
    )(x)
    assert got.dtype == jnp.float32
    assert slopes.dtype == jnp.bfloat16
    got = fp8_dot(x, w, preferred_element_type=jnp.float32)
    assert_close(got, rounded(x, E4M3), rounded(w, E4M3), MATRIX)


@pytest.mark.any_jax
@RECIPES
@pytest.mark.parametrize("leading", [(), (2, 0, 3)])
def test_few_rows(recipe, leading):
    x, w = jnp.ones((*leading, 128)), jnp.ones((128, 128))
    state = Fp8State.create(2) if recipe == "delayed" else None
    options = {"recipe": recipe, "state": state}
    y, pull = jax.vjp(lambda x, w: fp8_dot(x, w, **options), x, w)
    np.testing.assert_allclose(y, np.full((*leading, 128), 128.0), rtol=1e-6)
    dx, dw = pull(jnp.ones_like(y))
    np.testing.assert_allclose(dx, np.full(x.shape, 128.0), rtol=1e-6)
    np.testing.assert_allclose(dw, np.full(w.shape, np.prod(leading, initial=1.0)), rtol=1e-6)


def loss(x, w, recipe="current", state=None):
    return jnp.sum(fp8_dot(x, w, recipe=recipe, state=state, power_of_two=True) ** 2)


def assert_same(got, wanted):
    """Compares trees of results whose sums may be in another order."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * float(jnp.abs(y).max()))


def test_transformations_by_blocks(normal):
    xs, ws = normal(3, 5, 128), normal(3, 128, 128)
    grad = jax.grad(functools.partial(loss, recipe="block"), (0, 1))
    each = [grad(x, w) for x, w in zip(xs, ws, strict=True)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    assert_same(jax.jit(jax.vmap(grad))(xs, ws), stacked)

    def total(xs, w):
        step = jax.checkpoint(lambda sum_, x: (sum_ + loss(x, w, "block"), None))
        return jax.lax.scan(step, 0.0, xs)[0]

    dx, dw = jax.jit(jax.grad(total, (0, 1)))(xs, ws[0])
    each = [grad(x, ws[0]) for x in xs]
    assert_same((dx, dw), (jnp.stack([x for x, _ in each]), sum(w for _, w in each)))
    dx, dw = jax.vmap(grad, (0, None))(xs, ws[0])
    assert_same((dx, dw.sum(0)), (jnp.stack([x for x, _ in each]), sum(w for _, w in each)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(normal, check_vma):
    x, w = normal(8, 40), normal(40, 8)
    mesh = jax.make_mesh(
        (2,), ("rows",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )
    spec = jax.sharding.PartitionSpec
    options = {"in_specs": (spec("rows"), spec()), "out_specs": spec(), "check_vma": check_vma}
    total = jax.shard_map(lambda *x: jax.lax.psum(loss(*x), "rows"), mesh=mesh, **options)
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec("rows")))
    dx, dw = jax.jit(jax.grad(total, (0, 1)))(x, w)
    each = [jax.grad(loss, (0, 1))(jnp.asarray(np.asarray(part)), w) for part in (x[:4], x[4:])]
    assert_same((dx, dw), (jnp.concatenate([p for p, _ in each]), sum(q for _, q in each)))


@pytest.mark.parametrize(
    ("kind", "recipe"), [("Auto", "current"), ("Explicit", "block"), ("Explicit", "delayed")]
)
def test_sharded_rows(normal, rng, kind, recipe):
    x, w = normal(8, 128), normal(128, 128)
    state = some_state(rng) if recipe == "delayed" else None
    types = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((2,), ("rows",), types, devices=jax.devices("cpu")[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))

    def slopes(x, w, state):
        return jax.grad(lambda *args: loss(*args[:2], recipe, args[2]), (0, 1, 2))(x, w, state)

    with jax.set_mesh(mesh):
        got = jax.jit(slopes)(jax.device_put(x, sharding), w, state)
    assert_same(got, slopes(x, w, state))


def test_delayed_scaling_step_by_step(normal):
    state, seen = Fp8State.create(3), {"x": [], "w": [], "gradient": []}

    @jax.jit
    @functools.partial(jax.grad, argnums=2)
    def step(x, w, state, dy):
        return jnp.sum(fp8_dot(x, w, recipe="delayed", state=state) * dy)

    for i in range(6):
        given = {
            "x": normal(4, 16) * 2.0**-i,
            "w": normal(16, 8) * 2.0**i,
            "gradient": normal(4, 8),
        }
        if i == 2:
            given["x"] = given["x"].at[0, 0].set(jnp.inf)
        state = step(given["x"], given["w"], state, given["gradient"])
        for name, dtype in (("x", E4M3), ("w", E4M3), ("gradient", E5M2)):
            scale = getattr(state, name)
            assert scale.scale.shape == (1,)
            largest = max(seen[name], default=0)
            wanted = largest / LARGEST[dtype] if largest > 0 else 1
            np.testing.assert_allclose(scale.scale[0], wanted, rtol=2**-22)
            amax = float(jnp.abs(given[name]).max())
            # The history keeps no infinity (0 instead) and forgets the oldest entry.
            seen[name] = [amax if np.isfinite(amax) else 0, *seen[name]][:3]
            assert scale.amax_history.tolist() == [*seen[name], 0, 0, 0][:3]


@pytest.mark.any_jax
def test_delayed_scaling_under_vmap(normal, rng):
    """An unmapped state sees all examples; a mapped state sees its own example."""
    xs, ws, state = normal(3, 5, 16), normal(3, 16, 8), some_state(rng)
    slope = jax.grad(lambda x, w, state: loss(x, w, "delayed", state), 2)
    each = [slope(x, w, state) for x, w in zip(xs, ws, strict=True)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)

    def total(state):
        return jnp.sum(jax.vmap(lambda x, w: loss(x, w, "delayed", state))(xs, ws))

    assert_same(jax.jit(jax.grad(total))(state), jax.tree.map(lambda x: x.max(0), stacked))
    states = jax.tree.map(lambda x: jnp.stack([x] * 3), state)
    assert_same(jax.jit(jax.vmap(slope))(xs, ws, states), stacked)

    def layers(states):
        def layer(sum_, own):
            return sum_ + loss(*own[:2], "delayed", own[2]), None

        return jax.lax.scan(jax.checkpoint(layer), 0.0, (xs, ws, states))[0]

    assert_same(jax.jit(jax.grad(layers))(states), stacked)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": "best"}, ValueError, "recipe='best' is unknown; accepted: current, block"),
        ({"recipe": "block"}, ValueError, r"multiples of 128, got w.shape=\(40, 8\)"),
        ({"recipe": "delayed"}, TypeError, "needs an Fp8State.*NoneType"),
        ({"state": Fp8State.create(2)}, TypeError, "recipe='current' with a state of"),
        ({"w": jnp.ones((39, 8))}, ValueError, r"x.shape=\(2, 3, 40\) and w.shape=\(39, 8\)"),
        ({"w": jnp.ones((2, 40, 8))}, ValueError, r"w \(k, n\), got"),
        ({"x": jnp.ones((3, 40), jnp.int32)}, TypeError, "x.dtype=int32.*bfloat16, float16"),
        ({"w": jnp.ones((40, 8), E4M3)}, TypeError, "w.dtype=float8_e4m3fn"),
        ({"preferred_element_type": E4M3}, TypeError, "preferred_element_type=float8_e4m3fn"),
    ],
)
def test_what_it_refuses(options, error, message):
    arguments = {"x": jnp.ones((2, 3, 40)), "w": jnp.ones((40, 8))} | options
    with pytest.raises(error, match=message):
        fp8_dot(arguments.pop("x"), arguments.pop("w"), **arguments)


def test_dot_general(normal):
    x, w = normal(2, 3, 4, 5), normal(5, 6, 3, 7)
    got = fp8_dot_general(x, w, (((1, 3), (2, 0)), ((), ())))
    wanted = fp8_dot(
        x.transpose(0, 2, 1, 3).reshape(2, 4, 15), w.transpose(2, 0, 1, 3).reshape(15, 42)
    )
    np.testing.assert_array_equal(got, wanted.reshape(2, 4, 6, 7))
    with pytest.raises(NotImplementedError, match="batch"):
        fp8_dot_general(x, x, (((3,), (3,)), ((0,), (0,))))


def test_a_state_that_a_step_did_not_use_begins_again():
    x, w = jnp.eye(8, 128, dtype=jnp.bfloat16), jnp.ones((128, 256), jnp.bfloat16)

    def loss(w, state, is_used):
        def used():
            return fp8_dot(x, w, recipe="delayed", state=state).astype(jnp.float32).sum()

        return jax.lax.cond(is_used, used, lambda: 0.0)

    state = Fp8State.create(4)
    values = []
    for is_used in (True, True, False, True, True):
        value, (dw, state) = jax.value_and_grad(loss, (0, 1))(w, state, is_used)
        values.append(float(value))
        assert bool(jnp.isfinite(dw.astype(jnp.float32)).all())
    assert values == [2048, 2048, 0, 2048, 2048]
