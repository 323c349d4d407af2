"""Draws docs/architecture.svg: which folder imports which, by the imports and includes there are.

Ends with an error that names the import where a Python folder imports one above it, or where
folders import one another in a circle.

    python docs/draw_imports.py           # checks, and draws
    python docs/draw_imports.py --check   # checks alone, also that the drawing is up to date
"""

from __future__ import annotations

import argparse
import ast
import itertools
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

import layered_layout
from layered_layout import Point

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"

# From the top: each imports only what comes after it. `kernels` is last, because the build runs it
# without JAX.
PYTHON_ORDER = (
    *("__main__", "__init__", "transforms", "tools", "api", "primitives", "partitioning"),
    *("lowering", "epilogue", "tuning", "problem"),
    *("_extension", "_compat", "_core", "_clone", "kernels"),
)

_CAPTIONS = {
    "__main__": "the report on a machine",
    "__init__": "the public names",
    "transforms": "of whole functions: tune",
    "tools": "self-test and timing",
    "api": "what a user calls",
    "primitives": "JAX primitives and their rules",
    "partitioning": "how it is divided",
    "lowering": "a custom call, or XLA's own",
    "tuning": "what was measured",
    "problem": "what a product is",
    "_extension": "loads and registers",
    "_compat": "JAX's private names",
    "_core": "the compiled module",
    "_clone": "finds the installed package",
    "kernels": "the table of kernels",
    "ffi": "XLA's calls, decoded",
    "build": "compilers, written sources",
    "dispatch": "chooses and launches a row",
    "passes": "kernels before and after",
    "sm90": "TMA and wgmma",
    "sm80": "cp.async and mma.sync",
    "sm75": "mma.sync alone",
    "mma_sync": "what these two share",
    "simt": "plain FMA",
    "epilogue": "what follows the product",
    "scheduler": "which tile comes next",
    "ptx": "an instruction each",
    "common": "types and arithmetic",
    "gemm_params.h": "what a kernel is given",
    "kernel_config.h": "a row of the table",
}


class Import(NamedTuple):
    """One import or include, with the folders on both ends, relative to ROOT and to their trees."""

    file: str
    name: str
    source: str
    target: str


def _room(path: pathlib.PurePath) -> str:
    """Returns the outermost folder of a path in its tree; a file beside the folders is its own."""
    return path.parts[0].removesuffix(".py")


def python_imports(package: pathlib.Path) -> Iterator[Import]:
    """Yields what the modules of a package import of it from other folders."""
    inside = {path.name.split(".")[0] for path in package.iterdir()}
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package)
        source = _room(inner)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parents = (package.name, *inner.parts[:-1])
                parents = parents[: len(parents) + 1 - node.level] if node.level else ()
                module = ".".join((*parents, *([node.module] if node.module else [])))
                names = [f"{module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                first, *rest = name.split(".")
                if first != package.name:
                    continue
                # What is no file or folder is defined by __init__.py.
                target = rest[0] if rest and rest[0] in inside else "__init__"
                if target != source:
                    yield Import(_from_root(path), name, source, target)


def cpp_includes(tree: pathlib.Path) -> Iterator[Import]:
    """Yields what the sources of a tree include of it from other folders.

    The generator's templates count as sources, where `{arch}` may be any folder. Files that it
    writes, and headers of others, lie elsewhere.
    """
    for path in sorted(tree.rglob("*")):
        if path.suffix not in (".h", ".cuh", ".cc", ".cu", ".py"):
            continue
        source = _room(path.relative_to(tree))
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            for included in sorted(tree.glob(re.sub(r"\{[^}]*\}", "*", name))):
                target = _room(included.relative_to(tree))
                if target != source:
                    yield Import(_from_root(path), name, source, target)


def _from_root(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def upward(imports: Iterable[Import]) -> list[str]:
    """Returns a line for each Python import that runs against PYTHON_ORDER."""
    lines = []
    for file, name, source, target in imports:
        missing = {source, target} - set(PYTHON_ORDER)
        if missing:
            lines.append(f"{file} imports {name}: PYTHON_ORDER lacks {', '.join(sorted(missing))}")
        elif PYTHON_ORDER.index(target) <= PYTHON_ORDER.index(source):
            lines.append(f"{file} imports {name}: {target} is above {source}")
    return lines


def _edges(imports: Iterable[Import]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for each in imports:
        edges.setdefault(each.source, set()).add(each.target)
        edges.setdefault(each.target, set())
    return edges


def circles(imports: Iterable[Import]) -> list[str]:
    """Returns lines for each circle of folders.

    Of the imports that make it up those are named, between one folder and one other, that are the
    fewest: in all likelihood they are what closed it.
    """
    imports = list(imports)
    edges = _edges(imports)
    leads_to = {room: layered_layout.reachable(edges, room) for room in edges}
    found: dict[frozenset[str], dict[tuple[str, str], list[str]]] = {}
    for file, name, source, target in imports:
        if source in leads_to[target]:
            circle = frozenset(room for room in leads_to[source] if source in leads_to[room])
            line = f"{file} imports {name}: a circle, for {target} leads back to {source}"
            found.setdefault(circle, {}).setdefault((source, target), []).append(line)
    return [line for pairs in found.values() for line in min(pairs.values(), key=len)]


# --- The drawing ------------------------------------------------------------------------------

_BOX = Point(186, 46)
_PITCH = Point(206, 84)
_MARGIN = 28
_TITLE = 40
_STYLE = """\
text { font: 11.5px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a; }
text.name { font-size: 14px; font-weight: 600; fill: #1f2328; }
text.title { font-size: 15px; font-weight: 600; fill: #1f2328; }
rect.tree { fill: #f6f8fa; stroke: #d0d7de; }
rect.python { fill: #ddf4ff; stroke: #0969da; }
rect.cpp { fill: #dafbe1; stroke: #1a7f37; }
path { fill: none; stroke: #57606a; stroke-width: 1.4; marker-end: url(#to); }
path.built { stroke-dasharray: 5 4; }
marker path { marker-end: none; stroke: none; fill: #57606a; }"""
_MARKER = (
    '<marker id="to" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" '
    'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
    '<path d="M0 0.5 8 4 0 7.5z"/></marker>'
)


def _curve(points: list[Point]) -> str:
    """An SVG path through the points, vertical at each."""
    parts = [f"M{points[0].x:.0f} {points[0].y:.0f}"]
    for a, b in itertools.pairwise(points):
        y = (a.y + b.y) / 2
        parts.append(f"C{a.x:.0f} {y:.0f} {b.x:.0f} {y:.0f} {b.x:.0f} {b.y:.0f}")
    return " ".join(parts)


class _Tree:
    """The drawing of one tree of folders, at `top` of the picture."""

    def __init__(self, title: str, kind: str, imports: list[Import], top: float):
        self._title, self._kind, self._top = title, kind, top
        self._edges = _edges(imports)
        self._layout = layered_layout.Layout(self._edges, _PITCH, _BOX)
        self._mirrored = False
        self._left = 0.0
        self.height = _TITLE + self._layout.size.y + _MARGIN

    def width(self) -> float:
        return self._layout.size.x + 2 * _MARGIN

    def shift(self, width: float) -> None:
        """Puts the tree in the middle of a picture of this width."""
        self._left = (width - self._layout.size.x) / 2

    def mirror(self) -> None:
        self._mirrored = not self._mirrored

    def place(self, point: Point) -> Point:
        x = self._layout.size.x - point.x if self._mirrored else point.x
        return Point(self._left + x, self._top + _TITLE + point.y)

    def centre(self, room: str) -> Point:
        return self.place(self._layout.centres[room])

    def draw(self, width: float) -> Iterator[str]:
        size = f'width="{width - _MARGIN:.0f}" height="{self.height:.0f}"'
        yield f'<rect class="tree" x="{_MARGIN / 2:.0f}" y="{self._top:.0f}" {size} rx="8"/>'
        corner = f'x="{width - _MARGIN:.0f}" y="{self._top + 25:.0f}" text-anchor="end"'
        yield f'<text class="title" {corner}>{self._title}</text>'
        for _, points in sorted(self._layout.routes.items()):
            yield f'<path d="{_curve([self.place(point) for point in points])}"/>'
        for room in sorted(self._layout.centres):
            yield from self._draw_room(room)

    def _draw_room(self, room: str) -> Iterator[str]:
        x, y = self.centre(room)
        imports = ", ".join(sorted(self._edges[room])) or "nothing of this tree"
        yield f"<g><title>{escape(room)} imports {escape(imports)}</title>"
        corner = f'x="{x - _BOX.x / 2:.0f}" y="{y - _BOX.y / 2:.0f}"'
        size = f'width="{_BOX.x:.0f}" height="{_BOX.y:.0f}"'
        yield f'<rect class="{self._kind}" {corner} {size} rx="6"/>'
        middle = f'x="{x:.0f}" text-anchor="middle"'
        yield f'<text class="name" {middle} y="{y - 3:.0f}">{escape(room)}</text>'
        yield f'<text {middle} y="{y + 14:.0f}">{escape(_CAPTIONS.get(room, ""))}</text></g>'


def draw(python: list[Import], cpp: list[Import]) -> str:
    """Returns the picture as SVG."""
    upper = _Tree("jax_tcgemm/ (Python)", "python", python, _MARGIN / 2)
    lower = _Tree("cuda/ (C++ and CUDA)", "cpp", cpp, upper.height + 2.5 * _MARGIN)
    width = max(upper.width(), lower.width()) + _MARGIN
    for tree in (upper, lower):
        tree.shift(width)
    # The arrows between the trees are not to cross.
    if (upper.centre("_core") < upper.centre("kernels")) != (
        lower.centre("ffi") < lower.centre("build")
    ):
        lower.mirror()
    height = upper.height + lower.height + 3 * _MARGIN
    box = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        "<!-- Drawn by docs/draw_imports.py. -->",
        f"<style>\n{_STYLE}\n</style>",
        f"<defs>{_MARKER}</defs>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *upper.draw(width),
        *lower.draw(width),
    ]
    for start, end in (
        (upper.centre("_core"), lower.centre("ffi")),
        (lower.centre("build"), upper.centre("kernels")),
    ):
        half = _BOX.y / 2 if start.y < end.y else -_BOX.y / 2
        route = [Point(start.x, start.y + half), Point(end.x, end.y - half)]
        lines.append(f'<path class="built" d="{_curve(route)}"/>')
    return "\n".join([*lines, "</svg>", ""])


def main(argv: list[str] | None = None) -> int:
    """Checks, and draws unless told otherwise; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args(argv)
    python = list(python_imports(ROOT / "jax_tcgemm"))
    cpp = list(cpp_includes(ROOT / "cuda"))
    errors = [*(upward(python) or circles(python)), *circles(cpp)]
    if not errors:
        picture = draw(python, cpp)
        if not arguments.check:
            PICTURE.write_text(picture)
        elif PICTURE.read_text() != picture:
            errors.append("docs/architecture.svg is out of date: run docs/draw_imports.py")
    print("\n".join(errors), end="\n" if errors else "", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
