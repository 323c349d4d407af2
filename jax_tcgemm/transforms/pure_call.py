"""Calls a user's function as a pure function of arrays, then applies its in-place changes."""

from __future__ import annotations

import dataclasses
import functools
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
        leaves = [x.part if isinstance(x, _Given) else x for x in leaves]
        result, changes = jax.tree.unflatten(self.result_tree, leaves)
        for (container, key), (value,) in zip(self.changes, changes, strict=True):
            _change(container, key, value)
        return result

    def of_arrays(self, *arrays: Any) -> list[Any]:
        """Returns the arrays among the results and among the values of in-place changes."""
        given = iter(arrays)
        leaves = [next(given) if is_array(x) else x for x in self.leaves]
        args, kwargs = arguments = jax.tree.unflatten(self.tree, leaves)
        before = _Snapshot.of(arguments, self.arguments)
        result = self.f(*args, **kwargs)
        changes = _changes_by(self.f, before)
        self.changes = [(container, key) for container, key, _ in changes]
        # If the function stores an argument elsewhere, the caller's object itself is stored.
        own = {id(each.node): each.original for each in before.walk()}
        changed = jax.tree.map(
            lambda x: _Given(own[id(x)]) if id(x) in own else x,
            [(value,) for _, _, value in changes],
            is_leaf=lambda x: id(x) in own,
        )
        results, self.result_tree = jax.tree.flatten((result, changed))
        self.results = [_ARRAY if is_array(x) else x for x in results]
        return [x for x in results if is_array(x)]


@dataclasses.dataclass(frozen=True)
class _Given:
    """Stands for a part of the caller's arguments.

    Attributes:
        part: the part.
    """

    part: Any


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
    """A node of a copy of the arguments with its children at one point in time.

    Attributes:
        node: the node itself.
        original: the caller's object that it is a copy of.
        children: snapshots of its children by key; empty for a leaf.
    """

    node: Any
    original: Any
    children: dict[Any, _Snapshot]

    @classmethod
    def of(cls, node: Any, original: Any) -> _Snapshot:
        """Returns a snapshot of a node and all nodes below it."""
        own = _children(original)
        children = {key: cls.of(child, own[key]) for key, child in _children(node).items()}
        return cls(node, original, children)

    def walk(self) -> Iterator[_Snapshot]:
        """Yields this node and all nodes below it."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def is_like(self, node: Any) -> bool:
        """Returns true if a node has the same leaves in containers of the same types."""
        if node is self.node:
            return True
        now = _children(node)
        if type(node) is not type(self.node) or now.keys() != self.children.keys():
            return False
        is_leaf = jax.tree_util.all_leaves([node])
        return not is_leaf and all(self.children[k].is_like(x) for k, x in now.items())


def _children(node: Any) -> dict[Any, Any]:
    """Returns the children of a pytree's node by key; none for a leaf or an object of NNX."""
    if _is_nnx(node):
        return {}
    if isinstance(node, dict):
        return dict(node)
    children = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    return {} if len(children) == 1 and children[0] is node else dict(enumerate(children))


def _change(container: Any, key: Any, value: Any) -> None:
    """Changes a dict or list of the caller as the function changed its copy."""
    if value is _REMOVED:
        del container[key]
    else:
        container[key] = value


def _changes_by(f: Callable[..., Any], before: _Snapshot) -> list[tuple[Any, Any, Any]]:
    """Returns the changes that a function made, see ``_changes``.

    Raises:
        TypeError: it changed an object that is no dict or list.
    """
    try:
        return [*_changes(before)]
    except _CannotChangeError as error:
        name = getattr(f, "__qualname__", f)
        raise TypeError(
            f"fuse: {name} changes an argument in place, {error}, of which the caller's object "
            "would know nothing; accepted: a function that returns the new value, or one that "
            "changes dicts, lists and objects of Flax NNX"
        ) from None


def _changes(before: _Snapshot) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the changes that make the caller's arguments equal to their changed copy.

    Args:
        before: a snapshot of the copy before the function changed it.

    Yields:
        A dict or list of the caller, a key, and the new value for this key.

    Raises:
        _CannotChangeError: the function changed an object that is no dict or list.
    """
    for each in before.walk():
        node, now = each.node, _children(each.node)
        if isinstance(node, list) and len(now) != len(each.children):
            yield each.original, slice(None), [*node]
            continue
        for key in {**each.children, **now}:
            was = each.children.get(key)
            if was is not None and key in now and now[key] is was.node:
                continue
            if isinstance(node, dict | list):
                yield each.original, key, now.get(key, _REMOVED)
            # An object may make containers whenever it is flattened.
            elif was is None or key not in now or not was.is_like(now[key]):
                raise _CannotChangeError(f"an object of {type(node)}")


# Flax NNX


def _nnx() -> Any:
    """Returns the module ``flax.nnx``; ``None`` if nothing has imported it."""
    return sys.modules.get("flax.nnx")


def _is_nnx(x: Any) -> bool:
    """Returns true for an object of Flax NNX, which functions may change in place."""
    nnx = _nnx()
    return nnx is not None and isinstance(x, _nnx_types(nnx))


@functools.lru_cache(maxsize=1)
def _nnx_types(nnx: Any) -> tuple[type, ...]:
    names = ("Variable", "Pytree", "Object", "Module")
    return tuple(getattr(nnx, name) for name in names if hasattr(nnx, name))


def _call_nnx(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], evaluate: Evaluate
) -> Any:
    """Calls a function of NNX objects, as ``nnx.jit`` does.

    NNX splits the objects into a structure and arrays and merges them into copies for the function.
    Then it writes the state of the copies back into the caller's objects. Shared objects stay
    shared. Changes of dicts and lists are found in the copies, as for other arguments.
    """
    nnx = _nnx()
    changes: list[tuple[Any, Any, Any]] = []

    def of_state(graph: Any, state: Any) -> Any:
        with nnx.merge_context(_TAG, True) as context:
            own, named = context.merge(graph, state)
        before = _Snapshot.of((own, named), (tuple(args), dict(kwargs)))
        result = f(*own, **named)
        changes[:] = _changes_by(f, before)
        values = [value for _, _, value in changes if value is not _REMOVED]
        with nnx.split_context(_TAG) as context:
            return context.split((own, named, (result, values)))

    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            graph, state = context.split((tuple(args), dict(kwargs)))
        graph, state = _Call(of_state, (graph, state), {}).run(evaluate)
        with nnx.merge_context(_TAG, False) as context:
            result, values = context.merge(graph, state)[-1]
    remaining = iter(values)
    for container, key, value in changes:
        _change(container, key, _REMOVED if value is _REMOVED else next(remaining))
    return result
