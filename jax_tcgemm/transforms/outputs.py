"""Which values of a region a kernel writes: those with which the fewest bytes go through memory.

A value that others use as it is has to be written. Others that use a value element by element can
recompute it from something else that is written, for example from the product. Bytes are counted as
if XLA computed everything that has to be written in one kernel where there is no region.

Everything here is numbers, so that equal layers of a program are decided once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True)
class Flow:
    """The values of a region by number.

    Attributes:
        sizes: the bytes of each value; ``0`` for one that is read for nothing.
        made_of: the values that each is made of; ``None`` for one that is read from memory, and for
            a product.
        products: how many of the first values are products.
        choices: the values that the kernel may write beside the products.
        hard: values that have to be written.
        soft: values that others can make of something else.
        kernels: how many such others there are.
        reduced: values that the kernel reduces.
    """

    sizes: tuple[int, ...]
    made_of: tuple[tuple[int, ...] | None, ...]
    products: int
    choices: tuple[int, ...]
    hard: tuple[int, ...]
    soft: tuple[int, ...]
    kernels: int
    reduced: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def written(flow: Flow) -> tuple[int, ...] | None:
    """Returns the values to write, ``None`` where no choice moves fewer bytes than no region."""
    return _Choice(flow).run()


@functools.lru_cache(maxsize=4096)
def saved_bytes(flow: Flow, chosen: tuple[int, ...]) -> int:
    """Returns how many bytes fewer are moved than without the region.

    Args:
        flow: the values of the region.
        chosen: those that are written, as of ``written``.
    """
    choice = _Choice(flow)
    return round(choice.bytes_apart() - choice.bytes(_bits(chosen)))


class _Choice:
    """One decision; sets of values are the bits of integers."""

    def __init__(self, flow: Flow):
        self.flow = flow
        self.products = (1 << flow.products) - 1
        self.order = _in_order(flow)

    def run(self) -> tuple[int, ...] | None:
        """Adds values as long as that saves bytes."""
        chosen = _bits(self.flow.hard)
        least = self.bytes(chosen)
        further = self.further()
        while True:
            best, cost = min(
                ((chosen | each, self.bytes(chosen | each)) for each in further),
                key=lambda pair: pair[1],
            )
            if cost >= least:
                break
            chosen, least = best, cost
        if not chosen & ~self.products or least >= self.bytes_apart():
            return None
        return tuple(_numbers(chosen))

    def further(self) -> list[int]:
        """Returns what may be written as well; of equals the last leaves least to be made."""
        flow = self.flow
        values = sorted({*range(flow.products), *flow.choices}, reverse=True)
        soft = set(_cone(flow, flow.soft))
        return [*(1 << x for x in values if x in soft), self.products]

    def bytes(self, chosen: int) -> float:
        """Returns the bytes that are moved if the kernel writes these values."""
        flow = self.flow
        read = self.starts([*_numbers(chosen), *flow.reduced], 0) & ~self.products
        made = self.made_of(flow.soft, chosen) if flow.kernels else 0
        return self.sum(read) + self.sum(chosen) + flow.kernels * made

    def bytes_apart(self) -> float:
        """Returns the bytes that are moved if the kernel writes the products alone."""
        flow, products, hard = self.flow, self.products, _bits(self.flow.hard)
        read = self.starts(flow.hard, products)
        made = flow.kernels * self.made_of(flow.soft, products) if flow.kernels else 0
        reduced = self.made_of(flow.reduced, products | hard)
        return self.sum(products) + self.sum(read) + self.sum(hard) + made + reduced

    def made_of(self, values: Iterable[int], known: int) -> float:
        """Returns the bytes that are read to make values, infinite where a product is not known."""
        read = self.starts(values, known)
        return math.inf if read & self.products & ~known else self.sum(read)

    def starts(self, values: Iterable[int], known: int) -> int:
        """Returns what values are made of: known ones, products, and what is read."""
        found: dict[int, int] = {}
        for value in self.order:
            made_of = self.flow.made_of[value]
            bits = 1 << value
            if made_of is not None and not bits & known:
                bits = 0
                for each in made_of:
                    bits |= found[each]
            found[value] = bits
        return functools.reduce(operator.or_, (found[x] for x in values), 0)

    def sum(self, values: int) -> int:
        """Returns the bytes of values."""
        return sum(self.flow.sizes[x] for x in _numbers(values))


def _in_order(flow: Flow) -> list[int]:
    """Returns the values, each after those that it is made of."""
    order: dict[int, None] = {}
    waiting = list(range(len(flow.sizes)))
    while waiting:
        value = waiting[-1]
        unknown = [x for x in flow.made_of[value] or () if x not in order]
        if unknown:
            waiting += unknown
        else:
            order[waiting.pop()] = None
    return list(order)


def _cone(flow: Flow, values: Iterable[int]) -> Iterator[int]:
    """Yields values and all that they are made of."""
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            yield value
            waiting += flow.made_of[value] or ()


def _bits(values: Iterable[int]) -> int:
    return functools.reduce(operator.or_, (1 << x for x in values), 0)


def _numbers(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
