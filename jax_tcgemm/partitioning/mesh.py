"""How arrays are tiled over devices: XLA's shardings, read as digits of the devices' numbers.

The number of a device is written in mixed radix, and each radix is a prime. Eight devices have
three binary digits, the first the most significant. An axis of a mesh is one or more of these
digits, whatever its name, so the mesh itself need not be known. Some digits number the parts of a
dimension. Two dimensions are divided independently if they have no digit in common.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

# The digits that number the parts of a dimension, the most significant first.
Digits = tuple[int, ...]

# The digits of each dimension of an array.
Tiling = tuple[Digits, ...]


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a program, numbered in mixed radix.

    Attributes:
        radices: number of values of each digit.
    """

    radices: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of devices."""
        return math.prod(self.radices)

    def parts(self, digits: Iterable[int]) -> int:
        """Returns the number of values that these digits have together."""
        return math.prod(self.radices[digit] for digit in digits)

    def values(self, digits: Digits) -> np.ndarray:
        """Returns, for each device, the number that the digits form."""
        every = np.indices(self.radices).reshape(len(self.radices), self.count)
        value = np.zeros(self.count, int)
        for digit in digits:
            value = value * self.radices[digit] + every[digit]
        return value

    def groups(self, digits: Digits) -> list[list[int]]:
        """Returns the groups of devices that differ only in these digits, ordered by number."""
        others = [digit for digit in range(len(self.radices)) if digit not in digits]
        numbers = np.arange(self.count).reshape(self.radices)
        return numbers.transpose(*others, *digits).reshape(-1, self.parts(digits)).tolist()


def read_shardings(
    shardings: Sequence[Any], ranks: Sequence[int], count: int
) -> tuple[Devices, list[Tiling]]:
    """Returns the tiling that each sharding stands for.

    Args:
        shardings: XLA's ``HloSharding`` of each array, or ``None`` if it is not known.
        ranks: the number of dimensions of each array.
        count: number of devices.

    Returns:
        The devices and a tiling of each array. A dimension is whole if its parts cannot be numbered
        by digits, as on a mesh whose devices are in no regular order.
    """
    numbered = [_part_numbers(*each, count) for each in zip(shardings, ranks, strict=True)]

    def read(devices: Devices) -> list[list[Digits | None]]:
        return [[_digits_of(numbers, devices) for numbers in array] for array in numbered]

    def unread(tilings: list[list[Digits | None]]) -> int:
        return sum(digits is None for tiling in tilings for digits in tiling)

    tried = ((devices, read(devices)) for devices in _numberings(count))
    devices, tilings = min(tried, key=lambda pair: unread(pair[1]))
    return devices, [tuple(digits or () for digits in tiling) for tiling in tilings]


def _part_numbers(sharding: Any, rank: int, count: int) -> list[np.ndarray]:
    """Returns, for each dimension, the number of the part of every device."""
    whole = np.zeros(count, int)
    dims = [] if sharding is None else sharding.tile_assignment_dimensions()
    if sharding is None or sharding.is_replicated() or math.prod(dims) != count:
        return [whole] * rank
    order = np.asarray(sharding.tile_assignment_devices()).reshape(-1)
    parts = np.indices(dims).reshape(len(dims), count)
    numbers = np.empty_like(parts)
    numbers[:, order] = parts
    return list(numbers[:rank])


@functools.cache
def _numberings(count: int) -> list[Devices]:
    primes, rest = [], count
    for prime in range(2, count + 1):
        while rest % prime == 0:
            primes.append(prime)
            rest //= prime
    return [Devices(radices) for radices in _orders(tuple(primes))]


def _orders(primes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the distinct orders of numbers, some of which may be equal."""
    if not primes:
        return [()]
    places = {prime: primes.index(prime) for prime in sorted(set(primes))}
    return [
        (prime, *rest)
        for prime, i in places.items()
        for rest in _orders(primes[:i] + primes[i + 1 :])
    ]


def _digits_of(numbers: np.ndarray, devices: Devices) -> Digits | None:
    """Returns the digits that form these numbers, one for each device, if any do."""
    parts, digits = int(numbers.max()) + 1, []
    while parts > 1:
        for digit, radix in enumerate(devices.radices):
            fits = parts % radix == 0 and digit not in digits
            if fits and np.array_equal(numbers % radix, devices.values((digit,))):
                break
        else:
            return None
        digits.append(digit)
        numbers, parts = numbers // radix, parts // radix
    return tuple(reversed(digits))


def write_sharding(tiling: Tiling, devices: Devices, xla_client: Any) -> Any:
    """Returns the ``HloSharding`` of a tiling."""
    sharding = xla_client.OpSharding()
    parts = [devices.parts(digits) for digits in tiling]
    copies = devices.count // math.prod(parts)
    if copies == devices.count:
        sharding.type = xla_client.OpSharding.Type.REPLICATED
    else:
        used = [digit for digits in tiling for digit in digits]
        free = [digit for digit in range(len(devices.radices)) if digit not in used]
        numbers = np.arange(devices.count).reshape(devices.radices)
        sharding.type = xla_client.OpSharding.Type.OTHER
        sharding.tile_assignment_dimensions = parts + [copies] * (copies > 1)
        sharding.tile_assignment_devices = numbers.transpose(*used, *free).reshape(-1).tolist()
        sharding.replicate_on_last_tile_dim = copies > 1
    return xla_client.HloSharding.from_proto(sharding)


def shared(sequences: Sequence[Digits]) -> Digits:
    """Returns the longest common beginning of all sequences."""
    places = zip(*sequences, strict=False)
    return tuple(each[0] for each in itertools.takewhile(lambda x: len(set(x)) == 1, places))
