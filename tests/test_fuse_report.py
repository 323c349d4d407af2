"""The contents of ``fuse(f).report`` for a function's products."""

from __future__ import annotations

import html.parser
import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

from jax_tcgemm import fuse
from jax_tcgemm.transforms.report import Decision, Report

M, K, N = 128, 96, 160


def layer(x, w, b, v):
    y = jax.nn.relu(x @ w + b)
    return (y @ v).max(1), jnp.einsum("bij,bjk->bik", x[None], w[None])


@pytest.fixture
def arrays(normal):
    shapes = (M, K), (K, N), (N,), (N, 80)
    return [normal(*shape, dtype=jnp.bfloat16) for shape in shapes]


def test_each_product_once(arrays):
    report = fuse(layer).report(*arrays)
    first, second, third = report
    assert first.product == "bfloat16[128,96], bfloat16[96,160] -> bfloat16[128,160]"
    assert first.way == "kernel with epilogue"
    assert first.reason.startswith("1 result: ")
    # XLA would write the product and read it once more.
    assert first.saved_bytes == 2 * 2 * M * N
    assert (second.way, second.reason, second.saved_bytes) == ("kernel", "", 0)
    assert third.way == "XLA"
    assert "a batch of products" in third.reason
    place = pathlib.Path(__file__).name
    assert all(place in each.source and "layer" in each.source for each in report)
    assert repr(report) == "<Report of 3 products: 1 with an epilogue, 1 by XLA>"
    assert report[0] is first
    assert len(report[1:]) == 2


def test_types_will_do_and_nothing_is_run(arrays):
    ran = []

    def f(x, w, options, *, scale):
        jax.debug.callback(lambda: ran.append(1))
        assert options == {"name": "a"}
        return scale * (x @ w)

    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:2]]
    of_types = fuse(f).report(*types, {"name": "a"}, scale=2.0)
    of_arrays = fuse(f).report(*arrays[:2], {"name": "a"}, scale=2.0)
    assert list(of_types) == list(of_arrays)
    jax.effects_barrier()
    assert ran == []


def test_nothing_is_changed_in_place(arrays):
    def f(state, w):
        state["x"] = state["x"] @ w

    state = {"x": arrays[0]}
    assert len(fuse(f).report(state, arrays[1])) == 1
    assert state["x"] is arrays[0]
    fuse(f)(state, arrays[1])
    assert state["x"].shape == (M, N)


def test_objects_of_nnx_stay_as_they_are():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(K, N, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    before = model.kernel[...]

    def step(model, x):
        model.kernel[...] = model.kernel[...] * 2
        return model(x)

    x = jnp.ones((M, K), jnp.bfloat16)
    assert len(fuse(step).report(model, x)) == 1
    assert (model.kernel[...] == before).all()
    fuse(step)(model, x)
    assert (model.kernel[...] == 2 * before).all()


def test_bodies_of_loops(arrays):
    x, w = arrays[0], arrays[1][:, :K]

    def f(x):
        return jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=7)[0]

    (only,) = fuse(f).report(x)
    assert only.way == "kernel with epilogue"


def test_tables(arrays):
    def twice(*args):
        return [layer(*args) for _ in range(2)]

    report = fuse(twice).report(*arrays)
    head, *rows = str(report).splitlines()
    assert head.split() == ["count", "product", "computed", "by", "because", "saves", "where"]
    assert [row.split()[0] for row in rows] == ["2"] * 3
    cells: list[str] = []

    class Parser(html.parser.HTMLParser):
        def handle_data(self, data):
            cells.append(data)

    Parser().feed(report._repr_html_())
    shown = [cell for cell in cells if len(cell) < 60 and os.sep not in cell]
    assert len(shown) > 12
    assert all(any(cell in row for row in (head, *rows)) for cell in shown)
    assert "bfloat16[128,96], bfloat16[96,160] -> bfloat16[128,160]" in cells
    assert str(fuse(lambda x: x + 1).report(arrays[0])).count("\n") == 0


def test_printed_cells_are_short(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    long = "1 result: " + " ".join(f"operation_{i}" for i in range(50))
    sources = [
        f"{tmp_path}/model.py:3:4 (f)",
        "/venv/lib/python3.12/site-packages/flax/nn.py:7:8 (g)",
    ]
    report = Report([Decision("a, b -> c", "kernel", long, 0, source) for source in sources])
    _, first, second = str(report).splitlines()
    assert first.endswith("operation_3 ...         model.py:3:4 (f)")
    assert second.endswith("         flax/nn.py:7:8 (g)")
    assert long in report._repr_html_()
    assert report[0].reason == long


def test_a_body_counts_as_often_as_it_is_called(arrays):
    x, w = arrays[0], arrays[1][:, :K]
    layer = jax.checkpoint(lambda x: jnp.tanh(x @ w))

    def f(x):
        return layer(layer(layer(x)))

    assert len(fuse(f).report(x)) == 3


def test_products_that_stay_as_they_are(arrays):
    @jax.custom_vjp
    def by_hand(x, w):
        return x @ w

    by_hand.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, y: (y @ kept[1].T, kept[0].T @ y))

    def f(x, w):
        return by_hand(x, w), x.astype(jnp.int32) @ w.astype(jnp.int32)

    inside, of_integers = fuse(f).report(*arrays[:2])
    assert inside.way == of_integers.way == "XLA"
    assert inside.reason.startswith("within custom_vjp")
    assert of_integers.reason == "no kernel for such types or extents"


def test_an_extent_of_zero(arrays):
    (only,) = fuse(jnp.matmul).report(arrays[0][:0], arrays[1])
    assert only.way == "XLA"


def test_products_that_round_one_operand_are_kernels(normal):
    """The scores' cotangent of ``jax.nn.dot_product_attention`` is written in bfloat16, once."""
    x = normal(1, 128, 2, 64, dtype=jnp.bfloat16)

    def loss(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation="xla").astype(float).sum()

    report = fuse(jax.grad(loss, (0, 1, 2))).report(x, x, x)
    ways = [(each.product.startswith("float32[1,2,128,1,128]"), each.way) for each in report]
    assert sorted(ways) == [(False, "XLA")] * 3 + [(True, "kernel")] * 2
    only_one = fuse(jax.grad(loss)).report(x, x, x)
    assert {each.way for each in only_one} == {"XLA"}
