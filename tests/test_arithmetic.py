"""The table of arithmetic: the valid rows, and how a product finds its row."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.lax import DotAlgorithmPreset, Precision

from jax_tcgemm.kernels.arithmetic import ARITHMETIC, BF16, F16, F32, Arithmetic
from jax_tcgemm.problem import arithmetic

DEFAULT = (Precision.DEFAULT, Precision.DEFAULT)
TO_BF16 = Arithmetic(
    *("F16_F16_F32_TO_BF16", "f16bf16", F16, F16, F32, (BF16, F32), "f16", 16), promotes=True
)


def test_each_row_is_a_preset_of_jax():
    """Today every name is JAX's; our own names are for arithmetic without a JAX preset."""
    for name, row in ARITHMETIC.items():
        assert row.name == name == DotAlgorithmPreset[name].name
        assert jnp.dtype(row.a.name).itemsize == row.a.bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": F32}, "no kernel takes"),
        ({"k": 8}, "32 bytes of k"),
        ({"outputs": ()}, "D is of one type"),
        ({"outputs": (BF16, F16, F32)}, "D is of one type"),
        ({"outputs": (F32, F16)}, "D is of one type"),
        ({"accumulator": F16}, "Hopper kernels"),
    ],
)
def test_impossible_rows(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ARITHMETIC["BF16_BF16_F32"], **changes)


@pytest.mark.parametrize("precision", [DEFAULT, DotAlgorithmPreset.F16_F16_F32])
def test_a_row_that_writes_the_result_goes_before_one_that_does_not(monkeypatch, precision):
    f16, bf16, f32 = (jnp.dtype(each) for each in ("float16", "bfloat16", "float32"))

    def resolved(out):
        return arithmetic.resolve_algorithm(f16, f16, out, precision)

    assert [resolved(out) for out in (f16, bf16, f32)] == ["F16_F16_F32"] * 3
    assert arithmetic.written_dtype("F16_F16_F32", bf16) == f32
    monkeypatch.setitem(ARITHMETIC, TO_BF16.name, TO_BF16)
    monkeypatch.setitem(arithmetic.INPUT_DTYPES, TO_BF16.name, f16)
    assert [resolved(out) for out in (f16, bf16, f32)] == [
        *("F16_F16_F32", TO_BF16.name, "F16_F16_F32")
    ]
    assert arithmetic.written_dtype(TO_BF16.name, bf16) == bf16
    assert resolved(jnp.dtype(jax.numpy.float64)) is None
