"""The ladder of examples/: it builds, and on a GPU each rung is right."""

import importlib.util
import pathlib
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import pytest

LADDER = pathlib.Path(__file__).parent.parent / "examples" / "ladder"


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("ladder_run", LADDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up here
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def test_a_rung_is_a_short_file_and_one_of_the_list(run):
    listed = re.findall(r"  X\((\w+)\)", (LADDER / "ladder.h").read_text())
    assert [*listed, "gemm"] == [rung.name for rung in run.RUNGS]
    files = sorted(LADDER.glob("*.cu"))
    assert [file.stem[3:] for file in files] == listed
    for file in files:
        text = file.read_text()
        assert len(text.splitlines()) <= 150, file
        assert "// Ceiling: " in text, file


def test_arguments(run, capsys):
    with pytest.raises(SystemExit):
        run.main(["--size", "100"])
    assert "--size must be a multiple of 128" in capsys.readouterr().err


def test_needs_cmake(run, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="pip install cmake"):
        run.build(tmp_path)


@pytest.fixture(scope="module")
def library(run, tmp_path_factory):
    found = shutil.which("nvcc") or pathlib.Path("/usr/local/cuda/bin/nvcc").exists()
    if not found or not shutil.which("cmake"):
        pytest.skip("needs nvcc and CMake")
    return run.build(tmp_path_factory.mktemp("ladder"))


@pytest.mark.nightly
def test_without_a_gpu_it_builds_and_says_what_it_would_do(run, library, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    run.main(["--build", str(library.parent), "--dtype", "bfloat16"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"built {library}"
    assert [line.split()[1] for line in lines if re.match(r" ?\d+ ", line)] == [
        rung.name for rung in run.RUNGS
    ]
    assert lines[-1].startswith("no GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rungs_on_the_gpu(run, library, dtype):
    run.register(library)
    for m, n, k in ((128, 128, 128), (256, 384, 640), (384, 128, 1024)):
        for rung in filter(run.runs_here, run.RUNGS):
            error, allowed = run.error_of(rung, m, n, k, jnp.dtype(dtype))
            assert error <= allowed, rung.name
