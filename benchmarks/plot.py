"""Draws a result file of ``run.py``: the speed of each case beside XLA's.

Usage: python benchmarks/plot.py results.json --out docs/speed
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

Row = dict[str, Any]

# The background is transparent.
_TEXT = {"light": "#1f2328", "dark": "#f0f6fc"}
_GRID = "#7d859055"
_COLORS = {"jax_tcgemm": "#e5730f", "XLA": "#2f81f7", "Pallas": "#8957e5"}
_KEYS = {"jax_tcgemm": "us", "XLA": "xla_us", "Pallas": "pallas_us"}

_COLUMN_INCHES = 6.6
_CASE_INCHES = 0.2
_SUITE_INCHES = 0.75
_FOOT_INCHES = 0.5


def speeds(row: Row, sustained: bool = False) -> dict[str, float]:
    """Returns the TFLOP/s of each competitor that was timed.

    Args:
        row: a row of a result file.
        sustained: whether to use times with the clock at its power limit, if they exist.
    """
    tflop = row["tflops"] * row["us"]
    times = {name: row.get(key) for name, key in _KEYS.items()}
    if sustained and row.get("sustained_us"):
        times = {name: row.get(f"sustained_{key}") for name, key in _KEYS.items()}
    return {name: tflop / us for name, us in times.items() if us}


def columns(suites: dict[str, list[Row]]) -> list[list[str]]:
    """Distributes the suites over at most two columns of about the same height."""
    result: list[list[str]] = [[], []]
    heights = [0.0, 0.0]
    for suite in sorted(suites, key=lambda suite: -len(suites[suite])):
        lower = heights.index(min(heights))
        result[lower].append(suite)
        heights[lower] += _height(suites[suite])
    return [column for column in result if column]


def _height(rows: list[Row]) -> float:
    return _CASE_INCHES * len(rows) + _SUITE_INCHES


def draw(rows: list[Row], out: pathlib.Path, title: str, sustained: bool = False) -> None:
    """Writes the picture, for light and for dark pages.

    Args:
        rows: the rows of a result file; rows without a time are left out.
        out: path without suffix; ``-light.svg`` and ``-dark.svg`` are added.
        title: one line below the picture.
        sustained: see ``speeds``.

    Raises:
        ValueError: no row has a time.
    """
    suites: dict[str, list[Row]] = {}
    for row in rows:
        if row["us"]:
            suites.setdefault(row["suite"], []).append(row)
    if not suites:
        raise ValueError("there is no case with a time")
    out.parent.mkdir(parents=True, exist_ok=True)
    for theme, text in _TEXT.items():
        _draw(suites, out.with_name(f"{out.name}-{theme}.svg"), title, sustained, text)


def _draw(
    suites: dict[str, list[Row]], file: pathlib.Path, title: str, sustained: bool, text: str
) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    placed = columns(suites)
    inches = [sum(_height(suites[suite]) for suite in column) for column in placed]
    style: Any = dict.fromkeys(("text.color", "xtick.color", "ytick.color"), text)
    style |= {"font.size": 8, "axes.titlesize": 9, "svg.hashsalt": "speed"}
    style["svg.fonttype"] = "none"  # a reader can search the text
    with matplotlib.rc_context(style):
        height = max(inches) + _FOOT_INCHES
        figure = Figure(figsize=(_COLUMN_INCHES * len(placed), height))
        for index, column in enumerate(placed):
            top = height
            for suite in column:
                # The names of the cases take the left 58 % of a column.
                left, width = (index + 0.58) / len(placed), 0.4 / len(placed)
                plot_height = _CASE_INCHES * len(suites[suite])
                bottom = top - 0.3 - plot_height
                axes = figure.add_axes((left, bottom / height, width, plot_height / height))
                _draw_suite(axes, suite, suites[suite], sustained)
                top -= _height(suites[suite])
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower right", ncols=len(labels), frameon=False)
        figure.text(0.02, 0.12 / height, title)
        # Without a date, the same results give the same file.
        figure.savefig(file, transparent=True, metadata={"Date": None})


def _draw_suite(axes: Any, suite: str, rows: list[Row], sustained: bool) -> None:
    """Draws one suite: a line for each case, from the slowest to the fastest competitor."""
    rated = [speeds(row, sustained) for row in rows]
    for y, values in enumerate(rated):
        axes.plot([min(values.values()), max(values.values())], [y, y], color=_GRID, linewidth=2)
    for name, color in _COLORS.items():
        points = [(values[name], y) for y, values in enumerate(rated) if name in values]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=18, color=color, label=name, zorder=3)
    axes.set_title(f"{suite}, TFLOP/s", loc="left")
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.patch.set_alpha(0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def main(arguments: list[str] | None = None) -> int:
    """Draws the picture; returns the exit status.

    Args:
        arguments: command line; by default the process's.
    """
    parser = argparse.ArgumentParser(prog="python benchmarks/plot.py", description=__doc__)
    parser.add_argument("file", type=pathlib.Path, help="written by run.py --out")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/speed"))
    parser.add_argument("--suite", help="suites, joined by commas; by default all but random ones")
    parser.add_argument("--sustained", action="store_true", help="times at the power limit")
    args = parser.parse_args(arguments)
    content = json.loads(args.file.read_text())
    suites = args.suite.split(",") if args.suite else None
    rows = [
        row
        for row in content["rows"]
        if "us" in row  # a product
        and (row["suite"] in suites if suites else not row["suite"].startswith("random"))
    ]
    header = content["header"]
    title = f"{header['device']}, jax {header['versions']['jax']}, {header['date'][:10]}"
    try:
        draw(rows, args.out, title, args.sustained)
    except ImportError as error:
        print(f"plot.py needs matplotlib: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
