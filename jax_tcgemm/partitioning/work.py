"""The division of a primitive: its work, its arrays and a plan.

A primitive is described by the names of its dimensions, as an einsum is: ``m``, ``n``, ``k`` and
those of a batch. A plan gives each name the digits of the devices (``mesh.Digits``) that divide it;
no digit divides two names. A result that lacks a divided dimension is a sum over devices. This sum
is an all-reduce, or a reduce-scatter if parts of the result are requested along the same digits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jax_tcgemm.partitioning.mesh import Devices, Digits, Tiling

# The transfers that can run beside a product.
GATHER, SCATTER = "all-gather of a", "reduce-scatter of the result"
SUM = "all-reduce of the result"
GATHER_A, GATHER_B = "all-gather of a along k", "all-gather of b along k"


@dataclasses.dataclass(frozen=True)
class Array:
    """An operand or a result.

    Attributes:
        dims: the name of each dimension; ``None`` for one that must not be divided.
        itemsize: bytes of an element.
        label: its name in log lines.
    """

    dims: tuple[str | None, ...]
    itemsize: int
    label: str


@dataclasses.dataclass(frozen=True)
class Work:
    """The computation of a primitive.

    Attributes:
        extents: the extent of each name.
        operands: its operands.
        product: the array that is computed first, over all summed names.
        results: the results made from the product; one may lack dimensions of it, or have them in
            another order.
        factors: indices of the operands whose product is summed; the others join after the sum.
        operations: multiplications and additions.
        unscattered: names by which no sum is divided.
        packed: the name along which the second operand holds two extents side by side. It is
            divided into an even number of equal parts, if at all.
        whole: names that are divided into equal parts, if at all.
        rows: the names of the first operand's rows, the outermost first, if transfers of rows can
            run beside the product.
        overlaps: these transfers: some of ``GATHER``, ``GATHER_A``, ``GATHER_B``, ``SCATTER`` and
            ``SUM``.
    """

    extents: Mapping[str, int]
    operands: tuple[Array, ...]
    product: Array
    results: tuple[Array, ...]
    factors: frozenset[int]
    operations: float
    unscattered: frozenset[str] = frozenset()
    packed: str | None = None
    whole: frozenset[str] = frozenset()
    rows: tuple[str, ...] = ()
    overlaps: frozenset[str] = frozenset()

    @property
    def summed(self) -> tuple[str, ...]:
        """The names that the product lacks, in the order of the operands."""
        names = dict.fromkeys(name for array in self.operands for name in array.dims)
        return tuple(name for name in names if name and name not in self.product.dims)

    def elements(self, array: Array) -> int:
        """Returns the number of elements of an array (of its named dimensions)."""
        return math.prod(self.extents[name] for name in array.dims if name is not None)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is divided.

    Attributes:
        work: the work.
        devices: the devices.
        layout: the digits that divide each name in the product.
        scattered: the digits by which the sum divides a name of the result further.
        moved: the transfers in words, and the bytes that each device receives.
        overlap: the transfer that runs beside the product, or empty.
        rows: the name whose parts this transfer exchanges.
        gathered: the digits that divide this name in one operand further than in the product. The
            program of a device gathers the operand itself.
        note: why no transfer runs beside the product, if one could.
    """

    work: Work
    devices: Devices
    layout: Mapping[str, Digits]
    scattered: Mapping[str, Digits]
    moved: tuple[tuple[str, float], ...] = ()
    overlap: str = ""
    rows: str = ""
    gathered: Digits = ()
    note: str = ""

    def tiling(self, array: Array, *, is_factor: bool = False) -> Tiling:
        """Returns the tiling of an array."""
        return tuple(
            () if name is None else self.layout[name] + self._beyond(name, is_factor)
            for name in array.dims
        )

    def _beyond(self, name: str, is_factor: bool) -> Digits:
        return () if is_factor else self.scattered.get(name, ())

    @property
    def operand_tilings(self) -> list[Tiling]:
        """The tiling of each operand."""
        factors = self.work.factors
        tilings = [self.tiling(x, is_factor=i in factors) for i, x in enumerate(self.work.operands)]
        if self.gathered:
            which = self.gathered_operand
            pairs = zip(self.work.operands[which].dims, tilings[which], strict=True)
            tilings[which] = tuple(
                digits + self.gathered if name == self.rows else digits for name, digits in pairs
            )
        return tilings

    @property
    def result_tilings(self) -> list[Tiling]:
        """The tiling of each result."""
        return [self.tiling(x) for x in self.work.results]

    def summed_digits(self, array: Array | None = None) -> Digits:
        """Returns the digits of the devices over which the product, or an array, is a sum."""
        dims = (array or self.work.product).dims
        return tuple(d for name, digits in self.layout.items() if name not in dims for d in digits)

    @property
    def gathered_operand(self) -> int:
        """The index of the operand that the program of a device gathers."""
        return int(self.overlap == GATHER_B)

    @property
    def exchanged(self) -> Digits:
        """The digits of the devices that exchange rows beside the product."""
        if self.overlap == SUM:
            return self.summed_digits()
        return self.gathered or self.scattered[self.rows]

    @property
    def peers(self) -> int:
        """The number of devices that exchange rows beside the product."""
        return self.devices.parts(self.exchanged)

    @property
    def reorders_rows(self) -> bool:
        """True if the rows of a device do not follow each other in the result."""
        names = self.work.rows
        outer = names[: names.index(self.rows)] if self.rows in names else ()
        return any(self.part(name) > 1 for name in outer)

    @property
    def overlapped_bytes(self) -> float:
        """The bytes that each device receives beside the product."""
        gathered = self.work.operands[self.gathered_operand]
        array = gathered if self.gathered else self.work.product
        size = self.part_bytes(array, self.tiling(array, is_factor=True)) * (1 - 1 / self.peers)
        return 2 * size if self.overlap == SUM else size

    def part_bytes(self, array: Array, tiling: Tiling) -> float:
        """Returns the bytes of a device's part of an array with this tiling."""
        parts = math.prod(self.devices.parts(digits) for digits in tiling)
        return self.work.elements(array) * array.itemsize / parts

    def smaller_packed(self) -> Array:
        """Returns the packed operand or its product, whichever is smaller on a device."""
        operand = self.work.operands[1]
        product = dataclasses.replace(
            self.work.product, itemsize=operand.itemsize, label="the product"
        )
        both = (operand, product)
        return min(both, key=lambda x: self.part_bytes(x, self.tiling(x, is_factor=True)))

    def part(self, name: str, *, after_sum: bool = False) -> int:
        """Returns the extent of a device's part of a dimension of the product.

        Args:
            name: name of the dimension.
            after_sum: whether the dimension is that of a result, which the sum may divide further.
        """
        part = -(-self.work.extents[name] // self.devices.parts(self.layout[name]))
        beyond = self.scattered.get(name, ()) if after_sum else ()
        return -(-part // self.devices.parts(beyond))

    def is_even(self, name: str) -> bool:
        """Checks if all devices have the same extent of a dimension."""
        return self.work.extents[name] % self.devices.parts(self.layout[name]) == 0
