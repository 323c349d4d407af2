"""Draws the pictures of docs/gemm.md and docs/architecture.md, for light and for dark pages.

Usage: python -P docs/pictures/draw.py [FOLDER]

The numbers come from the kernel table and from the rules of ``cuda/scheduler/raster.cuh`` and
``cuda/dispatch/dispatch.cc`` (``set_tile_order``). The order of folders comes from the import rules
in ``pyproject.toml`` and from the ``#include`` lines of ``cuda/``.
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator

# With -P, a script's folder is not on the path.
sys.path.append(str(pathlib.Path(__file__).parent))

from picture import THEMES, WIDTH, Picture

from jax_tcgemm.kernels.table import BY_NAME

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
COOPERATIVE = BY_NAME["sm90_bf16_128x256x64_s4_c2x1_cooperative"]


def draw_way(theme: str) -> str:
    """Returns the picture of a tile's way through memory."""
    row = COOPERATIVE
    element = row.element_bytes
    stage_kib = (row.tile_m + row.tile_n) * row.tile_k * element // 1024
    warpgroups = row.consumer_warps // 4
    picture = Picture(theme, 520, "The way of a tile through memory")
    text, box = picture.text, picture.box

    text(0, 14, "global memory, through L2", "muted")
    box(40, 24, 150, 72, "empty")
    box(40, 44, 150, 18, "empty")
    picture.labelled(88, 44, 26, 18, "blue", "", 12)
    text(16, 66, "A", "blue")
    text(40, 112, f"{row.tile_m} rows x {row.tile_k} of k", size=12)
    box(330, 24, 150, 72, "empty")
    box(372, 24, 40, 72, "empty")
    picture.labelled(372, 50, 40, 18, "orange", "", 12)
    text(490, 66, "B", "orange")
    text(330, 112, f"{row.tile_k} of k x {row.tile_n} columns", size=12)
    picture.line([(101, 62), (101, 96)], "blue")
    picture.line([(101, 118), (101, 150)], "blue", arrow=True)
    picture.line([(392, 68), (392, 96)], "orange")
    picture.line([(392, 118), (392, 150)], "orange", arrow=True)
    text(246, 130, "TMA copies tiles. Two blocks", "muted", "middle", 12)
    text(246, 146, "share B: each copies half of it", "muted", "middle", 12)

    text(0, 170, f"shared memory: a ring of {row.stages} stages, {stage_kib} KiB each", "muted")
    pitch = 480 / row.stages
    for stage in range(row.stages):
        x = 20 + stage * pitch
        a_width = (pitch - 12) * row.tile_m / (row.tile_m + row.tile_n)
        picture.labelled(x, 180, a_width, 40, "blue", "A")
        picture.labelled(x + a_width, 180, pitch - 12 - a_width, 40, "orange", "B")
    picture.line([(260, 220), (260, 248)], "muted", arrow=True)
    text(270, 240, "wgmma reads shared memory", "muted", size=12)

    rows = row.tile_m // warpgroups
    text(0, 270, f"registers: {warpgroups} warpgroups, one float32 sum for each result", "muted")
    for group in range(warpgroups):
        label = f"warpgroup {group}: {rows} x {row.tile_n} sums"
        picture.labelled(20 + group * 245, 280, 235, 40, "purple", label)
    picture.line([(260, 320), (260, 348)], "muted", arrow=True)
    text(270, 340, "epilogue in float32", "muted", size=12)

    text(0, 370, "shared memory: a buffer for the rows of each warp, rounded once", "muted")
    for warp in range(row.consumer_warps):
        picture.labelled(
            20 + warp * 60, 380, 50, 30, "green", f"{row.tile_m // row.warps_m} rows", 12
        )
    picture.line([(260, 410), (260, 438)], "muted", arrow=True)
    text(270, 430, "TMA copies", "muted", size=12)
    text(0, 460, "global memory", "muted")
    box(185, 446, 150, 72, "empty")
    picture.labelled(227, 466, 40, 18, "green", "", 12)
    text(344, 486, "D", "green")
    return picture.svg()


def _schedule(
    picture: Picture, y: float, lanes: list[tuple[str, list[tuple[float, float, str, str]]]]
) -> None:
    for index, (name, bars) in enumerate(lanes):
        top = y + index * 30
        picture.text(0, top + 17, name, size=12)
        for start, end, color, label in bars:
            scale = (WIDTH - 92) / 12
            x, width = 90 + start * scale, (end - start) * scale
            picture.labelled(x, top, width, 24, color, label, 12)


def draw_pipeline(theme: str) -> str:
    """Returns the picture of the ring's timeline and of both schedules."""
    picture = Picture(theme, 446, "Timelines of the ring and of the schedules")
    stages = COOPERATIVE.stages
    text = picture.text

    text(0, 14, "Within a tile: the producer loads k-tiles ahead of the product")
    loads: list[tuple[float, float]] = []
    products: list[tuple[float, float]] = []
    for tile in range(2 * stages):
        # A stage is free when the product after its own has begun and its own has ended.
        begin = tile * 0.15 if tile < stages else products[tile - stages][1]
        loads.append((begin, begin + 2.4))
        start = max(loads[tile][1], products[-1][1] if products else 0)
        products.append((start, start + 1))
    rows = []
    for stage in range(stages):
        bars = []
        for tile in range(stage, 2 * stages, stages):
            bars.append((*loads[tile], "blue", f"load {tile}"))
            bars.append((*products[tile], "purple", f"{tile}"))
        rows.append((f"stage {stage}", bars))
    _schedule(picture, 24, rows)
    y = 24 + 30 * stages
    text(90, y + 14, "blue: TMA fills the stage.  violet: wgmma multiplies it", "muted", size=12)

    y += 44
    text(0, y, "Cooperative: both warpgroups compute halves of one tile")
    halves = [(0.8, 4, "purple", "tile 0"), (4, 5.4, "green", "write 0")]
    halves += [(5.4, 8.6, "purple", "tile 1"), (8.6, 10, "green", "write 1")]
    halves += [(10, 12, "purple", "tile 2")]
    loading = [(0, 3.6, "blue", "load 0"), (3.6, 4.6, "blue", "1")]
    loading += [(4.6, 5.6, "empty", "full"), (5.6, 8.2, "blue", "load 1")]
    loading += [(8.2, 9.2, "blue", "2"), (9.2, 10.2, "empty", "full")]
    loading += [(10.2, 12, "blue", "load 2")]
    _schedule(picture, y + 10, [("producer", loading), ("warpgroup 0", halves)])
    _schedule(picture, y + 70, [("warpgroup 1", halves)])

    y += 134
    text(0, y, "Pingpong: each warpgroup computes every other tile")
    first = [(0.8, 4, "purple", "tile 0"), (4, 5.4, "green", "write 0")]
    first += [(5.4, 7.2, "empty", "wait"), (7.2, 10.4, "purple", "tile 2")]
    first += [(10.4, 11.8, "green", "write 2")]
    second = [(0.8, 4, "empty", "wait for the turn"), (4, 7.2, "purple", "tile 1")]
    second += [(7.2, 8.6, "green", "write 1"), (8.6, 10.4, "empty", "wait")]
    second += [(10.4, 12, "purple", "tile 3")]
    loading = [(0, 3.6, "blue", "load 0"), (3.6, 6.8, "blue", "load 1")]
    loading += [(6.8, 10, "blue", "load 2"), (10, 12, "blue", "load 3")]
    _schedule(picture, y + 10, [("producer", loading)])
    _schedule(picture, y + 40, [("warpgroup 0", first), ("warpgroup 1", second)])
    return picture.svg()


def draw_swizzle(theme: str) -> str:
    """Returns the picture of the 128-byte swizzle."""
    picture = Picture(theme, 318, "The 128-byte swizzle")
    rows = chunks = 8
    cell, left = 26, 44
    picture.text(left - 6, 36, "banks", "muted", "end", 12)
    for panel, name in enumerate(("without a swizzle", "with the 128-byte swizzle")):
        x0 = left + panel * 256
        picture.text(x0, 14, name)
        for column, banks in ((0, "0-3"), (chunks - 1, "28-31")):
            picture.text(x0 + cell * (column + 0.5), 36, banks, "muted", "middle", 11)
        for row in range(rows):
            y = 42 + row * cell
            if panel == 0:
                picture.text(left - 6, y + 17, f"row {row}", "muted", "end", 12)
            for column in range(chunks):
                chunk = column ^ row if panel else column
                color = "orange" if chunk == 0 else "empty"
                picture.labelled(x0 + column * cell, y, cell, cell, color, str(chunk), 12)
    y = 42 + rows * cell + 20
    picture.text(left, y, "chunk 0 of 8 rows: one")
    picture.text(left, y + 17, "group of banks, 8 turns")
    picture.text(left + 256, y, "chunk 0 of 8 rows: all")
    picture.text(left + 256, y + 17, "32 banks, one turn")
    return picture.svg()


def raster(tiles_m: int, tiles_n: int, width: int) -> Iterator[tuple[int, int]]:
    """Yields the tiles in the order of ``raster_tile``: groups of ``width`` tile rows."""
    for begin in range(0, tiles_m, width):
        for tile_n in range(tiles_n):
            for tile_m in range(begin, min(begin + width, tiles_m)):
                yield tile_m, tile_n


def draw_order(theme: str) -> str:
    """Returns the picture of the tile order of an 8192 x 8192 result on 132 SMs."""
    row, extent, sms, group_rows = COOPERATIVE, 8192, 132, 2048
    tiles_m = extent // (row.tile_m * row.cluster_m)
    tiles_n = extent // (row.tile_n * row.cluster_n)
    width = group_rows // (row.tile_m * row.cluster_m)
    wave = sms // row.cluster_size
    picture = Picture(theme, 322, "The order of tiles")
    cell = 7
    for panel, (name, group) in enumerate(
        (("row after row", 1), (f"groups of {width} rows", width))
    ):
        x0 = panel * 262 + 14
        picture.text(x0, 14, name)
        seen = list(raster(tiles_m, tiles_n, group))
        picture.box(x0 - 1, 23, tiles_n * cell + 1, tiles_m * cell + 1, "empty")
        for index, color in enumerate(("orange", "blue")):
            places = [
                (x0 + tile_n * cell, 24.0 + tile_m * cell)
                for tile_m, tile_n in seen[index * wave : (index + 1) * wave]
            ]
            picture.cells(places, cell - 1, color)
        first = seen[:wave]
        of_a, of_b = (len({tile[axis] for tile in first}) for axis in (0, 1))
        y = 24 + tiles_m * cell + 20
        picture.text(x0, y, f"orange: first wave, {wave} clusters", size=12)
        picture.text(x0, y + 17, f"reads {of_a} strips of A and {of_b} of B:", size=12)
        strip_mib = row.tile_n * row.cluster_n * extent * row.element_bytes // 2**20
        picture.text(x0, y + 34, f"{(of_a + of_b) * strip_mib} MiB", size=12)
        picture.text(x0, y + 51, "blue: second wave", size=12)
    return picture.svg()


@functools.cache
def python_layers() -> list[str]:
    """Returns the folders and modules of the package, the topmost first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = project["tool"]["importlinter"]["contracts"]
    return [name for name in contract["layers"] if name != "__main__"]


@functools.cache
def cuda_layers() -> list[list[str]]:
    """Returns the folders of ``cuda/`` by layers, the topmost first; each includes lower ones."""
    folders = {path.name for path in (ROOT / "cuda").iterdir() if path.is_dir()}
    # One has no C++, and the other stands in for headers of the host.
    folders -= {"build", "nvrtc"}
    included = {}
    for name in folders:
        files = [path for path in (ROOT / "cuda" / name).rglob("*") if path.is_file()]
        lines = "\n".join(path.read_text() for path in files)
        included[name] = {*re.findall(r'^ *#include "(\w+)/', lines, re.MULTILINE)} & folders - {
            name
        }

    @functools.cache
    def height(name: str) -> int:
        return 1 + max(map(height, included[name]), default=-1)

    layers = [sorted(name for name in folders if height(name) == i) for i in range(len(folders))]
    return [layer for layer in reversed(layers) if layer]


def draw_folders(theme: str) -> str:
    """Returns the picture of the folders."""
    step = 27
    python, cuda = python_layers(), cuda_layers()
    picture = Picture(theme, 30 + step * len(python), "The folders")
    picture.text(0, 14, "jax_tcgemm/")
    for index, name in enumerate(python):
        color = {"kernels": "orange", "_extension": "green"}.get(name, "blue")
        picture.labelled(0.5, 24 + step * index, 170, step - 5, color, name)
    left, width = 206, WIDTH - 206.5
    # Beside the module that loads what is compiled of them.
    top = 24 + step * (len(python) - len(cuda))
    middle = 24 + step * python.index("_extension") + step / 2 - 2
    picture.text(left, top - 10, "cuda/")
    for row, layer in enumerate(cuda):
        each = (width + 6) / len(layer)
        for index, name in enumerate(layer):
            place = left + index * each, top + step * row
            picture.labelled(*place, each - 6, step - 5, "purple", name)
    picture.line(
        [(left, top + 11), (188, top + 11), (188, middle), (172, middle)], "green", arrow=True
    )
    picture.text(left, 40, "A folder imports, or includes,", "muted", size=12)
    picture.text(left, 56, "only what is below it.", "muted", size=12)
    picture.text(left, 84, "Green: the compiled module, which", "muted", size=12)
    picture.text(left, 100, "_extension loads.", "muted", size=12)
    picture.text(left, 128, "Orange: the kernel table. The build", "muted", size=12)
    picture.text(left, 144, "runs it and compiles its rows.", "muted", size=12)
    return picture.svg()


PICTURES = {
    "folders": draw_folders,
    "way": draw_way,
    "pipeline": draw_pipeline,
    "swizzle": draw_swizzle,
    "order": draw_order,
}


def main(folder: pathlib.Path = FOLDER) -> None:
    """Writes all pictures.

    Args:
        folder: where to.
    """
    for name, draw in PICTURES.items():
        for theme in THEMES:
            (folder / f"{name}-{theme}.svg").write_text(draw(theme))


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
