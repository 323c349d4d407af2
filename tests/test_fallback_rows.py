"""When fallback kernels run: nothing else computes the product. Without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import bf16, picked
from gpu_accuracy import LAYOUTS
from kernel_rows import chosen_config

from jax_tcgemm import _compat, _extension, gated_gemm, ragged_dot
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels.table import CONFIGS

pytestmark = pytest.mark.any_jax

FALLBACKS = {row.name: row for row in CONFIGS if row.is_fallback}
GATED = "simt_bf16_4x64x32_w4x1_s1_gated"
ROWS = "simt_bf16_4x32x32_w4x1_s1_grouped_m"
KINDS = {
    "gated": {"gated": True, "layout": "nn"},
    "m": {"grouped": "m", "layout": "nn"},
    "k": {"grouped": "k", "layout": "tn"},
}
PAIRS = "simt_tf32_4x32x32_w4x1_s1_pairs"
ALGORITHMS = ("BF16_BF16_F32", "F16_F16_F32")
SIZES = jnp.array([8, 8])


def kind_of(row):
    return "gated" if row.gated else "pairs" if row.pairs else row.grouped


def choose(algorithm, kind, extents, aligned, compute_capability, **options):
    sms, shared_memory = (132, 227 * 1024) if compute_capability == 90 else (58, 99 * 1024)
    return chosen_config(
        *(algorithm, *extents, 8, aligned, sms, shared_memory),
        compute_capability=compute_capability,
        **KINDS[kind],
        **options,
    )


def test_every_kind_of_product_that_sm90_rows_alone_compute_fast_has_one():
    kinds = {(row.algorithm, kind_of(row)) for row in FALLBACKS.values()}
    assert kinds == {*itertools.product(ALGORITHMS, KINDS), ("TF32_TF32_F32", "pairs")}
    fast = {(row.algorithm, kind_of(row)) for row in CONFIGS if row.arch == "sm90"}
    assert fast >= kinds
    for row in FALLBACKS.values():
        assert row.rounds_sums
        assert not row.copies_whole_chunks
        kind = kind_of(row)
        assert row.name.endswith(f"_{kind}" if len(kind) > 1 else f"_grouped_{kind}")
    assert {GATED, ROWS, PAIRS} <= set(FALLBACKS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_n": 32}, "one element"),
        ({"gated": False}, "one element"),
        ({"grouped": "m"}, "one weight"),
        ({"grouped": "columns"}, "unknown grouped"),
        ({"algorithm": "TF32_TF32_F32"}, "16-bit"),
        ({"algorithm": "F16_F16_F16"}, "float32 sums"),
    ],
)
def test_impossible_rows(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FALLBACKS[GATED], **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "BF16_BF16_F32"}, "pairs of float32"),
        ({"grouped": "m"}, "of one kind"),
        ({"pairs": False, "planes": True}, "planes are of sm90 rows"),
    ],
)
def test_impossible_rows_of_pairs(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FALLBACKS[PAIRS], **changes)


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gpus_without_the_sm90_family_take_them(algorithm, kind, capability):
    if not _extension.KERNEL_NAMES.issuperset(FALLBACKS):
        pytest.skip("not in this build")
    for extents, aligned, float32_result in itertools.product(
        [(1, 1, 1), (128, 512, 512), (8192, 14336, 4096), (333, 777, 1111)],
        *[(True, False)] * 2,
    ):
        options = {"float32_result": float32_result}
        name = choose(algorithm, kind, extents, aligned, capability, **options)
        row = FALLBACKS[name]
        assert (row.algorithm, kind_of(row)) == (algorithm, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hopper_takes_them_for_what_tma_cannot_address_alone(algorithm, kind):
    sm90 = {row.name for row in CONFIGS if row.arch == "sm90" and kind_of(row) == kind}
    if not _extension.KERNEL_NAMES.issuperset(sm90 | set(FALLBACKS)):
        pytest.skip("not in this build")
    for extents, float32_result, epilogue in itertools.product(
        [(1, 8, 8), (1, 4096, 4096), (64, 64, 64), (128, 512, 512), (8192, 14336, 4096)],
        (True, False),
        ("none",) if kind == "k" else ("none", "any"),  # groups along k have no epilogue
    ):
        options = {"float32_result": float32_result, "epilogue": epilogue}
        assert choose(algorithm, kind, extents, True, 90, **options) in sm90
        assert choose(algorithm, kind, extents, False, 90, **options) in FALLBACKS


@pytest.fixture
def local_gpu(monkeypatch):
    """Pretends that this machine has a GPU."""

    def pretend(capability):
        device = type("Device", (), {"compute_capability": capability, "device_kind": "a GPU"})
        monkeypatch.setattr(_compat, "initialized_cuda_devices", lambda: [device()])

    return pretend


def gated_calls(cuda_module, *operands, **options):
    # A new function, since jax caches the lowering of a function.
    return cuda_module(functools.partial(gated_gemm, **options), *operands)[1]


def ragged_calls(**options):
    operands = bf16(16, 8), bf16(2, 8, 8), SIZES
    traced = jax.jit(functools.partial(ragged_dot, **options)).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text().count("@jax_tcgemm_ragged_dot")


def test_gpus_that_are_known_to_lack_fast_kernels_leave_products_to_xla(cuda_module, local_gpu):
    operands = bf16(80, 16), bf16(16, 24), bf16(16, 24)
    for capability, calls in (("9.0", 1), ("8.0", 0), ("10.0", 0)):
        local_gpu(capability)
        assert len(gated_calls(cuda_module, *operands)) == calls
        assert ragged_calls() == calls
        assert len(gated_calls(cuda_module, *operands, config=GATED)) == 1
        assert ragged_calls(config=ROWS) == 1


def test_builds_with_no_other_leave_products_to_xla_unless_one_is_named(cuda_module, monkeypatch):
    monkeypatch.setattr(_extension, "KERNEL_NAMES", frozenset(FALLBACKS))
    assert not _extension.has_kernel("BF16_BF16_F32", gated=True)
    assert not _extension.has_kernel("BF16_BF16_F32", grouped="k")
    operands = bf16(80, 16), bf16(16, 24), bf16(16, 24)
    assert not gated_calls(cuda_module, *operands)
    assert not ragged_calls()
    assert len(gated_calls(cuda_module, *operands, config=GATED)) == 1
    assert ragged_calls(config=ROWS) == 1


@pytest.mark.parametrize(("transpose_w", "packed"), LAYOUTS)
def test_a_named_row_takes_any_alignment(cuda_module, transpose_w, packed):
    n, columns = 23, 46 if packed else 23
    w = bf16(columns, 9) if transpose_w else bf16(9, columns)
    weights = [w] if packed else [w, w]
    f = functools.partial(gated_gemm, config=GATED, transpose_w=transpose_w)
    text, (call,) = cuda_module(f, bf16(7, 9), *weights)
    assert picked(call, "config", "gated", "m", "n", "k") == (GATED, True, 7, n, 9)
    assert call["b_strides"] == ([1, 9] if transpose_w else [columns, 1])
    assert call["b2_offset"] == (0 if not packed else n * 9 if transpose_w else n)
    assert "stablehlo.pad" not in text
    sm90 = next(row.name for row in kernel_names.for_algorithm("BF16_BF16_F32") if row.gated)
    with pytest.raises(ValueError, match=rf"16 bytes at a time.*{GATED}"):
        gated_gemm(bf16(7, 9), *weights, config=sm90, transpose_w=transpose_w)


def test_a_named_row_takes_four_batch_dimensions(cuda_module):
    f = functools.partial(gated_gemm, config=GATED)
    for axis in range(3):  # the weights' batch order differs, so the dimensions do not fold
        f = jax.vmap(f, (1, axis, axis))
    x, w = bf16(2, 3, 4, 5, 6, 8), bf16(5, 4, 3, 8, 8)
    _, (call,) = cuda_module(lambda x, w: f(x, w, w), x, w)
    assert len(call["batch_shape"]) == 4
