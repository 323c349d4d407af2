"""Which products XLA computes because it is faster. On any machine."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import bf16

from jax_tcgemm import gemm
from jax_tcgemm.lowering.fallback.times import why_slower
from jax_tcgemm.problem.strides import Operands, StridedGemm, fold, strided_gemm

pytestmark = pytest.mark.any_jax


def folded(m: int, n: int, k: int, layout: str = "nn", batch: int = 1) -> StridedGemm:
    def lies(shape: tuple[int, int], letter: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        matrix = (1, 2) if letter == "n" else (2, 1)
        return (0, *matrix), (batch, *(shape if letter == "n" else shape[::-1]))

    (a_axes, a), (b_axes, b) = lies((m, k), layout[0]), lies((k, n), layout[1])
    return fold(strided_gemm(Operands(a_axes, b_axes), Operands(a, b)))


# Times of an H200 in us, ours and XLA's: lab/README.md.
@pytest.mark.parametrize(
    ("problem", "ours", "xla"),
    [
        # Few rows, and B unaligned.
        ((8, 50257, 768), 67, 32),
        ((96, 50257, 768), 75, 50),
        ((128, 50257, 768), 76, 52),
        ((128, 14335, 4096), 102, 95),
        ((64, 4095, 4096, "tn"), 30.2, 24.4),
        ((256, 50257, 768), 80, 98),
        ((256, 4095, 4096), 35, 51),
        # A unaligned.
        ((7, 24496, 656, "tt"), 15.6, 12.7),
        ((53, 32368, 1808, "tt"), 58.0, 48.9),
        ((3, 18136, 1064, "tn"), 21.8, 18.9),
        ((14, 23944, 1984, "tn"), 36.7, 26.7),
        ((44, 26712, 656, "tn"), 21.2, 17.5),
        ((47, 6232, 544, "tt"), 11.5, 14.3),
        ((6, 7352, 1960, "tt"), 14.8, 31.8),
        ((75, 16904, 608, "tn"), 16.5, 19.6),
        ((8, 4096, 4095), 16, 33),
        ((128, 4096, 4095), 20, 40),
        ((8, 4096, 4095, "nt"), 27, 33),
        ((2, 4095, 4095), 26, 40),
        # Attention of 197, 577 and more tokens.
        ((197, 197, 64, "nt", 768), 60, 49),
        ((577, 577, 64, "nt", 192), 163, 77),
        ((1025, 1025, 128, "nt", 48), 127, 73),
        ((1025, 1025, 256, "nt", 32), 60, 70),
        ((197, 64, 197, "nn", 768), 80, 50),
        ((577, 64, 577, "nn", 192), 120, 78),
        ((1025, 128, 1025, "nn", 48), 97, 91),
        ((1025, 512, 1025, "nn", 16), 62, 120),
        # Batches of small ones.
        ((65, 65, 65, "nn", 256), 26, 8.8),
        ((129, 129, 128, "nt", 256), 23, 18),
        ((257, 257, 256, "nt", 64), 21.3, 19.6),
        ((128, 513, 512, "nn", 32), 27, 23),
        ((1024, 129, 512, "nn", 32), 32, 47),
        ((257, 256, 257, "nn", 64), 25, 28),
        ((513, 513, 513, "nn", 32), 59, 111),
        ((32, 32, 32, "nn", 128), 5.2, 1.2),
        ((32, 32, 32, "nn", 8192), 24.6, 14.4),
        ((64, 32, 64, "nn", 1024), 7.0, 6.0),
        ((32, 32, 128, "nn", 1024), 8.1, 6.6),
        ((16, 128, 64, "nn", 1024), 8.8, 8.0),
        ((128, 16, 64, "nn", 1024), 9.1, 7.9),
        ((16, 16, 64, "nn", 4096), 14.1, 7.3),
        ((48, 48, 48, "nn", 1024), 6.8, 7.5),
        ((64, 64, 64, "nn", 1024), 8.6, 9.4),
        ((32, 32, 512, "nn", 1024), 20.0, 20.4),
        # An unaligned result.
        ((2048, 4097, 64, "nt"), 21, 14),
        ((4096, 4097, 128, "nt"), 44, 28),
        ((4096, 4097, 256, "nt"), 27, 31),
        # Problems as large as in the suites.
        ((333, 777, 1111), 13, 18),
        ((2048, 50257, 768), 267, 648),
    ],
)
def test_bfloat16_as_measured(problem, ours, xla):
    assert (why_slower("BF16_BF16_F32", folded(*problem), 2) is not None) == (xla < ours)


@pytest.mark.parametrize(
    "problem",
    [
        *[(2048, 2048, 128, "nt", 32), (1000, 1000, 1000), (1024, 1025, 256, "nt")],
        *[(64, 64, 64, "nn", 64), (64, 64, 256, "nn", 256), (96, 96, 96, "nn", 1024)],
    ],
)
def test_what_the_kernels_have_yet_to_gain(problem):
    """XLA is faster, but the kernels still compute these products."""
    assert why_slower("BF16_BF16_F32", folded(*problem), 2) is None


@pytest.mark.parametrize(
    ("problem", "ours", "xla"),
    [
        ((8, 50257, 768), 129, 49),
        ((128, 50257, 768), 142, 88),
        ((32, 4095, 4096), 71, 27),
        ((256, 14335, 4096), 218, 253),
        ((1, 4096, 4096), 22.5, 18.8),
        ((16, 4096, 4096), 23.0, 20.7),
        ((32, 6144, 4096), 35.5, 29.4),
        ((32, 4096, 14336, "nt"), 61.4, 60.9),
        ((64, 4096, 4096), 22.8, 25.0),
        # One row.
        ((1, 6976, 960, "tt"), 16.1, 7.8),
        ((1, 1128, 5736, "nt"), 14.1, 9.4),
        ((1, 576, 8216), 13.2, 9.4),
        ((1, 3248, 8584, "tn"), 39.4, 90.8),
        ((1, 2960, 6960, "tn"), 31.8, 68.4),
        # A few rows, and many columns.
        ((3, 14856, 800, "tt"), 23.1, 17.6),
        ((13, 27792, 2560, "tn"), 108.9, 68.5),
        ((14, 23944, 1984), 61.0, 49.7),
        ((14, 12696, 1048, "tt"), 25.2, 21.2),
        ((24, 11016, 2504, "nt"), 36.0, 45.9),
        ((9, 2376, 688, "nt"), 7.1, 7.4),
        ((18, 768, 11592, "tn"), 28.7, 38.3),
        ((197, 197, 64, "nt", 192), 42, 23),
        ((197, 64, 197, "nn", 192), 39, 29),
        ((1001, 1001, 1001), 23, 32),
        ((32, 32, 32, "nn", 1024), 6.9, 5.2),
        ((64, 32, 64, "nn", 1024), 11.8, 11.3),
        ((32, 32, 128, "nn", 1024), 14.1, 11.9),
        ((64, 64, 64, "nn", 1024), 14.4, 16.0),
    ],
)
def test_float32_as_measured(problem, ours, xla):
    reason = why_slower("TF32_TF32_F32", folded(*problem), 4)
    assert (reason is not None) == (xla < ours)


def test_only_near_what_was_measured():
    assert why_slower("BF16_BF16_F32", folded(577, 577, 64, "nt", 2), 2) is None  # small
    assert why_slower("BF16_BF16_F32", folded(4097, 4097, 8, "nt"), 2) is None
    assert why_slower("TF32_TF32_F32", folded(8, 64, 2**18), 4) is None
    assert why_slower("F16_F16_F16", folded(577, 577, 64, "nt", 192), 2) is None
    assert why_slower("F16_F16_F32", folded(577, 577, 64, "nt", 192), 2)
    assert why_slower("BF16_BF16_F32", folded(8, 577, 64, "nt", 4096), 2) is None  # few rows
    assert why_slower("BF16_BF16_F32", folded(577, 0, 64, "nt", 192), 2) is None
    # Few rows of an unaligned A that is not transposed, or few rows times an unaligned B.
    for problem in ((8, 12000, 4095, "nt"), (64, 20000, 1001), (7, 20001, 1000, "tn")):
        assert why_slower("BF16_BF16_F32", folded(*problem), 2) is None
    # float32 results may have aligned rows where bfloat16 results do not.
    assert why_slower("BF16_BF16_F32", folded(580, 580, 64, "nt", 192), 2)
    assert why_slower("BF16_BF16_F32", folded(580, 580, 64, "nt", 192), 4) is None


def test_small_batches_as_they_were_measured_alone():
    small = functools.partial(why_slower, "BF16_BF16_F32")
    problem = 32, 32, 64
    assert small(folded(*problem, "nn", 128), 2) == "small batches, 32 x 32 x 64"
    assert small(folded(*problem, "nn", 127), 2) is None
    assert small(folded(*problem, "nn", 128), 4) is None
    assert small(folded(*problem, "nn", 128), 2, has_factor=True) is None
    assert small(folded(*problem, "nn", 128), 2, is_plain=False) is None
    for layout in ("nt", "tn", "tt"):
        assert small(folded(*problem, layout, 128), 2) is None
    assert why_slower("TF32_TF32_F32", folded(*problem, "nn", 128), 4) is None
    shared = strided_gemm(Operands((None, 0, 1), (0, 1, 2)), Operands((32, 64), (128, 64, 32)))
    assert small(fold(shared), 2) is None


def test_reasons():
    reason = why_slower("BF16_BF16_F32", folded(577, 64, 577, "nn", 192), 2)
    assert reason == "52 products an element, and a unaligned"
    reason = why_slower("BF16_BF16_F32", folded(8, 4095, 4096), 2)
    assert reason == "few rows, 8, and b has a leading dimension of 4095 elements, unaligned"


def test_plain_products_without_a_configuration(cuda_module):
    def count(**options) -> int:
        f = jax.vmap(lambda a, b: gemm(a, b, transpose_b=True, **options))
        _, calls = cuda_module(f, *args)
        return len(calls)

    args = jnp.stack([bf16(577, 64)] * 16), jnp.stack([bf16(577, 64)] * 16)
    assert count() == count(alpha=0.125) == 0
    assert count(config="sm90_bf16_128x128x64_s6_c2x1_pingpong") == 1
    assert count(bias=bf16(577)) == count(activation="relu") == 1


def test_a_shared_operand_is_read_once():
    """129 products an element; 64 matrices of A would reduce that to 86."""
    axes = Operands((None, 0, 1), (0, 1, 2))
    shared = strided_gemm(axes, Operands((257, 264), (64, 264, 257)))
    assert why_slower("BF16_BF16_F32", fold(shared), 2) is None
    assert why_slower("BF16_BF16_F32", folded(257, 257, 264, "nn", 64), 2)


def test_an_operand_that_is_copied_anyway(cuda_module):
    """A batch dimension is innermost, and the unaligned operand is aligned once it is copied."""
    a, b = jnp.zeros((512, 512, 16), jnp.bfloat16), jnp.stack([bf16(512, 32)] * 16)
    _, calls = cuda_module(jax.vmap(gemm, in_axes=(-1, 0)), a, b)
    assert len(calls) == 1
