"""Buffers of the custom call: results in place of C, layouts, workspaces. Without a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import assert_nothing_moves, bf16, picked

from jax_tcgemm import gemm


def accumulate(x, dy, c, **options):
    options = {"transpose_a": True, "preferred_element_type": jnp.float32, **options}
    return gemm(x, dy, c, **options)


ACCUMULATED = (bf16(16, 4), bf16(16, 6), jnp.zeros((4, 6)))


def test_gradients_are_accumulated_in_place(cuda_module):
    text, (call,) = cuda_module(accumulate, *ACCUMULATED, donate_argnums=2)
    assert_nothing_moves(text)
    assert picked(call, "c_role", "beta", "operands", "results") == (
        *("add", 1.0, ["16x4xbf16", "16x6xbf16", "4x6xf32"], ["4x6xf32"]),
    )
    assert "output_tuple_indices = [], operand_index = 2" in text
    assert "tf.aliasing_output = 0" in text  # the donation


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (ACCUMULATED, {"beta": 2.0}),
        (ACCUMULATED, {"beta": jnp.float32(1)}),
        (ACCUMULATED, {"activation": "relu"}),
        (ACCUMULATED, {"preferred_element_type": None}),
        ((*ACCUMULATED[:2], jnp.zeros(6)), {}),
        ((*ACCUMULATED[:2], bf16(4, 6)), {}),
        (tuple(x.astype(jnp.float32) for x in ACCUMULATED), {}),
    ],
)
def test_other_addends_stay(cuda_module, args, options):
    f = functools.partial(accumulate, **options)
    text, (call,) = cuda_module(f, *args)
    assert call["has_c"]
    assert "output_operand_alias" not in text


def test_addends_of_a_batch_are_overwritten_where_they_lie_alike(cuda_module):
    x, dy, c = (jnp.stack([x] * 3) for x in ACCUMULATED)
    text, _ = cuda_module(jax.vmap(accumulate), x, dy, c)
    assert "operand_index = 2" in text
    text, _ = cuda_module(jax.vmap(accumulate, (0, 0, None)), x, dy, c[0])
    assert "output_operand_alias" not in text
    text, _ = cuda_module(jax.vmap(accumulate, (0, 0, 1)), x, dy, c.swapaxes(0, 1))
    assert "output_operand_alias" not in text


def test_row_major_layouts_are_asked_for(cuda_module):
    text, _ = cuda_module(lambda a, b: gemm(a, b), bf16(2, 4, 6), bf16(2, 6, 5))
    assert text.count("dense<[2, 1, 0]> : tensor<3xindex>") == 3
    assert "output_operand_alias" not in text


def test_odd_rows_get_a_workspace(cuda_module):
    """The kernel copies unaligned operands, with padding, into a hidden result."""
    text, (call,) = cuda_module(lambda a, b: gemm(a, b), bf16(1000, 1001), bf16(1001, 1000))
    assert_nothing_moves(text)
    assert call["has_workspace"]
    assert call["padding_bytes"] == 1000 * 1024 * 2
    assert call["results"] == ["1000x1000xbf16", f"{1000 * 1024 * 2}xui8"]
    _, (call,) = cuda_module(lambda a, b: gemm(a, b), bf16(1000, 1000), bf16(1000, 1000))
    assert not call["has_workspace"]
    _, (call,) = cuda_module(
        lambda a, b: gemm(a, b, config="sm80_bf16_64x64x32_w2x2_s3_realign"),
        bf16(1000, 1001),
        bf16(1001, 1000),
    )
    assert not call["has_workspace"]


@pytest.mark.parametrize("m", [1, 2, 128, 129])
def test_a_matrix_is_not_copied_for_few_rows(cuda_module, m):
    """XLA reads the matrix in place, for a vector on either side and for few rows on the left."""

    def count(f, *args):
        _, calls = cuda_module(lambda *args: f(*args), *args)
        return len(calls)

    matrix, rows = bf16(768, 5025), bf16(m, 768)
    assert count(gemm, rows, matrix) == (m > 128)
    transposed = functools.partial(gemm, transpose_a=True, transpose_b=True)
    assert count(transposed, matrix, rows) == (m > 1)
    assert count(gemm, rows, bf16(768, 5024)) == 1
    assert count(gemm, bf16(m, 769), bf16(769, 5024)) == 1  # only the rows are unaligned
    assert count(gemm, bf16(m, 769), bf16(769, 5025)) == (m > 1)  # both are unaligned
    assert count(gemm, rows, bf16(768, 1001)) == (m > 1)  # few columns
    assert count(transposed, bf16(1001, 8 * m), bf16(5024, 1001)) == 1  # B has rows along k
    a_transposed = functools.partial(gemm, transpose_a=True)
    assert count(a_transposed, bf16(768, 8 * m), matrix) == (8 * m > 128)
    row = "sm80_bf16_64x64x32_w2x2_s3_realign"
    assert count(functools.partial(gemm, config=row), rows, matrix) == 1


def test_a_long_k_gets_a_workspace(cuda_module):
    """Products over parts of k lie behind the padded copies; unpadded operands need no copy."""
    _, (call,) = cuda_module(lambda a, b: gemm(a, b), bf16(128, 65536), bf16(65536, 128))
    assert call["has_workspace"]
    assert call["padding_bytes"] == 0
    assert call["results"] == ["128x128xbf16", f"{64 * 128 * 128 * 4}xui8"]
    _, (call,) = cuda_module(lambda a, b: gemm(a, b), bf16(256, 30001), bf16(30001, 27))
    padding = 256 * 60032 + 30002 * 64  # rows of 60002 and 54 bytes, padded to whole lines of 128
    assert call["padding_bytes"] == padding
    assert call["results"][1] == f"{padding + 64 * 256 * 27 * 4}xui8"
    _, (call,) = cuda_module(lambda a, b: gemm(a, b), bf16(1000, 10001), bf16(10001, 1000))
    assert call["padding_bytes"] == 1000 * 10048 * 2
    assert call["results"][1] == f"{1000 * 10048 * 2 + 4 * 1000 * 1000 * 4}xui8"
