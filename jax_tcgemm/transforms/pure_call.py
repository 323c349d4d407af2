"""Calls a user's function as a pure function of arrays, then applies its in-place changes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Computes a function of arrays that returns a list of arrays.
Evaluate = Callable[[Callable[..., list[Any]], list[Any]], Sequence[Any]]

# The tag by which NNX finds its contexts.
_TAG = "jax_tcgemm.fuse"


def call(f: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], evaluate: Evaluate) -> Any:
    """Calls a function; ``evaluate`` computes the arrays of the result.

    Anything but an array passes into the function and out of it unchanged. If the function changes
    dicts, lists or objects of Flax NNX in place, the caller's objects change, too.

    Args:
        f: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        evaluate: computes a function of the arrays among the arguments.

    Returns:
        The function's result.

    Raises:
        TypeError: the function changes an argument of another kind in place.
    """
    owner = getattr(f, "__self__", None)
    if _is_nnx(owner):  # a method, whose object is an argument
        f, args = f.__func__, (owner, *args)
    elif _is_nnx(f):
        f, args = type(f).__call__, (f, *args)
    if any(map(_is_nnx, jax.tree.leaves((args, kwargs), is_leaf=_is_nnx))):
        return _call_nnx(f, args, kwargs, evaluate)
    return _Call(f, args, kwargs).run(evaluate)


def is_array(x: Any) -> bool:
    """Returns true if a leaf of a pytree is an array, which is traced."""
    if isinstance(x, np.ndarray):
        return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
    return isinstance(x, jax.Array)


class _Call:
    """A call whose arguments are pytrees.

    Attributes:
        results: the leaves of the function's result, then those of the changed values, with
            ``_ARRAY`` in the place of each array: a traced array must not be kept.
        changes: the in-place changes, as ``_changes`` yields them, without the values.
    """

    def __init__(self, f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.f = f
        self.arguments = tuple(args), dict(kwargs)
        self.leaves, self.tree = jax.tree.flatten(self.arguments)
        self.results: list[Any] = []
        self.result_tree: Any = None

    def run(self, evaluate: Evaluate) -> Any:
        """Calls the function and applies its in-place changes to the caller's objects."""
        arrays = [jnp.asarray(x) for x in self.leaves if is_array(x)]
        computed = iter(evaluate(self.of_arrays, arrays))
        leaves = [next(computed) if x is _ARRAY else x for x in self.results]
        leaves = [x.leaf if isinstance(x, _Given) else x for x in leaves]
        result, changes = jax.tree.unflatten(self.result_tree, leaves)
        for (container, key), (value,) in zip(self.changes, changes, strict=True):
            if value is _REMOVED:
                del container[key]
            else:
                container[key] = value
        return result

    def of_arrays(self, *arrays: Any) -> list[Any]:
        """Returns the arrays among the results and among the values of in-place changes."""
        given = iter(arrays)
        leaves = [next(given) if is_array(x) else x for x in self.leaves]
        args, kwargs = arguments = jax.tree.unflatten(self.tree, leaves)
        before = _Snapshot.of(arguments)
        result = self.f(*args, **kwargs)
        try:
            changes = [*_changes(self.arguments, before)]
        except _CannotChangeError as error:
            name = getattr(self.f, "__qualname__", self.f)
            raise TypeError(
                f"fuse: {name} changes an argument in place, {error}, of which the caller's object "
                "would know nothing; accepted: a function that returns the new value, or one that "
                "changes dicts, lists and objects of Flax NNX"
            ) from None
        changed = [(value,) for _, _, value in changes]
        self.changes = [(container, key) for container, key, _ in changes]
        results, self.result_tree = jax.tree.flatten((result, changed))
        # If the function stores an argument elsewhere, the caller's object itself is stored.
        count = len(jax.tree.leaves(result))
        own = {id(x): old for x, old in zip(leaves, self.leaves, strict=True)}
        for i, x in enumerate(results[count:], count):
            results[i] = _Given(own[id(x)]) if id(x) in own else x
        self.results = [_ARRAY if is_array(x) else x for x in results]
        return [x for x in results if is_array(x)]


@dataclasses.dataclass(frozen=True)
class _Given:
    """Stands for a leaf of the caller's arguments."""

    leaf: Any


class _Array:
    """Stands for an array among the results."""


_ARRAY = _Array()


class _Removed:
    """Stands for a value that the function removed from a dict."""


_REMOVED = _Removed()


class _CannotChangeError(Exception):
    """The function changed an object in place that is no dict or list; the message names it."""


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """A node of a pytree with its children at one point in time.

    Attributes:
        node: the object itself.
        children: snapshots of its children by key; empty for a leaf.
    """

    node: Any
    children: dict[Any, _Snapshot]

    @classmethod
    def of(cls, node: Any) -> _Snapshot:
        """Returns a snapshot of a node and all nodes below it."""
        return cls(node, {key: cls.of(child) for key, child in _children(node).items()})


def _children(node: Any) -> dict[Any, Any]:
    """Returns the children of a pytree's node by key; none for a leaf."""
    if isinstance(node, dict):
        return dict(node)
    children = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    return {} if len(children) == 1 and children[0] is node else dict(enumerate(children))


def _changes(old: Any, before: _Snapshot) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the changes that make an argument equal to its changed copy.

    Args:
        old: the caller's object.
        before: a snapshot of the copy before the function changed it.

    Yields:
        A dict or list of the caller, a key, and the new value for this key.

    Raises:
        _CannotChangeError: the function changed an object that is no dict or list.
    """
    node, own = before.node, _children(old)
    now = _children(node)
    if isinstance(node, list) and len(now) != len(own):
        yield old, slice(None), [*node]
        return
    for key in {**before.children, **now}:
        was = before.children.get(key)
        if was is not None and key in now and now[key] is was.node:
            yield from _changes(own[key], was)
        elif isinstance(node, dict | list):
            yield old, key, now.get(key, _REMOVED)
        else:
            raise _CannotChangeError(f"an object of {type(node)}")


# Flax NNX


def _nnx() -> Any:
    """Returns the module ``flax.nnx``; ``None`` if nothing has imported it."""
    return sys.modules.get("flax.nnx")


def _is_nnx(x: Any) -> bool:
    """Returns true for an object of Flax NNX, which functions may change in place."""
    nnx = _nnx()
    names = ("Variable", "Pytree", "Object", "Module")
    types = tuple(getattr(nnx, name) for name in names if hasattr(nnx, name))
    return nnx is not None and isinstance(x, types)


def _call_nnx(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], evaluate: Evaluate
) -> Any:
    """Calls a function of NNX objects, as ``nnx.jit`` does.

    NNX splits the objects into a structure and arrays and merges them into copies for the function.
    Then it writes the state of the copies back into the caller's objects. Shared objects stay
    shared.
    """
    nnx = _nnx()

    def of_state(graph: Any, state: Any) -> Any:
        with nnx.merge_context(_TAG, True) as context:
            own, named = context.merge(graph, state)
        result = f(*own, **named)
        with nnx.split_context(_TAG) as context:
            return context.split((own, named, result))

    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            graph, state = context.split((tuple(args), dict(kwargs)))
        graph, state = _Call(of_state, (graph, state), {}).run(evaluate)
        with nnx.merge_context(_TAG, False) as context:
            return context.merge(graph, state)[-1]
