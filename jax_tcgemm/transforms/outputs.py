"""Decides which values of a region a kernel writes so that it moves the fewest bytes.

The kernel must write a value that a user outside cannot recompute. Users that work element by
element can recompute a value from another written value, for example from the product. The
comparison without a region assumes that XLA computes all values that must be written in one kernel.

All data here are numbers, so equal layers of a program share one cached decision.
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
        sizes: the bytes of each value; ``0`` for a value so small that reading it is free.
        made_of: the inputs from which each value is computed; ``None`` for a value that is read
            from memory, and for a product.
        products: how many of the first values are products.
        choices: the values that the kernel may write in addition to the products.
        hard: values that the kernel must write.
        soft: values that their users can recompute from other values.
        kernels: how many kernels use the soft values.
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
    """Returns the values to write; ``None`` if a region would not save bytes."""
    return _Choice(flow).run()


@functools.lru_cache(maxsize=4096)
def saved_bytes(flow: Flow, chosen: tuple[int, ...]) -> int:
    """Returns how many bytes the region saves.

    Args:
        flow: the values of the region.
        chosen: the values that the kernel writes, as ``written`` returns them.
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
        """Adds values to write as long as that saves bytes; returns them, or ``None``."""
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
        """Returns the further values that may be written.

        Later values come first: if two save equal bytes, users of the later one compute less.
        """
        flow = self.flow
        values = sorted({*range(flow.products), *flow.choices}, reverse=True)
        soft = set(_cone(flow, flow.soft))
        return [*(1 << x for x in values if x in soft), self.products]

    def bytes(self, chosen: int) -> float:
        """Returns how many bytes are moved if the kernel writes these values."""
        flow = self.flow
        read = self.starts([*_numbers(chosen), *flow.reduced], 0) & ~self.products
        made = self.made_of(flow.soft, chosen) if flow.kernels else 0
        return self.sum(read) + self.sum(chosen) + flow.kernels * made

    def bytes_apart(self) -> float:
        """Returns how many bytes are moved if the kernel writes only the products."""
        flow, products, hard = self.flow, self.products, _bits(self.flow.hard)
        read = self.starts(flow.hard, products)
        made = flow.kernels * self.made_of(flow.soft, products) if flow.kernels else 0
        reduced = self.made_of(flow.reduced, products | hard)
        return self.sum(products) + self.sum(read) + self.sum(hard) + made + reduced

    def made_of(self, values: Iterable[int], known: int) -> float:
        """Returns the bytes read to compute values; infinite if that needs an unwritten product."""
        read = self.starts(values, known)
        return math.inf if read & self.products & ~known else self.sum(read)

    def starts(self, values: Iterable[int], known: int) -> int:
        """Returns the sources of values: known values, products, and values read from memory."""
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
        """Returns the total bytes of values."""
        return sum(self.flow.sizes[x] for x in _numbers(values))


def _in_order(flow: Flow) -> list[int]:
    """Returns the values in topological order, each after its inputs."""
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
    """Yields values and all values that they depend on."""
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
