"""Every operation under every transformation of JAX, against its formula in float64.

Tolerances follow from types and magnitudes: the formula is computed again with each operand changed
by one rounding. A result may be eight times as wrong as that changes the formula's largest element.
"""

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
import pytest
from function_operations import FUNCTIONS
from jax import lax
from jax.sharding import AxisType, NamedSharding
from operations import PRODUCTS
from sharded_program import mesh_of

import jax_tcgemm

OPERATIONS = PRODUCTS | FUNCTIONS
SEED = int(os.environ.get("JAX_TCGEMM_TEST_SEED", secrets.randbits(32)))
EXAMPLES = 2  # of a batch; also steps of a loop


class Data(NamedTuple):
    """What the transformations of an operation read.

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
    """Returns the formula's results in float64, and how far roundings of the data change each."""
    op, plain, rng = OPERATIONS[name], drawn(name)[1], np.random.default_rng(SEED)
    with jax.enable_x64(True):
        run = jax.jit(lambda data: change(Case(op.formula, op.moving, data)))
        exact = jax.tree.map(np.asarray, run(wide(plain)))
        rounding = float(jnp.finfo(op.dtype).eps) / 2
        near = [jax.tree.map(np.asarray, run(wide(plain, rng, rounding))) for _ in range(8)]
    changed = jax.tree.map(lambda x, *others: max(_largest(x - y) for y in others), exact, *near)
    return exact, changed


def _largest(x: Any) -> float:
    return float(np.abs(x).max(initial=0))


def check(name: str, change: Callable[[Case], Any], found: Any, part: Any = lambda x: x) -> None:
    """Compares an operation's results with a part of those of its formula."""
    print(f"JAX_TCGEMM_TEST_SEED={SEED}")
    eps = float(jnp.finfo(OPERATIONS[name].dtype).eps)
    trees = found, *map(part, reference(name, change))
    for x, exact, changed in zip(*map(jax.tree.leaves, trees), strict=True):
        assert x.shape == exact.shape
        error = _largest(np.asarray(x).astype(exact.dtype) - exact)
        allowed = 8 * (changed + max(eps, float(jnp.finfo(x.dtype).eps)) * _largest(exact))
        assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


# Transformations that change what is computed


def forward(case: Case) -> Any:
    """Differentiates by all arguments at once, and by each alone."""
    g, values = case.alone()
    tangents = case.data.tangents
    each = []
    for i, (x, t) in enumerate(zip(values, tangents, strict=True)):
        of_one = lambda x, i=i: g(*values[:i], x, *values[i + 1 :])  # noqa: E731
        each.append(jax.jvp(of_one, (x,), (t,))[1])
    return jax.jvp(g, tuple(values), tuple(tangents)), each


def reverse_of_each(case: Case) -> Any:
    """Differentiates by each argument while the others are constant."""
    g, values = case.alone()
    found = []
    for i, x in enumerate(values):
        of_one = lambda x, i=i: g(*values[:i], x, *values[i + 1 :])  # noqa: E731
        found.append(jax.vjp(of_one, x)[1](case.data.weights))
    return found


def second(case: Case) -> Any:
    """Differentiates all cotangents, forward and in reverse."""
    g, values = case.alone()

    def gradient(*values):
        return jax.vjp(g, *values)[1](case.data.weights)

    tangents = tuple(case.data.tangents)
    return jax.jvp(gradient, tuple(values), tangents)[1], jax.vjp(gradient, *values)[1](tangents)


def vmap(case: Case) -> Any:
    """Maps all arguments along their first and last axes, and each argument alone."""
    last = [min(map(jnp.ndim, jax.tree.leaves(x))) for x in case.data.args]
    every = [0] * len(last), last, *np.where(np.eye(len(last)), last, None).tolist()
    return [jax.vmap(case.f, axes)(*case.stacked(axes)) for axes in every]


def vmap_of_gradient(case: Case) -> Any:
    return jax.vmap(lambda *args: case.pulled(list(args)))(*case.stacked())


def gradient_of_vmap(case: Case) -> Any:
    """Maps all arguments, the first alone, and all others."""
    others = [None] * (len(case.data.args) - 1)
    found = []
    for axes in ([0, *others], [None, *[0 for _ in others]], [0, *[0 for _ in others]]):
        mapped = case._replace(f=jax.vmap(case.f, axes))
        found.append(mapped.pulled(case.stacked(axes), case.stacked_weights()))
    return found


def nested_vmap(case: Case) -> Any:
    others = [None] * (len(case.data.args) - 1)
    inner = jax.vmap(case.f, [None, *[0 for _ in others]])
    return jax.vmap(inner, [0, *others])(*case.stacked())


def scan(case: Case) -> Any:
    """Differentiates a loop whose carry scales the first argument of the next step."""
    one = jnp.ones((), jnp.result_type(float))

    def step(carry, x):
        y = case.f((x[0] * (1 + carry)).astype(x[0].dtype), *x[1:])
        mean = sum(jnp.mean(jnp.real(leaf)) for leaf in jax.tree.leaves(y))
        return jnp.tanh(mean).astype(one.dtype), y

    loop = case._replace(f=lambda *xs: lax.scan(step, 0 * one, xs))
    return loop.pulled(case.stacked(), (one, case.stacked_weights()))


def loops(case: Case) -> Any:
    """Runs ``map``, ``while_loop`` and ``cond``."""
    xs, y = case.stacked(), jax.tree.map(jnp.zeros_like, case.data.weights)
    body = lambda state: (state[0] + 1, case.f(*jax.tree.map(lambda x: x[state[0]], xs)))  # noqa: E731
    y = lax.while_loop(lambda state: state[0] < EXAMPLES, body, (0, y))[1]
    branch = lax.cond(jnp.float32(1) < EXAMPLES, case.f, lambda *args: y, *case.data.args)
    return lax.map(lambda x: case.f(*x), xs), y, branch


CHANGES = {
    each.__name__.replace("_", " "): each
    for each in (
        *(forward, second, vmap, gradient_of_vmap),  # those of variants
        *(reverse_of_each, vmap_of_gradient, nested_vmap, scan, loops),
    )
}


def cells(transformations: Any, of_variants: Any) -> Any:
    """Returns names of a transformation and an operation; variants take few of them."""
    return pytest.mark.parametrize(
        ("transformation", "name"),
        [
            pytest.param(each, name, marks=[] if op.is_main else pytest.mark.any_jax)
            for name, op in OPERATIONS.items()
            for each in transformations
            if op.is_main or each in of_variants
        ],
    )


@cells(CHANGES, [*CHANGES][:4])
def test_changes(transformation, name):
    op, data = OPERATIONS[name], drawn(name)[0]
    change = CHANGES[transformation]
    run = jax.jit(lambda data: change(Case(op.ours, op.moving, data)))
    if transformation in op.errors:
        error, text = op.errors[transformation]
        with pytest.raises(error, match=text):
            run(data)
    else:
        check(name, change, run(data))


# Transformations that leave the value and the cotangents as they are


def jit(case: Case, *_: Any) -> Any:
    return jax.jit(lambda data: case._replace(data=data).pulled())(case.data)


def without_jit(case: Case, *_: Any) -> Any:
    with jax.disable_jit():
        return case.pulled()


def linearize(case: Case, *_: Any) -> Any:
    def run(data):
        g, values = case._replace(data=data).alone()
        y, linear = jax.linearize(g, *values)
        return y, jax.linear_transpose(linear, *values)(data.weights)

    return jax.jit(run)(case.data)


def remat(case: Case, op: Any, policy: Any = None) -> Any:
    f = jax.checkpoint(lambda *args: op.ours(*args), policy=policy)
    return jit(case._replace(f=f))


def shard_map(case: Case, op: Any, check_vma: bool = True) -> Any:
    options = {"in_specs": op.specs, "out_specs": op.out, "check_vma": check_vma}
    return jit(case._replace(f=jax.shard_map(case.f, mesh=mesh_of((2,)), **options)))


def export(case: Case, *_: Any) -> Any:
    pytest.importorskip("flatbuffers")
    checks = jax_tcgemm.export_disabled_checks()
    options = {"platforms": ("cpu", "cuda"), "disabled_checks": checks}
    exported = jax.export.export(jax.jit(case.f), **options)(*case.data.args)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    return jit(case._replace(f=loaded.call))


def explicit_axes(case: Case, op: Any) -> Any:
    mesh = mesh_of((2,), AxisType.Explicit)

    def put(x, spec):
        return jax.tree.map(lambda y: jax.device_put(y, NamedSharding(mesh, spec)), x)

    with jax.set_mesh(mesh):
        args = [put(x, spec) for x, spec in zip(case.data.args, op.specs, strict=True)]
        data = case.data._replace(args=args, weights=put(case.data.weights, op.out))
        y, cotangents = jit(case._replace(data=data))
        for leaf in jax.tree.leaves(y):
            assert jax.typeof(leaf).sharding.spec == (*op.out, *[None] * (leaf.ndim - len(op.out)))
    return y, cotangents


_POLICIES = jax.checkpoint_policies
_NAMES = jax_tcgemm.PREACTIVATION, jax_tcgemm.ACTIVATION
WRAPPERS = {
    "jit": jit,
    "shard_map": shard_map,
    "remat, names": functools.partial(remat, policy=_POLICIES.save_only_these_names(*_NAMES)),
    "eager": lambda case, op: case.pulled(),
    "without jit": without_jit,
    "linearize": linearize,
    "remat": remat,
    "remat, everything": functools.partial(remat, policy=_POLICIES.everything_saveable),
    "shard_map, unchecked": functools.partial(shard_map, check_vma=False),
    "export": export,
    "explicit axes": explicit_axes,
}
DIVIDED = ("shard_map", "shard_map, unchecked", "explicit axes")


@cells(WRAPPERS, [*WRAPPERS][:3])
def test_wrappers(transformation, name):
    op = OPERATIONS[name]
    if op.out is None and transformation in DIVIDED:
        pytest.skip("parts of the arguments do not give parts of the result")
    case = Case(op.ours, op.moving, drawn(name)[0])
    check(name, Case.pulled, WRAPPERS[transformation](case, op))


@pytest.mark.parametrize("name", [name for name, op in OPERATIONS.items() if op.linear])
def test_linear_transpose(name):
    op, data = OPERATIONS[name], drawn(name)[0]
    for moving in op.linear:
        g, values = Case(op.ours, list(moving), data).alone()
        found = jax.jit(lambda g=g, x=values: jax.linear_transpose(g, *x)(data.weights))()
        at = [op.moving.index(i) for i in moving]
        check(name, Case.pulled, found, lambda pulled, at=at: [pulled[1][i] for i in at])
