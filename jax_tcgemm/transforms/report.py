"""The table that ``report`` of a function under ``fuse`` returns."""

from __future__ import annotations

import dataclasses
import html
import os
import re
import textwrap
from collections.abc import Sequence

# Characters of a reason that ``print`` shows: an epilogue may have dozens of operations.
_SHOWN = 64
_HEAD = ("count", "product", "computed by", "because", "saves", "where")


@dataclasses.dataclass(frozen=True)
class Decision:
    """How one product is computed.

    Attributes:
        product: the types of its operands and of its result.
        way: ``"kernel"``, ``"kernel with epilogue"`` or ``"XLA"``.
        reason: the operations of the epilogue, or why there is none.
        saved_bytes: how many bytes the epilogue saves compared to a separate kernel.
        source: the file, line and function that contain the product.
    """

    product: str
    way: str
    reason: str
    saved_bytes: int
    source: str


def _short_path(source: str) -> str:
    """Returns a source as seen from the working directory, or from the installed packages."""
    within = re.sub(r"^.*/(?:site|dist)-packages/", "", source)
    return within.removeprefix(os.getcwd() + os.sep)


class Report(Sequence[Decision]):
    """The decisions for all products of a program, in order; ``print`` shows a table.

    The body of a loop counts once. The printed table shortens long reasons and the paths of files;
    the elements and the table of a notebook have them whole.
    """

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self._decisions = tuple(decisions)

    def __len__(self) -> int:
        return len(self._decisions)

    def __getitem__(self, index):
        return self._decisions[index]

    def _rows(self) -> list[tuple[str, ...]]:
        counts: dict[Decision, int] = {}
        for each in self._decisions:
            counts[each] = counts.get(each, 0) + 1
        return [
            (
                str(count),
                each.product,
                each.way,
                each.reason,
                f"{each.saved_bytes * 1e-6:.1f} MB" if each.saved_bytes else "",
                each.source,
            )
            for each, count in counts.items()
        ]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [_HEAD]
        for *others, reason, saved, source in self._rows():
            reason = textwrap.shorten(reason, _SHOWN, placeholder=" ...")
            rows.append((*others, reason, saved, _short_path(source)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)

    def __repr__(self) -> str:
        fused = sum(each.way == "kernel with epilogue" for each in self)
        left = sum(each.way == "XLA" for each in self)
        return f"<Report of {len(self)} products: {fused} with an epilogue, {left} by XLA>"

    def _repr_html_(self) -> str:
        """Returns the table as HTML for a notebook."""

        def line(tag: str, cells: Sequence[str]) -> str:
            return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)

        body = "".join(f"<tr>{line('td', row)}</tr>" for row in self._rows())
        return f"<table><tr>{line('th', _HEAD)}</tr>{body}</table>"
