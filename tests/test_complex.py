"""Products of complex64: the real products that they are lowered to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import picked

from jax_tcgemm import _extension, dot_general, gemm

pytestmark = pytest.mark.usefixtures("hopper")


def c64(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.complex64)


def test_b_is_read_as_it_lies(cuda_module, said):
    _, (call,) = cuda_module(lambda a, b: gemm(a, b), c64(1000, 520), c64(520, 1100))
    assert picked(call, "algorithm", "pairs_of_b") == ("TF32_TF32_F32", True)
    assert picked(call, "m", "n", "k") == (1000, 2200, 1040)
    assert picked(call, "a_strides", "b_strides") == ([1040, 1], [2200, 1])
    assert call["operands"] == ["1000x520xcomplex<f32>", "520x1100xcomplex<f32>"]
    assert call["results"][0] == "1000x1100xcomplex<f32>"
    assert said[-1].endswith("complex numbers as pairs, TF32_TF32_F32")


@pytest.mark.parametrize(
    ("a", "b", "options"),
    [
        ((1000, 520), (1100, 520), {"transpose_b": True}),  # k is contiguous
        ((1000, 520), (520, 1101), {}),  # TMA cannot address these rows
        ((1000, 521), (521, 1100), {}),
    ],
)
def test_what_no_kernel_reads_as_it_lies_is_expanded(cuda_module, a, b, options):
    _, (call,) = cuda_module(lambda a, b: gemm(a, b, **options), c64(*a), c64(*b))
    assert picked(call, "algorithm", "pairs_of_b") == ("TF32_TF32_F32", False)
    n, k = b if options else b[::-1]
    shape = (2 * n, 2 * k) if options else (2 * k, 2 * n)
    assert call["operands"] == [f"{a[0]}x{a[1]}xcomplex<f32>", f"{shape[0]}x{shape[1]}xf32"]
    assert picked(call, "m", "n", "k") == (1000, 2 * n, 2 * k)


@pytest.mark.parametrize("transpose_b", [False, True])
def test_planes_are_made_of_b_as_it_lies(cuda_module, transpose_b):
    b = c64(1101, 521) if transpose_b else c64(521, 1101)
    _, (call,) = cuda_module(
        lambda a, b: gemm(a, b, transpose_b=transpose_b, precision="highest"), c64(1000, 521), b
    )
    assert picked(call, "algorithm", "pairs_of_b") == ("F32_F32_F32", True)
    assert call["b_strides"] == ([1, 1042] if transpose_b else [2202, 1])
    # Planes with k padded to a multiple of 64, and the notes about the operands.
    assert call["padding_bytes"] == 2 * 3 * 1088 * (1000 + 2202) + 128 + 1024 * 4


def test_batches(cuda_module):
    _, (call,) = cuda_module(lambda a, b: gemm(a, b), c64(5, 640, 768), c64(5, 768, 1280))
    assert picked(call, "pairs_of_b", "batch_shape") == (True, [5])
    assert call["b_strides"] == [2 * 768 * 1280, 2560, 1]
    # If B has no batch, the batch becomes rows of one product.
    _, (call,) = cuda_module(lambda a, b: gemm(a, b), c64(5, 640, 768), c64(768, 1280))
    assert picked(call, "pairs_of_b", "batch_shape", "m") == (True, [], 3200)


def test_without_the_kernel_b_is_expanded(cuda_module, monkeypatch):
    others = frozenset(name for name in _extension.KERNEL_NAMES if "pairs" not in name)
    monkeypatch.setattr(_extension, "KERNEL_NAMES", others)
    _, (call,) = cuda_module(lambda a, b: gemm(a, b), c64(1000, 520), c64(520, 1100))
    assert call["pairs_of_b"] is False


@pytest.mark.parametrize(
    ("n", "k", "precision", "is_xla"),
    [
        (700, 16944, "highest", True),
        (700, 8192, "highest", False),
        (1600, 16944, "highest", False),
        (700, 16944, None, False),
    ],
)
def test_xla_multiplies_what_it_adds_up_in_parts(cuda_module, said, n, k, precision, is_xla):
    _, calls = cuda_module(lambda a, b: gemm(a, b, precision=precision), c64(700, k), c64(k, n))
    assert len(calls) == (not is_xla)
    assert said[-1].endswith("XLA adds up in parts") == is_xla


def test_dot_general(cuda_module):
    heads = (((3,), (3,)), ((0, 2), (0, 2)))  # bqhd,bkhd->bhqk
    x, y = c64(2, 1024, 3, 512), c64(2, 1280, 3, 512)
    _, (call,) = cuda_module(lambda x, y: dot_general(x, y, heads), x, y)
    assert picked(call, "algorithm", "m", "n", "k") == ("TF32_TF32_F32", 1024, 2560, 1024)
    assert picked(call, "batch_shape", "a_strides") == ([2, 3], [3145728, 1024, 3072, 1])
    _, (call,) = cuda_module(lambda x, y: dot_general(x, y, heads, precision="highest"), x, y)
    assert picked(call, "algorithm", "pairs_of_b") == ("F32_F32_F32", True)
    assert call["b_strides"] == [3932160, 1024, 1, 3072]
