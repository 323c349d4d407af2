"""A Sphinx extension for pictures that have a form for light and one for dark pages.

A page has such a picture as GitHub shows it:

    <picture>
      <source media="(prefers-color-scheme: dark)" srcset="NAME-dark.svg">
      <img alt="TEXT" src="NAME-light.svg">
    </picture>

Sphinx neither copies the files of raw HTML nor knows which form the reader has chosen. So this
extension makes two images of it, which the theme shows or hides by their class.
"""

from __future__ import annotations

import html
import re
from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform  # pyright: ignore[reportMissingImports]

_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">'
    r'\s*<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)">\s*</picture>\s*'
)


class ThemedPictures(SphinxTransform):
    """Replaces ``<picture>`` by an image for each theme."""

    default_priority = 200  # before Sphinx collects the images

    def apply(self, **_: Any) -> None:
        """Changes the page."""
        for node in list(self.document.findall(nodes.raw)):
            if not node.astext().lstrip().startswith("<picture"):
                continue
            found = _PICTURE.fullmatch(node.astext().strip())
            if found is None:
                raise ValueError(f"{self.env.docname}: no picture with two forms: {node.astext()}")
            alt = html.unescape(found["alt"])
            images = [
                nodes.image(uri=found[theme], alt=alt, classes=[f"only-{theme}", "dark-light"])
                for theme in ("light", "dark")
            ]
            node.replace_self(nodes.paragraph("", "", *images))


def setup(app: Any) -> dict[str, bool]:
    """Registers the transform."""
    app.add_transform(ThemedPictures)
    return {"parallel_read_safe": True}
