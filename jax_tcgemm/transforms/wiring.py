"""The maker, the users and the order of all values of a graph, kept up to date by joins."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from jax_tcgemm.transforms.graph import Item, Value

# A place in the order of items. Longer tuples lie between shorter ones.
Position = tuple[int, ...]


class Wiring:
    """Items in topological order: each comes after the items whose outputs it reads.

    A join renumbers only the items that move, so its cost does not grow with the program.

    Attributes:
        position: the place of each item.
        makers: the item that computes each value; arguments and constants have none.
        users: the items that read each value.
    """

    def __init__(self, items: Sequence[Any], marked: Iterable[Any], kept: frozenset[Value]):
        """Connects items.

        Args:
            items: all items in their order.
            marked: the items that ``depends_on`` can ask about.
            kept: values that stay although no item reads them.
        """
        self.position: dict[Any, Position] = {item: (i,) for i, item in enumerate(items)}
        self.makers: dict[Value, Any] = {}
        self.users: dict[Value, dict[Any, None]] = {}
        self.kept = kept
        self._bits = {item: 1 << i for i, item in enumerate(marked)}
        self._ancestors: dict[Value, int] = {}  # the bits of the marked items before a value
        for item in items:
            self._connect(item)
            bits = self._bits_before(item)
            self._ancestors.update((value, bits) for value in item.outputs)

    @property
    def items(self) -> list[Any]:
        """The items in their order."""
        return sorted(self.position, key=self.position.__getitem__)

    def users_of(self, value: Value) -> Iterable[Any]:
        """Returns the items that read a value."""
        return self.users.get(value, ())

    def bits_of(self, marked: Iterable[Any]) -> int:
        """Returns the bit mask of some marked items, for ``depends_on``."""
        return functools.reduce(operator.or_, (self._bits[item] for item in marked))

    def depends_on(self, value: Value, bits: int) -> bool:
        """Returns true if a value depends on an output of one of the marked items."""
        return bool(self._ancestors.get(value, 0) & bits)

    def before(self, items: Iterable[Any], start: Position, most: int) -> set[Any] | None:
        """Returns the items from ``start`` on that the given items depend on.

        Args:
            items: the items; the result contains one only if another depends on it.
            start: a place in the order. The result has no item before it.
            most: the largest number of items to return.

        Returns:
            The items, or ``None`` if there are more than ``most``.
        """
        found: set[Any] = set()
        waiting = [value for item in items for value in item.taken]
        while waiting:
            maker = self.makers.get(waiting.pop())
            if maker is not None and maker not in found and self.position[maker] >= start:
                found.add(maker)
                if len(found) > most:
                    return None
                waiting += maker.taken
        return found

    def join(
        self, gone: Iterable[Any], joined: Item, first: Iterable[Any], start: Position
    ) -> None:
        """Replaces some items by one.

        Args:
            gone: the items to replace; one of them is at ``start``.
            joined: the new item.
            first: items after ``start`` that must come before the new item, with all items after
                ``start`` that they depend on.
            start: the place of the new item.
        """
        gone = list(gone)
        moved = sorted(first, key=self.position.__getitem__)
        for item in gone:
            self._disconnect(item)
            del self.position[item]
        for i, item in enumerate(moved):
            self.position[item] = (*start, 0, i)
        self.position[joined] = (*start, 1)
        self._connect(joined)
        self._bits[joined] = sum(self._bits.get(item, 0) for item in gone)
        self._update_ancestors(joined)
        self._drop_unused(value for item in gone for value in item.taken)

    def _bits_before(self, item: Any) -> int:
        bits = self._bits.get(item, 0)
        for value in item.taken:
            bits |= self._ancestors.get(value, 0)
        return bits

    def _update_ancestors(self, item: Any) -> None:
        """Updates what the outputs of an item depend on, and all values that follow from them."""
        waiting = [item]
        while waiting:
            item = waiting.pop()
            bits = self._bits_before(item)
            for value in item.outputs:
                if self._ancestors.get(value, 0) != bits:
                    self._ancestors[value] = bits
                    waiting += self.users.get(value, ())

    def _drop_unused(self, values: Iterable[Value]) -> None:
        """Removes the makers of values that nothing reads any more, and so on upstream."""
        waiting = list(values)
        while waiting:
            maker = self.makers.get(waiting.pop())
            if maker is None or maker.has_effects:
                continue
            if not any(x in self.kept or self.users.get(x) for x in maker.outputs):
                self._disconnect(maker)
                del self.position[maker]
                waiting += maker.taken

    def _connect(self, item: Any) -> None:
        for value in item.outputs:
            self.makers[value] = item
        for value in item.taken:
            self.users.setdefault(value, {})[item] = None

    def _disconnect(self, item: Any) -> None:
        for value in item.outputs:
            if self.makers.get(value) is item:
                del self.makers[value]
        for value in item.taken:
            self.users[value].pop(item, None)
