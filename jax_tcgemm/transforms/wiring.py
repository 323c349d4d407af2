"""Who makes and who uses each value of a graph, and in which order, while items are joined."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from jax_tcgemm.transforms.graph import Item, Value

# A place in the order of items: longer ones lie between others.
Position = tuple[int, ...]


class Wiring:
    """Items in an order in which each comes after those whose outputs it reads.

    Joining items renumbers only those that move, so its cost does not grow with the program.

    Attributes:
        position: the place of each item.
        makers: the item that makes a value; arguments and constants have none.
        users: the items that read a value.
    """

    def __init__(self, items: Sequence[Any], marked: Iterable[Any], kept: frozenset[Value]):
        """Connects items.

        Args:
            items: in their order.
            marked: those of the items that ``depends_on`` asks for.
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
        """Returns a number for some marked items, for ``depends_on``."""
        return functools.reduce(operator.or_, (self._bits[item] for item in marked))

    def depends_on(self, value: Value, bits: int) -> bool:
        """Whether a value is made of what one of some marked items makes."""
        return bool(self._ancestors.get(value, 0) & bits)

    def before(self, items: Iterable[Any], start: Position, most: int) -> set[Any] | None:
        """Returns what items depend on from ``start`` on, without themselves.

        Args:
            items: the items.
            start: a place in the order; what lies before it is left out.
            most: a number of items.

        Returns:
            ``None`` if there are more than ``most``.
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
        """Puts one item in the place of some.

        Args:
            gone: the items that it replaces; one of them is at ``start``.
            joined: the new item.
            first: items behind ``start`` that have to come before the new one, with all of those
                behind ``start`` that they depend on.
            start: where the new item is put.
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
        """Notes what the outputs of an item, and what follows, depend on now."""
        waiting = [item]
        while waiting:
            item = waiting.pop()
            bits = self._bits_before(item)
            for value in item.outputs:
                if self._ancestors.get(value, 0) != bits:
                    self._ancestors[value] = bits
                    waiting += self.users.get(value, ())

    def _drop_unused(self, values: Iterable[Value]) -> None:
        """Removes the makers of values that nothing reads any more, and so on."""
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
