"""The pages: their code runs, and their links lead somewhere."""

import importlib.util
import os
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import Drawn, gptq, named, save
from test_prose import PAGES, ROOT

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads this when it is imported

LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(#[^)\s]*)?\)")
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
MARKED_BLOCK = re.compile(r"(?:<!-- needs (\w+) -->\n)?```python\n(.*?)```", re.DOTALL)


def _anchor(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return text.replace(" ", "-")


def _links() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target, anchor in LINK.findall(text):
            other = (page.parent / target).resolve() if target else page
            where = f"{page.relative_to(ROOT)} -> {target}{anchor}"
            if not other.exists():
                yield where, "no such file"
            elif anchor and other.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
                if anchor[1:] not in map(_anchor, headings):
                    yield where, "no such heading"


@pytest.mark.any_jax
def test_links_lead_somewhere():
    assert not dict(_links())


def _names() -> dict[str, object]:
    """Returns the arrays that the pages take for granted."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    def train_step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.square(batch @ w).mean())(state)
        return state - 0.1 * gradient, loss

    return {
        "x": drawn(16, 128),
        "w": drawn(128, 16),
        "c": drawn(16, 16),
        "b": drawn(16),
        "bias": drawn(16),
        "residual": drawn(16, 16),
        "w_gate": drawn(128, 16),
        "w_up": drawn(128, 16),
        "expert_w": drawn(2, 128, 16),
        "stack_of_w": drawn(3, 128, 16),
        "group_sizes": jnp.array([9, 7], jnp.int32),
        "train_step": train_step,
        "state": drawn(128, 16),
        "batch": drawn(16, 128),
    }


@pytest.mark.any_jax
def test_readme_runs():
    names = _names()
    for block in BLOCK.findall((ROOT / "README.md").read_text()):
        exec(compile(block, "README.md", "exec"), names)
    assert names["ys"].shape == (3, 16, 16)
    assert names["y"].dtype == jnp.bfloat16


@pytest.mark.any_jax
def test_the_first_page_runs(capsys):
    names: dict[str, object] = {}
    for block in BLOCK.findall((ROOT / "docs" / "start.md").read_text()):
        exec(compile(block, "start.md", "exec"), names)
    said = capsys.readouterr().out
    assert "computed by" in said
    assert "swish" in said


@pytest.mark.any_jax
@pytest.mark.filterwarnings("default")  # of the libraries
def test_the_page_of_quantization_runs(rng, tmp_path):
    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    matrices = {name: drawn(256, 64) for name in ("w", "w_gate", "w_up")}
    names = {**matrices, "x": drawn(16, 256), "bias": drawn(64), "c": drawn(8, 256)}
    names["folder"] = tmp_path
    missing = set()
    for needed, block in MARKED_BLOCK.findall((ROOT / "docs" / "quantization.md").read_text()):
        if needed and importlib.util.find_spec(needed) is None:
            missing.add(needed)
            continue
        if needed == "safetensors":
            weight = Drawn(rng, 256, 64, 128, symmetric=True)
            tensors, config = gptq(weight)
            save(tmp_path, named(tensors), config)
        exec(compile(block, "quantization.md", "exec"), names)
        if needed == "safetensors":
            a = jnp.asarray(names["x"], jnp.float32)
            np.testing.assert_allclose(names["y"], a @ weight.array, rtol=0.1, atol=2)
    assert missing <= {"flax", "keras", "qwix", "safetensors"}
    assert names["dw"].shape == (256, 64)


@pytest.mark.any_jax
@pytest.mark.filterwarnings("default")  # of the libraries
def test_the_page_of_frameworks_runs(capsys):
    pytest.importorskip("optax")
    names: dict[str, object] = {}
    missing, losses = set(), []
    for needed, block in MARKED_BLOCK.findall((ROOT / "docs" / "frameworks.md").read_text()):
        if needed and importlib.util.find_spec(needed) is None:
            missing.add(needed)
            continue
        exec(compile(block, "frameworks.md", "exec"), names)
        if (loss := names.pop("loss", None)) is not None:
            losses.append(float(loss))
    assert missing <= {"flax", "equinox", "haiku", "keras"}
    assert "computed by" in capsys.readouterr().out
    assert losses
    assert all(1 < loss < 10 for loss in losses)  # untrained, 32 classes: about log(32)


@pytest.mark.any_jax
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_python(page):
    for block in BLOCK.findall(page.read_text()):
        compile(block, str(page), "exec")
