"""The include rules of ``cuda/``, and what the package's modules import from the package itself.

``lint-imports``, another hook, checks that Python folders import downwards.
"""

import graphlib
import pathlib
import re

import pytest

import jax_tcgemm

pytestmark = pytest.mark.any_jax

ROOT = pathlib.Path(__file__).parent.parent
CUDA = ROOT / "cuda"
INCLUDE = re.compile(r'^\s*#\s*include "([^"{]+)"', re.MULTILINE)
FROM_PACKAGE = re.compile(r"^\s*from jax_tcgemm import ([^(\n]+|\([^)]+\))", re.MULTILINE)


def folder(path: pathlib.PurePath) -> str:
    """Returns the outermost folder of a path; a header beside the folders is its own folder."""
    return path.parts[0]


def includes() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in CUDA.rglob("*.*"):
        if path.suffix in (".h", ".cuh", ".cc", ".cu"):
            own = folder(path.relative_to(CUDA))
            names = map(pathlib.PurePath, INCLUDE.findall(path.read_text()))
            others = {folder(name) for name in names if (CUDA / name).exists()}
            found.setdefault(own, set()).update(others - {own})
    return found


def test_no_folders_include_one_another_in_a_circle():
    graph = includes()
    assert {"dispatch", "sm90", "common"} <= graph.keys()
    assert "sm90" in graph["dispatch"]
    graphlib.TopologicalSorter(graph).prepare()


def test_modules_import_only_modules_from_the_package():
    """Public names are the top layer, which ``lint-imports`` does not check."""
    found = set()
    for path in (ROOT / "jax_tcgemm").rglob("*.py"):
        if path.name not in ("__main__.py", "selftest.py"):
            for names in FROM_PACKAGE.findall(path.read_text()):
                found |= set(re.findall(r"(\w+)(?: as \w+)?", names.strip("()")))
    assert "_core" in found
    assert not found & set(jax_tcgemm.__all__)
