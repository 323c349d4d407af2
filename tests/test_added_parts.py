"""Functions of products whose k is split: choices, workspaces and compilation, without a GPU."""

from __future__ import annotations

import jax
import pytest
import random_epilogues
from cuda_calls import bf16
from kernel_rows import rank_rows

from jax_tcgemm import _core, gated_gemm, gemm
from jax_tcgemm.epilogue import source
from jax_tcgemm.kernels import table
from jax_tcgemm.kernels.names import read_config
from jax_tcgemm.problem import alignment
from jax_tcgemm.problem.strides import Operands, StridedGemm


def _ranked(m, n, k, workspace=1 << 24, algorithm="BF16_BF16_F32", **more):
    return rank_rows(
        algorithm, m, n, k, 1, True, 132, 232448,
        compute_capability=90, epilogue="any", compiled=True, workspace_bytes=workspace, **more,
    )  # fmt: skip


def _adding():
    """Returns the rows for functions whose blocks add up parts of k."""
    facts = {row: _core.row_facts(row.name) for row in table.CONFIGS}
    return [row for row, each in facts.items() if each.adds_parts and each.takes_reductions]


@pytest.mark.parametrize("algorithm", ["BF16_BF16_F32", "F16_F16_F32"])
@pytest.mark.parametrize("reduces", [False, True])
def test_the_rows_that_split_are_those_of_the_table(algorithm, reduces):
    split = [
        name
        for shape in [(128, 128, 8192), (256, 192, 4096), (96, 512, 8192)]
        for name, _, adds in _ranked(*shape, algorithm=algorithm, reduces=reduces)
        if adds
    ]
    names = {read_config(name)[0] for name in split}
    assert names == {row.name for row in _adding() if row.algorithm == algorithm}
    assert {read_config(name)[1] for name in split} == {2, 4}
    others = [name for name, _, adds in _ranked(128, 128, 8192) if not adds]
    assert not any("/splits" in name for name in others)


def test_few_tiles_of_a_long_k_are_split():
    (name, _, adds), *_ = _ranked(256, 4096, 14336)
    assert adds
    assert name.endswith("/splits=2")
    assert not any(adds for _, _, adds in _ranked(256, 4096, 14336, workspace=0))
    assert not _ranked(2048, 4096, 4096)[0][2]


@pytest.mark.parametrize("algorithm", ["S8_S8_S32", "E4M3_E4M3_F32"])
def test_sums_of_8_bits_are_not_split(algorithm):
    assert not any(adds for _, _, adds in _ranked(128, 512, 8192, algorithm=algorithm, layout="nt"))


def _results(f, *x):
    """Returns the types of the results of the call of a compiled function."""
    text = jax.jit(f).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "compiled_gemm" in line]
    results = call.rsplit("->", 1)[1]
    return [each.split(">")[0] for each in results.split("tensor<")[1:]]


def test_which_calls_have_a_workspace():
    silu = lambda a, b: gemm(a, b, epilogue=jax.nn.silu)  # noqa: E731
    largest = 4 * 132 * 128 * 128 + _core.FIXUP_FLAG_BYTES
    assert _results(silu, bf16(256, 4096), bf16(4096, 1024)) == ["256x1024xf32", f"{largest}xui8"]
    # a short k, more tiles, two weights, several products
    assert _results(silu, bf16(256, 1000), bf16(1000, 1024)) == ["256x1024xf32"]
    assert _results(silu, bf16(2048, 4096), bf16(4096, 1024)) == ["2048x1024xf32"]
    gated = lambda a, b: gated_gemm(a, b, b, epilogue=lambda g, u: g * u)  # noqa: E731
    assert len(_results(gated, bf16(256, 4096), bf16(4096, 1024))) == 1
    batch = bf16(3, 256, 4096), bf16(3, 4096, 1024)
    assert len(_results(silu, *batch)) == 1


def test_bytes_hold_every_tile_of_the_blocks_that_run_at_once():
    gemm_of = lambda m, n, k: StridedGemm(m, n, k, (), Operands((), ()))  # noqa: E731
    for row in _adding():
        tile = 4 * row.tile_m * row.tile_n * (2 if row.tile_m * row.tile_n <= 64 * 128 else 1)
        assert 132 * tile <= alignment.bytes_of_added_parts(gemm_of(128, 128, 8192))


def test_a_row_that_adds_parts_compiles(rng):
    rows = _adding()
    for i in rng.choice(len(rows), 4, replace=False):
        epilogue = random_epilogues.draw_smooth(int(rng.integers(2**31)))
        name = rows[i].name + source.ADDS_PARTS
        assert random_epilogues.compiles(epilogue, name, "nn") is None
