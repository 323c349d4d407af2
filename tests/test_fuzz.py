"""The fuzzer: the problems it draws, the errors it finds, and resuming a run. On the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import fuzz
import gemm_problems
import jax.numpy as jnp
import numpy as np
import packed_problems
import pytest
from packed_values import QTYPES

from jax_tcgemm import gemm
from jax_tcgemm.kernels.arithmetic import ARITHMETIC


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs the script here and returns its exit status and output."""
    monkeypatch.setattr(fuzz, "set_environment", lambda jobs: None)

    def call(*arguments: object) -> tuple[int, str]:
        status = fuzz.main([*map(str, arguments), "--jobs", "0"])
        return status, capsys.readouterr().out

    return call


@pytest.fixture
def small(monkeypatch):
    """Limits the fuzzer to small problems."""
    monkeypatch.setattr(gemm_problems, "_MOST_PRODUCTS", 1e5)


def checked_indices(monkeypatch) -> list[int]:
    """Records the problems that run, and makes each pass."""
    indices = []

    def record(kind, seed, kernels, index):
        indices.append(index)
        return fuzz.Result("none", "passed")

    monkeypatch.setattr(fuzz, "run_problem", record)
    return indices


def test_a_problem_depends_on_seed_and_index_alone():
    first = [gemm_problems.draw(3, i) for i in range(50)]
    assert [gemm_problems.draw(3, i) for i in reversed(range(50))] == first[::-1]
    assert [gemm_problems.draw(4, i) for i in range(50)] != first


def test_what_is_drawn():
    problems = [gemm_problems.draw(0, i) for i in range(1500)]
    assert {problem.algorithm for problem in problems} == set(ARITHMETIC)
    for extent in ("m", "n", "k"):
        values = {getattr(problem, extent) for problem in problems}
        assert {0, 1} <= values
    assert any(problem.row for problem in problems)
    assert any(problem.mapped for problem in problems)
    assert {len(problem.batch) for problem in problems} == {0, 1, 2}
    assert {name for problem in problems for name in problem.operands} == {
        "a",
        "b",
        "c",
        "bias",
        "alpha",
        "beta",
        "residual",
        "row_scale",
        "column_scale",
    }


def test_rows_by_name():
    rows = {gemm_problems.draw(0, i, "sm80_tf32_*").row for i in range(100)}
    assert {row.algorithm for row in rows if row} == {"TF32_TF32_F32"}
    assert len(rows) > 3


def test_right_results_pass(run, small):
    status, text = run("--count", 10, "--seed", 1)
    assert status == 0, text
    assert text.startswith("seed 1\n")
    assert "10 problems of seed 1, 0 failed" in text


@pytest.mark.parametrize("value", [1.0, jnp.nan])
def test_one_wrong_element_is_found(monkeypatch, run, small, value):
    def wrong(*args, **kwargs):
        d = gemm(*args, **kwargs)
        return d.at[..., -1:, -1:].add(value)

    seed, index = next((1, i) for i in range(50) if np.prod(gemm_problems.draw(1, i).shape) > 0)
    monkeypatch.setattr(gemm_problems, "gemm", wrong)
    status, text = run("--count", 1, "--seed", seed, "--start", index)
    assert status == 1
    assert f"--seed {seed} --start {index} --count 1" in text
    assert "elements are wrong" in text
    assert "Problem(algorithm=" in text


def test_problems_with_packed_weights(monkeypatch, run):
    monkeypatch.setattr(packed_problems, "_MOST_ELEMENTS", 2**14)
    options = ("--problems", "packed", "--count", 6, "--seed", 1)
    status, text = run(*options)
    assert status == 0, text
    assert "6 problems of seed 1, 0 failed" in text

    def wrong(*args, **kwargs):
        d = gemm(*args, **kwargs)
        return d.at[..., -1:, -1:].multiply(1.5)

    monkeypatch.setattr(packed_problems, "gemm", wrong)
    status, text = run(*options)
    assert status == 1
    assert "1 of " in text
    assert "--seed 1 --start 0 --count 1 --problems packed" in text


def test_what_is_drawn_with_packed_weights():
    problems = [packed_problems.draw(0, i) for i in range(1000)]
    assert [packed_problems.draw(0, i) for i in range(1000)] == problems
    assert {problem.qtype for problem in problems if problem.has_kernel} == set(QTYPES)
    groups = {problem.group for problem in problems if problem.has_kernel}
    assert {32, 64, 128, 256, 512} <= groups
    assert all(problem.k % problem.group == 0 for problem in problems)
    assert 0.6 < np.mean([problem.has_kernel for problem in problems]) < 0.95
    for name in ("scale", "output"):
        assert {getattr(each, name) for each in problems} == set(packed_problems.FLOATS)
    assert {each.rows for each in problems if each.has_kernel} >= set(range(1, 65))


def test_a_failure_does_not_end_the_run(monkeypatch, run, small):
    def refuse(*args, **kwargs):
        raise ValueError("no")

    monkeypatch.setattr(gemm_problems, "gemm", refuse)
    status, text = run("--count", 3)
    assert status == 1
    assert "3 failed" in text
    assert "ValueError: no" in text


def test_other_dtypes_and_shapes_are_found(monkeypatch, run, small):
    monkeypatch.setattr(
        gemm_problems, "gemm", lambda *args, **kwargs: gemm(*args, **kwargs)[..., None]
    )
    assert run("--count", 2)[0] == 1


def test_a_run_is_continued(monkeypatch, run, tmp_path):
    indices = checked_indices(monkeypatch)
    state = tmp_path / "state"
    assert run("--count", 4, "--seed", 9, "--start", 2, "--state", state)[0] == 0
    assert indices == [2, 3, 4, 5]
    status, text = run("--count", 7, "--state", state)
    assert (status, indices) == (0, list(range(2, 9)))
    assert text.startswith("seed 9\n")
    assert "7 problems of seed 9" in text
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    with pytest.raises(SystemExit, match="seed 9"):
        run("--seed", 8, "--state", state)
    with pytest.raises(SystemExit, match="problems gemm"):
        run("--problems", "packed", "--state", state)


def test_failures_are_kept(monkeypatch, run, tmp_path):
    failed = fuzz.Result("none", "failed", "why")
    monkeypatch.setattr(fuzz, "run_problem", lambda *arguments: failed)
    run("--count", 1, "--state", tmp_path / "state")
    checked_indices(monkeypatch)
    status, text = run("--count", 2, "--state", tmp_path / "state")
    assert status == 1
    assert "--start 0 --count 1" in text
    assert json.loads((tmp_path / "state").read_text())["failures"] == {"0": "why"}


def test_time_is_limited(monkeypatch, run):
    assert checked_indices(monkeypatch) == []
    status, text = run("--count", 5, "--start", 3, "--minutes", 0)
    assert status == 0
    assert "stopped before problem 3" in text


@pytest.mark.any_jax
def test_processes():
    command = [sys.executable, fuzz.__file__, "--jobs", "2", "--count", "4", "--seed", "1"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4 problems of seed 1, 0 failed" in done.stdout
