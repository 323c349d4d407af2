"""``Picture``: an SVG, for light and for dark pages."""

from __future__ import annotations

from html import escape

WIDTH = 520

# Fill and line of each color. Text on a fill has the color "text".
THEMES = {
    "light": {
        "text": ("#1f2328", "#1f2328"),
        "muted": ("#59636e", "#59636e"),
        "empty": ("#f6f8fa", "#818b98"),
        "blue": ("#cfe8ff", "#0969da"),
        "orange": ("#ffe2cc", "#bc4c00"),
        "green": ("#c9f2d3", "#1a7f37"),
        "purple": ("#eadcff", "#8250df"),
    },
    "dark": {
        "text": ("#f0f6fc", "#f0f6fc"),
        "muted": ("#a3acb8", "#a3acb8"),
        "empty": ("#21262d", "#7d8590"),
        "blue": ("#0c3a75", "#4493f8"),
        "orange": ("#6b2a06", "#f0883e"),
        "green": ("#0f4a22", "#3fb950"),
        "purple": ("#4b2a85", "#ab7df8"),
    },
}


class Picture:
    """An SVG that grows by shapes."""

    def __init__(self, theme: str, height: int, title: str):
        self._colors = THEMES[theme]
        # GitHub's and the site's pages have their own background.
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
            f' width="{WIDTH}" height="{height}" font-size="13"',
            ' font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
        ]

    def box(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Draws a rectangle."""
        fill, line = self._colors[color]
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'fill="{fill}" stroke="{line}"/>'
        )

    def cells(self, places: list[tuple[float, float]], size: float, color: str) -> None:
        """Draws squares with gaps between them."""
        path = "".join(f"M{x:g} {y:g}h{size:g}v{size:g}h-{size:g}z" for x, y in places)
        self._parts.append(f'<path d="{path}" fill="{self._colors[color][1]}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        color: str = "text",
        anchor: str = "start",
        size: int = 13,
    ) -> None:
        """Writes a line whose baseline is ``y``."""
        _, fill = self._colors[color]
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}" '
            f'font-size="{size}">{escape(text)}</text>'
        )

    def labelled(
        self, x: float, y: float, width: float, height: float, color: str, text: str, size: int = 13
    ) -> None:
        """Draws a rectangle with a line in its middle."""
        self.box(x, y, width, height, color)
        self.text(x + width / 2, y + height / 2 + size * 0.36, text, "text", "middle", size)

    def line(self, points: list[tuple[float, float]], color: str, arrow: bool = False) -> None:
        """Draws a line; its last part is horizontal or vertical and may end in an arrow."""
        _, stroke = self._colors[color]
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="1.5"/>'
        )
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
            ends = [(x + dx, y + dy), (x - 7 * dx - 4 * dy, y - 7 * dy - 4 * dx)]
            ends.append((x - 7 * dx + 4 * dy, y - 7 * dy + 4 * dx))
            path = " ".join(f"{x:g},{y:g}" for x, y in ends)
            self._parts.append(f'<polygon points="{path}" fill="{stroke}"/>')

    def svg(self) -> str:
        """Returns the text of the file."""
        return "\n".join([*self._parts, "</svg>", ""])
