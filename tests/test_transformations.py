"""Every operation under every transformation of JAX, against its formula in float64.

A result may be twice as wrong as the formula in its own types, with operands changed by a rounding,
and by two roundings more. Errors are compared with the formula's largest element.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_program import mesh_of
from transformed import EXAMPLES, OPERATIONS, Case, check, drawn

import jax_tcgemm

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


def jacobians(case: Case) -> Any:
    """Maps tangents and cotangents alone, as ``jacfwd``, ``jacrev`` and ``hessian`` do."""
    g, values = case.alone()
    tangents = [jnp.stack([t, -2 * t]) for t in case.data.tangents]

    def along(f, *values):
        return jax.vmap(lambda *tangents: jax.jvp(f, values, tangents)[1])

    hessians = []
    for i, (x, t) in enumerate(zip(values, tangents, strict=True)):
        of_one = lambda x, i=i: g(*values[:i], x, *values[i + 1 :])  # noqa: E731
        gradient = lambda x, f=of_one: jax.vjp(f, x)[1](case.data.weights)  # noqa: E731
        hessians.append(along(gradient, x)(t))
    reverse = jax.vmap(jax.vjp(g, *values)[1])(case.stacked_weights())
    return along(g, *values)(*tangents), reverse, hessians


def vmap(case: Case) -> Any:
    """Maps all arguments along their first and last axes, and each argument alone."""
    last = [min(map(jnp.ndim, jax.tree.leaves(x))) for x in case.data.args]
    every = [0] * len(last), last, *np.where(np.eye(len(last)), last, None).tolist()
    return [jax.vmap(case.f, axes)(*case.stacked(axes)) for axes in every]


def _of_all_and_last(case: Case, f: Any) -> Any:
    """Maps all arguments, and the last alone."""
    others = [None] * (len(case.data.args) - 1)
    every = [*[0 for _ in others], 0], [*others, 0]
    return [jax.vmap(lambda *x: f(list(x)), axes)(*case.stacked(axes)) for axes in every]


def vmap_of_gradient(case: Case) -> Any:
    return _of_all_and_last(case, case.pulled)


def vmap_of_jvp(case: Case) -> Any:
    def along(args):
        g, values = case.alone(args)
        return jax.jvp(g, tuple(values), tuple(case.data.tangents))

    return _of_all_and_last(case, along)


def gradient_of_vmap(case: Case) -> Any:
    """Maps the first argument alone, and all others."""
    others = [None] * (len(case.data.args) - 1)
    found = []
    for axes in ([0, *others], [None, *[0 for _ in others]]):
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
        *(forward, reverse_of_each, second, jacobians),
        *(vmap, nested_vmap, vmap_of_gradient, vmap_of_jvp, gradient_of_vmap, scan, loops),
    )
}


# Other operations have the same rules. These are tested under all transformations, and some of them
# with every version of JAX.
VARIED = ("gemm", "dot_general", "mlp", "ragged_dot", "function", "packed")
EVERY_JAX = ("gemm", "mlp", "ragged_dot", "function")
# Others apply the same rules. pytest runs these for the varied operations, with --nightly for all.
IMPLIED = (
    *("reverse of each", "jacobians", "nested vmap", "vmap of jvp", "linearize"),
    *("remat", "remat, everything", "shard_map, unchecked"),
)
# These need an operation whose arguments' parts give parts of the result.
DIVIDED = ("export, symbolic", "shard_map", "shard_map, unchecked", "explicit axes")


def cells(transformations: Any) -> Any:
    """Returns names of a transformation and an operation."""

    def marks(each, name):
        if each in IMPLIED:
            return [pytest.mark.any_jax, *[pytest.mark.nightly] * (name not in VARIED)]
        return [] if name in EVERY_JAX else [pytest.mark.any_jax]

    return pytest.mark.parametrize(
        ("transformation", "name"),
        [
            pytest.param(each, name, marks=marks(each, name))
            for name, op in OPERATIONS.items()
            for each in transformations
            if each in (op.only or transformations) and (op.out or each not in DIVIDED)
        ],
    )


def refusal(name: str, transformation: str) -> Any:
    """Expects the error that a cell names."""
    refused = OPERATIONS[name].errors.get(transformation)
    return pytest.raises(refused[0], match=refused[1]) if refused else contextlib.nullcontext()


@cells(CHANGES)
def test_changes(transformation, name):
    op, change = OPERATIONS[name], CHANGES[transformation]
    run = jax.jit(lambda data: change(Case(op.ours, op.moving, data)))
    with refusal(name, transformation) as refused:
        found = run(drawn(name)[0])
    if refused is None:
        check(name, change, found)


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


def export(case: Case, op: Any, is_symbolic: bool = False) -> Any:
    """Exports and loads; if symbolic, the dimensions that devices would divide have no extents."""
    pytest.importorskip("flatbuffers")
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.data.args)
    if is_symbolic:
        (rows,) = jax.export.symbolic_shape("rows")
        for i, spec in enumerate(op.specs):
            if "x" in spec:
                shape = [*types[i].shape]
                shape[spec.index("x")] = rows
                types[i] = jax.ShapeDtypeStruct(shape, types[i].dtype)
    checks = jax_tcgemm.export_disabled_checks()
    options = {"platforms": ("cpu", "cuda"), "disabled_checks": checks}
    exported = jax.export.export(jax.jit(case.f), **options)(*types)
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
            spec = P(*op.out, *[None] * (leaf.ndim - len(op.out)))
            assert jax.typeof(leaf).sharding.spec == spec
    return y, cotangents


_POLICIES = jax.checkpoint_policies
_NAMES = jax_tcgemm.PREACTIVATION, jax_tcgemm.ACTIVATION
WRAPPERS = {
    "eager": lambda case, op: case.pulled(),
    "jit": jit,
    "without jit": without_jit,
    "linearize": linearize,
    "remat": remat,
    "remat, names": functools.partial(remat, policy=_POLICIES.save_only_these_names(*_NAMES)),
    "remat, everything": functools.partial(remat, policy=_POLICIES.everything_saveable),
    "shard_map": shard_map,
    "shard_map, unchecked": functools.partial(shard_map, check_vma=False),
    "export": export,
    "export, symbolic": functools.partial(export, is_symbolic=True),
    "explicit axes": explicit_axes,
}


@cells(WRAPPERS)
def test_wrappers(transformation, name):
    op = OPERATIONS[name]
    case = Case(op.ours, op.moving, drawn(name)[0])
    with refusal(name, transformation) as refused:
        found = WRAPPERS[transformation](case, op)
    if refused is None:
        check(name, Case.pulled, found)


@pytest.mark.parametrize("name", [name for name, op in OPERATIONS.items() if op.linear])
def test_linear_transpose(name):
    op, data = OPERATIONS[name], drawn(name)[0]
    for moving in op.linear:
        g, values = Case(op.ours, list(moving), data).alone()
        found = jax.jit(lambda g=g, x=values: jax.linear_transpose(g, *x)(data.weights))()
        at = [op.moving.index(i) for i in moving]
        check(name, Case.pulled, found, lambda pulled, at=at: [pulled[1][i] for i in at])
