"""Random functions as lists of steps, and copies with one step changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from function_pairs import SHAPE, Function
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata

_UNARY: dict[str, Function] = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "logistic": jax.nn.sigmoid,
    "abs": jnp.abs,
    "neg": lambda z: -z,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
}

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "max": jnp.maximum,
    "where": lambda x, y: jnp.where(x > y, x, y * 0.5),
}

_PARAMETERS: dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, ...]]] = {
    "reduce_precision": (lambda z, bits: lax.reduce_precision(z, 8, bits), (6, 7, 10, 23)),
    "cumsum": (lambda z, axis: lax.cumsum(z, axis) / 72, (0, 1)),
    "cummax": (lambda z, is_reversed: lax.cummax(z, 0, reverse=is_reversed), (False, True)),
    "integer_pow": (lambda z, y: lax.integer_pow(jnp.tanh(z), y), (2, 3, 5)),
    "iota": (lambda z, axis: z + lax.broadcasted_iota(jnp.float32, SHAPE, axis) / 72, (0, 1)),
    "convert": (lambda z, dtype: z.astype(dtype).astype(z.dtype), ("bfloat16", "float16")),
    "transpose": (lambda z, order: z + lax.transpose(z, order), ((0, 1), (1, 0))),
}

# Kinds of steps that enclose others.
_AROUND = ("call", "checkpoint", "forward rule", "backward rule", "loop", "branch", "told")


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step.

    Attributes:
        kind: the kind of step.
        name: the name of the operation, or the name given to the step.
        value: the number, array, parameter or context in the step.
        inner: the steps within.
    """

    kind: str
    name: str = ""
    value: Any = None
    inner: tuple[Step, ...] = ()


def draw(rng: np.random.Generator, depth: int = 0) -> tuple[Step, ...]:
    """Draws the steps of a function."""
    return tuple(_step(rng, depth) for _ in range(int(rng.integers(1, 6 - depth))))


def _step(rng: np.random.Generator, depth: int) -> Step:
    kinds = ["number", "array", "unary", "parameter", "name", "drawn"]
    kind = str(rng.choice(kinds + list(_AROUND) * (depth < 3)))
    if kind == "unary":
        return Step(kind, str(rng.choice(list(_UNARY))))
    if kind == "parameter":
        name = str(rng.choice(list(_PARAMETERS)))
        values = _PARAMETERS[name][1]
        return Step(kind, name, values[int(rng.integers(len(values)))])
    if kind == "name":
        return Step(kind, str(rng.choice(["one", "other", "third"])))
    if kind == "drawn":
        return Step(kind, value=(bool(rng.random() < 0.5), rng.integers(0, 2**32, 2, np.uint32)))
    name = str(rng.choice(list(_BINARY)))
    if kind == "number":
        return Step(kind, name, _number(rng))
    if kind == "array":
        shape = ((), (72,), (72, 1), SHAPE)[int(rng.integers(4))]
        array = rng.normal(size=shape).astype(np.float32)
        return Step(kind, name, array if rng.random() < 0.3 else jnp.asarray(array))
    value = {
        "told": str(rng.integers(100)),
        "loop": int(rng.integers(1, 4)),
        "branch": float(rng.normal()),
    }.get(kind, float(rng.normal()))
    return Step(kind, "f", value, draw(rng, depth + 1))


def _number(rng: np.random.Generator) -> Any:
    sort = rng.random()
    if sort < 0.2:
        return int(rng.integers(-2, 3))
    if sort < 0.3:
        return [0.0, -0.0][int(rng.integers(2))]
    value = float(rng.normal() * 10.0 ** -rng.integers(0, 6))
    return value if sort < 0.8 else np.float32(value)


def run(steps: tuple[Step, ...], z: Any) -> Any:
    """Computes the steps."""
    for step in steps:
        z = _apply(step, z)
    return z


def _apply(step: Step, z: Any) -> Any:
    kind, value = step.kind, step.value
    if kind in ("number", "array"):
        return _BINARY[step.name](z, value)
    if kind == "unary":
        return _UNARY[step.name](z)
    if kind == "parameter":
        return _PARAMETERS[step.name][0](z, value)
    if kind == "name":
        return checkpoint_name(z, step.name)
    if kind == "drawn":
        with jax.threefry_partitionable(value[0]):
            key = jax.random.wrap_key_data(value[1])
            return jnp.where(jax.random.bernoulli(key, 0.7, SHAPE), z, 0)
    return _AROUND_OTHERS[kind](step, lambda z: run(step.inner, z))(z)


def _named_call(step: Step, inner: Function) -> Function:
    def call(z: Any) -> Any:
        return inner(z)

    call.__name__ = call.__qualname__ = step.name
    return jax.jit(call)


def _forward_rule(step: Step, inner: Function) -> Function:
    function = jax.custom_jvp(inner)
    function.defjvp(lambda p, t: (function(*p), t[0] * step.value))
    return function


def _backward_rule(step: Step, inner: Function) -> Function:
    function = jax.custom_vjp(inner)
    function.defvjp(lambda z: (inner(z), None), lambda _, g: (g * step.value,))
    return function


def _told(step: Step, inner: Function) -> Function:
    def tell(z: Any) -> Any:
        with set_xla_metadata(told=step.value):
            return inner(z) + 1

    return tell


_AROUND_OTHERS: dict[str, Callable[[Step, Function], Function]] = {
    "call": _named_call,
    "checkpoint": lambda _, inner: jax.checkpoint(inner),
    "forward rule": _forward_rule,
    "backward rule": _backward_rule,
    "loop": lambda step, inner: (
        lambda z: lax.fori_loop(0, step.value, lambda _, x: jnp.tanh(inner(x)), z)
    ),
    "branch": lambda step, inner: lambda z: lax.cond(z[0, 0] > step.value, inner, jnp.negative, z),
    "told": _told,
}


# Changing a step


def sites(steps: tuple[Step, ...], path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yields the places of steps that can be changed."""
    for i, step in enumerate(steps):
        # A call's name means nothing, and the call disappears if it closes over arrays.
        if step.kind not in ("unary", "checkpoint", "call"):
            yield (*path, i)
        yield from sites(step.inner, (*path, i))


def changed(
    steps: tuple[Step, ...], path: tuple[int, ...], rng: np.random.Generator, by_much: bool
) -> tuple[Step, ...]:
    """Returns the steps with one step changed.

    Args:
        steps: all steps.
        path: the place of the changed step.
        rng: draws the change.
        by_much: whether numbers change by more than a bit.
    """
    i, *rest = path
    if rest:
        inner = changed(steps[i].inner, tuple(rest), rng, by_much)
        anew = dataclasses.replace(steps[i], inner=inner)
    else:
        anew = _other(steps[i], rng, by_much)
    return (*steps[:i], anew, *steps[i + 1 :])


def _other(step: Step, rng: np.random.Generator, by_much: bool) -> Step:
    kind, value = step.kind, step.value
    if kind == "number":
        return dataclasses.replace(step, value=_other_number(value, rng, by_much))
    if kind == "array":
        array = np.array(value)
        if by_much:
            array = array + np.float32(1)
        else:
            at = tuple(int(rng.integers(extent)) for extent in array.shape)
            array[at] = np.nextafter(array[at], np.float32(9))
        return dataclasses.replace(step, value=jnp.asarray(array))
    if kind == "parameter":
        others = [x for x in _PARAMETERS[step.name][1] if x != value]
        return dataclasses.replace(step, value=others[int(rng.integers(len(others)))])
    if kind == "name":
        return dataclasses.replace(step, name=step.name + "x")
    if kind == "drawn":
        is_partitionable, words = value
        if rng.random() < 0.5:
            return dataclasses.replace(step, value=(not is_partitionable, words))
        return dataclasses.replace(step, value=(is_partitionable, words ^ np.uint32(1)))
    if kind == "told":
        return dataclasses.replace(step, value=value + "1")
    if kind == "loop":
        return dataclasses.replace(step, value=value + 1)
    return dataclasses.replace(step, value=_other_number(value, rng, by_much))


def _other_number(value: Any, rng: np.random.Generator, by_much: bool) -> Any:
    if by_much:
        return value + 1
    if value == 0 and isinstance(value, float):
        return -value
    if isinstance(value, int):
        return value + int(rng.choice([-1, 1]))
    # The operation reads the number as float32.
    near = np.nextafter(np.float32(value), np.float32(rng.choice([-9, 9])))
    return near if isinstance(value, np.float32) else float(near)


def every(steps: tuple[Step, ...]) -> Iterator[Step]:
    """Yields the steps and the steps within them."""
    for step in steps:
        yield step
        yield from every(step.inner)
