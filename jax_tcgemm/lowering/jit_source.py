"""The C++ of a program for operands in place, in a product or in a separate pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _core
from jax_tcgemm.epilogue import program_source, source
from jax_tcgemm.epilogue.program import Leaf, Program
from jax_tcgemm.kernels import table
from jax_tcgemm.problem.alignment import COPY_BYTES
from jax_tcgemm.problem.strides import Shape, StridedGemm, absent_strides, fold_beside, row_major


def source_of(
    made: Program, strides: Sequence[Shape], n: int, *, batched: bool, scaled: bool = False
) -> str:
    """Returns the C++ of a program.

    Args:
        made: the program.
        strides: strides of each leaf, in elements along ``(*batch, m, n)``.
        n: number of columns of the results.
        batched: whether there is more than one matrix.
        scaled: whether the factors have block scales.
    """
    whole = [n * result.dtype.itemsize % COPY_BYTES == 0 for result in made.matrices]
    return program_source.of_program(
        made, kinds_of(made, strides, n), whole, batched=batched, scaled=scaled
    )


def function_attributes(
    made: Program, strides: Sequence[Shape], n: int, text: str
) -> dict[str, Any]:
    """Returns the attributes that every call with a program has.

    Args:
        made: the program.
        strides: as in ``source_of``.
        n: the same.
        text: what the kernel is compiled for.
    """
    vectors = [is_vector for _, is_vector in kinds_of(made, strides, n)]
    elements = [math.prod(x.shape) for x in made.outputs]
    return {
        "operand_strides": np.asarray([step for each in strides for step in each], np.int64),
        "operand_vectors": np.asarray(vectors, np.int64),
        "result_elements": np.asarray(elements, np.int64),
        "digest": source.digest(text),
        "source": text,
    }


def folded(shape: Shape, made: Program) -> tuple[StridedGemm, tuple[Shape, ...]]:
    """Returns the matrices in as few dimensions as the leaves allow, and the leaves' strides.

    Args:
        shape: shape of the matrices, ``(..., m, n)``.
        made: the program.
    """
    *batch, m, n = shape
    own = absent_strides(len(batch))._replace(a=row_major(shape))
    leaves = tuple(leaf.strides(len(shape)) for leaf in made.leaves)
    gemm = StridedGemm(m, n, 1, tuple(batch), own)
    return fold_beside(gemm, leaves, keeps_rows=made.keeps_rows)


# Rows and columns of the smallest sub-tile, and the gap between its rows in shared memory, as in
# CompiledPlan of cuda/epilogue/compiled_io.cuh.
_ROWS, _COLUMNS, _GAP = 16, 16, 16

# The most bytes of shared memory that a warp has in any row.
MOST_WARP_BYTES = 8192


@functools.cache
def most_result_bytes(algorithm: str, *, gated: bool, grouped: str, streams: bool) -> int:
    """Returns the most shared memory that a warp has for results in rows of this kind.

    Args:
        algorithm: name of the arithmetic.
        gated: whether there are two weights.
        grouped: as in ``KernelConfig``.
        streams: whether rows read an 8-bit weight in place.
    """
    kind = algorithm, gated, grouped, streams
    every = (*table.CONFIGS, *table.RUN_TIME_CONFIGS)
    rows = [x for x in every if (x.algorithm, x.gated, x.grouped, x.streams_b) == kind]
    facts = [_core.row_facts(row.name) for row in rows]
    return max((row.warp_buffer_bytes for row in facts if row.takes_functions), default=0)


def result_bytes(made: Program) -> int:
    """Returns the shared memory of a warp for the results of a sub-tile."""
    return sum(matrix_bytes(jnp.dtype(result.dtype).itemsize) for result in made.matrices)


def warp_bytes(made: Program, strides: Sequence[Shape], n: int) -> int:
    """Returns the shared memory of a warp for a sub-tile, with operands one stage ahead."""
    sizes: list[int] = []
    columns = 0
    for leaf, kind in zip(made.leaves, kinds_of(made, strides, n), strict=True):
        if kind == ("kMatrix", True):
            sizes.append(jnp.dtype(leaf.dtype).itemsize)
        elif kind == ("kColumns", True):
            columns += jnp.dtype(leaf.dtype).itemsize * _COLUMNS
    return result_bytes(made) + columns + sum(map(matrix_bytes, sizes))


def matrix_bytes(size: int) -> int:
    """Returns the shared memory of a warp for a matrix of elements of ``size`` bytes."""
    return _ROWS * (_COLUMNS * size + _GAP)


def kinds_of(made: Program, strides: Sequence[Shape], n: int) -> list[tuple[str, bool]]:
    """Returns along which dimensions each leaf moves, and whether it is read by vectors."""
    pairs = zip(made.leaves, strides, strict=True)
    return [(_along(steps), _is_vector(leaf, steps, n)) for leaf, steps in pairs]


def _along(strides: Shape) -> str:
    """Returns along what an operand moves, from its strides along (*batch, m, n)."""
    if strides[-2] == 0:
        return "kNothing" if strides[-1] == 0 else "kColumns"
    return "kRows" if strides[-1] == 0 else "kMatrix"


def _is_vector(leaf: Leaf, strides: Shape, n: int) -> bool:
    """Checks if 16 bytes of neighbouring columns are contiguous and aligned."""
    size = jnp.dtype(leaf.dtype).itemsize
    steps = (*strides[:-1], n)
    return strides[-1] == 1 and all(step * size % COPY_BYTES == 0 for step in steps)
