"""Each public name has an example, and the examples run."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checkpoint_files import Drawn, gptq, named, save
from test_prose import ROOT

import jax_tcgemm
from jax_tcgemm import Tunings, checkpoints

pytestmark = pytest.mark.any_jax

DOCUMENTED: dict[str, Any] = {
    name: public for name in jax_tcgemm.__all__ if callable(public := getattr(jax_tcgemm, name))
} | {"checkpoints.load": checkpoints.load}
CONSTANTS = [name for name in jax_tcgemm.__all__ if isinstance(getattr(jax_tcgemm, name), str)]
EXAMPLE = re.compile(r"^Example:\n((?:    .*\n|\n)+)", re.MULTILINE)
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def _example(public: Any) -> str:
    """Returns the section `Example` of a docstring, or an empty text."""
    found = EXAMPLE.search(inspect.cleandoc(public.__doc__ or "") + "\n")
    return found.group(1) if found else ""


def _train_step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.square(batch @ w).mean())(state)
    return state - 0.1 * gradient, loss


def _tune(f: Callable[..., Any], *args: Any, **options: Any) -> Tunings:
    """Stands for `tune`, which needs a GPU."""
    inspect.signature(jax_tcgemm.tune).bind(f, *args, **options)
    jax.eval_shape(f, *args)
    return Tunings()


@pytest.fixture
def names(normal, rng, tmp_path) -> dict[str, Any]:
    """Returns the names that the examples take for granted."""

    def drawn(*shape: int) -> jax.Array:
        return normal(*shape, dtype=jnp.bfloat16)

    public = {name: getattr(jax_tcgemm, name) for name in jax_tcgemm.__all__}
    return public | {
        "jax": jax,
        "jnp": jnp,
        "x": drawn(8, 128),
        "w": drawn(128, 256),
        "w_gate": drawn(128, 256),
        "w_up": drawn(128, 256),
        "w_down": drawn(256, 128),
        "b": drawn(256),
        "expert_w": drawn(2, 128, 256),
        "expert_w_gate": drawn(2, 128, 256),
        "expert_w_up": drawn(2, 128, 256),
        "train_step": _train_step,
        "state": drawn(128, 16),
        "batch": drawn(8, 128),
        "tune": _tune,
        "path": tmp_path / "tunings.json",
        "folder": tmp_path,
    }


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_run(name, names, rng, tmp_path):
    if name == "checkpoints.load":
        pytest.importorskip("safetensors")
        tensors, config = gptq(Drawn(rng, 128, 64, 128, symmetric=True))
        save(tmp_path, named(tensors), config)
    test = doctest.DocTestParser().get_doctest(
        _example(DOCUMENTED[name]), names, name, filename=None, lineno=0
    )
    assert test.examples, f"{name} has no section Example"
    assert len(_example(DOCUMENTED[name]).strip().splitlines()) <= 6
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


def test_examples_of_constants_run(names, capsys):
    blocks = BLOCK.findall((ROOT / "docs" / "reference.md").read_text())
    for name in CONSTANTS:
        assert any(name in block for block in blocks), f"{name} has no example"
    for block in blocks:
        exec(compile(block, "reference.md", "exec"), names)
    assert capsys.readouterr().out.split() == [jax_tcgemm.__version__]


def test_failures_are_found(names):
    assert not _example(_train_step)
    test = doctest.DocTestParser().get_doctest(">>> x.shape\n(8, 127)\n", names, "", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed == 1
