"""Which device computes what: of all ways that the shardings suggest, the one that moves least.

A primitive is described by the names of its dimensions, as an einsum is: ``m``, ``n``, ``k`` and
those of a batch. A plan gives each name the digits of the devices (``mesh.Digits``) that divide it;
no digit divides two. A result that lacks a divided dimension is a sum over devices: an all-reduce,
or a reduce-scatter where the result is wanted in parts along the same digits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax_tcgemm.partitioning.mesh import Devices, Digits, Tiling

# The work that takes as long as a byte takes to come from another device, and the bytes of memory
# that are read meanwhile: 700 TFLOP/s and 4 TB/s of an H200, 400 GB/s of NVLink. And the bytes that
# come in the 10 us that a collective takes by itself.
_OPERATIONS_A_BYTE = 1750
_BYTES_READ_A_BYTE = 10
_BYTES_A_COLLECTIVE = 2**22

# Layouts of so many are compared at most.
_MOST_LAYOUTS = 4096


@dataclasses.dataclass(frozen=True)
class Array:
    """An operand or a result.

    Attributes:
        dims: the name of each dimension; ``None`` for one that is not to be divided.
        itemsize: bytes of an element.
        label: what it is called where it is spoken of.
    """

    dims: tuple[str | None, ...]
    itemsize: int
    label: str


@dataclasses.dataclass(frozen=True)
class Work:
    """What a primitive computes.

    Attributes:
        extents: the extent of each name.
        operands: its operands.
        results: its results.
        factors: which operands are those of what is summed; the others join after the sum.
        operations: multiplications and additions.
        unscattered: names by which no sum is divided.
        packed: the name along which the second operand holds two of what it has, side by side. It
            is divided into an even number of like parts, if at all.
    """

    extents: Mapping[str, int]
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    factors: frozenset[int]
    operations: float
    unscattered: frozenset[str] = frozenset()
    packed: str | None = None

    @property
    def summed(self) -> tuple[str, ...]:
        """The names that the first result lacks, in the order of the operands."""
        names = dict.fromkeys(name for array in self.operands for name in array.dims)
        return tuple(name for name in names if name and name not in self.results[0].dims)

    def elements(self, array: Array) -> int:
        """Returns how many elements an array has (of its named dimensions)."""
        return math.prod(self.extents[name] for name in array.dims if name is not None)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is divided.

    Attributes:
        work: what is divided.
        devices: among which.
        layout: the digits that divide each name in the product.
        scattered: those by which the sum divides a name of the result further.
        moved: what has to travel, in words, and how many bytes of it each device receives.
    """

    work: Work
    devices: Devices
    layout: Mapping[str, Digits]
    scattered: Mapping[str, Digits]
    moved: tuple[tuple[str, float], ...] = ()

    def tiling(self, array: Array, *, is_factor: bool = False) -> Tiling:
        """Returns how an array lies on the devices."""
        return tuple(
            () if name is None else self.layout[name] + self._beyond(name, is_factor)
            for name in array.dims
        )

    def _beyond(self, name: str, is_factor: bool) -> Digits:
        return () if is_factor else self.scattered.get(name, ())

    @property
    def operand_tilings(self) -> list[Tiling]:
        """How each operand lies on the devices."""
        factors = self.work.factors
        return [self.tiling(x, is_factor=i in factors) for i, x in enumerate(self.work.operands)]

    @property
    def result_tilings(self) -> list[Tiling]:
        """How each result lies on the devices."""
        return [self.tiling(x) for x in self.work.results]

    def summed_digits(self, result: int = 0) -> Digits:
        """Returns the digits of the devices among which a result is a sum."""
        dims = self.work.results[result].dims
        return tuple(d for name, digits in self.layout.items() if name not in dims for d in digits)

    def smaller_packed(self) -> Array:
        """Returns which has fewer elements on a device, a packed operand or the product with it."""
        operand = self.work.operands[1]
        product = dataclasses.replace(
            self.work.results[0], itemsize=operand.itemsize, label="the product"
        )
        both = (operand, product)
        return min(both, key=lambda x: _part_bytes(self, x, self.tiling(x, is_factor=True)))

    def part(self, name: str) -> int:
        """Returns the extent of a device's part of a dimension of the product."""
        return -(-self.work.extents[name] // self.devices.parts(self.layout[name]))

    def is_even(self, name: str) -> bool:
        """Says whether all devices have as much of a dimension."""
        return self.work.extents[name] % self.devices.parts(self.layout[name]) == 0


def make_plan(
    work: Work, devices: Devices, operands: Sequence[Tiling], results: Sequence[Tiling] | None
) -> Plan:
    """Returns the plan that takes the least time, mostly that of what travels.

    Args:
        work: what is to be divided.
        devices: among which.
        operands: how the operands lie.
        results: how the results are wanted, ``None`` if that does not matter.
    """
    plans = []
    for layout in _layouts(work, devices, operands, results or ()):
        plan = Plan(work, devices, layout, _scattered(work, devices, layout, results))
        moved = (
            *_gathered(plan, operands),
            *_exchanged(plan),
            *_joined(plan),
            *_resharded(plan, results),
        )
        plans.append(dataclasses.replace(plan, moved=tuple(move for move in moved if move[1])))
    return min(plans, key=_time)


def _layouts(
    work: Work, devices: Devices, operands: Sequence[Tiling], results: Sequence[Tiling]
) -> Iterator[dict[str, Digits]]:
    """Yields the layouts of which every name's digits are those of an operand or a result."""
    arrays = zip((*work.operands, *work.results), (*operands, *results), strict=False)
    suggested: dict[str, set[Digits]] = {name: {()} for name in work.extents}
    for array, tiling in arrays:
        for name, digits in zip(array.dims, tiling, strict=True):
            if name is not None and devices.parts(digits) <= work.extents[name]:
                suggested[name] |= {digits[:i] for i in range(len(digits) + 1)}
                suggested[name] |= {digits[i:] for i in range(len(digits))}
    if work.packed is not None:
        suggested[work.packed] = {
            digits
            for digits in suggested[work.packed]
            if not digits
            or devices.parts(digits) % 2 == work.extents[work.packed] % devices.parts(digits) == 0
        }
    for name in work.summed:
        # Nothing is gathered that can be summed where it lies.
        kept = _kept(name, work, operands)
        suggested[name] = {each for each in suggested[name] if each[: len(kept)] == kept}
    # The most divided first.
    choices = [
        sorted(each, key=lambda digits: (-len(digits), digits)) for each in suggested.values()
    ]
    count = 0
    for chosen in itertools.product(*choices):
        digits = [digit for each in chosen for digit in each]
        if len(set(digits)) == len(digits):
            yield dict(zip(suggested, chosen, strict=True))
            count += 1
        if count == _MOST_LAYOUTS:
            return


def _kept(name: str, work: Work, operands: Sequence[Tiling]) -> Digits:
    """Returns the digits by which a summed name stays divided.

    The first that all factors share which have it; of a name that one factor has all of them, if
    they divide nothing else.
    """
    own, others = [], set()
    for i in sorted(work.factors):
        for each, digits in zip(work.operands[i].dims, operands[i], strict=True):
            if each == name:
                own.append(digits)
            else:
                others.update(digits)
    if len(own) == 1:
        return () if others.intersection(own[0]) else own[0]
    return _shared(own)


def _shared(sequences: Sequence[Digits]) -> Digits:
    """Returns what all begin with."""
    places = zip(*sequences, strict=False)
    return tuple(each[0] for each in itertools.takewhile(lambda x: len(set(x)) == 1, places))


def _scattered(
    work: Work, devices: Devices, layout: Mapping[str, Digits], results: Sequence[Tiling] | None
) -> dict[str, Digits]:
    """Returns the digits of a sum along which its result is wanted in parts."""
    if not results:
        return {}
    summed = {digit for name in work.summed for digit in layout[name]}
    scattered = {}
    for name, wanted in zip(work.results[0].dims, results[0], strict=True):
        if name is None or name in work.unscattered:
            continue
        own = layout[name]
        rest = wanted[len(own) :]
        is_part = bool(rest) and wanted[: len(own)] == own and summed.issuperset(rest)
        # Parts of parts are those of the whole only where these are all of one size.
        if is_part and (not own or work.extents[name] % devices.parts(wanted) == 0):
            scattered[name] = rest
    return scattered


_Moved = tuple[str, float]


def _gathered(plan: Plan, operands: Sequence[Tiling]) -> Iterator[_Moved]:
    """Yields what comes from other devices before the product, in bytes that each receives."""
    tilings = zip(plan.work.operands, operands, plan.operand_tilings, strict=True)
    for array, source, target in tilings:
        what = f"{_movement(source, target)} of {array.label}"
        yield what, _received(plan, array, source, target)


def _exchanged(plan: Plan) -> Iterator[_Moved]:
    """Yields what it costs to bring the halves together of what lies packed."""
    name = plan.work.packed
    if name is not None and plan.layout[name]:
        packed = plan.smaller_packed()
        yield (
            f"exchange of halves of {packed.label}",
            _part_bytes(plan, packed, plan.tiling(packed, is_factor=True)),
        )


def _joined(plan: Plan) -> Iterator[_Moved]:
    """Yields what the sums over devices cost."""
    beyond = [digit for digits in plan.scattered.values() for digit in digits]
    scattered = plan.devices.parts(beyond)
    for i, array in enumerate(plan.work.results):
        summed = plan.summed_digits(i)
        size = _part_bytes(plan, array, plan.tiling(array, is_factor=True))
        is_scattered = bool(beyond) and set(beyond) <= set(summed)
        if is_scattered:
            yield f"reduce-scatter of {array.label}", size * (1 - 1 / scattered)
        parts = plan.devices.parts(summed) // (scattered if is_scattered else 1)
        size /= scattered if is_scattered else 1
        yield f"all-reduce of {array.label}", 2 * size * (1 - 1 / parts)


def _resharded(plan: Plan, results: Sequence[Tiling] | None) -> Iterator[_Moved]:
    """Yields what has to travel until the results lie as they are wanted."""
    if results is not None:
        tilings = zip(plan.work.results, plan.result_tilings, results, strict=True)
        for array, source, target in tilings:
            size = _received(plan, array, source, target)
            yield f"{_movement(source, target)} of {array.label}", size


def _part_bytes(plan: Plan, array: Array, tiling: Tiling) -> float:
    parts = math.prod(plan.devices.parts(digits) for digits in tiling)
    return plan.work.elements(array) * array.itemsize / parts


def _received(plan: Plan, array: Array, source: Tiling, target: Tiling) -> float:
    """Returns the bytes of a device's part that it does not have yet."""
    lost = 1
    for own, wanted in zip(source, target, strict=True):
        lost *= plan.devices.parts(own[len(_shared((own, wanted))) :])
    return _part_bytes(plan, array, target) * (1 - 1 / lost)


def _movement(source: Tiling, target: Tiling) -> str:
    before = {digit for digits in source for digit in digits}
    after = {digit for digits in target for digit in digits}
    return "all-gather" if after <= before - after or after < before else "all-to-all"


def _time(plan: Plan) -> float:
    """Returns how long it takes, in bytes that could travel meanwhile."""
    parts = plan.devices.parts(digit for digits in plan.layout.values() for digit in digits)
    arrays = (*plan.work.operands, *plan.work.results)
    tilings = (*plan.operand_tilings, *plan.result_tilings)
    pairs = zip(arrays, tilings, strict=True)
    read = sum(_part_bytes(plan, array, tiling) for array, tiling in pairs)
    work = plan.work.operations / parts / _OPERATIONS_A_BYTE
    moved = sum(_BYTES_A_COLLECTIVE + size for _, size in plan.moved)
    return moved + work + read / _BYTES_READ_A_BYTE
