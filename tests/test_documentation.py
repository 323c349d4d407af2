"""The pages: their code runs, and their links lead somewhere."""

import importlib.util
import os
import pathlib
import re
from collections.abc import Iterator

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
    for page in (*PAGES, *ROOT.glob("lab/*.md")):
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


@pytest.mark.any_jax
def test_readme_runs():
    names: dict[str, object] = {}
    for block in BLOCK.findall((ROOT / "README.md").read_text()):
        exec(compile(block, "README.md", "exec"), names)
    assert names["ys"].shape == (2, 512, 2048)
    assert names["y"].dtype == names["grads"].dtype == jnp.bfloat16
    assert 0 < names["loss"] < 1


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
    names: dict[str, object] = {"folder": tmp_path}
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
@pytest.mark.parametrize(
    "page",
    [
        *("transformations", "experts", "float8_training", "export"),
        *("epilogues", "fusion", "precision", "sharding"),
    ],
)
def test_the_guide_runs(page):
    if page == "export":
        pytest.importorskip("flatbuffers")
    names: dict[str, object] = {}
    blocks = BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert blocks
    for block in blocks:
        if "tools.profile" not in block:  # needs a GPU
            exec(compile(block, f"{page}.md", "exec"), names)
    results = [names[name] for name in ("d", "y", "dw", "loss") if name in names]
    assert results
    # A loss may also be a function.
    assert all(callable(x) or np.isfinite(np.asarray(x, np.float32)).all() for x in results)


def _pictures() -> Iterator[tuple[pathlib.Path, str]]:
    """Yields each picture of the pages with its HTML."""
    for page in PAGES:
        for text in re.findall(r"<picture>.*?</picture>", page.read_text(), re.DOTALL):
            yield page, text


@pytest.mark.any_jax
def test_pictures_have_two_forms_and_a_description():
    found = list(_pictures())
    assert len(found) >= 5
    for page, text in found:
        dark, alt, light = re.findall(r'(?:srcset|alt|src)="([^"]*)"', text)
        assert dark == light.replace("-light.svg", "-dark.svg")
        assert (page.parent / dark).is_file()
        assert (page.parent / light).is_file()
        assert len(alt) > 20
    assert not [page for page in PAGES if re.search(r"!\[[^\]]*\]\(", page.read_text())]


@pytest.mark.any_jax
def test_pictures_are_those_of_the_script(tmp_path):
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "pictures" / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    draw.main(tmp_path)
    written = sorted(tmp_path.iterdir())
    assert len(written) == 2 * len(draw.PICTURES)
    for file in written:
        assert file.read_text() == (ROOT / "docs" / "pictures" / file.name).read_text()
    # Every tile once, and the last group may have fewer rows.
    order = list(draw.raster(5, 3, 2))
    assert sorted(order) == [(i, j) for i in range(5) for j in range(3)]
    assert order[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert order[-3:] == [(4, 0), (4, 1), (4, 2)]


@pytest.mark.any_jax
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_python(page):
    for block in BLOCK.findall(page.read_text()):
        compile(block, str(page), "exec")
