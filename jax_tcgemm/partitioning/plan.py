"""Chooses the layout of a product on devices: the fastest that the shardings suggest."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jax_tcgemm.partitioning import overlap
from jax_tcgemm.partitioning.cost import moves, time
from jax_tcgemm.partitioning.mesh import Devices, Digits, Tiling
from jax_tcgemm.partitioning.work import Plan, Work

# At most this many layouts are compared.
_MOST_LAYOUTS = 4096


def make_plan(
    work: Work,
    devices: Devices,
    operands: Sequence[Tiling],
    results: Sequence[Tiling] | None,
    against: str = "",
) -> Plan:
    """Returns the plan that takes the least time, which is mostly that of transfers.

    Args:
        work: the work to divide.
        devices: the devices.
        operands: tilings of the operands.
        results: requested tilings of the results, ``None`` if they do not matter.
        against: why no transfer may run beside the product; empty if it may.
    """
    plans = []
    for layout in _layouts(work, devices, operands, results or ()):
        plan = Plan(work, devices, layout, _scattered(work, devices, layout, results))
        plans.append(dataclasses.replace(plan, moved=moves(plan, operands, results)))
    return overlap.overlapped(min(plans, key=time), operands, results, against)


def _layouts(
    work: Work, devices: Devices, operands: Sequence[Tiling], results: Sequence[Tiling]
) -> Iterator[dict[str, Digits]]:
    """Yields the layouts in which the digits of every name are those of an operand or a result."""
    suggested = _suggested(work, devices, operands, results)
    # The most divided layouts come first.
    order = lambda digits: (-len(digits), digits)  # noqa: E731
    choices = [sorted(each, key=order) for each in suggested.values()]
    count = 0
    for chosen in itertools.product(*choices):
        digits = [digit for each in chosen for digit in each]
        if len(set(digits)) == len(digits):
            yield dict(zip(suggested, chosen, strict=True))
            count += 1
        if count == _MOST_LAYOUTS:
            return


def _suggested(
    work: Work, devices: Devices, operands: Sequence[Tiling], results: Sequence[Tiling]
) -> dict[str, set[Digits]]:
    """Returns the digits that may divide each name: those of an array, or the first or last."""
    suggested: dict[str, set[Digits]] = {name: {()} for name in work.extents}
    arrays = zip((*work.operands, *work.results), (*operands, *results), strict=False)
    for array, tiling in arrays:
        for name, digits in zip(array.dims, tiling, strict=True):
            if name is not None:
                suggested[name] |= {digits[:i] for i in range(len(digits) + 1)}
                suggested[name] |= {digits[i:] for i in range(len(digits))}
    for name, extent in work.extents.items():
        parts = {digits: devices.parts(digits) for digits in suggested[name]}
        suggested[name] = {
            digits
            for digits, count in parts.items()
            if count <= max(1, extent)
            and (name != work.packed or not digits or count % 2 == extent % count == 0)
            and (name not in work.whole or extent % count == 0)
        }
    for name in work.summed:
        # Data that can be summed in place is not gathered.
        kept = _kept(name, work, operands)
        while kept not in suggested[name]:
            kept = kept[:-1]
        suggested[name] = {each for each in suggested[name] if each[: len(kept)] == kept}
    return suggested


def _kept(name: str, work: Work, operands: Sequence[Tiling]) -> Digits:
    """Returns the digits by which a summed name stays divided.

    If several factors have the name, these are the digits that divide it alike in all of them. If
    one factor has the name, these are its digits if they divide nothing else.
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
    return own[0] if len(set(own)) == 1 else ()


def _scattered(
    work: Work, devices: Devices, layout: Mapping[str, Digits], results: Sequence[Tiling] | None
) -> dict[str, Digits]:
    """Returns the digits of a sum along which parts of its result are requested."""
    dims = [array.dims for array in work.results]
    if not results or work.product.dims not in dims:
        return {}
    summed = {digit for name in work.summed for digit in layout[name]}
    scattered = {}
    tiling = results[dims.index(work.product.dims)]
    for name, wanted in zip(work.product.dims, tiling, strict=True):
        if name is None or name in work.unscattered:
            continue
        own = layout[name]
        rest = wanted[len(own) :]
        is_part = bool(rest) and wanted[: len(own)] == own and summed.issuperset(rest)
        # Parts of parts are parts of the whole only if all have one size.
        is_free = not own and name not in work.whole
        if is_part and (is_free or work.extents[name] % devices.parts(wanted) == 0):
            scattered[name] = rest
    return scattered
