"""Data for transformations of an operation, and results of its formula in float64."""

from __future__ import annotations

import functools
import os
import secrets
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from function_operations import FUNCTIONS
from operations import PRODUCTS

OPERATIONS = PRODUCTS | FUNCTIONS
SEED = int(os.environ.get("JAX_TCGEMM_TEST_SEED", secrets.randbits(32)))
EXAMPLES = 2  # of a batch; also steps of a loop


class Data(NamedTuple):
    """Arguments, tangents and cotangents of an operation.

    Attributes:
        args: the arguments.
        tangents: tangents of the arguments that have derivatives.
        weights: the result's cotangent.
        many: arguments of each example.
    """

    args: list[Any]
    tangents: list[Any]
    weights: Any
    many: list[list[Any]]


class Case(NamedTuple):
    """A function, the arguments by which it is differentiated, and data."""

    f: Callable[..., Any]
    moving: list[int]
    data: Data

    def alone(self, args: list[Any] | None = None) -> tuple[Callable[..., Any], list[Any]]:
        """Returns a function of the arguments that have derivatives, and their values."""
        args = self.data.args if args is None else args

        def g(*values):
            own = dict(zip(self.moving, values, strict=True))
            return self.f(*(own.get(i, x) for i, x in enumerate(args)))

        return g, [args[i] for i in self.moving]

    def pulled(self, args: list[Any] | None = None, weights: Any = None) -> Any:
        """Returns the value and all cotangents."""
        g, values = self.alone(args)
        y, pullback = jax.vjp(g, *values)
        return y, pullback(self.data.weights if weights is None else weights)

    def stacked(self, axes: list[int | None] | None = None) -> list[Any]:
        """Stacks the arguments of all examples, each along its axis."""
        axes = [0] * len(self.data.args) if axes is None else axes
        return [
            examples[0]
            if axis is None
            else jax.tree.map(lambda *x, axis=axis: jnp.stack(x, axis), *examples)
            for examples, axis in zip(zip(*self.data.many, strict=True), axes, strict=True)
        ]

    def stacked_weights(self) -> Any:
        return jax.tree.map(lambda x: jnp.stack([x, -2 * x]), self.data.weights)


@functools.cache
def drawn(name: str) -> tuple[Data, Data]:
    """Returns the data of an operation, and equal data of its formula."""
    op = OPERATIONS[name]
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])

    def like(x):
        numbers = rng.standard_normal(x.shape)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            numbers = numbers + 1j * rng.standard_normal(x.shape)
        return jnp.asarray(numbers, x.dtype)

    sets = [
        [*zip(*(argument.draw(rng) for argument in op.arguments), strict=True)]
        for _ in range(1 + EXAMPLES)
    ]
    (args, *many), plain = [list(own) for own, _ in sets], [list(other) for _, other in sets]
    tangents = [like(args[i]) for i in op.moving]
    weights = jax.tree.map(like, jax.eval_shape(op.ours, *args))
    return Data(args, tangents, weights, many), Data(plain[0], tangents, weights, plain[1:])


def wide(data: Data, rng: np.random.Generator | None = None, rounding: float = 0.0) -> Data:
    """Converts data to float64, and changes each number by so much of itself."""

    def convert(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        x = np.asarray(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
        x = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
        return x if rng is None else x * (1 + rounding * rng.choice([-1.0, 1.0], x.shape))

    return jax.tree.map(convert, data)


@functools.cache
def reference(name: str, change: Callable[[Case], Any]) -> tuple[Any, Any]:
    """Returns the formula's results in float64, and the largest error of each in its own type.

    Each error is the largest of several computations. All but one change each number of the data by
    half the distance of neighbouring numbers in the operation's type.
    """
    op, plain, rng = OPERATIONS[name], drawn(name)[1], np.random.default_rng(SEED)
    run = jax.jit(lambda data: change(Case(op.formula, op.moving, data)))
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, run(wide(plain)))
    rounding = float(jnp.finfo(op.dtype).eps) / 2
    near = [plain]
    for _ in range(16):
        moved = wide(plain, rng, rounding)
        near.append(jax.tree.map(lambda x, old: jnp.asarray(x, old.dtype), moved, plain))
    errors = jax.tree.map(
        lambda x, *others: max(_largest(np.asarray(y).astype(x.dtype) - x) for y in others),
        exact,
        *map(run, near),
    )
    return exact, errors


def _largest(x: Any) -> float:
    return float(np.abs(x).max(initial=0))


def check(name: str, change: Callable[[Case], Any], found: Any, part: Any = lambda x: x) -> None:
    """Compares an operation's results with a part of those of its formula."""
    print(f"JAX_TCGEMM_TEST_SEED={SEED}")
    trees = found, *map(part, reference(name, change))
    for x, exact, usual in zip(*map(jax.tree.leaves, trees), strict=True):
        assert x.shape == exact.shape
        error = _largest(np.asarray(x).astype(exact.dtype) - exact)
        allowed = 2 * (usual + float(jnp.finfo(x.dtype).eps) * _largest(exact))
        assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"
