"""A Sphinx extension that lists the kernels and the arithmetic, as the package has them.

The directive ``{kernel-table}`` writes one row for each family of kernels, and
``{arithmetic-table}`` one row for each arithmetic.
"""

from __future__ import annotations

import collections
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from jax_tcgemm.kernels.arithmetic import ALL_ARITHMETIC
from jax_tcgemm.kernels.built import built_epilogue
from jax_tcgemm.kernels.packed_configs import BY_NAME as PACKED_ROWS
from jax_tcgemm.kernels.table import CONFIGS, RUN_TIME_CONFIGS


def _table(head: list[str], rows: list[list[str]]) -> nodes.table:
    table = nodes.table()
    group = nodes.tgroup(cols=len(head))
    table += group
    for _ in head:
        group += nodes.colspec(colwidth=1)
    for part, lines in ((nodes.thead(), [head]), (nodes.tbody(), rows)):
        group += part
        for line in lines:
            row = nodes.row()
            part += row
            for cell in line:
                entry = nodes.entry()
                entry += nodes.paragraph(text=cell)
                row += entry
    return table


class KernelTable(Directive):
    """Counts the rows of the kernel table by architecture and arithmetic."""

    def run(self) -> list[Any]:
        """Returns the table."""
        found: dict[tuple[str, str], list[Any]] = collections.defaultdict(list)
        for row in (*CONFIGS, *RUN_TIME_CONFIGS):
            found[row.arch, row.algorithm].append(row)
        lines = []
        for (arch, algorithm), rows in sorted(found.items()):
            tiles = sorted({(row.tile_m, row.tile_n) for row in rows})
            least, most = (f"{m} x {n}" for m, n in (tiles[0], tiles[-1]))
            built = sum(row in CONFIGS and bool(built_epilogue(row)) for row in rows)
            lines.append([arch, algorithm, str(len(rows)), str(built), least, most])
        for bits in (4, 8):
            rows = [row for each, row in PACKED_ROWS.values() if each == bits]
            tiles = sorted({(row.tokens, 64 * row.row_blocks) for row in rows})
            least, most = (f"{m} x {n}" for m, n in (tiles[0], tiles[-1]))
            lines.append(["sm90", f"packed weights, {bits} bits", str(len(rows)), "0", least, most])
        head = ["family", "arithmetic", "kernels", "in the build", "smallest tile", "largest tile"]
        return [_table(head, lines)]


class ArithmeticTable(Directive):
    """Lists the arithmetic of the kernels."""

    def run(self) -> list[Any]:
        """Returns the table."""
        lines = []
        for name, row in ALL_ARITHMETIC.items():
            families = {
                each.arch for each in (*CONFIGS, *RUN_TIME_CONFIGS) if each.algorithm == name
            }
            lines.append([name, row.accumulator.name, ", ".join(sorted(families)) or "planes"])
        return [_table(["arithmetic", "accumulator", "families"], lines)]


def setup(app: Any) -> dict[str, bool]:
    """Registers the directives."""
    app.add_directive("kernel-table", KernelTable)
    app.add_directive("arithmetic-table", ArithmeticTable)
    return {"parallel_read_safe": True}
