"""The plugin that rewrites programs of other projects' tests, and its report."""

from __future__ import annotations

import json
import sys

import jax_own_tests
import pytest

pytestmark = pytest.mark.any_jax

# Contents of a test file as JAX's own.
TESTS = """
import jax
import jax.numpy as jnp


def test_a_region():
    x = jnp.ones((128, 128), jnp.bfloat16)
    assert jax.jit(lambda x: jax.nn.gelu(x @ x + 1))(x).shape == x.shape


def test_fails_in_any_case():
    assert False


def test_an_inner_jit_and_eager_operations():
    x = jnp.arange(12.0).reshape(3, 4)
    inner = jax.jit(lambda x, y: x @ y)
    assert float(jax.jit(lambda x: inner(x, x.T).sum())(x)) == float((x @ x.T).sum())
"""


@pytest.mark.nightly
def test_both_runs_and_their_difference(tmp_path, monkeypatch, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "own_test.py").write_text(TESTS)
    outcomes = tmp_path / "outcomes"
    arguments = [str(tmp_path), "--files", "own_test", "--keep", str(outcomes)]
    monkeypatch.setattr(sys, "argv", ["jax_own_tests.py", *arguments])
    assert jax_own_tests.main() == 0
    printed = capsys.readouterr().out
    assert "without: 1 failed, 2 passed" in printed
    assert "with fuse: 1 failed, 2 passed" in printed
    assert "failures that fuse causes: 0" in printed
    fused = json.loads((outcomes / "fused.json").read_text())
    assert fused["counts"]["regions"] >= 1
    assert fused["counts"]["programs"] > fused["counts"]["products"] >= 1
    assert not json.loads((outcomes / "plain.json").read_text())["counts"]


def _of(**outcomes):
    return {
        "outcomes": {
            name: {"outcome": "failed" if message else "passed", "message": message}
            for name, message in outcomes.items()
        }
    }


def test_what_counts_as_caused_by_fuse():
    plain = _of(a="", b="already", c="")
    fused = _of(a="KeyError: Value(3)", b="still", c="", new="only there")
    assert jax_own_tests.failures(plain, fused) == {
        "a": "KeyError: Value(3)",
        "new": "only there",
    }
    assert jax_own_tests.is_rounding("Not equal to tolerance\n ACTUAL: array([1], dtype=bfloat16)")
    assert not jax_own_tests.is_rounding("Not equal to tolerance\n ACTUAL: array([1.], float32)")
    assert not jax_own_tests.is_rounding("TypeError: bfloat16")
    counted = "tests/api_test.py::APITest::test_eval_shape_trace_cache_share"
    assert jax_own_tests.kind_of(counted, "5 != 1") == "counts of traces"
    assert jax_own_tests.kind_of("tests/a.py::test_b", "5 != 1") == "failures that fuse causes"
