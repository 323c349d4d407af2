"""The benchmark of public models: its programs in small sizes, and the evaluation of its times."""

from __future__ import annotations

import json

import jax
import model_step
import models
import programs
import pytest

from jax_tcgemm import fuse

# Programs whose libraries the test environment installs.
HERE = ("gqa decode 16", "experts train")


@pytest.mark.any_jax
@pytest.mark.parametrize("name", HERE)
def test_steps_keep_their_state_and_have_products(name):
    program = programs.PROGRAMS[name](model_step.TINY)
    state, _ = jax.eval_shape(program.step, program.state, *program.inputs)
    before, after = (jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (program.state, state))
    assert before == after
    assert len(fuse(program.step).report(program.state, *program.inputs)) > 10


@pytest.mark.nightly
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_under_fuse(name):
    row = models.measure(name, fused_first=False, tiny=True, rounds=1)
    assert "error" not in row
    if "note" in row:
        pytest.skip(row["note"])
    assert row["ratio"] > 0


def test_rows_become_a_table(monkeypatch, tmp_path, capsys):
    rows = {
        "a train": {"jit_ms": 3.0, "fuse_ms": 2.0, "ratio": 1.5},
        "b train": {"jit_ms": 1.0, "fuse_ms": 2.0, "ratio": 0.5},
        "c decode": {"note": "not installed: c"},
        "d decode": {"error": "differs"},
    }
    more = {"jit_first_s": 1.0, "fuse_first_s": 2.0, "jit_temporaries": 1e6, "fuse_temporaries": 0}
    asked = []

    def run(name, fused_first, tiny):
        asked.append(fused_first)
        row = rows[name]
        return {"suite": "models", "case": name, **row, **(more if "ratio" in row else {})}

    monkeypatch.setattr(models, "PROGRAMS", rows)
    monkeypatch.setattr(models, "_in_a_process", run)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    out = tmp_path / "out.json"
    assert models.main(["--out", str(out), "--commit", "abc"]) == 1
    assert asked == [False, True, False, True]
    assert len(json.loads(out.read_text())["rows"]) == 4
    shown = capsys.readouterr().out
    assert "train: geometric mean 0.866 of 2, least 0.500" in shown
    assert "not installed: c" in shown
    assert "decode:" not in shown
    monkeypatch.setattr(models, "PROGRAMS", {"a train": None})
    assert models.main([]) == 0


def test_what_is_not_installed_is_left_out(monkeypatch):
    def missing(sizes):
        raise ModuleNotFoundError("no", name="transformers")

    monkeypatch.setitem(models.PROGRAMS, "gpt2 train", missing)
    row = models.measure("gpt2 train", fused_first=False)
    assert row["note"] == "not installed: transformers"
