"""Places the nodes of a graph without circles in layers, each above all that it points to."""

from __future__ import annotations

import itertools
from typing import NamedTuple

Edges = dict[str, set[str]]
Edge = tuple[str, str]


class Point(NamedTuple):
    """A place, or a size."""

    x: float
    y: float


class _Bend(NamedTuple):
    """Where a long edge passes a layer, as a node among the others."""

    source: str
    target: str
    layer: int


_Node = str | _Bend


def reachable(edges: Edges, start: str) -> set[str]:
    """Returns where arrows lead from a node, the node itself included."""
    found, todo = {start}, [start]
    while todo:
        new = edges.get(todo.pop(), set()) - found
        found |= new
        todo.extend(new)
    return found


def reduced(edges: Edges) -> list[Edge]:
    """Returns the edges but those that a longer way replaces, sorted."""
    return sorted(
        (source, target)
        for source, targets in edges.items()
        for target in targets
        if not any(target in reachable(edges, other) for other in targets - {target})
    )


def layers(edges: Edges) -> dict[str, int]:
    """Returns each node's layer: 0 at the bottom; nodes that nothing points to are on top."""
    found: dict[str, int] = {}

    def visit(node: str) -> int:
        if node not in found:
            found[node] = 1 + max((visit(target) for target in edges[node]), default=-1)
        return found[node]

    top = max(visit(node) for node in sorted(edges))
    inner = set().union(*edges.values())
    return {node: layer if node in inner else top for node, layer in found.items()}


class Layout:
    """Centres of the nodes, and routes of the edges, from the corner (0, 0) to `size`.

    Edges that a longer way replaces are left out. Long edges bend around the nodes of the layers
    between.
    """

    def __init__(self, edges: Edges, pitch: Point, box: Point):
        self._pitch, self._box = pitch, box
        self._layers = layers(edges)
        self._chains: dict[Edge, list[_Node]] = {}
        for source, target in reduced(edges):
            between = range(self._layers[source] - 1, self._layers[target], -1)
            bends = [_Bend(source, target, layer) for layer in between]
            self._chains[source, target] = [source, *bends, target]
        self._rows = self._order()
        x = self._columns()
        left = min(x.values())
        width = max(x.values()) - left + box.x
        self.size = Point(width, (len(self._rows) - 1) * pitch.y + box.y)
        self._at = {
            node: Point(x[node] - left + box.x / 2, row * pitch.y + box.y / 2)
            for row, nodes in enumerate(self._rows)
            for node in nodes
        }
        self.centres = {node: self._at[node] for node in self._layers}
        self.routes = self._draw_routes()

    def _neighbours(self) -> tuple[dict[_Node, list[_Node]], dict[_Node, list[_Node]]]:
        above: dict[_Node, list[_Node]] = {}
        below: dict[_Node, list[_Node]] = {}
        for chain in self._chains.values():
            for upper, lower in itertools.pairwise(chain):
                below.setdefault(upper, []).append(lower)
                above.setdefault(lower, []).append(upper)
        return above, below

    def _order(self) -> list[list[_Node]]:
        """Returns the rows from the top, in the order of few crossings."""
        top = max(self._layers.values())
        rows: list[list[_Node]] = [[] for _ in range(top + 1)]
        for node, layer in sorted(self._layers.items()):
            rows[top - layer].append(node)
        for chain in self._chains.values():
            for bend in chain[1:-1]:
                assert isinstance(bend, _Bend)
                rows[top - bend.layer].append(bend)
        above, below = self._neighbours()
        best, fewest = [list(row) for row in rows], self._crossings(rows, below)
        for sweep in range(24):
            downward = sweep % 2 == 0
            near = above if downward else below
            for row in range(len(rows)) if downward else reversed(range(len(rows))):
                place = {node: i for nodes in rows for i, node in enumerate(nodes)}

                def mean(node: _Node, place=place, near=near) -> float:
                    places = [place[other] for other in near.get(node, ())]
                    return sum(places) / len(places) if places else place[node]

                rows[row].sort(key=mean)
            crossings = self._crossings(rows, below)
            if crossings < fewest:
                best, fewest = [list(row) for row in rows], crossings
        return best

    @staticmethod
    def _crossings(rows: list[list[_Node]], below: dict[_Node, list[_Node]]) -> int:
        count = 0
        for upper, lower in itertools.pairwise(rows):
            place = {node: i for i, node in enumerate(lower)}
            ends = [
                place[other]
                for node in upper
                for other in sorted(below.get(node, ()), key=place.__getitem__)
            ]
            count += sum(a > b for i, a in enumerate(ends) for b in ends[i + 1 :])
        return count

    def _columns(self) -> dict[_Node, float]:
        """Returns where each node is in its row: near the mean of its neighbours."""
        above, below = self._neighbours()
        x = {node: i * self._pitch.x for row in self._rows for i, node in enumerate(row)}
        for sweep in range(400):
            for row in self._rows if sweep % 2 else reversed(self._rows):
                wanted: list[tuple[float, float]] = []
                for node in row:
                    near = [*above.get(node, ()), *below.get(node, ())]
                    # Long edges are to be straight.
                    weights = [
                        8.0 if isinstance(node, _Bend) and isinstance(other, _Bend) else 1.0
                        for other in near
                    ]
                    total = sum(weight * x[n] for weight, n in zip(weights, near, strict=True))
                    wanted.append((total / sum(weights), sum(weights)) if near else (x[node], 1.0))
                x |= zip(row, self._spread(row, wanted), strict=True)
        return x

    def _spread(self, row: list[_Node], wanted: list[tuple[float, float]]) -> list[float]:
        """Returns the places nearest to those wanted, by weight, that leave room in this order."""
        offsets = [0.0]
        for a, b in itertools.pairwise(row):
            bends = isinstance(a, _Bend) + isinstance(b, _Bend)
            offsets.append(offsets[-1] + (self._pitch.x, self._pitch.x * 0.6, 28.0)[bends])
        # Neighbours that touch are one block at the mean of what they want: (place, weight, count).
        blocks: list[tuple[float, float, int]] = []
        for (place, weight), offset in zip(wanted, offsets, strict=True):
            block = (place - offset, weight, 1)
            while blocks and blocks[-1][0] > block[0]:
                before = blocks.pop()
                total = before[0] * before[1] + block[0] * block[1]
                weight = before[1] + block[1]
                block = (total / weight, weight, before[2] + block[2])
            blocks.append(block)
        places = [place for place, _, count in blocks for _ in range(count)]
        return [place + offset for place, offset in zip(places, offsets, strict=True)]

    def _draw_routes(self) -> dict[Edge, list[Point]]:
        """Returns the points of each edge; at a box the edges lie side by side in their order."""
        starts: dict[str, list[tuple[float, Edge]]] = {}
        ends: dict[str, list[tuple[float, Edge]]] = {}
        for edge, chain in self._chains.items():
            starts.setdefault(edge[0], []).append((self._at[chain[1]].x, edge))
            ends.setdefault(edge[1], []).append((self._at[chain[-2]].x, edge))
        routes = {edge: self._through(chain) for edge, chain in self._chains.items()}
        for sides, index, half in ((starts, 0, self._box.y / 2), (ends, -1, -self._box.y / 2)):
            for node, edges in sides.items():
                step = self._box.x / (len(edges) + 1)
                for i, (_, edge) in enumerate(sorted(edges), 1):
                    centre = self._at[node]
                    routes[edge][index] = Point(
                        centre.x - self._box.x / 2 + i * step, centre.y + half
                    )
        return routes

    def _through(self, chain: list[_Node]) -> list[Point]:
        """Returns the points of a route: upright beside the boxes of the layers between."""
        half = self._box.y / 2
        first, *bends, last = (self._at[node] for node in chain)
        sides = (Point(x, y + side) for x, y in bends for side in (-half, half))
        return [first, *sides, last]
