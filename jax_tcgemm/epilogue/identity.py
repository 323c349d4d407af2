"""Keys of jaxprs: two are equal only if both jaxprs compute and differentiate the same.

A key has three parts:

- a digest of everything that has bits or a name: operations, the order of variables, types, numbers
  and arrays by type, shape and bytes (never by ``repr``, which rounds), parameters, contexts;
- objects of JAX whose ``==`` is sound, such as shardings and meshes;
- objects that are compared by reference: derivative rules, and whatever is not understood. The key
  keeps them alive, since Python reuses an ``id()``.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import operator
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from jax_tcgemm._compat import HOST_ARRAYS, jaxprs


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    """A key that distinguishes a jaxpr from others.

    Attributes:
        digest: digest of everything that has bits or a name.
        equal: objects that are compared by ``==``.
        same: objects that are compared by ``is``.
    """

    digest: bytes
    equal: tuple[Any, ...]
    same: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        """Returns true if the jaxprs compute and differentiate the same."""
        if not isinstance(other, Key) or self.digest != other.digest:
            return False
        if len(self.same) != len(other.same) or not all(map(operator.is_, self.same, other.same)):
            return False
        # This comparison is last: ``==`` raises an error for symbolic extents of two scopes.
        return self.equal == other.equal

    def __hash__(self) -> int:
        return hash(self.digest)


def key_of(closed: core.ClosedJaxpr) -> Key:
    """Returns the key of a jaxpr and its constants."""
    writer = _Writer()
    written = writer.value(closed)
    digest = hashlib.sha256(written).digest()
    return Key(digest, tuple(writer.equal), tuple(writer.same))


class Digests:
    """Digests of jaxprs, to be compared only with digests of the same instance.

    A digest needs no objects beside it, because the instance holds them for all of its digests.
    Digests take less time than keys.
    """

    def __init__(self) -> None:
        self._writer = _Writer()

    def of(self, closed: Any) -> bytes:
        """Returns the digest of a jaxpr, or of an object with one, and its constants."""
        return self._writer.of_jaxpr(closed)


class _Writer:
    """Writes values as bytes.

    Attributes:
        equal: the numbers of objects to be compared by ``==``, by type and value.
        same: objects to be compared by reference.
    """

    def __init__(self) -> None:
        self.equal: dict[Any, int] = {}
        self.same: list[Any] = []
        self._numbers: dict[int, int] = {}  # numbers in `same`, by id
        # Bytes of objects that occur often, by id; `_alive` keeps these ids from being reused.
        self._known: dict[int, bytes] = {}
        self._operations: dict[tuple[Any, ...], bytes] = {}
        self._alive: list[Any] = []

    def value(self, x: Any) -> bytes:
        """Writes any value that a jaxpr holds."""
        write = _PLAIN.get(type(x))
        if write is not None:
            return write(x)
        known = self._known.get(id(x))
        if known is not None:
            return known
        if type(x) is tuple or type(x) is list:
            return _joined(type(x).__name__.encode(), map(self.value, x))
        if isinstance(x, np.dtype):
            return self._once(x, self._dtype)
        if isinstance(x, (*HOST_ARRAYS, np.generic)):
            return self._array(x)
        if isinstance(x, Tracer):
            return self._reference(x)
        if isinstance(x, jax.Array):
            return self._array(x)
        if isinstance(x, jaxprs.ShapedArray):
            return self._once(x, self._aval)
        return self._composite(x)

    def _composite(self, x: Any) -> bytes:
        kind: type = type(x)
        if _is_frozen(kind):
            values = (getattr(x, field.name) for field in dataclasses.fields(x))
            return _joined(b"fields", (self._reference(kind), *map(self.value, values)))
        if isinstance(x, type) or jaxprs.is_rule(x):
            return self._reference(x)
        if isinstance(x, enum.Enum):
            return _joined(b"enum", (self._reference(kind), _text(x.name)))
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return _joined(b"named", (self._reference(kind), *map(self.value, x)))
        if kind is dict:
            pairs = (part for pair in x.items() for part in pair)
            return _joined(b"dict", map(self.value, pairs))
        if kind is set or kind is frozenset:
            return _joined(b"set", sorted(map(self.value, x)))
        if jaxprs.jaxpr_of(x) is not None:
            return self._once(x, self.of_jaxpr)
        if jaxprs.is_symbolic(x):  # a polynomial with integer coefficients; scopes may share names
            return _joined(b"extent", (_text(str(x)), self._reference(x.scope)))
        return self._of_jax(x) if _is_of_jax(kind) else self._reference(x)

    def _of_jax(self, x: Any) -> bytes:
        kind = type(x)
        for base in (int, float, complex):
            if isinstance(x, base):  # a number that carries its type, such as `TypedFloat`
                dtype = self.value(getattr(x, "dtype", None))
                return _joined(b"typed", (self._reference(kind), _PLAIN[base](x), dtype))
        if kind.__eq__ is object.__eq__:
            return self._reference(x)
        try:
            return self._equality(x)
        except TypeError:  # it cannot be hashed
            return self._reference(x)

    def _once(self, x: Any, write: Callable[[Any], bytes]) -> bytes:
        """Writes an object that occurs often, and remembers the bytes."""
        known = self._known.get(id(x))
        if known is None:
            known = self._known[id(x)] = write(x)
            self._alive.append(x)
        return known

    def _reference(self, x: Any) -> bytes:
        number = self._numbers.get(id(x))
        if number is None:
            number = self._numbers[id(x)] = len(self.same)
            self.same.append(x)
        return b"is%d;" % number

    def _equality(self, x: Any) -> bytes:
        return b"eq%d;" % self.equal.setdefault((type(x), x), len(self.equal))

    def _dtype(self, dtype: np.dtype) -> bytes:
        # The name alone does not distinguish structured types such as float0.
        parts = (_text(dtype.name), _text(dtype.str), self.value(dtype.names))
        return _joined(b"dtype", (*parts, self._reference(dtype.type)))

    def _array(self, x: Any) -> bytes:
        """Writes an array by its bytes, which are read once."""
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            words = self._array(jax.random.key_data(x))
            return _joined(b"keys", (self.value(x.dtype), words))
        try:
            values = np.asarray(x)
        except RuntimeError:  # it was deleted, or is on devices of other processes
            return self._reference(x)
        if values.dtype.hasobject:
            return self._reference(x)
        kind = b"scalar" if isinstance(x, np.generic) else b"array"
        is_weak = b"w" if getattr(x, "weak_type", False) else b"s"
        parts = (self.value(values.dtype), self.value(values.shape), _content(values.tobytes()))
        return _joined(kind, (is_weak, *parts))

    def _aval(self, aval: Any) -> bytes:
        # `==` compares its sharding and the mesh axes over which it varies.
        is_weak = b"w" if aval.weak_type else b"s"
        parts = (self.value(aval.dtype), self.value(aval.shape), is_weak, self._equality(aval))
        return _joined(b"aval", parts)

    def _context(self, context: Any) -> bytes:
        return self.value(jaxprs.context_fields(context))

    def of_jaxpr(self, closed: Any) -> bytes:
        """Writes a jaxpr, with its constants if it has any, as a digest."""
        jaxpr = jaxprs.jaxpr_of(closed)
        numbers: dict[Any, int] = {}

        def atom(x: Any) -> bytes:
            if isinstance(x, core.Literal):
                return self._literal(x)
            aval = x.aval
            return b"v%d:%b" % (
                numbers.setdefault(x, len(numbers)),
                self._known.get(id(aval)) or self.value(aval),
            )

        def equation(eqn: Any) -> bytes:
            taken = _joined(b"of", map(atom, eqn.invars))
            made = _joined(b"to", map(atom, eqn.outvars))
            return _joined(b"do", (self._operation(eqn), taken, made))

        parts = [
            _joined(b"given", map(atom, jaxpr.constvars)),
            _joined(b"held", map(self.value, getattr(closed, "consts", ()))),
            _joined(b"taken", map(atom, jaxpr.invars)),
            _joined(b"all", map(equation, jaxpr.eqns)),
            _joined(b"return", map(atom, jaxpr.outvars)),
        ]
        return b"jaxpr:" + hashlib.sha256(b"".join(parts)).digest()

    def _operation(self, eqn: Any) -> bytes:
        """Writes an equation's operation; equations with the same objects share the bytes."""
        params = eqn.params
        which = (id(eqn.primitive), id(eqn.ctx), *params, *map(id, params.values()))
        known = self._operations.get(which)
        if known is None:
            named = (part for k, x in sorted(params.items()) for part in (_text(k), self.value(x)))
            known = self._operations[which] = _joined(
                b"by",
                (
                    _text(eqn.primitive.name),
                    self._reference(eqn.primitive),
                    _joined(b"with", named),
                    self._once(eqn.ctx, self._context),
                ),
            )
            self._alive.append(eqn)
        return known

    def _literal(self, literal: Any) -> bytes:
        # `val` may be a Python number; it is lowered in the type of `aval`.
        is_key = jnp.issubdtype(literal.aval.dtype, jax.dtypes.extended)
        value = literal.val if is_key else np.asarray(literal.val, literal.aval.dtype)
        return _joined(b"number", (self._array(value), self.value(literal.aval)))


def _joined(kind: bytes, parts: Iterable[bytes]) -> bytes:
    """Joins self-delimiting parts."""
    written = list(parts)
    return b"%b%d(%b" % (kind, len(written), b"".join(written))


def _text(x: str) -> bytes:
    return _bytes(x.encode("utf-8", "surrogatepass"))


def _bytes(x: bytes) -> bytes:
    return b"bytes%d:%b" % (len(x), x)


def _content(x: bytes) -> bytes:
    """Returns few bytes as they are, and the digest of many."""
    return _bytes(x) if len(x) <= 64 else b"digest:" + hashlib.sha256(x).digest()


def _is_frozen(kind: type) -> bool:
    """Checks if a class is a frozen dataclass, so that fields define its instances."""
    params = vars(kind).get("__dataclass_params__")
    return params is not None and params.frozen


def _is_of_jax(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("jax", "jaxlib")


_PLAIN: Mapping[type, Callable[[Any], bytes]] = {
    type(None): lambda x: b"none;",
    type(Ellipsis): lambda x: b"dots;",
    bool: lambda x: b"yes;" if x else b"no;",
    int: lambda x: b"int%d;" % x,
    float: lambda x: b"float:" + struct.pack("<d", x),
    complex: lambda x: b"complex:" + struct.pack("<dd", x.real, x.imag),
    str: lambda x: b"text:" + _text(x),
    bytes: _bytes,
}
