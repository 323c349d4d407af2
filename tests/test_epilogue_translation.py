"""User functions as C++: what is translated, what it becomes, and that NVRTC compiles it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_epilogues
from jax import lax
from nightly import slow

from jax_tcgemm.epilogue import compiler, cubins, function, nvrtc, operations, translation
from jax_tcgemm.kernels import table
from jax_tcgemm.lowering import jit_epilogue as lowering

pytestmark = pytest.mark.any_jax


BF16 = jnp.bfloat16


def _traced(f, *operands, shape=(64, 64), accumulators=1):
    products = [jax.ShapeDtypeStruct(shape, jnp.float32)] * accumulators
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    made, _ = function.trace(lambda *x: jax.tree.leaves(f(*x)), [*products, *types], accumulators)
    return made


def _leaves(f, *operands, **options):
    made = translation.translate(_traced(f, *operands, **options))
    assert not isinstance(made, str), made
    return [leaf.index for leaf in made.leaves]


def test_axes_come_from_broadcasting_not_from_shapes():
    vector = jnp.ones(64)
    assert _leaves(lambda acc, x: acc + x, vector) == [(1,)]
    assert _leaves(lambda acc, x: acc + x[:, None], vector) == [(0,)]
    assert _leaves(lambda acc, x: acc + x.T, jnp.ones((64, 64))) == [(1, 0)]
    assert _leaves(lambda acc, x: acc + x + x[:, None], vector) == [(1,), (0,)]
    assert _leaves(lambda acc, x: acc + x.reshape(1, 64), vector) == [(1,)]


def test_equal_functions_are_one_key():
    def make():
        return _traced(lambda acc, x: jax.nn.gelu(acc + x), jnp.ones(64))

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != _traced(lambda acc, x: jax.nn.gelu(acc - x), jnp.ones(64))


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda acc: jax.nn.softmax(acc), "reduce_max within"),
        (lambda acc: jnp.sort(acc), "sort"),
        (lambda acc: acc[::-1], "rev"),
        (lambda acc: jnp.cumsum(acc, 0), "cumsum"),
        (lambda acc: acc.sum(0), "0 results of the product's shape"),
        (lambda acc: lax.complex(acc, acc), "complex64"),
    ],
)
def test_what_is_not_translated_says_so(f, reason):
    made = translation.translate(_traced(f))
    assert isinstance(made, str)
    assert reason in made


def test_what_is_known_before_is_computed_before():
    def f(acc, x):
        return acc * jnp.sort(x)

    made = translation.translate(_traced(f, jnp.arange(64.0)))
    assert not isinstance(made, str)
    (sorted_,) = made.known([jnp.arange(64.0)[::-1]])
    np.testing.assert_array_equal(sorted_, np.arange(64.0))


def _lines(function):
    made = translation.translate(_traced(lambda acc: [function(acc)]))
    assert not isinstance(made, str), made
    return "\n".join(made.lines)


def test_half_of_one_and_tanh_is_a_logistic_function():
    lines = _lines(jax.nn.gelu)
    assert lines.count("logistic(") == 1
    assert "tanh" not in lines
    assert "2.f *" not in lines
    both = _lines(lambda x: 0.5 * (1 + jnp.tanh(x)) + (1 - jnp.tanh(x)))
    assert both.count("beside_tanh(") == 1
    assert "logistic(" not in both


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: jax.nn.gelu(x).astype(BF16), "coarse_logistic"),
        (lambda x: jnp.exp(x).astype(jnp.float8_e4m3fn), "coarse_exp"),
        (lambda x: jax.nn.sigmoid(x.astype(BF16)), "coarse_logistic"),
        (lambda x: ((1 + jnp.tanh(x)) * (1 - jnp.tanh(x))).astype(BF16), "coarse_beside_tanh"),
        # Rounded between two operations.
        (lambda x: jax.nn.silu(x).astype(BF16).astype(jnp.float32), "coarse_logistic"),
        # In full precision, since a float32 value is a result or decides another result.
        (jax.nn.gelu, "logistic"),
        (lambda x: (y := jnp.exp(x), y.astype(BF16), y.max()), "fast_exp"),
        (lambda x: (y := jax.nn.gelu(x), y.astype(BF16)), "logistic"),
        (lambda x: jnp.where(jnp.exp(x) > 2, x, 0), "fast_exp"),
    ],
)
def test_what_16_bits_do_not_show_is_computed_more_quickly(function, wanted):
    made = translation.translate(_traced(lambda acc: jax.tree.leaves(function(acc))))
    assert not isinstance(made, str), made
    assert re.findall(r"(\w*(?:exp|logistic|tanh))\(", "\n".join(made.lines)) == [wanted]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (1 + lax.tanh(0.5)),
        lambda x: x + x * lax.tanh(0.1),
        lambda x: x * (0.5 * (1 + lax.tanh(0.5))),
        lambda x: x * (1 - lax.tanh(0.5)),
    ],
)
def test_tanh_of_a_number(function):
    assert "tanhf" in _lines(function)


def test_every_operation_of_the_table_compiles():
    """NVRTC compiles each operation separately, on floats or on integers."""
    found = nvrtc.find()
    assert not isinstance(found, str), found
    names = sorted({*operations.NAMES} - {"add_any", "clamp"})
    lines = []
    for i, name in enumerate(names):
        for dtype in (jnp.float32, BF16, jnp.int32, jnp.uint8, jnp.bool_):
            values = [operations.constant(1, dtype)] * 2
            try:
                texts = {
                    operations.translated(name, values, [dtype] * 2, {}, coarse=coarse)
                    for coarse in (False, True)
                }
            except operations.NotTranslatableError:
                continue
            for number, text in enumerate(sorted(texts)):
                lines.append(f"  const auto v{i}_{jnp.dtype(dtype).name}_{number} = {text};")
    source = (
        '#include "epilogue/compiled_rounding.cuh"\n'
        "namespace jax_tcgemm {\n__global__ void f() {\n" + "\n".join(lines) + "\n}\n}\n"
    )
    assert len(lines) > 60
    assert found.compile(source, "sm_90a", cubins.include_folders())


@pytest.mark.parametrize("part", [0, slow(1), slow(2)])
def test_random_functions_translate_and_compile(part, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    rng = np.random.default_rng()
    for seed in rng.integers(2**31, size=10):
        epilogue = random_epilogues.draw(int(seed))
        what = random_epilogues.compiles(epilogue, "sm90_bf16_128x128x64_s6_c2x1_pingpong")
        assert what is None, (part, epilogue, what)


def _programs_of(row):
    """Returns the C++ of an epilogue: for plain operands and batches, and with block scales."""
    accumulator = jax.ShapeDtypeStruct((96, 64), jnp.int32 if row.tag == "s8" else jnp.float32)
    weights = 2 if row.gated else 1
    operands = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((96, 64), (96, 1), (64,), ())]
    types = [accumulator] * weights + operands
    made, _ = function.trace(lambda *x: [sum(x[1:], x[0]).astype(BF16)], types, weights)
    translated = translation.translate(made)
    assert not isinstance(translated, str), translated
    strides = [(0, *leaf.strides(2)) for leaf in translated.leaves]
    has_blocks = row.promote and not (row.gated or row.streams_b or row.grouped != "none")
    for scaled in (False, True)[: 1 + has_blocks]:
        yield lowering.source_of(translated, strides, 64, batched=not scaled, scaled=scaled)


_ROWS = [row for row in table.RUN_TIME_CONFIGS if row.algorithm in ("E4M3_E4M3_F32", "S8_S8_S32")]
_ROWS += [row for row in table.RUN_TIME_CONFIGS if row.skinny and row.tag == "e4m3e4m3_fast"]


@pytest.mark.parametrize(
    "row", [slow(row) if i % 3 else row for i, row in enumerate(_ROWS)], ids=lambda row: row.name
)
def test_rows_of_8_bits_compile(row, tmp_path, monkeypatch):
    """The programs use both accumulators; the build compiles no quantized rows."""
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    layout = "nn" if row.streams_b else "nt"
    assert all(compiler.compile_kernel(text, row.name, layout) for text in _programs_of(row))
