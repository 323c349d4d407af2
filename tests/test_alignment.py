"""Which operands 16-byte copies can address, and how much workspace the other operands get."""

from __future__ import annotations

import pytest

from jax_tcgemm.problem.alignment import misalignment, padding_bytes, split_bytes
from jax_tcgemm.problem.strides import Operands, StridedGemm

pytestmark = pytest.mark.any_jax


def gemm(m, n, k, a, b, batch=()):
    none = (0,) * (len(batch) + 2)
    rest = Operands(a, b, none[2:], none, none[1:], none[2:], none[2:])
    return StridedGemm(m, n, k, batch, rest)


@pytest.mark.parametrize(
    ("a", "k", "what"),
    [
        ((64, 1), 64, None),
        ((1, 64), 64, None),
        ((72, 1), 64, None),
        ((65, 1), 64, "leading dimension of 65"),
        ((1, 65), 64, "leading dimension of 65"),
        ((64, 1), 63, "contiguous extent of 63"),
        ((64, 1), 1, "contiguous extent of 1"),
    ],
)
def test_matrices(a, k, what):
    found = misalignment(gemm(64, 64, k, a, (64, 1)), "a", 2)
    assert found is None if what is None else what in found


def test_single_rows_and_batches():
    assert misalignment(gemm(1, 64, 64, (7, 1), (64, 1)), "a", 2) is None
    assert "batch stride of 4" in misalignment(
        gemm(8, 8, 8, (4, 8, 1), (0, 8, 1), batch=(3,)), "a", 2
    )
    assert misalignment(gemm(8, 8, 8, (4, 8, 1), (0, 8, 1), batch=(3,)), "a", 4) is None
    assert misalignment(gemm(8, 8, 8, (64, 8, 1), (0, 8, 1), batch=(3,)), "b", 2) is None


def test_padding():
    m, n, k = 1000, 2000, 1001
    odd = gemm(m, n, k, (k, 1), (n, 1))
    assert padding_bytes(odd, 2) == m * 1024 * 2  # b is aligned
    transposed = gemm(m, n, k, (1, m), (1, k))
    assert padding_bytes(transposed, 2) == n * 1024 * 2  # a is aligned
    assert padding_bytes(gemm(m, n, 1008, (1008, 1), (n, 1)), 2) == 0
    assert padding_bytes(odd, 4) == m * 1024 * 4


def test_padding_is_for_products_that_take_a_while_and_copies_a_broadcast_operand_once():
    assert padding_bytes(gemm(100, 100, 101, (101, 1), (100, 1)), 2) == 0
    assert padding_bytes(gemm(0, 100, 1001, (1001, 1), (100, 1)), 2) == 0
    assert padding_bytes(gemm(8, 8, 1001, (1001, 1), (8, 1)), 2) == 8 * 1024 * 2  # k is long
    assert padding_bytes(gemm(4096, 4096, 37, (37, 1), (4096, 1)), 2) == 4096 * 64 * 2
    short = gemm(4096, 3, 1000, (1000, 1), (3, 1))  # rows of 6 bytes are not padded
    assert padding_bytes(short, 2) == 1000 * 16
    tiny = gemm(5, 5, 5, (25, 5, 1), (25, 5, 1), batch=(10**6,))
    assert padding_bytes(tiny, 2) == 0
    batch = gemm(512, 512, 501, (512 * 501, 501, 1), (0, 512, 1), batch=(8,))
    assert padding_bytes(batch, 2) == 8 * 512 * 512 * 2
    shared = gemm(512, 512, 501, (0, 501, 1), (501 * 512, 512, 1), batch=(8,))
    assert padding_bytes(shared, 2) == 512 * 512 * 2


def test_room_for_partial_products():
    assert split_bytes(gemm(128, 128, 65536, (65536, 1), (128, 1))) == 64 * 128 * 128 * 4
    assert split_bytes(gemm(1024, 1024, 16384, (16384, 1), (1024, 1))) == 4 * 1024 * 1024 * 4
    assert split_bytes(gemm(1024, 1024, 1016, (1016, 1), (1024, 1))) == 0  # k too short
    assert split_bytes(gemm(4096, 4096, 16384, (16384, 1), (4096, 1))) == 0  # enough tiles
    assert split_bytes(gemm(0, 128, 65536, (65536, 1), (128, 1))) == 0
    batch = gemm(8, 8, 65536, (8 * 65536, 65536, 1), (0, 8, 1), batch=(2,))
    assert split_bytes(batch) == 0
