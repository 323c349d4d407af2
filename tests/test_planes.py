"""float32 products by products of planes: the rows that exist, and where they are lowered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import Gpu, picked
from jax.lax import DotAlgorithmPreset, Precision

from jax_tcgemm import _compat, _extension, dot_general, gated_gemm, gemm
from jax_tcgemm.kernels.arithmetic import ARITHMETIC, PLANE_PRODUCTS
from jax_tcgemm.problem.alignment import plane_bytes
from jax_tcgemm.problem.arithmetic import resolve_planes
from jax_tcgemm.problem.strides import Operands, StridedGemm

pytestmark = pytest.mark.any_jax

HIGHEST = (Precision.HIGHEST, Precision.HIGHEST)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(("name", "count"), [("X3", 3), ("X6", 6), ("X9", 9)])
def test_products_come_smallest_first(name, count):
    row = PLANE_PRODUCTS[f"BF16_BF16_F32_{name}"]
    orders = [i + j for i, j in row.pairs]
    assert orders == sorted(orders, reverse=True)
    assert len(set(row.pairs)) == len(row.pairs) == count
    assert row.pairs[-1] == (0, 0)
    assert all(max(pair) < row.count for pair in row.pairs)
    # A row has all or no pairs of an order: sm90/plane_loop.cuh relies on it.
    for order in range(row.order + 1):
        assert orders.count(order) == min(order + 1, 2 * row.count - 1 - order)
    assert row.factors in ARITHMETIC


@pytest.mark.parametrize(
    ("a", "b", "out", "precision", "name"),
    [
        ("float32", "float32", "float32", HIGHEST, "F32_F32_F32"),
        ("float32", "float32", "float32", (Precision.DEFAULT, Precision.HIGHEST), "F32_F32_F32"),
        ("float32", "float32", "bfloat16", HIGHEST, "F32_F32_F32"),
        ("float32", "float32", "float32", DotAlgorithmPreset.F32_F32_F32, "F32_F32_F32"),
        ("float32", "bfloat16", "float32", DotAlgorithmPreset.BF16_BF16_F32_X3, "BF16_BF16_F32_X3"),
        ("float32", "float32", "float32", (Precision.HIGH, Precision.HIGH), None),
        ("float32", "float32", "float64", HIGHEST, None),
        ("float32", "bfloat16", "float32", HIGHEST, None),
        ("bfloat16", "bfloat16", "float32", HIGHEST, None),
        ("float64", "float64", "float32", DotAlgorithmPreset.F32_F32_F32, None),
        ("float32", "float32", "float32", DotAlgorithmPreset.TF32_TF32_F32, None),
        ("complex64", "complex64", "complex64", HIGHEST, None),
    ],
)
def test_which_products_have_planes(a, b, out, precision, name):
    found = resolve_planes(*(jnp.dtype(x) for x in (a, b, out)), precision)
    assert (found and found.name) == name


def test_workspace_is_that_of_the_planes():
    def gemm_of(a, b, batch=()):
        return StridedGemm(m=130, n=70, k=100, batch=batch, strides=Operands(a, b))

    # Three planes, or two, of 128 along k, and the notes about the operands.
    noted = 128 + 1024 * 4
    assert plane_bytes(gemm_of((100, 1), (1, 100)), 3) == 2 * 3 * 128 * (130 + 70) + noted
    assert plane_bytes(gemm_of((1, 130), (70, 1)), 2) == 2 * 2 * 128 * (130 + 70) + noted
    # A shared operand of a batch is split once.
    shared = gemm_of((13000, 100, 1), (0, 1, 100), batch=(5,))
    assert plane_bytes(shared, 3) == 2 * 3 * 128 * (5 * 130 + 70) + noted


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "precision", ["highest", "float32", "F32_F32_F32", "BF16_BF16_F32_X9", "TF32_TF32_F32_X3"]
)
def test_one_call_with_the_epilogue(cuda_module, said, precision):
    def f(a, b, bias):
        return gemm(a, b, bias=bias, activation="gelu", precision=precision)

    _, (call,) = cuda_module(f, f32(1700, 520), f32(520, 1140), f32(1140))
    name = "F32_F32_F32" if precision in ("highest", "float32") else precision
    assert picked(call, "algorithm", "activation", "has_bias") == (name, "Gelu", True)
    bytes_of_planes = 2 * 3 * 576 * (1700 + 1140) + 128 + 1024 * 4
    assert picked(call, "padding_bytes", "has_workspace") == (bytes_of_planes, True)
    assert call["operands"][:2] == ["1700x520xf32", "520x1140xf32"]
    count = len(PLANE_PRODUCTS[name].pairs)
    assert said[-1].endswith(f"{name}, {count} products of 3 planes in BF16_BF16_F32")


@pytest.mark.usefixtures("hopper")
def test_gradients_are_products_of_planes_too(cuda_module):
    def loss(a, b):
        return gemm(a, b, activation="silu", precision="highest").sum()

    _, calls = cuda_module(jax.grad(loss, argnums=(0, 1)), f32(1024, 1024), f32(1024, 1024))
    assert [call["algorithm"] for call in calls] == 3 * ["F32_F32_F32"]


@pytest.mark.usefixtures("hopper")
def test_dot_general_and_batches(cuda_module):
    def f(a, b):
        return dot_general(a, b, (((2,), (1,)), ((0,), (0,))), precision=Precision.HIGHEST)

    _, (call,) = cuda_module(f, f32(5, 640, 768), f32(5, 768, 640))
    assert picked(call, "algorithm", "batch_shape") == ("F32_F32_F32", [5])
    _, (call,) = cuda_module(jax.vmap(f), f32(2, 5, 640, 768), f32(2, 5, 768, 640))
    assert call["batch_shape"] == [10]


@pytest.mark.parametrize(
    ("capability", "shapes", "options", "reason"),
    [
        (None, ((1024, 512), (512, 1024)), {}, "F32_F32_F32 without a GPU of compute capability"),
        ("8.0", ((1024, 512), (512, 1024)), {}, "F32_F32_F32 without a GPU of compute capability"),
        ("10.0", ((1024, 512), (512, 1024)), {}, "F32_F32_F32 without a GPU of compute capability"),
        ("9.0", ((16, 4096), (4096, 4096)), {}, "16 x 4096 x 4096, for which XLA"),
        ("9.0", ((4096, 64), (64, 4096)), {}, "4096 x 4096 x 64, for which no kernel was"),
        ("9.0", ((600, 256), (256, 600)), {}, "600 x 600 x 256, for which XLA takes less time"),
        ("9.0", ((512, 8192), (8192, 512)), {}, "512 x 512 x 8192, for which XLA takes"),
        ("9.0", ((1024, 512), (512, 1024)), {"config": "xla"}, "by config"),
        ("9.0", ((1024, 2**29), (2**29, 1024)), {}, "k=536870912 as that of 6 products"),
    ],
)
def test_what_xla_multiplies(cuda_module, monkeypatch, said, capability, shapes, options, reason):
    gpus = [Gpu(capability)] if capability else []
    monkeypatch.setattr(_compat, "initialized_cuda_devices", lambda: gpus)
    text, calls = cuda_module(
        lambda a, b: gemm(a, b, precision="highest", **options), *(f32(*x) for x in shapes)
    )
    assert not calls
    assert "HIGHEST" in text
    assert ": fallback to XLA: " in said[-1]
    assert reason in said[-1]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("precision", "k", "is_xla"),
    [
        ("BF16_BF16_F32_X6", 8080, True),
        ("BF16_BF16_F32_X6", 4096, False),
        ("BF16_BF16_F32_X3", 32768, False),
        ("highest", 16384, False),
        ("highest", 16448, True),
    ],
)
def test_xla_multiplies_what_it_adds_up_in_parts(cuda_module, said, precision, k, is_xla):
    f = jax.jit(lambda a, b: gemm(a, b, precision=precision))
    _, calls = cuda_module(f, f32(1000, k), f32(k, 1000))
    assert len(calls) == (not is_xla)
    assert said[-1].endswith("XLA adds up in parts") == is_xla


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("shape", "dtype", "precision", "transpose_b", "is_xla"),
    [  # measured on an H200: XLA's time over the kernel's
        ((192, 4096, 1024), "float32", "highest", True, False),  # 1.17
        ((224, 4096, 4096), "float32", "highest", False, False),  # 1.34
        ((128, 4096, 4096), "float32", "highest", True, True),  # 0.84
        ((512, 512, 1024), "float32", "highest", False, True),  # 0.73
        ((256, 1024, 8192), "float32", "highest", False, True),  # 0.59
        ((1586, 6040, 536), "float32", "BF16_BF16_F32_X3", False, False),  # 1.77
        ((32, 256, 256, 1024), "float32", "highest", True, True),  # 0.91
        ((16, 512, 512, 512), "float32", "highest", False, False),  # 1.10
        ((128, 8192, 2048), "complex64", None, False, False),  # 2.13
        ((256, 256, 8192), "complex64", None, False, True),  # 0.25
        ((512, 512, 2048), "complex64", None, False, True),  # 0.88
        ((384, 1024, 1024), "complex64", None, False, False),  # 1.15
        ((384, 1024, 1024), "complex64", None, True, True),  # its B takes another pass
        ((384, 1024, 1024), "complex64", "highest", False, False),  # 1.26
        ((192, 1024, 1024), "complex64", "highest", False, True),  # 0.74
    ],
)
def test_the_faster_one_multiplies(cuda_module, said, shape, dtype, precision, transpose_b, is_xla):
    *batch, m, n, k = shape
    a = jax.ShapeDtypeStruct((*batch, m, k), jnp.dtype(dtype))
    b = jax.ShapeDtypeStruct((*batch, n, k) if transpose_b else (*batch, k, n), jnp.dtype(dtype))
    product = jax.jit(lambda a, b: gemm(a, b, transpose_b=transpose_b, precision=precision))
    _, calls = cuda_module(product, a, b)
    assert len(calls) == (not is_xla)
    assert ("XLA takes less time" in said[-1]) == is_xla


@pytest.mark.usefixtures("hopper")
def test_xla_multiplies_where_no_kernel_takes_planes(cuda_module, monkeypatch, said):
    def gated(x, w, v):
        return gated_gemm(x, w, v, precision="highest")

    _, calls = cuda_module(gated, f32(1024, 512), f32(512, 1024), f32(512, 1024))
    assert not calls
    assert said[-1].endswith("no gated kernel for F32_F32_F32")
    others = frozenset(name for name in _extension.KERNEL_NAMES if "planes" not in name)
    monkeypatch.setattr(_extension, "KERNEL_NAMES", others)
    f = jax.jit(lambda a, b: gemm(a, b, precision="highest"))
    assert not cuda_module(f, f32(1024, 512), f32(512, 1024))[1]
    assert said[-1].endswith("no kernel for F32_F32_F32 in this build")


def test_rows_by_name_are_of_other_arithmetic():
    with pytest.raises(ValueError, match="no kernel computes"):
        gemm(
            jnp.ones((8, 8)),
            jnp.ones((8, 8)),
            precision="highest",
            config="sm90_bf16_128x128x64_s6_c2x1_cooperative_planes",
        )
    with pytest.raises(ValueError, match="is not a kernel configuration for BF16_BF16_F32"):
        gemm(
            jnp.ones((8, 8), jnp.bfloat16),
            jnp.ones((8, 8), jnp.bfloat16),
            config="sm90_bf16_128x128x64_s6_c2x1_cooperative_planes",
        )


@pytest.mark.parametrize("name", ["BF16_BF16_F32_X9", "TF32_TF32_F32_X3"])
def test_presets_that_a_cpu_does_not_know_are_those_of_float32(name):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((9, 70), (70, 5)))
    y = jax.jit(lambda a, b: gemm(a, b, precision=name))(a, b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.max(np.abs(y - exact) / (np.abs(a) @ np.abs(b))) < 1e-6
