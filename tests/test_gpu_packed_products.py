"""Products with packed weights on a Hopper GPU, compared with float64 and ``jax.numpy``."""

from __future__ import annotations

import functools

import jax
import packed_problems
import pytest
from gpu_accuracy import poison
from packed_problems import FLOATS, Problem, wrong
from packed_values import QTYPES

from jax_tcgemm import _extension, gemm, pack
from jax_tcgemm.kernels import packed as kernels

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

DRAWN = 96
FORMATS = [*((qtype, False) for qtype in QTYPES), ("int4", True), ("uint4", True)]

by_kernel = functools.partial(gemm, config="kernel")


# Tiles of 8, 16, 32, 64 and 128 rows, with and without residues; several tiles.
@pytest.mark.parametrize(
    "rows", [(1, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 512)], ids=str
)
@pytest.mark.parametrize(("qtype", "has_zeros"), FORMATS)
def test_every_format_and_tile(rng, qtype, has_zeros, rows):
    m = int(rng.integers(rows[0], rows[1] + 1))
    group = int(rng.choice([32, 64, 128]))
    k = 128 * int(rng.integers(1, 12))
    activation, scale, output = (str(rng.choice(FLOATS[:count])) for count in (2, 3, 3))
    if activation == "float16":
        scale = activation
    problem = Problem(
        *(m, int(rng.integers(1, 500)), k, group, qtype, has_zeros, scale, activation, output)
    )
    assert problem.has_kernel
    assert packed_problems.failure(problem, rng) is None, problem


CORNERS = {
    "one tile": Problem(1, 64, 64, 64),
    "one element": Problem(1, 1, 64, 64),
    "one column of many rows": Problem(64, 1, 128, 32),
    "n % 64 and n % 4": Problem(5, 129, 256, 128),
    "n % 4, wide": Problem(40, 257, 256, 128, output="float32"),
    "n % 4, batched": Problem(3, 66, 128, 64, batch=(3,), has_own_weights=True),
    "half a stage": Problem(7, 128, 640, 128),
    "a quarter of a stage": Problem(16, 100, 320, 64),
    "three quarters of a stage, wgmma": Problem(33, 130, 448, 64),
    "one short stage": Problem(20, 64, 64, 32),
    "half a stage of 8 bits": Problem(17, 64, 192, 192, "int8"),
    "all rows, less than a stage": Problem(2, 64, 192, 192),
    "all rows, less than a stage, wgmma": Problem(50, 64, 192, 192, "uint4", has_zeros=True),
    "all rows, short last stage": Problem(9, 70, 1088, 1088, "float8_e4m3fn"),
    "groups of two stages": Problem(9, 64, 1024, 512, "uint4", has_zeros=True),
    "groups of four stages": Problem(64, 64, 1024, 512, "int8"),
    "eight parts of k": Problem(1, 64, 14336, 128),
    "parts of k of unequal sizes": Problem(16, 64, 7232, 64, has_zeros=True),
    "parts of k, wgmma": Problem(64, 256, 4160, 32, "uint4", has_zeros=True),
    "parts of k, all rows": Problem(30, 200, 4160, 4160, "int8", scale="float32"),
    "parts of k, many rows": Problem(200, 100, 7232, 64, "int8"),
    "more tiles than multiprocessors": Problem(4, 64 * 300, 128, 128),
    "rows of a batch": Problem(3, 96, 256, 128, batch=(2, 4)),
    "weights of a batch": Problem(64, 80, 384, 128, "int8", batch=(5,), has_own_weights=True),
    "weights of two dimensions": Problem(9, 64, 320, 64, batch=(2, 3), has_own_weights=True),
    "float16": Problem(11, 100, 512, 128, scale="float16", activation="float16"),
    "float16, wgmma": Problem(
        *(60, 100, 512, 128, "float8_e4m3fn"), scale="float16", activation="float16"
    ),
    "float16, float32 scales": Problem(
        *(13, 100, 512, 32, "uint4", True, "float32", "float16", "float32")
    ),
}


@pytest.mark.parametrize("name", CORNERS)
def test_corner_cases(rng, name):
    assert CORNERS[name].has_kernel
    assert packed_problems.failure(CORNERS[name], rng) is None


@pytest.mark.parametrize("m", [5, 16, 30, 60, 100])
def test_short_parts_of_k(rng, monkeypatch, m):
    monkeypatch.setattr(kernels, "_LEAST_K", 256)
    shape = (m, int(rng.integers(1, 200)), 64 * int(rng.integers(9, 50)))
    qtype = QTYPES[rng.integers(4)]
    problem = Problem(*shape, 64, qtype, has_zeros=qtype == "uint4")
    row = kernels.choose(problem.bits, *shape, problem.group)
    assert row is not None
    assert row.split_k > 1
    assert packed_problems.failure(problem, rng) is None, problem


@pytest.mark.parametrize("m", [5, 16])
@pytest.mark.parametrize("scale", FLOATS)
def test_tiles_for_large_weights(rng, monkeypatch, scale, m):
    """Few rows of large weights take two blocks a tile, here for smaller weights."""
    rows = {key: (0, row) for key, (_, row) in kernels._LARGE.items()}
    monkeypatch.setattr(kernels, "_LARGE", rows)
    problem = Problem(m, 300, 1088, 64, "uint4", has_zeros=True, scale=scale)
    row = kernels.choose(4, problem.m, problem.n, problem.k, problem.group)
    assert row is not None
    assert row.row_blocks == 2
    assert packed_problems.failure(problem, rng) is None


MANY = kernels.MOST_ROWS + 1
DEQUANTIZED = {
    "many rows": Problem(MANY, 200, 320, 64),
    "residues": Problem(MANY + 2, 129, 192, 192, "uint4", True, "float32", output="float32"),
    "int8 with float16 scales": Problem(MANY, 66, 320, 64, "int8", scale="float16"),
    "float8": Problem(-(-MANY // 2), 70, 448, 32, "float8_e4m3fn", batch=(2,)),
    "weights of a batch": Problem(MANY, 100, 128, 128, batch=(3,), has_own_weights=True),
    "groups that are no stages": Problem(8, 100, 192, 96, "int8"),
    "short groups": Problem(8, 100, 192, 16, "uint4", True),
    "scales that may not fit": Problem(40, 100, 256, 64, activation="float16"),
}


@pytest.mark.parametrize("name", DEQUANTIZED)
def test_a_kernel_dequantizes(rng, name):
    problem = DEQUANTIZED[name]
    x, q = problem.operands(rng)
    w = pack(q)
    run = jax.jit(lambda x, w: by_kernel(x, w, preferred_element_type=problem.output))
    assert _extension.UNPACK_TARGET in run.lower(x, w).as_text()
    poison((*w.batch, problem.n, problem.k), problem.activation)
    poison((*problem.batch, problem.m, problem.n), problem.output)
    assert wrong(run(x, w), x, q) is None


@pytest.mark.parametrize("index", range(DRAWN))
def test_drawn_problems(rng, index):
    problem = packed_problems.draw(int(rng.integers(2**32)), index)
    what = packed_problems.failure(problem, rng)
    assert what is None, f"{problem}: {what}"
