"""Keys that distinguish numbers by type and bits, where ``==`` does not.

``0.0 == -0.0``, ``1 == 1.0 == True``, and NaN is not equal to itself. A cache that compares static
parameters by ``==`` therefore returns a program that was compiled for another number.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import Any


def exactly(value: Any) -> Any:
    """Returns a hashable value that is equal for numbers of the same type and bits.

    Args:
        value: a Python number, a tuple of such values, or any other hashable value.
    """
    if isinstance(value, tuple):
        return type(value), *map(exactly, value)
    if isinstance(value, float):
        return float, struct.pack("<d", value)
    if isinstance(value, complex):
        return complex, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, int):
        return bool if isinstance(value, bool) else int, int(value)
    return value


def number_of(key: Any) -> Any:
    """Returns the Python number from which ``exactly`` made a key."""
    kind, bits = key
    if kind is complex:
        return complex(*struct.unpack("<dd", bits))
    return struct.unpack("<d", bits)[0] if kind is float else kind(bits)


class ComparedExactly:
    """Base of frozen dataclasses whose numbers are compared by ``exactly``.

    A subclass sets ``eq=False``.
    """

    @functools.cached_property
    def _exact(self) -> tuple[Any, ...]:
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return tuple(exactly(getattr(self, field.name)) for field in fields)

    def __eq__(self, other: object) -> bool:
        """Returns whether both are of one class and have the same fields."""
        if self is other:
            return True
        return type(other) is type(self) and self._exact == other._exact

    def __hash__(self) -> int:
        return hash(self._exact)
