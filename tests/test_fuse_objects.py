"""``fuse`` of functions that take and return more than arrays, or that change their arguments."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusions import check_equal

from jax_tcgemm import fuse

N = 128


@pytest.fixture
def x(normal):
    return normal(N, N, dtype=jnp.bfloat16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A layer that training changes in place."""

    w: jax.Array


def test_what_is_no_array_passes_through(x):
    seen = []

    def f(tree):
        seen.append([type(leaf) for leaf in jax.tree.leaves(tree)])
        return {**tree, "y": tree["w"] @ tree["w"]}

    tree = {"w": x, "n": 3, "rate": 0.5, "name": "layer", "act": jnp.tanh, "none": None}
    tree["text"] = np.array(["a", "b"])
    result = fuse(f)(tree)
    for key in ("n", "rate", "name", "act", "none", "text"):
        assert result[key] is tree[key], key
    assert isinstance(result["y"], jax.Array)
    again = fuse(f)(result)  # like the next call of a training step
    assert again["n"] is tree["n"]
    assert seen[0] == seen[1][: len(seen[0])]


def test_numpy_arrays_become_arrays(x):
    results = fuse(lambda x, n: (x @ x, n, np.float32(2), 1.0, True))(x, np.ones(3))
    assert [type(each) for each in results[2:]] == [np.float32, float, bool]
    assert all(isinstance(each, jax.Array) for each in results[:2])


def test_dicts_and_lists_are_changed(x):
    """The changes are those without ``fuse``: keys removed, added, replaced; inner objects stay."""

    def f(state, log, count):
        state["w"] = jnp.tanh(state["w"] @ state["w"])
        del state["unused"]
        state["new"] = {"kept": state["kept"], "n": count + 1}
        state["inner"]["y"] = state["inner"]["y"] + 1
        state["pair"] = (state["pair"][0], state["w"])
        log.append(jnp.abs(state["w"]).sum())
        log[0] = log[0] * 2
        return state["w"]

    def state():
        inner = {"y": x, "n": 5}
        return {"w": x, "unused": x, "kept": x, "inner": inner, "pair": (x, x)}, [x, "text"], 3

    ours, plain = state(), state()
    inner = ours[0]["inner"]
    result, expected = fuse(f)(*ours), f(*plain)
    check_equal(result, expected)
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for own, other in zip(*map(jax.tree.leaves, (ours, plain)), strict=True):
        assert type(own) is type(other)
        if isinstance(own, jax.Array):
            check_equal(own, other)
    assert ours[0]["inner"] is inner
    assert ours[0]["new"]["kept"] is x


def test_changes_under_jit_are_those_of_jit(x):
    def f(state):
        state["w"] = state["w"] @ state["w"]
        return state.pop("w")

    state = {"w": x}
    check_equal(jax.jit(fuse(f))(state), jax.jit(f)({"w": x}))
    assert state["w"] is x


@pytest.mark.parametrize("wrap", [lambda layer: layer, lambda layer: {"layer": layer}])
def test_other_objects_must_not_be_changed(x, wrap):
    def f(argument):
        layer = argument["layer"] if isinstance(argument, dict) else argument
        layer.w = layer.w @ layer.w
        return layer.w

    with pytest.raises(TypeError, match=r"changes an argument in place, an object of .*Layer"):
        fuse(f)(wrap(Layer(x)))


def test_objects_that_are_replaced(x):
    def f(state):
        state["layer"] = Layer(state["layer"].w @ state["layer"].w)

    layer = Layer(x)
    state = {"layer": layer}
    fuse(f)(state)
    assert layer.w is x
    check_equal(state["layer"].w, x @ x)


@jax.tree_util.register_pytree_node_class
class Boxed:
    """An object that makes a dict of its layers whenever it is flattened."""

    def __init__(self, w, table):
        self.w, self.table = w, table

    def tree_flatten(self):
        return [{"w": [self.w], "empty": {}, "none": None}, self.table], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0]["w"][0], children[1])


def test_objects_that_make_containers_when_flattened(x):
    def f(boxed):
        boxed.table["count"] += 1
        return boxed.w @ boxed.w, boxed

    table = {"count": 1}
    result, boxed = fuse(f)(Boxed(x, table))
    check_equal(result, x @ x)
    assert isinstance(boxed, Boxed)
    assert table == {"count": 2}

    def replace(boxed):
        boxed.w = boxed.w @ boxed.w

    with pytest.raises(TypeError, match=r"changes an argument in place, an object of .*Boxed"):
        fuse(replace)(Boxed(x, {}))


def test_dicts_that_move_are_changed(x):
    """A dict or list that the function changes and moves is the caller's, also when removed."""

    def f(layers, state):
        layers.append({"w": x @ x})
        layers[0]["w"] = layers[0]["w"] + 1
        layers.pop(1)["w"] = None
        state["first"] = (layers[0], state["list"])
        state.pop("list").append(3)

    def arguments():
        return [{"w": x}, {"w": x}, {"w": x}], {"list": [x]}

    plain, ours = arguments(), arguments()
    first, second, third = ours[0]
    inner = ours[1]["list"]
    f(*plain)
    fuse(f)(*ours)
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    jax.tree.map(lambda a, b: check_equal(a, b) if isinstance(a, jax.Array) else None, ours, plain)
    assert ours[0][0] is first
    assert ours[0][1] is third
    assert second == {"w": None}
    assert ours[1]["first"][0] is first
    assert ours[1]["first"][1] is inner
    assert inner[1:] == [3]


nnx = pytest.importorskip("flax.nnx")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Point:
    x: jax.Array


class Net(nnx.Module):
    """A model with statistics, random numbers and a layer that it uses twice."""

    def __init__(self, rngs):
        self.first = nnx.Linear(N, N, rngs=rngs, param_dtype=jnp.bfloat16)
        self.norm = nnx.BatchNorm(N, rngs=rngs)
        self.second = nnx.Linear(N, N, rngs=rngs)
        self.tied = self.second
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        x = self.second(self.norm(jax.nn.gelu(self.first(x))))
        return self.tied(self.dropout(x))


def grown(model, x):
    """Adds to the structure of a model, and returns a part of it."""
    model.seen = nnx.Variable(x.sum())
    return model.second


@pytest.mark.parametrize("place", ["fuse", "nnx.jit(fuse)", "fuse(nnx.jit)"])
def test_nnx_models_are_updated(normal, place):
    optax = pytest.importorskip("optax")

    def step(model, optimizer, x, y):
        value, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    x = normal(N, N)
    found = {}
    for name, wrapped in {
        "plain": step,
        place: {
            "fuse": fuse(step),
            "nnx.jit(fuse)": nnx.jit(fuse(step)),
            "fuse(nnx.jit)": fuse(nnx.jit(step)),
        }[place],
    }.items():
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        losses = [float(wrapped(model, optimizer, x, jnp.sin(x))) for _ in range(5)]
        counts = [model.calls[...], model.dropout.rngs.count[...], optimizer.step[...]]
        found[name] = losses, [*map(int, counts)], float(model.norm.mean[...].sum())
        assert model.tied is model.second
    (losses, counts, mean), (own, own_counts, own_mean) = found.values()
    assert losses[-1] < 0.95 * losses[0]
    np.testing.assert_allclose(own, losses, rtol=0.01)
    np.testing.assert_allclose(own_mean, mean, rtol=0.02, atol=0.01)
    assert own_counts == counts == [5, 5, 5]


def test_nnx_structure_and_results(normal):
    model = Net(nnx.Rngs(0))
    assert fuse(grown)(model, normal(N, N)) is model.second
    assert model.seen[...].shape == ()


def test_dicts_and_lists_beside_nnx_models_are_changed(normal):
    def step(model, log, history, *, places):
        y = model(x)
        log["loss"] = y.mean()
        log["n"] += 1
        del log["gone"]
        history.append(y.max())
        places["in"]["model"] = model
        return model

    x, model = normal(N, N), Net(nnx.Rngs(0))
    log, history, places = {"n": 0, "gone": x}, [], {"in": {}}
    inner = places["in"]
    assert fuse(step)(model, log, history, places=places) is model
    assert {k: v for k, v in log.items() if k != "loss"} == {"n": 1}
    assert log["loss"].shape == history[0].shape == ()
    assert inner["model"] is model
    assert places["in"] is inner
    with pytest.raises(TypeError, match=r"changes an argument in place.*_Point"):
        fuse(lambda model, point: setattr(point, "x", model(x)))(model, _Point(x))


def test_nnx_methods_and_callable_modules(normal):
    x = normal(N, N)
    model = Net(nnx.Rngs(0))
    fuse(model)(x)
    fuse(model.__call__)(x)
    assert int(model.calls[...]) == 2


def test_nnx_models_that_are_closed_over(normal):
    """Such models belong to another trace; NNX raises an error."""
    model = Net(nnx.Rngs(0))
    with pytest.raises(Exception, match="trace level"):
        fuse(lambda x: model(x))(normal(N, N))


def test_what_is_no_function_is_refused(x):
    with pytest.raises(TypeError, match="fuse takes a function, got f="):
        fuse(x @ x)  # pyright: ignore[reportArgumentType]
