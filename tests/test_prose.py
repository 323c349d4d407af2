"""How sentences begin in the documentation, docstrings and comments; how long README is."""

import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.any_jax

ROOT = pathlib.Path(__file__).parent.parent
# The subject comes first.
OPENING = re.compile(
    r"(?:^|[.:!?]\s+|\n\s*\n\s*|^\s*[-*|]\s+)(?:Of|What|Whose|Whether)\b", re.MULTILINE
)
PAGES = sorted(
    path for folder in (".", "docs", "benchmarks") for path in (ROOT / folder).glob("*.md")
)
SOURCES = sorted(
    path
    for folder in ("jax_tcgemm", "cuda", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".pyi", ".cuh", ".cu", ".cc", ".h")
)


def openings(text: str) -> list[str]:
    """Returns the beginnings of sentences that open with a word that is no subject."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [text[found.start() : found.end() + 40].strip() for found in OPENING.finditer(text)]


def _prose_of_python(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
    lines: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield "\n".join(lines)
                lines = []
            lines.append(token.string.lstrip("# "))
            last = token.start[0]
    yield "\n".join(lines)


def _prose_of_cpp(text: str) -> Iterator[str]:
    for block in re.findall(r"(?:^\s*//.*\n)+|//.*$", text, re.MULTILINE):
        yield re.sub(r"^\s*//\s?", "", block, flags=re.MULTILINE)


def prose(path: pathlib.Path) -> Iterator[str]:
    text = path.read_text()
    if path.suffix == ".md":
        yield text
    elif path.suffix in (".py", ".pyi"):
        yield from _prose_of_python(text)
    else:
        yield from _prose_of_cpp(text)


@pytest.mark.parametrize("paths", [PAGES, SOURCES], ids=["pages", "sources"])
def test_sentences_open_with_their_subject(paths):
    found = {
        str(path.relative_to(ROOT)): each
        for path in paths
        if (each := [opening for text in prose(path) for opening in openings(text)])
    }
    assert not found, f"{sum(map(len, found.values()))}: {found}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_openings_are_found():
    text = "Of rows. It is. What it does\n\nWhose rows?\n- Whether it is\nfew of\nthem. Officers."
    assert len(openings(text)) == 4
    assert list(_prose_of_python('"""Of."""\n# What\nx = 1\ny = 2  # Whose\n'))
    assert list(_prose_of_cpp("int x;  // Of one\n// What\n// it is\n")) == [
        "Of one",
        "What\nit is\n",
    ]
