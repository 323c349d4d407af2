"""Choices that Python makes before the extension makes its own: the two must agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from kernel_rows import rank_rows
from tuned_calls import only

from jax_tcgemm import _compat, gemm, ragged_dot
from jax_tcgemm.epilogue import compiler
from jax_tcgemm.kernels import table
from jax_tcgemm.kernels.arithmetic import PLANE_PRODUCTS
from jax_tcgemm.kernels.names import read_config
from jax_tcgemm.lowering import fallback
from jax_tcgemm.problem import ragged
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands
from jax_tcgemm.transforms.candidates import (
    built_candidates,
    candidates,
    relative,
    rows_of_relative,
)

BF16, F16, F32 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))
H200 = {"sm_count": 132, "shared_memory_per_block": 232448, "compute_capability": 90}


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_float16_with_c_has_other_rows_than_its_relative():
    """In pingpong, uneven parts of k need what adds up parts, which no C may follow."""
    types = (array(512, 4096, dtype=F16), array(4096, 512, dtype=F16), array(512, 512, dtype=F16))
    product = only(gemm, *types)
    every = built_candidates(relative(product), H200)
    rows = rows_of_relative(product, every, H200)
    assert rows
    assert not any(name.endswith("pingpong/splits=3") for name in rows)


def test_planes_with_a_bias_need_a_compiler(monkeypatch):
    """The build has no such rows, and the extension would take a kernel of single FMAs."""
    spec = GemmSpec(Operands((0, 1), (0, 1), bias=(0,)), F32, (jax.lax.Precision.HIGHEST,) * 2)
    shapes = {"a": (1024, 1024), "b": (1024, 2048), "bias": (2048,)}
    x = Operands(**{name: array(*shape, dtype=F32) for name, shape in shapes.items()})
    planes = PLANE_PRODUCTS["F32_F32_F32"]
    for may_compile in (True, False):
        monkeypatch.setattr(compiler, "may_compile_rows", lambda may=may_compile: may)
        assert (fallback.no_planes(planes, spec, x) is None) == may_compile


def test_rows_that_swap_operands_compute_wide_functions():
    """Two batch dimensions have no rows that promote, so all others are listed."""

    def names(wide):
        ranked = rank_rows(
            *("BF16_BF16_F32", 40, 4096, 8192, 6, True, 132, 232448),
            compute_capability=90,
            epilogue="any",
            batch_rank=2,
            compiled=True,
            shows_sums=wide,
        )
        return {name for name, _, _ in ranked}

    assert any(table.BY_NAME[name].swap_ab for name in names(wide=False))
    assert names(wide=True) == names(wide=False)


def test_copies_by_threads_take_any_number_of_batches():
    product = only(gemm, array(2, 1, 3, 1, 128, 512), array(1, 5, 1, 7, 512, 256))
    rows = [table.BY_NAME[read_config(name)[0]] for name in candidates(product, H200)]
    assert any(row.copies_whole_chunks for row in rows)
    assert not any(row.arch == "sm90" for row in rows)


@pytest.mark.parametrize("k", [1001, 201])
def test_a_vector_of_odd_length_is_read_by_tma(k):
    product = only(gemm, array(1, k), array(k, 2048))
    rows = [table.BY_NAME[read_config(name)[0]] for name in candidates(product, H200)]
    assert rows
    assert any(row.arch == "sm90" for row in rows)
    assert not any(row.copies_whole_chunks and row.arch == "sm80" for row in rows)


def test_built_rows_add_the_bias_of_groups(monkeypatch):
    monkeypatch.setattr(compiler, "may_compile_rows", lambda: False)
    none = _compat.canonicalize_precision(None)
    extents = (4096, 1024, 8, 1024, 2048, 8)
    for out, has_row in ((BF16, True), (F32, False)):
        spec = ragged.dot(out, none, None, has_bias=True)
        reason = fallback.no_ragged_kernel("BF16_BF16_F32", spec, extents)
        assert (reason is None) == has_row
    f = lambda x, w, sizes, bias: ragged_dot(x, w, sizes, bias=bias)  # noqa: E731
    sizes = array(8, dtype=jnp.int32)
    assert built_candidates(
        only(f, array(4096, 1024), array(8, 1024, 2048), sizes, array(8, 2048)), H200
    )
