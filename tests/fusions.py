"""Helpers of the tests of ``fuse``: fixed and random functions, and inspection of programs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rounding_errors import SIGNS, with_errors

from jax_tcgemm import fuse
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.transforms.graph import inner_nodes

M, K, N = 320, 96, 128

_UNARY: list[Callable[[Any], Any]] = [
    jnp.tanh,
    jnp.sin,
    jax.nn.sigmoid,
    jax.nn.relu,
    jax.nn.gelu,
    lambda x: x * 0.5,
    lambda x: 1 - x,
    lambda x: jnp.exp(-jnp.abs(x)),
    lambda x: jax.jit(jnp.cos)(x),
    lambda x: jnp.where(x > 0, x, 0.1 * x),
]
_BINARY: list[Callable[[Any, Any], Any]] = [
    jnp.add,
    jnp.subtract,
    lambda x, y: jnp.tanh(x) * y,
    jnp.maximum,
    lambda x, y: jnp.clip(x, -1, 1) * jnp.clip(y, -1, 1),
]
_PRODUCTS: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x @ y,
    lambda x, y: x.T @ y,
    lambda x, y: jnp.einsum("ij,kj->ik", x, y),
    lambda x, y: (x.T @ y).T,
    lambda x, y: x @ y.astype(jnp.float32).T.astype(y.dtype),  # stored parameters
    lambda x, y: (x.T @ y).astype(jnp.float32).T.astype(x.dtype),
    lambda x, y: jnp.concatenate([x[:8] @ (y * 0.5), x[8:] @ y]),  # few rows
]


def _labelled(x: Any) -> Any:
    """Subtracts from each row its value at one place, as a loss does with its labels."""
    places = (jnp.arange(len(x)) * 7 % x.shape[1])[:, None]
    return x - jnp.take_along_axis(x, places, 1)


def _embedded(x: Any, count: int) -> Any:
    """Adds sums of rows: rows with the same number modulo ``count`` share a sum."""
    numbers = jnp.arange(len(x)) % count
    sums = jnp.zeros((count, x.shape[1]), x.dtype).at[numbers].add(x / len(x))
    return x + sums[numbers]


# Functions that read, join or add up parts of a matrix.
_PARTS: list[Callable[[Any], Any]] = [
    lambda x: jnp.concatenate([-x[:, len(x) // 2 :], x[:, : len(x) // 2]], 1),  # rotated
    lambda x: jnp.concatenate(jnp.split(x, 2, 1)[::-1], 1),
    lambda x: x * jax.lax.dynamic_slice_in_dim(x, 3, 1, 0),
    _labelled,
    lambda x: _embedded(x, 1),
    lambda x: _embedded(x, 8),
]


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on earlier values.

    Attributes:
        kind: the kind of operation.
        which: the number of the function among those of this kind.
        operands: the numbers of the values it reads, modulo the number of existing values.
    """

    kind: str
    which: int
    operands: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class RandomFunction:
    """A function of ``(matrices (3, s, s), rows (2, s))``.

    Attributes:
        steps: its operations, in order.
        results: the numbers of the values that it returns.
        moved: the seed for moving intermediate 16-bit values by half a rounding; 0 moves none.
    """

    steps: tuple[Step, ...]
    results: tuple[int, ...]
    moved: int = 0

    def __call__(self, matrices: Any, rows: Any) -> list[Any]:
        """Computes the results."""
        size = matrices.shape[-1]
        values, vectors = list(matrices), list(rows)
        columns = [jnp.ones((size, 1), matrices.dtype)]
        rng = np.random.default_rng(self.moved)
        for step in self.steps:
            x, y = (values[i % len(values)] for i in step.operands)
            if self.moved and x.dtype.itemsize == 2:
                factors = 1 + rng.choice([-0.5, 0.5], 2) * float(jnp.finfo(x.dtype).eps)
                x, y = (
                    (v.astype(jnp.float32) * factor.astype(np.float32)).astype(v.dtype)
                    for v, factor in zip((x, y), factors, strict=True)
                )
            match step.kind:
                case "product":
                    # Bounds the factors by 2, since chains of squares overflow.
                    x, y = (2 * jnp.tanh(v / 2) for v in (x, y))
                    product = _PRODUCTS[step.which % len(_PRODUCTS)](x, y)
                    values.append(product * size**-0.5)
                case "unary":
                    values.append(_UNARY[step.which % len(_UNARY)](x))
                case "binary":
                    values.append(_BINARY[step.which % len(_BINARY)](x, y))
                case "row":
                    values.append(x + vectors[step.which % len(vectors)])
                case "column":
                    values.append(x * columns[step.which % len(columns)])
                case "wide":
                    values.append((x.astype(jnp.float32) + 1).astype(x.dtype))
                case "parts":
                    values.append(_PARTS[step.which % len(_PARTS)](x))
                case "of_rows":
                    columns.append(jnp.tanh(x.max(-1, keepdims=True)))
                case "of_columns":
                    vectors.append(x.mean(0) if step.which % 2 else jnp.tanh(x.max(0)))
        return [values[i % len(values)] for i in self.results] + [vectors[-1], columns[-1]]

    def __str__(self) -> str:
        """Returns the text that a failed test prints."""
        lines = (f"{x.kind} {x.which} of {x.operands}" for x in self.steps)
        return "; ".join((*lines, f"-> {self.results}"))


def random_function(rng: np.random.Generator) -> RandomFunction:
    """Draws a function."""
    odds_of = {"product": 5, "unary": 5, "binary": 4, "row": 2, "parts": 2}
    odds_of |= dict.fromkeys(("column", "wide", "of_rows", "of_columns"), 1)
    kinds, odds = [*odds_of], np.array([*odds_of.values()])
    count = int(rng.integers(6, 24))
    steps = tuple(
        Step(
            str(kind),
            int(rng.integers(60)),
            # Prefers the latest values, so that chains occur.
            tuple(int(2 + i - min(rng.geometric(0.5) - 1, i + 2)) for _ in range(2)),
        )
        for i, kind in enumerate(rng.choice(kinds, count, p=odds / odds.sum()))
    )
    results = tuple(int(x) for x in rng.integers(0, count + 3, int(rng.integers(1, 4))))
    return RandomFunction((Step("product", 0, (0, 1)), *steps), results)


def operands(rng: np.random.Generator, size: int) -> tuple[jax.Array, jax.Array]:
    """Draws arguments of a random function, in bfloat16."""
    shapes = (3, size, size), (2, size)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)


def loss_of(function: RandomFunction) -> Callable[[Any, Any], Any]:
    """Returns a loss that depends on all results, for gradients."""

    def loss(matrices: Any, rows: Any) -> Any:
        results = function(matrices, rows)
        return sum((jnp.sin(x.astype(jnp.float32)) ** 2).mean() for x in results)

    return loss


def worst_of_random(function: RandomFunction, args: Any, *, gradient: bool = False) -> float:
    """Returns ``worst`` for a random function under ``fuse``, or for its loss and gradients."""

    def whole(f: RandomFunction) -> Any:
        return jax.value_and_grad(loss_of(f), argnums=(0, 1)) if gradient else f

    def found(seeds: Iterable[int], draws: int = 0) -> float:
        moved = [whole(dataclasses.replace(function, moved=seed)) for seed in seeds]
        return worst(whole(function), fuse(whole(function)), args, moved=moved, draws=draws)

    # If a rounding decides which of two numbers is larger, few perturbations show it.
    first = found((1, 2))
    return first if first <= 1 else found(range(1, 13), draws=50)


def worst(
    function: Any,
    ours: Any,
    args: Any,
    slack: float = 2.0,
    between: Any = jnp.bfloat16,
    moved: Sequence[Any] = (),
    draws: int = 0,
) -> float:
    """Returns the largest error of a result, in multiples of the tolerance.

    The tolerance is twice the largest error of these: the plain function, the plain function with
    each argument rounded the other way, the functions in ``moved``, and ``draws`` computations with
    random errors of float32. A long chain of roundings multiplies any error.

    Args:
        function: the plain function.
        ours: the function under test.
        args: the arguments of both functions.
        slack: how many roundings of the largest number are allowed in addition, since the plain
            function may compute a sum exactly by chance.
        between: the type to which intermediate values are rounded.
        moved: the plain function with other intermediate roundings.
        draws: how often intermediate results get random errors of float32. These are seen in
            differences of nearly equal numbers, such as the derivatives of saturated functions.
    """
    plain, own = jax.jit(function), jax.jit(ours)(*args)
    every = [args, *(_shaken(args, seed) for seed in range(4))]
    theirs = [jax.tree.leaves(plain(*each)) for each in every]
    theirs += [jax.tree.leaves(jax.jit(other)(*args)) for other in moved]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.asarray(x).astype(np.float64) if _is_float(x) else np.asarray(x) for x in args]
        exact = jax.jit(function)(*wide)
        if not all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(exact)):
            # Otherwise XLA may compute a maximum twice, so that no element equals the maximum.
            exact = function(*map(jnp.asarray, wide))
        rough = jax.jit(with_errors(function, float(jnp.finfo(jnp.float32).eps)))
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (draws, SIGNS))
        near = [jax.tree.leaves(rough(each, *wide)) for each in signs]
    assert jax.tree.structure(exact) == jax.tree.structure(own)
    found = 0.0
    results = zip(*map(jax.tree.leaves, (own, exact)), zip(*theirs, strict=True), strict=True)
    for i, (other, truth, plains) in enumerate(results):
        assert {(x.shape, x.dtype) for x in plains} == {(other.shape, other.dtype)}
        with np.errstate(invalid="ignore"):  # because of NaN
            truth, given, *bases = (np.asarray(x, np.float64) for x in (truth, other, *plains))
        # The plain function may compute that maximum twice, too. Then it gives no reference for an
        # element.
        known = np.isfinite([truth, *bases]).all(0)
        if not known.any():
            continue
        if not np.isfinite(given[known]).all():
            return np.inf
        bases += [np.asarray(leaves[i], np.float64) for leaves in near]
        errors = (np.abs(x[known] - truth[known]) for x in (given, *bases))
        off, *bounds = (x[np.isfinite(x)].max(initial=0.0) for x in errors)
        rounding = float(jnp.finfo(between).eps) if _is_float(other) else 0.0
        allowed = 2 * max(bounds) + slack * rounding * np.abs(truth[known]).max()
        found = max(found, 0.0 if off == 0 else off / allowed if allowed else np.inf)
    return found


def _shaken(args: Any, seed: int) -> Any:
    """Returns arguments whose 16-bit numbers are moved by half a rounding, up or down."""
    rng = np.random.default_rng(seed)

    def moved(x: Any) -> Any:
        if not _is_float(x) or x.dtype.itemsize > 2:
            return x
        signs = rng.choice([-1.0, 1.0], x.shape)
        eps = float(jnp.finfo(x.dtype).eps)
        return (np.asarray(x, np.float32) * (1 + 0.5 * eps * signs)).astype(x.dtype)

    return jax.tree.map(moved, args)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


# Inspection of programs

INNER = jaxprs.CALLS | {"scan", "while", "cond", "shard_map"}


def equations(f: Any, *args: Any, inner: frozenset[str] = INNER) -> list[Any]:
    """Returns the equations of a function, at any depth.

    Args:
        f: the function.
        *args: its arguments.
        inner: names of the operations that are looked into.
    """
    eqns = jax.make_jaxpr(f)(*args).eqns
    return [x for eqn in eqns for x in inner_nodes(eqn, inner)]


def operations(f: Any, *args: Any) -> collections.Counter[str]:
    """Counts the primitives of a function, at any depth."""
    return collections.Counter(eqn.primitive.name for eqn in equations(f, *args))


def with_epilogues(f: Any, *args: Any) -> list[tuple[int, int]]:
    """Returns the numbers of operands and results of each product with a compiled epilogue."""
    eqns = equations(fuse(f), *args)
    return [(len(eqn.invars), len(eqn.outvars)) for eqn in eqns if "compiled" in eqn.primitive.name]


def check(f: Any, *args: Any, **allowed: Any) -> None:
    assert worst(f, fuse(f), args, **{"slack": 1.0, **allowed}) <= 1


def check_equal(ours: Any, theirs: Any) -> None:
    for own, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        own, other = np.asarray(own, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(own, other, atol=0.02 * np.abs(other).max())


def layer_arrays(normal: Callable[..., Any], m=M, k=K, n=N) -> dict[str, jax.Array]:
    """Draws a layer's arrays in bfloat16: x, two weights, a bias, the weight of the way back."""
    shapes = {"x": (m, k), "w": (k, n), "u": (k, n), "b": (n,), "d": (n, k)}
    return {name: normal(*shape, dtype=jnp.bfloat16) / 8 for name, shape in shapes.items()}


def layer(x, w, b):
    return jax.nn.gelu(x @ w + b)


def mlp_loss(x, w, b, d):
    y = x + jax.nn.gelu(jnp.einsum("mk,kn->mn", x, w) + b) @ d
    return jnp.mean(y.astype(jnp.float32) ** 2)


def gated_loss(x, w, u, d):
    y = x + (jax.nn.silu(x @ w) * (x @ u)) @ d
    return jnp.mean(y.astype(jnp.float32) ** 2)
