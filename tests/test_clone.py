"""Python in a clone runs the installed package, even though the sources hide it."""

from __future__ import annotations

import importlib
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import jax_tcgemm

pytestmark = pytest.mark.any_jax

INSTALLED = pathlib.Path(jax_tcgemm.__file__).parent
# Properties of an imported package, wherever Python found it.
CHECKS = f"""
import importlib, importlib.resources, inspect, pathlib, pickle, sys
import jax_tcgemm
from jax_tcgemm.tools import selftest


def check():
    files = {{n: m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "jax_tcgemm"}}
    del files["jax_tcgemm._core"]  # of an editable install
    others = {{name: file for name, file in files.items() if {str(INSTALLED)!r} not in file}}
    others.pop("jax_tcgemm._clone", None)
    assert not others, others
    assert importlib.resources.files("jax_tcgemm").joinpath("py.typed").is_file()
    assert "export_disabled_checks" in inspect.getsource(jax_tcgemm)
    for activation in (jax_tcgemm.softcap(1.0), jax_tcgemm.clip(0.0, 6.0)):
        assert pickle.loads(pickle.dumps(activation)) == activation
"""
PROGRAM = (
    CHECKS
    + """
import multiprocessing

if __name__ == "__main__":
    check()
    importlib.reload(jax_tcgemm)
    check()
    import jax_tcgemm.tools.collectives  # not loaded before

    check()
    child = multiprocessing.get_context("spawn").Process(target=check)
    child.start()
    child.join()
    assert child.exitcode == 0
"""
)


@pytest.fixture
def clone(tmp_path):
    """Returns the sources without the extension, as in git."""
    folder = tmp_path / "clone"
    ignored = shutil.ignore_patterns("_core*", "include", "__pycache__", "sm90_kernels.txt")
    shutil.copytree(INSTALLED, folder / "jax_tcgemm", ignore=ignored)
    return folder


@pytest.fixture
def run(clone):
    """Returns a function that runs Python in the clone and returns the output."""
    paths = [str(INSTALLED.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
    }

    def run(*arguments, works=True):
        command = [sys.executable, "-W", "error", *map(str, arguments)]
        done = subprocess.run(command, cwd=clone, env=environment, text=True, capture_output=True)
        assert (done.returncode == 0) is works, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_programs_in_a_clone(run, clone):
    """It also works after `reload`, in a spawned process, and for `python -m`."""
    (clone / "program.py").write_text(PROGRAM)
    run("program.py")
    assert "usage: jax-tcgemm" in run("-m", "jax_tcgemm", "--help")
    assert str(INSTALLED) in run("-c", "import jax_tcgemm; print(jax_tcgemm.__path__)")


@pytest.mark.nightly  # .ci/run runs in a clone, too
def test_pytest_in_a_clone(run, clone):
    """The test runs in an xdist worker that pytest starts."""
    test = f"{CHECKS}\n\ndef test_one():\n    check()\n\n\ndef test_two():\n    check()\n"
    (clone / "test_program.py").write_text(test)
    without = ("-p", "no:cacheprovider", "-p", "no:benchmark")
    assert "2 passed" in run("-m", "pytest", "-q", *without, "test_program.py", "-n", "1")


@pytest.mark.skipif(
    not any(INSTALLED.glob("_core*.so")), reason="an editable install, which a clone may take"
)
def test_a_clone_of_another_version_says_so(run, clone):
    own = clone / "jax_tcgemm" / "__init__.py"
    own.write_text(own.read_text() + "\n# another version\n")
    said = run("-c", "import jax_tcgemm", works=False)
    assert f"{own}, of a clone without a compiled extension, differs" in said
    assert "pip install ." in said


def test_an_extension_that_cannot_be_loaded(run, clone):
    (clone / "jax_tcgemm" / "_core.abi3.so").write_text("no library")
    said = run("-c", "import jax_tcgemm", works=False)
    assert (
        f"imported from {clone / 'jax_tcgemm'}, whose compiled extension cannot be loaded" in said
    )


# The import rules, for a package that has nothing else.
INIT = """
import sys
from jax_tcgemm import _clone
_clone.hand_over(sys.modules[__name__])
from small_package import part
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Returns a function that creates package folders, and one that imports from them."""

    def make(name, init=True, extension=False):
        folder = tmp_path / name / "small_package"
        folder.mkdir(parents=True)
        if init:
            (folder / "__init__.py").write_text(INIT)
            (folder / "part.py").write_text("")
        if extension:
            (folder / "_core.py").write_text("")
        return folder

    def imported(*folders, finders=()):
        monkeypatch.setattr(sys, "path", [*(str(each.parent) for each in folders), *sys.path])
        monkeypatch.setattr(sys, "meta_path", [*finders, *sys.meta_path])
        importlib.invalidate_caches()
        package = importlib.import_module("small_package")
        for name in [name for name in sys.modules if name.startswith("small_package")]:
            del sys.modules[name]
        return package, pathlib.Path(package.part.__file__).parent

    return make, imported


def test_the_first_with_an_extension_is_taken(small):
    make, imported = small
    folders = [make("clone"), make("other"), make("first", extension=True)]
    package, found = imported(*folders, make("second", extension=True))
    assert found == folders[2]
    assert pathlib.Path(package.__file__).parent == folders[2]
    assert package.__path__ == package.__spec__.submodule_search_locations == [str(folders[2])]
    assert package.__loader__ is package.__spec__.loader


def test_a_clone_with_an_extension_stays(small):
    make, imported = small
    own = make("clone", extension=True)
    assert imported(own, make("installed", extension=True))[1] == own


def test_without_an_installed_package_nothing_changes(small):
    make, imported = small
    own = make("clone")
    package, found = imported(own)
    assert found == own
    assert package.__path__ == [str(own)]


def test_a_folder_with_nothing_but_an_extension_is_no_package(small):
    """An editable install puts such a folder into site-packages."""
    make, imported = small
    own = make("clone")
    folder = make("site-packages", init=False, extension=True)
    assert imported(own, folder)[1] == own


def test_an_editable_install_stays(small):
    """The finder of the editable install knows where the extension is."""
    make, imported = small
    own = make("clone")
    folder = make("site-packages", init=False, extension=True)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != "small_package._core":
                return None
            return importlib.util.spec_from_file_location(name, folder / "_core.py")

    assert imported(own, make("installed", extension=True), finders=[Finder])[1] == own
