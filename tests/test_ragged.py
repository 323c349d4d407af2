"""ragged_dot: values and gradients against float64 loops and jax.lax, errors, lowering."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_rows import chosen_config
from ragged_problems import (
    BF16,
    F16,
    F32,
    check_problem,
    contracted,
    looped,
    random_problem,
)

import jax_tcgemm
from jax_tcgemm import _extension, gated_ragged_dot, ragged_dot
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem import ragged
from jax_tcgemm.problem.strides import Operands


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_equals_the_loop_and_lax(rng, normal, assert_accurate, dtype):
    for _ in range(4):
        check_problem(random_problem(rng, normal, dtype), assert_accurate)


@pytest.mark.parametrize("sizes", [[3, 4], [0, 0], [7, 7], [-5, 6], [2**31 - 1] * 2, [-(2**31), 9]])
def test_sizes_that_do_not_fit_are_clamped(normal, sizes):
    lhs, rhs = normal(9, 4), normal(2, 4, 3)
    d = ragged_dot(lhs, rhs, jnp.asarray(sizes, jnp.int32), precision="highest")
    np.testing.assert_allclose(d, looped(lhs, rhs, sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint32, np.uint64])
def test_sizes_of_any_integer_type(normal, dtype):
    lhs, rhs = normal(9, 4), normal(2, 4, 3)
    sizes = np.asarray([4, np.iinfo(dtype).max], dtype)
    with jax.enable_x64(True):
        d = ragged_dot(lhs, rhs, sizes, precision="highest")
    np.testing.assert_allclose(d, looped(lhs, rhs, [4, 5]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4, 3, 2), (5, 0, 3, 2), (5, 4, 0, 2), (5, 4, 3, 0)])
def test_empty_extents(normal, shape):
    m, k, n, groups = shape
    bias = normal(groups, n)
    sizes = jnp.full(groups, 2, jnp.int32)
    d = ragged_dot(normal(m, k), normal(groups, k, n), sizes, bias=bias, activation="relu")
    assert d.shape == (m, n)
    if k == 0:
        np.testing.assert_array_equal(d[:4], np.repeat(np.maximum(bias, 0), 2, axis=0))


def test_values_of_other_groups_and_of_none_do_not_matter(normal):
    """Infinities outside of a group reach neither its rows nor its contraction."""
    lhs, rhs = normal(9, 4).at[6:].set(jnp.inf), normal(2, 4, 3).at[1].set(jnp.nan)
    d = ragged_dot(lhs, rhs, jnp.array([6, 0]))
    assert np.isfinite(d).all()
    spec = ragged.contraction(jnp.dtype(F32), (jax.lax.Precision.HIGHEST,) * 2)
    (d,) = gemm_primitive.bind(Operands(lhs, normal(9, 3), jnp.array([4, 2])), spec)
    assert np.isfinite(d).all()


@pytest.mark.parametrize("types", [(BF16, F32), (F32, BF16), (F16, None), (jnp.int8, None)])
def test_result_dtype_is_that_of_lax(normal, types):
    a, b = types
    lhs, rhs = normal(6, 4, dtype=a), normal(2, 4, 3, dtype=b or a)
    ours = functools.partial(ragged_dot, group_sizes=jnp.array([2, 3]))
    lax = functools.partial(jax.lax.ragged_dot, group_sizes=jnp.array([2, 3]))
    assert ours(lhs, rhs).dtype == lax(lhs, rhs).dtype
    preferred = {"preferred_element_type": F32}
    assert ours(lhs, rhs, **preferred).dtype == lax(lhs, rhs, **preferred).dtype == F32


# Derivatives


def test_derivatives_of_16_bit_operands_are_products_of_them(normal, assert_accurate):
    """Each cotangent is rounded once, and cotangents of rhs are zero for empty groups."""
    sizes = np.array([9, 0, 20])
    lhs, rhs, ct = (normal(*s, dtype=BF16) for s in ((33, 12), (3, 12, 7), (33, 7)))
    _, pullback = jax.vjp(lambda a, b: ragged_dot(a, b, jnp.asarray(sizes)), lhs, rhs)
    dlhs, drhs = pullback(ct)
    assert dlhs.dtype == drhs.dtype == BF16
    exact = looped(ct, jnp.swapaxes(rhs, 1, 2), sizes), contracted(lhs, ct, sizes)
    for actual, wanted in zip((dlhs, drhs), exact, strict=True):
        assert_accurate(actual, jnp.asarray(wanted, BF16), wanted)
    assert not np.asarray(drhs[1]).any()


def test_gated_weights_have_one_shape(normal):
    lhs, gate, up = normal(9, 4), normal(3, 4, 5), normal(2, 4, 5)
    with pytest.raises(ValueError, match="rhs_up must have the shape of rhs_gate"):
        gated_ragged_dot(lhs, gate, up, jnp.array([4, 0, 3]))


def test_group_sizes_have_no_derivative(normal):
    lhs, rhs, sizes = normal(6, 3), normal(2, 3, 2), jnp.array([2, 3])
    grad = jax.grad(lambda s: ragged_dot(lhs, rhs, s).sum(), allow_int=True)(sizes)
    assert grad.dtype == jax.dtypes.float0


def test_unused_preactivation_is_not_computed(normal, cuda_text):
    operands = normal(16, 8, dtype=BF16), normal(2, 8, 8, dtype=BF16), jnp.array([8, 8])
    forward = functools.partial(ragged_dot, activation="silu")
    assert cuda_text(forward, *operands).count("has_aux = false") == 1
    gradient = jax.grad(lambda *x: forward(*x).astype(F32).sum(), (0, 1))
    text = cuda_text(gradient, *operands)
    assert text.count("custom_call @jax_tcgemm_ragged_dot_v1") == 3  # z, dlhs, drhs
    assert text.count("has_aux = true") == 0  # the sum needs no d


# Errors


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"lhs": (6, 4, 1)}, ValueError, r"lhs.shape=\(6, 4, 1\)"),
        ({"rhs": (4, 3)}, ValueError, r"rhs.shape=\(4, 3\)"),
        ({"rhs": (2, 5, 3)}, ValueError, "agree in k"),
        ({"sizes": jnp.array([1.0, 2.0])}, TypeError, "group_sizes must be integers"),
        ({"sizes": jnp.array([1, 2, 3])}, ValueError, "2 matrices"),
        ({"bias": (4,)}, ValueError, "bias.shape"),
        ({"activation": "selu"}, ValueError, "activation='selu'"),
        ({"transpose_rhs": 1}, TypeError, "transpose_rhs"),
        ({"config": "none"}, ValueError, "config='none' is no kernel configuration for groups"),
        ({"config": 3}, TypeError, "config=3"),
    ],
)
def test_errors(normal, changes, error, words):
    shapes = {"lhs": (6, 4), "rhs": (2, 4, 3)}
    lhs, rhs = (normal(*changes.get(name, shape)) for name, shape in shapes.items())
    names = ("activation", "transpose_rhs", "config")
    options = {name: changes[name] for name in names if name in changes}
    if "bias" in changes:
        options["bias"] = normal(*changes["bias"])
    with pytest.raises(error, match=words):
        ragged_dot(lhs, rhs, changes.get("sizes", jnp.array([2, 3])), **options)


# Lowering for CUDA


@pytest.fixture
def cuda_text(all_kernels) -> Callable[..., str]:
    """Returns a function that lowers for CUDA, with or without a GPU, to the module's text."""

    def lower(function: Callable, *args: Any) -> str:
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    return lower


def test_one_custom_call_with_what_it_needs(normal, cuda_text):
    operands = normal(20, 16, dtype=BF16), normal(3, 8, 16, dtype=BF16), jnp.array([8, 8, 1])
    text = cuda_text(
        lambda a, b, s, c: ragged_dot(a, b, s, bias=c, activation="gelu", transpose_rhs=True),
        *operands,
        normal(3, 8),
    )
    assert text.count(f"custom_call @{_extension.RAGGED_DOT_TARGET}") == 1
    for part in ("m = 20", "n = 8", "k = 16", "groups = 3", 'activation = "Gelu"', "depth = false"):
        assert part in text, part
    for part in ("has_bias = true", "transpose_rhs = true", "has_aux = false", "BF16_BF16_F32"):
        assert part in text, part
    assert "pad" not in text


def test_what_tma_cannot_step_over_is_padded(normal, cuda_text):
    operands = normal(20, 13, dtype=F16), normal(3, 13, 9, dtype=F16), jnp.array([8, 8, 1])
    text = cuda_text(ragged_dot, *operands)
    assert text.count(f"custom_call @{_extension.RAGGED_DOT_TARGET}") == 1
    assert "n = 16" in text
    assert "k = 16" in text
    assert "tensor<20x9xf16>" in text


@pytest.mark.parametrize("dtype", [F32, jnp.int8])
def test_other_dtypes_lower_to_the_reference(normal, cuda_text, dtype):
    operands = normal(20, 16, dtype=dtype), normal(3, 16, 8, dtype=dtype), jnp.array([8, 8, 1])
    assert "custom_call @jax_tcgemm" not in cuda_text(ragged_dot, *operands)


def test_a_named_kernel_is_asked_for_and_not_by_derivatives(normal, cuda_text):
    operands = normal(16, 8, dtype=BF16), normal(2, 8, 8, dtype=BF16), jnp.array([8, 8])
    name = kernel_names.for_algorithm("BF16_BF16_F32", "m")[0].name
    function = functools.partial(ragged_dot, config=name)
    assert cuda_text(function, *operands).count(f'config = "{name}"') == 1
    text = cuda_text(jax.grad(lambda *x: function(*x).astype(F32).sum(), (0, 1)), *operands)
    assert text.count(', config = ""') == text.count("custom_call @") == 2


def test_no_gemm_takes_a_ragged_kernel():
    names = {row.name for row in kernel_table.CONFIGS if row.grouped != "none"}
    assert names
    for algorithm in ("BF16_BF16_F32", "F16_F16_F32"):
        assert not names & {row.name for row in kernel_names.for_algorithm(algorithm)}
    operand = jnp.zeros((8, 8), BF16)
    with pytest.raises(ValueError, match="is not a kernel configuration for"):
        jax_tcgemm.gemm(operand, operand, config=min(n for n in names if "_bf16_" in n))


@pytest.mark.parametrize(
    ("grouped", "extents", "groups", "wanted"),
    [
        ("m", (1024, 14336, 4096), 8, "128x192x64"),
        ("m", (256, 2048, 2048), 8, "128x256x64"),
        ("m", (128, 2048, 2048), 8, "128x128x64"),
        ("m", (64, 2048, 2048), 8, "64x128x64"),
        ("m", (1, 2048, 2048), 8, "64x128x64"),
        ("k", (4096, 14336, 1024), 8, "128x256x64"),
        ("k", (512, 512, 512), 8, "128x128x64"),
    ],
)
def test_the_choice_depends_on_the_mean_size(grouped, extents, groups, wanted):
    rows = kernel_names.for_algorithm("BF16_BF16_F32", grouped)
    if not _extension.KERNEL_NAMES.issuperset(row.name for row in rows):
        pytest.skip("not in this build")
    name = chosen_config(
        *("BF16_BF16_F32", *extents, groups, True, 132, 227 * 1024),
        compute_capability=90,
        layout="nn" if grouped == "m" else "tn",
        grouped=grouped,
    )
    assert name in {row.name for row in rows}
    assert wanted in name
