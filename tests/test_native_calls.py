"""Custom calls with random attributes: handlers refuse accesses beyond a buffer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from native_calls import INVALID_ARGUMENT, Handler
from native_draws import TARGETS as PLAIN_TARGETS
from native_draws import (
    Call,
    contiguous,
    damaged,
    draw_gemm,
    draw_ragged,
    gemm_operands,
)
from native_packed import (
    draw_pack,
    draw_packed,
    draw_packed_function,
    draw_packed_ragged,
    draw_unpack,
    pack_is_within,
    packed_function_is_within,
    packed_is_within,
    packed_ragged_is_within,
    unpack_is_within,
)
from native_programs import compiled_is_within, draw_compiled, draw_pass, pass_is_within

from jax_tcgemm import _extension

TARGETS = PLAIN_TARGETS | {
    "pass": (_extension.COMPILED_PASS_TARGET, draw_pass, pass_is_within),
    "compiled": (_extension.COMPILED_TARGET, draw_compiled, compiled_is_within),
    "packed": (_extension.PACKED_TARGET, draw_packed, packed_is_within),
    "packed ragged": (
        _extension.PACKED_RAGGED_TARGET,
        draw_packed_ragged,
        packed_ragged_is_within,
    ),
    "packed function": (
        _extension.PACKED_FUNCTION_TARGET,
        draw_packed_function,
        packed_function_is_within,
    ),
    "unpack": (_extension.UNPACK_TARGET, draw_unpack, unpack_is_within),
    "pack": (_extension.PACK_TARGET, draw_pack, pack_is_within),
}

pytestmark = [pytest.mark.any_jax, pytest.mark.usefixtures("no_gpu")]


@pytest.mark.parametrize("name", TARGETS)
def test_valid_calls_are_accepted(name):
    target, draw, is_within_buffers = TARGETS[name]
    handler, rng = Handler(target), random.Random(0)
    for _ in range(300):
        call = draw(rng)
        assert is_within_buffers(call), call
        code, message = handler(call.attributes, call.operands, call.results)
        assert code != INVALID_ARGUMENT, (message, call)


@pytest.mark.parametrize("name", TARGETS)
def test_no_call_beyond_its_buffers_is_accepted(name, rng):
    target, draw, is_within_buffers = TARGETS[name]
    handler, own = Handler(target), random.Random(int(rng.integers(2**32)))
    accepted = 0
    for _ in range(20_000):
        call = damaged(draw(own), own)
        code, _ = handler(call.attributes, call.operands, call.results, call.offsets)
        if code != INVALID_ARGUMENT:
            accepted += 1
            assert is_within_buffers(call), call
    assert accepted > 500


# --- Calls that handlers once accepted -------------------------------------------------------


def refused(target: str, call: Call) -> str:
    code, message = Handler(target)(call.attributes, call.operands, call.results)
    assert code == INVALID_ARGUMENT, message
    return message


def plain_gemm(m: int, n: int, k: int, batch: list[int], **changes: Any) -> dict[str, Any]:
    rng = random.Random(0)
    while True:
        at = draw_gemm(rng).attributes
        if not any(value is True for value in at.values()):
            break
    for name, _, extents in gemm_operands(at | {"m": m, "n": n, "k": k, "batch_shape": batch}):
        if f"{name}_strides" in at:
            at[f"{name}_strides"] = contiguous(extents)
    at |= {"m": m, "n": n, "k": k, "batch_shape": batch, "algorithm": "BF16_BF16_F32"}
    return at | changes


def test_counts_beyond_64_bits():
    """A batch of 2^24 matrices of 2^20 x 2^20 has 2^64 elements, which wrapped to zero."""
    strides = {"a_strides": [0, 0, 1], "b_strides": [0, 1, 0]}
    at = plain_gemm(2**20, 2**20, 1, [2**24], **strides)
    operands = [("bf16", [2**20])] * 2
    assert "elements" in refused(_extension.GEMM_TARGET, Call(at, operands, [("bf16", [0])]))


def test_a_stride_whose_span_wraps():
    at = plain_gemm(17, 16, 16, [], a_strides=[2**60, 1])
    operands = [("bf16", [17, 16]), ("bf16", [16, 16])]
    assert "stride" in refused(_extension.GEMM_TARGET, Call(at, operands, [("bf16", [17, 16])]))


def test_groups_of_empty_operands():
    call = draw_ragged(random.Random(0))
    call.attributes |= {"m": 2**20, "n": 2**20, "k": 2**20, "groups": 2**24, "depth": False}
    call.attributes |= {"has_bias": False, "has_aux": False}
    operands = [("bf16", [2**20, 2**20]), ("bf16", [0]), ("s32", [2**24])]
    results = [("bf16", [2**20, 2**20])]
    message = refused(_extension.RAGGED_DOT_TARGET, Call(call.attributes, operands, results))
    assert "rhs has 0 elements" in message


def test_a_transpose_into_nothing():
    at = {"batch": 2**24, "rows": 2**20, "columns": 2**20, "in_ld": 0, "in_batch_stride": 0}
    call = Call(at | {"out_ld": 2**20}, [("s8", [2**20])], [("s8", [0])])
    assert "the result has 0 elements" in refused(_extension.TRANSPOSE_TARGET, call)


def test_one_element_for_a_matrix():
    rng = random.Random(0)
    while True:
        call = draw_compiled(rng)
        if call.program.results and not call.attributes["has_groups"]:
            break
    call.results = [(dtype, [1]) for dtype, _ in call.results]
    call.attributes["result_elements"] = [1] * len(call.results)
    assert "result 0 has 1 elements" in refused(_extension.COMPILED_TARGET, call)
