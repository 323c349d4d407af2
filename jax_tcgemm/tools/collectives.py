"""Reads from a compiled program's text how much data its devices exchange."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "c128": 16,
}
_LINE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|"
    r"collective-permute)(?:-start)?\((?P<rest>.*)"
)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|\w+_computations?)=(?:\{(.*?)\}|(%?[\w.-]+))"
)
_WAITS = re.compile(r"-(?:done|update)\(")  # waits for an operation that another line started
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Collective(NamedTuple):
    """One collective operation.

    Attributes:
        kind: its name in XLA.
        received: the minimum number of bytes that each device receives, with any algorithm.
    """

    kind: str
    received: float


def collectives(text: str, devices: int) -> list[Collective]:
    """Returns the collectives of a program, in the order of its text.

    A collective inside a loop appears once per iteration, or once if XLA does not know the number
    of iterations. XLA may copy a loop's body to start a transfer earlier; the result is the same.

    Args:
        text: the result of ``as_text()`` of a compiled program.
        devices: the number of devices of the program.
    """
    computations: dict[str, list[str]] = {}
    for name, lines in computations_of(text):
        computations.setdefault(name, []).extend(lines)
    runs = _runs(computations)
    found = [
        (_collective(match, devices), runs[name])
        for name, lines in computations.items()
        for match in filter(None, map(_LINE.search, lines))
    ]
    return [each for each, count in found for _ in range(count) if each.received]


def computations_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and the lines of each computation; the entry computation's name is empty.

    Args:
        text: the result of ``as_text()`` of a compiled program.
    """
    name, body = "", []
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            yield name, body
            name, body = "" if head[1] else head[2], []
        body.append(line)
    yield name, body


def _runs(computations: dict[str, list[str]]) -> dict[str, int]:
    """Returns how often each computation runs."""
    calls = {name: [*_calls(lines)] for name, lines in computations.items()}
    runs = collections.Counter({"": 1})

    def visit(name: str, count: int) -> None:
        for called, times in calls.get(name, ()):
            runs[called] += count * times
            visit(called, count * times)

    visit("", 1)
    return runs


def _calls(lines: list[str]) -> Iterator[tuple[str, int]]:
    """Yields the computations that these lines call, and how often each call runs them."""
    for line in lines:
        if _WAITS.search(line):
            continue
        trips = _TRIPS.search(line)
        for role, several, one in _CALLED.findall(line):
            for each in (several or one).split(","):
                times = int(trips[1]) if trips else 1
                yield each.strip().lstrip("%"), times + (role == "condition" and trips is not None)


def _collective(match: re.Match[str], devices: int) -> Collective:
    kind, rest = match["kind"], match["rest"]
    arrays = [
        _ITEM_BYTES[dtype] * math.prod(int(extent) for extent in shape.split(",") if extent)
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match["result"])
        if dtype in _ITEM_BYTES
    ]
    # These return their operands before the results; a permutation may return counters after them.
    if f"{kind}-start(" in match[0]:
        if kind == "all-gather":
            arrays = arrays[len(arrays) // 2 :]
        if kind == "collective-permute":
            arrays = arrays[1:2]
    size = sum(arrays)
    parts = _group_size(rest, devices)
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", rest.split("source_target_pairs=")[-1])
        return Collective(kind, size * sum(a != b for a, b in pairs) / devices)
    if kind == "reduce-scatter":
        return Collective(kind, size * (parts - 1))
    return Collective(kind, size * (1 - 1 / parts) * (2 if kind == "all-reduce" else 1))


def _group_size(text: str, devices: int) -> int:
    """Returns how many devices take part in a collective; XLA has three notations for it."""
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]", text)
    if iota:
        return int(iota[1])
    mesh = re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", text)
    if mesh:
        extents = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(extents[name]) for name in re.findall(r"'(\w+)'", mesh[2]))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    return len(listed[1].split(",")) if listed else devices
