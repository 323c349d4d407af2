"""Who may import whom: docs/draw_imports.py, which also draws it."""

import draw_imports
import layered_layout
import pytest

pytestmark = pytest.mark.any_jax

PYTHON = list(draw_imports.python_imports(draw_imports.ROOT / "jax_tcgemm"))
CPP = list(draw_imports.cpp_includes(draw_imports.ROOT / "cuda"))


def test_no_python_folder_imports_one_above_it():
    assert draw_imports.upward(PYTHON) == []


@pytest.mark.parametrize("imports", [PYTHON, CPP], ids=["python", "cpp"])
def test_no_folders_import_one_another_in_a_circle(imports):
    assert draw_imports.circles(imports) == []


def test_the_drawing_is_up_to_date():
    drawn = draw_imports.draw(PYTHON, CPP)
    assert draw_imports.PICTURE.read_text() == drawn, "run docs/draw_imports.py"
    assert draw_imports.main(["--check"]) == 0


def test_imports_are_found_in_each_form(tmp_path):
    package = tmp_path / "package"
    for folder in ("api", "problem"):
        (package / folder).mkdir(parents=True)
    (package / "_core.pyi").touch()
    (package / "problem" / "spec.py").write_text(
        "import numpy\n"
        "from ..api import gemm\n"
        "from package import _core, gemm\n"
        "from package.problem import axes\n"
        "def late():\n"
        "    import package.api.mlp\n"
    )
    found = [each[1:] for each in draw_imports.python_imports(package)]
    assert sorted(found) == [
        ("package._core", "problem", "_core"),
        ("package.api.gemm", "problem", "api"),
        ("package.api.mlp", "problem", "api"),
        ("package.gemm", "problem", "__init__"),
    ]


def test_includes_are_found_in_templates_too(tmp_path):
    for name in ("build/generate.py", "sm80/launch.cuh", "sm90/launch.cuh", "config.h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "build/generate.py").write_text('_SOURCE = """\n#include "{arch}/launch.cuh"\n"""')
    (tmp_path / "sm90/launch.cuh").write_text(
        '#include <stdint.h>\n#include "config.h"\n  #  include "sm80/launch.cuh"\n'
        '#include "sm90/launch.cuh"\n// #include "build/none.h"\n#include "written.inc"\n'
    )
    found = [each[2:] for each in draw_imports.cpp_includes(tmp_path)]
    assert found == [("build", "sm80"), ("build", "sm90"), ("sm90", "config.h"), ("sm90", "sm80")]


def test_errors_name_the_import():
    upward = draw_imports.Import("problem/spec.py", "jax_tcgemm.api.gemm", "problem", "api")
    assert draw_imports.upward([upward]) == [
        "problem/spec.py imports jax_tcgemm.api.gemm: api is above problem"
    ]
    unknown = draw_imports.Import("api/gemm.py", "jax_tcgemm.attic", "api", "attic")
    assert "lacks attic" in draw_imports.upward([unknown])[0]
    ring = [draw_imports.Import(f"{a}.h", f"{b}.h", a, b) for a, b in ("ab", "bc", "ca", "cd")]
    line = "c.h imports a.h: a circle, for a leads back to c"
    assert draw_imports.circles([*ring[:2], *ring]) == [line]


def test_each_folder_is_above_all_that_it_imports():
    edges = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"d"}}
    assert layered_layout.layers(edges) == {"a": 3, "b": 2, "c": 1, "d": 0, "e": 3}
    assert layered_layout.reduced(edges) == [("a", "b"), ("b", "c"), ("c", "d"), ("e", "d")]
    pitch, box = layered_layout.Point(10, 10), layered_layout.Point(8, 4)
    layout = layered_layout.Layout(edges, pitch, box)
    assert set(layout.routes) == set(layered_layout.reduced(edges))
    for (source, target), points in layout.routes.items():
        assert layout.centres[source].y < layout.centres[target].y
        heights = [point.y for point in points]
        assert heights == sorted(heights)
