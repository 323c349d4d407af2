"""Addresses of elements: strides and folding, against NumPy reading the same memory."""

from __future__ import annotations

import numpy as np
import pytest

from jax_tcgemm.problem import ragged, strides
from jax_tcgemm.problem.strides import MAX_EXTENT, Operands, StridedGemm, fold, strided_gemm

pytestmark = pytest.mark.any_jax


def batched(batch, m, n, k, **operands) -> StridedGemm:
    zeros = Operands(*((0,) * (len(batch) + len(roles)) for roles in strides.ROLES))
    return StridedGemm(m, n, k, batch, zeros._replace(**operands))


def read(flat: np.ndarray, shape: tuple[int, ...], steps: tuple[int, ...]) -> np.ndarray:
    """Reads an operand through its strides, as the kernel does."""
    address = np.zeros((), np.int64)
    for extent, step in zip(shape, steps, strict=True):
        address = address[..., None] + step * np.arange(extent)
    return flat[address]


def formula(x: Operands) -> np.ndarray:
    """Computes a formula that uses each operand, with all batch and matrix axes present."""
    alpha, beta = (scale[..., None, None] for scale in (x.alpha, x.beta))
    scale = alpha * x.row_scale[..., :, None] * x.column_scale[..., None, :]
    first = scale * (x.a @ x.b) + beta * x.c + x.bias[..., None, :]
    return first - (x.a @ x.b2 + x.bias2[..., None, :]) * x.c2


def evaluate(gemm: StridedGemm, data: Operands) -> np.ndarray:
    """Returns the row-major result of the formula, flat."""
    extents = {"m": gemm.m, "n": gemm.n, "k": gemm.k}

    def operand(roles, flat, steps):
        shape = (*gemm.batch, *(extents[role] for role in roles))
        return read(flat, shape, steps)

    operands = map(operand, strides.ROLES, data, gemm.strides)
    return formula(Operands(*operands)).ravel()


def random_operand(rng, extents):
    """Draws an axis order and missing axes; returns the axes, shape and data."""
    missing = [bool(rng.integers(3) == 0) for _ in extents]
    present = [i for i, is_missing in enumerate(missing) if not is_missing]
    order = rng.permutation(present) if rng.integers(2) else np.array(present, int)
    shape = tuple(extents[i] for i in order)
    position = {int(i): at for at, i in enumerate(order)}
    axes = tuple(position.get(i) for i in range(len(extents)))
    return axes, shape, rng.standard_normal(shape)


@pytest.mark.parametrize("batch_ndim", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("draw", range(20))
def test_folding_keeps_the_result(rng, batch_ndim, draw):
    batch = tuple(int(x) for x in rng.choice([1, 2, 3], batch_ndim))
    m, n, k = (int(x) for x in rng.choice([1, 2, 4], 3))
    roles = {"m": m, "n": n, "k": k}
    axes, shapes, data = [], [], []
    for name in strides.ROLES:
        extents = (*batch, *(roles[role] for role in name))
        drawn = random_operand(rng, extents)
        while name in ("mk", "kn") and None in drawn[0][len(batch) :]:
            drawn = random_operand(rng, extents)
        axes.append(drawn[0])
        shapes.append(drawn[1])
        data.append(drawn[2])
    # Every batch dimension is in a or in b.
    lacking = [i for i in range(batch_ndim) if axes[0][i] is None and axes[1][i] is None]
    if lacking:
        axes[1] = tuple(range(len(batch) + 2))
        shapes[1] = (*batch, k, n)
        data[1] = rng.standard_normal(shapes[1])
    plain = strided_gemm(Operands(*axes), Operands(*shapes))
    assert (plain.batch, plain.m, plain.n, plain.k) == (batch, m, n, k)
    aligned = [
        np.expand_dims(x.transpose([p for p in axis if p is not None]), missing)
        if (missing := tuple(i for i, p in enumerate(axis) if p is None))
        else x.transpose(axis)
        for x, axis in zip(data, axes, strict=True)
    ]
    expected = formula(Operands(*aligned))
    expected = np.broadcast_to(expected, (*batch, m, n)).ravel()
    flat = Operands(*(x.ravel() for x in data))
    np.testing.assert_allclose(evaluate(plain, flat), expected)
    folded = fold(plain)
    assert len(folded.batch) <= len(batch)
    assert folded.m * int(np.prod(folded.batch)) == m * int(np.prod(batch))
    np.testing.assert_allclose(evaluate(folded, flat), expected)


def test_one_extents_go():
    gemm = batched((1, 3, 1), 4, 5, 6, a=(9, 24, 7, 6, 1), b=(9, 30, 7, 5, 1))
    folded = fold(gemm)
    assert folded.batch == (3,)
    assert folded.strides.a == (24, 6, 1)
    assert folded.strides.b == (30, 5, 1)


def test_rows_of_a_batch_fold():
    gemm = batched((2, 3), 4, 5, 6, a=(72, 24, 6, 1), b=(0, 0, 5, 1), c=(60, 20, 5, 1))
    folded = fold(gemm)
    assert (folded.m, folded.batch) == (24, ())
    assert folded.strides.a == (6, 1)
    assert folded.strides.c == (5, 1)


@pytest.mark.parametrize(
    "blocker",
    [
        {"b": (30, 5, 1)},
        {"bias": (5, 1)},
        {"alpha": (1,)},
        {"beta": (1,)},
        {"c": (0, 5, 1)},
        {"a": (6, 18, 1)},
    ],
)
def test_rows_of_a_batch_stay_where_they_must(blocker):
    gemm = batched((3,), 4, 5, 6, **{"a": (24, 6, 1), **blocker})
    assert fold(gemm).batch == (3,)


def test_rows_are_folded_as_far_as_they_are_counted():
    strides = {"a": (2**29 * 6, 6, 1), "b": (0, 5, 1), "c": (2**29 * 5, 5, 1)}
    assert fold(batched((2,), 2**29, 5, 6, **strides)).m == MAX_EXTENT
    folded = fold(batched((3,), 2**29, 5, 6, **strides))
    assert (folded.m, folded.batch) == (2**29, (3,))


def test_outer_batch_survives_an_inner_fold():
    gemm = batched((2, 3), 4, 5, 6, a=(72, 24, 6, 1), b=(30, 0, 5, 1))
    folded = fold(gemm)
    assert (folded.m, folded.batch) == (12, (2,))


def test_single_rows_fold_at_any_distance():
    folded = fold(batched((7,), 1, 5, 6, a=(100, 6, 1), c=(50, 5, 1)))
    assert (folded.m, folded.batch) == (7, ())
    assert folded.strides.a == (100, 1)
    assert folded.strides.c == (50, 1)


def test_neighbours_merge():
    gemm = batched((2, 3, 4), 5, 5, 5, a=(300, 100, 25, 5, 1), b=(25, 0, 0, 5, 1))
    gemm = StridedGemm(5, 5, 5, (2, 3, 4), gemm.strides._replace(alpha=(0, 0, 1)))
    assert fold(gemm).batch == (2, 3, 4)
    gemm = batched((2, 3, 4), 5, 5, 5, a=(300, 100, 25, 5, 1), b=(300, 100, 25, 5, 1))
    assert fold(gemm).batch == (24,)


@pytest.mark.parametrize(
    ("matrix_strides", "extents", "expected"),
    [
        ((6, 1), (4, 6), True),
        ((1, 4), (4, 6), True),
        ((12, 2), (4, 6), False),
        ((12, 2), (1, 6), True),
        ((12, 2), (4, 1), True),
        ((0, 0), (4, 0), True),
    ],
)
def test_has_unit_stride(matrix_strides, extents, expected):
    assert strides.has_unit_stride((99, *matrix_strides), extents) is expected


def test_insert_batch():
    assert strides.insert_batch((0, None, 1), None) == (None, 0, None, 1)
    assert strides.insert_batch((0, None, 1), 0) == (0, 1, None, 2)
    assert strides.insert_batch((1, 0), 1) == (1, 2, 0)
    assert strides.insert_batch((1, 0), 2) == (2, 1, 0)


def test_merge_neighbours_only():
    assert strides.merge((0, 1, 2), (2, 3, 4), 0, 1) == ((0, 1), (6, 4))
    assert strides.merge((0, 1, 2), (2, 3, 4), 0, 2) is None
    assert strides.merge((None, 0, 1), (3, 4), 0, 1) is None
    assert strides.merge((1, 0, 2), (3, 2, 4), 0, 2) == ((0, 1), (3, 8))


def test_row_major():
    assert strides.row_major((2, 3, 4)) == (12, 4, 1)
    assert strides.row_major(()) == ()
    assert strides.row_major((2**20, 2**20, 3)) == (3 * 2**20, 3, 1)


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_are_the_batch_of_the_weights(transposed):
    m, n, k, groups = 9, 5, 7, 3
    spec = ragged.dot(np.dtype(np.float32), None, transpose_b=transposed, has_bias=True)
    b = (groups, n, k) if transposed else (groups, k, n)
    shapes = Operands((m, k), b, (groups,), bias=(groups, n))
    of_b = (k * n, 1, k) if transposed else (k * n, n, 1)
    assert spec.strided(shapes) == batched(
        (groups,), m, n, k, a=(0, k, 1), b=of_b, group_sizes=(1,), bias=(n, 1)
    )
    assert spec.result_shape(shapes) == (m, n)
    assert spec.transposes_b == transposed
    contraction = ragged.contraction(np.dtype(np.float32), None)
    shapes = Operands((k, m), (k, n), (groups,))
    assert contraction.strided(shapes) == batched(
        (groups,), m, n, k, a=(0, 1, m), b=(0, n, 1), group_sizes=(1,)
    )
    assert contraction.result_shape(shapes) == (groups, m, n)
