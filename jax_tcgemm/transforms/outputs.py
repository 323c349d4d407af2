"""Which values of a region a kernel writes: those with which the fewest bytes go through memory.

What is used as it is has to be written. What others use element by element they can make of
something else: of the product, say, or of a sum that is written anyway. Bytes are counted as if
what has to be written was one kernel of XLA's where there is no region.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jax_tcgemm.transforms.graph import Node, Value


@dataclasses.dataclass(frozen=True)
class Flow:
    """What there is to choose from.

    Attributes:
        products: the values that the kernel multiplies.
        makers: what makes the others of the region, and what it may make of its operands.
        hard: those that have to be written.
        soft: those that others make of something else.
        kernels: how many such others there are.
        reduced: those that the kernel reduces, in a region.
        small: a value of fewer bytes counts for nothing.
    """

    products: Sequence[Value]
    makers: Mapping[Value, Node]
    hard: Sequence[Value]
    soft: Sequence[Value]
    kernels: int
    reduced: Sequence[Value]
    small: float

    def written(self) -> list[Value] | None:
        """Returns what is written, ``None`` where that moves no fewer bytes than without a region.

        Reductions aside.
        """
        chosen, least = set(self.hard), self._bytes(set(self.hard))
        # Of equals the last, of which least is left to be made.
        further = [{x} for x in reversed((*self.products, *self.makers))]
        further.append(set(self.products))
        while True:
            best = min((chosen | each for each in further), key=self._bytes)
            cost = self._bytes(best)
            if cost >= least:
                break
            chosen, least = best, cost
        if not chosen - set(self.products) or least >= self._bytes_apart():
            return None
        return [x for x in (*self.products, *self.makers) if x in chosen]

    def _bytes(self, written: set[Value]) -> float:
        """Returns what goes through memory where the kernel writes such values."""
        read = self._starts([*written, *self.reduced], set())
        own = self._sum(x for x in read if x not in self.products)
        made = self._made_of(self.soft, written)
        return own + self._sum(written) + (self.kernels and self.kernels * made)

    def _bytes_apart(self) -> float:
        """Returns what does where it writes the products alone."""
        products = set(self.products)
        read = self._starts(self.hard, products)
        made = self.kernels * self._made_of(self.soft, products)
        reduced = self._made_of(self.reduced, {*products, *self.hard})
        return self._sum([*products, *read, *self.hard]) + made + reduced

    def _made_of(self, values: Iterable[Value], written: set[Value]) -> float:
        """Returns what is read to make values, infinite where more has to be written."""
        read = self._starts(values, written)
        if any(x in self.products and x not in written for x in read):
            return math.inf
        return self._sum(read)

    def _starts(self, values: Iterable[Value], known: set[Value]) -> set[Value]:
        """Returns what values are made of: what is known, the products, and what is read."""
        found: set[Value] = set()
        seen: set[Value] = set()
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in known or value not in self.makers:
                found.add(value)
            else:
                waiting += self.makers[value].taken
        return found

    def _sum(self, values: Iterable[Value]) -> float:
        return float(sum(x.bytes for x in values if x.bytes > self.small))
