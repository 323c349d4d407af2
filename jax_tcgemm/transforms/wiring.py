"""Who makes and who uses each value of a list of items, kept while items are joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax_tcgemm.transforms.graph import Value


class Wiring:
    """Items in order, each after those whose outputs it takes.

    Attributes:
        items: the list.
        position: of each item in it.
        makers: the item that gives a value; arguments and constants have none.
        users: the items that take a value, in no order.
    """

    def __init__(self, items: Sequence[Any]):
        self.items = list(items)
        self.position: dict[Any, int] = {}
        self.makers: dict[Value, Any] = {}
        self.users: dict[Value, list[Any]] = {}
        self._number()
        for item in self.items:
            self._add(item)

    def users_of(self, value: Value) -> list[Any]:
        """Returns the items that take a value."""
        return self.users.get(value, [])

    def before(self, items: Iterable[Any], start: int) -> set[Any]:
        """Returns what items depend on that lies from ``start`` on, themselves aside."""
        found: set[Any] = set()
        waiting = [value for item in items for value in item.taken]
        while waiting:
            maker = self.makers.get(waiting.pop())
            if maker is not None and maker not in found and self.position[maker] >= start:
                found.add(maker)
                waiting += maker.taken
        return found

    def join(self, gone: set[Any], joined: Any, items: list[Any], kept: frozenset[Value]) -> None:
        """Takes another list, in which one item is in the place of some.

        Args:
            gone: those that are not in the list.
            joined: what is in their place.
            items: the list, which may have items that are no longer used by any.
            kept: values that stay though no item uses them.
        """
        for item in gone:
            self._remove(item)
        self._add(joined)
        dead: set[Any] = set()
        waiting = [value for item in gone for value in item.taken]
        while waiting:
            value = waiting.pop()
            maker = self.makers.get(value)
            if maker is None or maker in dead or maker.has_effects:
                continue
            if not any(x in kept or self.users_of(x) for x in maker.outputs):
                dead.add(maker)
                self._remove(maker)
                waiting += maker.taken
        self.items = [item for item in items if item not in dead]
        self._number()

    def _remove(self, item: Any) -> None:
        for value in item.outputs:
            if self.makers.get(value) is item:
                del self.makers[value]
        for value in dict.fromkeys(item.taken):
            self.users[value].remove(item)

    def _add(self, item: Any) -> None:
        for value in item.outputs:
            self.makers[value] = item
        for value in dict.fromkeys(item.taken):
            self.users.setdefault(value, []).append(item)

    def _number(self) -> None:
        self.position = {item: i for i, item in enumerate(self.items)}
