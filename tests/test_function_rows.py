"""Functions as epilogues of every kind of row: choices and compilation, without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_epilogues
from kernel_rows import rank_rows

from jax_tcgemm import _core, gated_gemm, gemm
from jax_tcgemm.epilogue import compiler, function, translation
from jax_tcgemm.kernels import table
from jax_tcgemm.kernels.choice_input import ChoiceInput
from jax_tcgemm.lowering import jit_epilogue, jit_rows, jit_source
from jax_tcgemm.transforms import tune as tune_module
from jax_tcgemm.transforms.candidates import candidates, rows_of_relative

_H200 = {"sm_count": 132, "shared_memory_per_block": 232448, "compute_capability": 90}
_KINDS = {
    "tf32": lambda row: row.arch == "sm90" and row.tag == "tf32",
    "swapped": lambda row: row.swap_ab,
    "skinny": lambda row: row.skinny,
    "sm80": lambda row: row.arch == "sm80",
    "others": lambda row: (
        row.arch == "sm90" and not (row.tag == "tf32" or row.swap_ab or row.skinny)
    ),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_rows_compile_with_a_function(rng, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    rows = [row for row in table.CONFIGS if _KINDS[kind](row)]
    rows = [x for x in rows if _core.row_facts(x.name).takes_functions and not x.gated]
    assert len(rows) > 5
    for i in rng.choice(len(rows), min(6, len(rows)), replace=False):
        row = rows[i]
        layouts = ["nn", "nt"] if row.swap_ab else ["nn", "nt", "tn", "tt"]
        epilogue = random_epilogues.draw_smooth(int(rng.integers(2**31)))
        # Earlier GPUs convert no float8.
        capability = int(rng.choice([89, 90, 100, 120])) if row.arch == "sm80" else 90
        layout = str(rng.choice(layouts))
        what = random_epilogues.compiles(epilogue, row.name, layout, capability)
        assert what is None, (row.name, what)


def test_functions_without_float8_compile_for_ampere(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    types = [jax.ShapeDtypeStruct((96, 64), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.bfloat16)]
    f = lambda z, bias: (jax.nn.gelu(z + bias).astype(jnp.bfloat16), z.max(0))  # noqa: E731
    translated = translation.translate(function.trace(f, types, 1)[0])
    strides = [leaf.strides(2) for leaf in translated.leaves]
    text = jit_source.source_of(translated, strides, 64, batched=False)
    for tag in ("bf16", "f16", "tf32"):
        (row, *_) = (x for x in table.CONFIGS if x.arch == "sm80" and x.tag == tag)
        for capability in (80, 86):
            assert compiler.compile_kernel(text, row.name, "nt", capability=capability)


def test_sums_that_show_are_promoted_on_other_gpus():
    ranked = [
        rank_rows(
            "BF16_BF16_F32", 2048, 4096, 4096, 1, True, 108, 166912,
            compute_capability=80, epilogue="any", compiled=True, shows_sums=wide,
        )
        for wide in (False, True)
    ]  # fmt: skip
    for wide, rows in enumerate(ranked):
        assert rows
        assert {table.BY_NAME[name].arch for name, _, _ in rows} == {"sm80"}
        assert {table.BY_NAME[name].promote for name, _, _ in rows} == {bool(wide)}


def test_hopper_takes_sm80_rows_by_name_alone():
    (name, *_) = (x.name for x in table.CONFIGS if x.arch == "sm80" and x.tag == "bf16")
    assert all(row.arch == "sm90" for row in _rows(512, 512, 512))
    choice = ChoiceInput(
        "BF16_BF16_F32", 512, 512, 512, 1, True, 132, 232448,
        compute_capability=90, epilogue="any", compiled=True,
    )  # fmt: skip
    assert [row for row, _, _ in _core.rank_configs(choice, config=name)] == [name]


def _rows(m, n, k, algorithm="BF16_BF16_F32", **more):
    ranked = rank_rows(
        algorithm, m, n, k, 1, True, 132, 232448,
        compute_capability=90, epilogue="any", compiled=True, **more,
    )  # fmt: skip
    return [table.BY_NAME[name] for name, _, _ in ranked]


def _divides_blocks(row):
    """Checks if thread blocks share 16 x 16 results, so that none can reduce them."""
    facts = _core.row_facts(row.name)
    return facts.takes_functions and not facts.takes_reductions


def test_rows_of_two_weights_compile(rng, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    rows = [row for row in table.CONFIGS if row.gated and row.skinny]
    product = jax.ShapeDtypeStruct((24, 64), jnp.float32)
    bias = jax.ShapeDtypeStruct((64,), jnp.bfloat16)

    def gate(z, u, bias):
        y = jax.nn.silu(z + bias) * u
        return [y.astype(jnp.bfloat16), z.astype(jnp.bfloat16), y]

    made, _ = function.trace(gate, [product, product, bias], 2)
    translated = translation.translate(made)
    strides = [(0, *leaf.strides(2)) for leaf in translated.leaves]
    text = jit_source.source_of(translated, strides, 64, batched=True, scaled=False)
    for i in rng.choice(len(rows), 3, replace=False):
        layout = str(rng.choice(["nn", "nt", "tn", "tt"]))
        assert compiler.compile_kernel(text, rows[i].name, layout), rows[i].name


def test_elements_of_a_batch_are_read_by_little_code(tmp_path, monkeypatch):
    """The offset of a batch takes 130 instructions, once for each operand."""
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    values = [jax.ShapeDtypeStruct((96, 64), jnp.float32)] * 5
    made, _ = function.trace(lambda z, *others: jnp.bfloat16(sum(others, z)), values, 1)
    translated = translation.translate(made)
    sizes = []
    for batch in (False, True):
        strides = [(0,) * batch + leaf.strides(2) for leaf in translated.leaves]
        text = jit_source.source_of(translated, strides, 64, batched=batch)
        sizes.append(len(compiler.compile_kernel(text, "sm90_bf16_64x16x64_s8_c1x1_skinny", "nt")))
    assert sizes[1] < 2 * sizes[0], sizes


@pytest.mark.parametrize("m", [1, 16, 40, 64])
def test_few_rows_of_two_weights_take_skinny_rows(m):
    rows = _rows(m, 4096, 4096, gated=True)
    assert rows[0].skinny
    assert all(row.gated for row in rows)
    # A tile goes along the columns of both weights, so there must not be fewer of those.
    assert not any(row.skinny for row in _rows(4096, m, 4096, gated=True))
    assert not any(
        row.skinny and _divides_blocks(row)
        for row in _rows(m, 4096, 4096, gated=True, reduces=True)
    )


@pytest.mark.parametrize("m", [1, 16, 40])
def test_few_rows_take_skinny_rows(m):
    rows = _rows(m, 4096, 4096)
    assert rows[0].skinny
    assert any(_divides_blocks(row) for row in rows)
    assert not any(_divides_blocks(row) for row in _rows(m, 4096, 4096, reduces=True))


@pytest.mark.parametrize("algorithm", ["S8_S8_S32", "E4M3_E4M3_F32_FAST"])
def test_rows_of_8_bits_are_skinny_for_few_rows_alone(algorithm):
    """The choices are the fastest rows that were timed on an H200, or up to 11 % slower."""

    def tile(*shape):
        row = _rows(*shape, algorithm, layout="nt")[0]
        return (row.tile_n, row.split_k) if row.skinny else None

    assert tile(16, 14336, 4096) == (16, 1)
    assert tile(16, 4096, 14336) == (16, 2)
    assert tile(32, 4096, 4096) == tile(4096, 32, 4096) == (32, 2)
    assert tile(64, 4096, 14336) == (64, 2)
    assert tile(64, 14336, 4096) is None
    for m, n, k in ((65, 65, 4096), (256, 1024, 4096), (512, 512, 1024)):
        assert not any(row.skinny for row in _rows(m, n, k, algorithm, layout="nt"))


def test_few_measured_rows_are_of_both_kinds():
    operands = (jax.ShapeDtypeStruct(shape, jnp.int8) for shape in ((16, 4096), (4096, 4096)))
    scale = jax.ShapeDtypeStruct((16,), jnp.float32)
    options = {"transpose_b": True, "preferred_element_type": "bfloat16"}
    scaled = lambda a, b, s: gemm(a, b, row_scale=s, **options)  # noqa: E731
    (product,) = tune_module.find_products(scaled, *operands, scale)
    names = candidates(product, _H200, 3)
    assert [table.BY_NAME[name].skinny for name in names] == [True, True, False]


def test_float32_takes_rows_in_tf32():
    rows = _rows(512, 512, 512, "TF32_TF32_F32")
    assert rows
    assert {row.tag for row in rows} == {"tf32"}


def _lowered(function, *shapes, dtype):
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("precision", [None, "highest"])
def test_float32_products_have_a_compiled_epilogue(precision):
    f = lambda a, b: gemm(a, b, epilogue=jnp.sin, precision=precision)  # noqa: E731
    text = _lowered(f, (256, 128), (128, 192), dtype=jnp.float32)
    assert ("compiled_gemm" in text) == (precision is None)


def test_float32_has_no_function_of_two_weights():
    f = lambda g, u: jnp.tanh(g) * u  # noqa: E731
    for weights in ([(128, 192)] * 2, [(128, 384)]):
        run = lambda a, *w: gated_gemm(a, *w, epilogue=f)  # noqa: E731
        assert "compiled_gemm" not in _lowered(run, (256, 128), *weights, dtype=jnp.float32)
        assert "compiled_gemm" in _lowered(run, (256, 128), *weights, dtype=jnp.bfloat16)


def test_another_row_takes_the_place_of_one_that_divides_blocks():
    (row, *_) = [row for row in table.CONFIGS if _divides_blocks(row) and row.tag == "bf16"]
    for f in (jnp.sin, lambda z: (jnp.sin(z), z.max(0))):
        run = lambda a, b, f=f: gemm(a, b, epilogue=f, config=row.name)  # noqa: E731
        text = _lowered(run, (16, 512), (512, 256), dtype=jnp.bfloat16)
        assert "compiled_gemm" in text


@pytest.mark.parametrize("count", [3, 4])
def test_more_results_than_a_warp_has_room_for(count):
    f = lambda z: [jnp.sin(z + i) for i in range(count)]  # noqa: E731
    text = _lowered(lambda a, b: gemm(a, b, epilogue=f), (256, 64), (64, 192), dtype=jnp.float32)
    assert ("compiled_gemm" in text) == (count == 3)


@pytest.mark.parametrize("m", [8, 64])
@pytest.mark.parametrize("count", [3, 6])
def test_results_of_8_bit_rows_have_room(monkeypatch, m, count):
    """Rows that read weights in place have less room; with more results, others take over."""
    plans = []

    def keep(spec, plan, _inner=jit_epilogue._call_or_reason):
        plans.append((spec, plan))
        return _inner(spec, plan)

    monkeypatch.setattr(jit_epilogue, "_call_or_reason", keep)
    f = lambda z: [jnp.sin(z + i) for i in range(count)]  # noqa: E731
    run = lambda a, b: gemm(a, b, epilogue=f)  # noqa: E731
    text = _lowered(run, (m, 512), (512, 1024), dtype=jnp.float8_e4m3fn)
    ((spec, plan),) = plans
    assert isinstance(plan, str) != ("compiled_gemm" in text)
    if not isinstance(plan, str):
        assert jit_rows.ranked_rows(plan, spec, _H200)


def test_one_row_of_each_batch_is_folded():
    def f(z, r, s):
        return jnp.tanh(z * s + r)

    shapes = [(8, 1, 512), (512, 1024), (8, 1, 1024), (8, 1, 1)]
    run = lambda a, b, *x: gemm(a, b, epilogue=f, epilogue_operands=x)  # noqa: E731
    text = _lowered(run, *shapes, dtype=jnp.bfloat16)
    assert "m = 8 : i64" in text
    assert "batch_shape = array<i64>" in text or "batch_shape = dense<>" in text
    shapes[0] = (4, 2, 1, 512)
    shapes[2:] = [(4, 2, 1, 1024), (4, 1, 1, 1)]  # does not fold into one row dimension
    assert "m = 2 : i64" in _lowered(run, *shapes, dtype=jnp.bfloat16)


def test_small_batches_are_xlas_unless_a_kernel_is_asked_for():
    shapes = (128, 8, 64), (128, 64, 64)
    f = lambda a, b, **options: gemm(a, b, epilogue=jnp.tanh, **options)  # noqa: E731
    assert "compiled_gemm" not in _lowered(f, *shapes, dtype=jnp.bfloat16)
    strict = lambda a, b: f(a, b, config="kernel")  # noqa: E731
    assert "compiled_gemm" in _lowered(strict, *shapes, dtype=jnp.bfloat16)


def test_sums_that_show_are_promoted():
    for m, n, more in (
        (48, 8192, {}),
        (768, 64, {"gated": True}),
        (512, 1024, {"gated": True}),
    ):
        rows = _rows(m, n, 4096, shows_sums=True, **more)
        assert all(row.promote for row in rows[:8]), (m, n)
        assert not all(row.promote for row in _rows(m, n, 4096, **more)[:8])
    rows = _rows(4096, 4096, 4096, shows_sums=True, gated=True)
    assert not any(row.promote for row in rows)


@pytest.mark.parametrize(
    ("f", "shows"),
    [
        (jnp.sin, True),
        (lambda z: jnp.sin(z).astype(jnp.bfloat16), False),
        (lambda z: (z.astype(jnp.bfloat16), z.max(0)), True),
        (lambda z: (y := z.astype(jnp.bfloat16), (y.astype(jnp.float32) ** 2).sum(-1)), False),
        (lambda z: jnp.sin(z.astype(jnp.bfloat16)).astype(jnp.float32), False),
    ],
)
def test_sums_do_not_show_behind_a_rounding(f, shows):
    product = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    made, _ = function.trace(f, [product], 1)
    assert translation.translate(made).shows_sums == shows


@pytest.mark.parametrize(
    "f", [jnp.sin, lambda z: jnp.sin(z).astype(jnp.bfloat16), lambda z: (jnp.sin(z), z.max(0))]
)
@pytest.mark.parametrize("shape", [(16, 256, 512), (64, 512, 8192), (512, 4096, 512)])
def test_rows_of_the_plain_product_compute_the_function_as_accurately(f, shape):
    m, k, n = shape
    types = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((m, k), (k, n))]
    (product,) = tune_module.find_products(lambda a, b: gemm(a, b, epilogue=f), *types)
    every = [row.name for row in table.CONFIGS if row.tag == "bf16"]
    names = rows_of_relative(product, [*every, f"{every[0]}/splits=2"], _H200)
    rows = [table.BY_NAME[name] for name in names]
    assert rows
    results = jax.tree.leaves(jax.eval_shape(f, jax.ShapeDtypeStruct((m, n), jnp.float32)))
    is_wide = any(x.dtype.itemsize > 2 for x in results)
    for row in rows:
        facts = _core.row_facts(row.name)
        assert facts.takes_reductions if len(results) > 1 else facts.takes_functions
        assert row.promote or not (is_wide and m <= 64)


def test_values_of_float32_and_of_few_rows(normal):
    bias = normal(72)
    f = lambda z, c: (jnp.tanh(z + c), z.sum(0))  # noqa: E731
    for m, dtype in ((96, jnp.float32), (5, jnp.bfloat16)):
        a, b = normal(m, 64, dtype=dtype), normal(64, 72, dtype=dtype)
        got = jax.jit(lambda a, b: gemm(a, b, epilogue=f, epilogue_operands=(bias,)))(a, b)
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        for x, y in zip(got, f(jnp.asarray(exact, jnp.float32), bias), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * float(np.abs(exact).max()))
