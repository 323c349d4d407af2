"""The cost of a plan: the bytes that travel, and the time of transfers and work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax_tcgemm.partitioning.mesh import Tiling, shared
from jax_tcgemm.partitioning.work import SCATTER, SUM, Array, Plan

# Operations, and bytes read from memory, in the time that one byte takes to come from another
# device: 700 TFLOP/s and 4 TB/s of an H200, 400 GB/s of NVLink. _BYTES_A_COLLECTIVE bytes come in
# the 10 us that a collective takes by itself.
_OPERATIONS_A_BYTE = 1750
_BYTES_READ_A_BYTE = 10
_BYTES_A_COLLECTIVE = 2**22

# Two and four H200s, in the wall time of programs: NCCL's gathers and scatters of large arrays take
# 2 to 3 times as long as counted above. Copies between two devices take 1.05 times as long, copies
# among more devices 2.3 times. A product in parts takes 1.05 times as long as a whole one, and the
# meeting of the devices as long as two collectives.
_SLOWER_COLLECTIVES = 2.5
_SLOWER_COPIES, _SLOWER_COPIES_OF_TWO = 2.3, 1.05
_SLOWER_PARTS = 1.05
_COLLECTIVES_A_MEETING = 2

_Moved = tuple[str, float]


def moves(
    plan: Plan, operands: Sequence[Tiling], results: Sequence[Tiling] | None
) -> tuple[_Moved, ...]:
    """Returns the transfers in words, and the bytes that each device receives.

    Args:
        plan: how the work is divided.
        operands: how the operands lie before.
        results: the requested tilings of the results, ``None`` if they do not matter.
    """
    each = (
        *_overlapped(plan),
        *_gathered(plan, operands),
        *_exchanged(plan),
        *_joined(plan),
        *_resharded(plan, results),
    )
    return tuple((what, size) for what, size in each if size)


def _overlapped(plan: Plan) -> Iterator[_Moved]:
    """Yields the transfer beside the product."""
    if plan.overlap:
        yield f"{plan.overlap} beside the product in {plan.peers} parts", plan.overlapped_bytes


def _gathered(plan: Plan, operands: Sequence[Tiling]) -> Iterator[_Moved]:
    """Yields the transfers before the product, with the bytes that each device receives."""
    tilings = zip(plan.work.operands, operands, plan.operand_tilings, strict=True)
    for array, source, target in tilings:
        what = f"{_movement(source, target)} of {array.label}"
        yield what, _received(plan, array, source, target)


def _exchanged(plan: Plan) -> Iterator[_Moved]:
    """Yields the transfer that brings the halves of a packed array together."""
    name = plan.work.packed
    if name is not None and plan.layout[name]:
        packed = plan.smaller_packed()
        yield (
            f"exchange of halves of {packed.label}",
            plan.part_bytes(packed, plan.tiling(packed, is_factor=True)),
        )


def _joined(plan: Plan) -> Iterator[_Moved]:
    """Yields the transfers of the sums over devices."""
    beyond = [digit for digits in plan.scattered.values() for digit in digits]
    scattered = plan.devices.parts(beyond)
    for array in plan.work.results:
        summed = plan.summed_digits(array)
        size = plan.part_bytes(array, plan.tiling(array, is_factor=True))
        is_scattered = bool(beyond) and set(beyond) <= set(summed)
        if is_scattered and plan.overlap != SCATTER:
            yield f"reduce-scatter of {array.label}", size * (1 - 1 / scattered)
        parts = plan.devices.parts(summed) // (scattered if is_scattered else 1)
        size /= scattered if is_scattered else 1
        if plan.overlap != SUM:
            yield f"all-reduce of {array.label}", 2 * size * (1 - 1 / parts)


def _resharded(plan: Plan, results: Sequence[Tiling] | None) -> Iterator[_Moved]:
    """Yields the transfers that bring the results into their requested tilings."""
    if results is not None:
        tilings = zip(plan.work.results, plan.result_tilings, results, strict=True)
        for array, source, target in tilings:
            size = _received(plan, array, source, target)
            yield f"{_movement(source, target)} of {array.label}", size


def _received(plan: Plan, array: Array, source: Tiling, target: Tiling) -> float:
    """Returns the bytes of a device's part that it does not have yet."""
    lost = 1
    for own, wanted in zip(source, target, strict=True):
        lost *= plan.devices.parts(own[len(shared((own, wanted))) :])
    return plan.part_bytes(array, target) * (1 - 1 / lost)


def _movement(source: Tiling, target: Tiling) -> str:
    before = {digit for digits in source for digit in digits}
    after = {digit for digits in target for digit in digits}
    return "all-gather" if after < before else "all-to-all"


def time(plan: Plan) -> float:
    """Returns the time of a plan, in bytes that could travel meanwhile."""
    parts = plan.devices.parts(digit for digits in plan.layout.values() for digit in digits)
    arrays = (*plan.work.operands, *plan.work.results)
    tilings = (*plan.operand_tilings, *plan.result_tilings)
    pairs = zip(arrays, tilings, strict=True)
    read = sum(plan.part_bytes(array, tiling) for array, tiling in pairs)
    work = plan.work.operations / parts / _OPERATIONS_A_BYTE
    moved = sum(_BYTES_A_COLLECTIVE + size for _, size in plan.moved)
    return moved + work + read / _BYTES_READ_A_BYTE


def overlapped_share(plan: Plan) -> float:
    """Returns the time of a product with a transfer beside it.

    Args:
        plan: a plan with a transfer beside the product.

    Returns:
        The time as a share of that of the transfer and the product, one after the other. Several
        products of the same gathered rows are expected to share the gather either way.
    """
    size, peers = plan.overlapped_bytes, plan.peers
    before = _SLOWER_COLLECTIVES * size + _BYTES_A_COLLECTIVE
    copies = size * (_SLOWER_COPIES if peers > 2 else _SLOWER_COPIES_OF_TWO)
    parts = plan.devices.parts(digit for digits in plan.layout.values() for digit in digits)
    work = plan.work.operations / parts / _OPERATIONS_A_BYTE
    after = _COLLECTIVES_A_MEETING * _BYTES_A_COLLECTIVE
    if plan.overlap in (SCATTER, SUM):
        # The parts are read and their sum is written.
        product = plan.work.product
        summed = plan.part_bytes(product, plan.tiling(product, is_factor=True)) / peers
        after += (peers + 1) * summed / _BYTES_READ_A_BYTE
    if plan.overlap == SUM:
        # The rows of a sum travel behind the product.
        copies /= 2
        after += copies + _BYTES_A_COLLECTIVE
    if plan.reorders_rows:
        array = plan.work.product if plan.gathered else plan.work.operands[0]
        copied = plan.part_bytes(array, plan.tiling(array, is_factor=True))
        after += 2 * copied / _BYTES_READ_A_BYTE
    # One part is multiplied after the last copy has arrived, or before the first can leave.
    together = max(_SLOWER_PARTS * work, copies + work / peers)
    return (together + after) / (work + before)
