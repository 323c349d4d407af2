"""The C++ of a program for operands in place, in a product or in a separate pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp

from jax_tcgemm import _core
from jax_tcgemm.epilogue import program_source
from jax_tcgemm.epilogue.program import Leaf, Program
from jax_tcgemm.kernels import table
from jax_tcgemm.problem.alignment import COPY_BYTES
from jax_tcgemm.problem.strides import Shape


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


def staged_of(made: Program, strides: Sequence[Shape], n: int) -> tuple[bool, ...]:
    """Returns which leaves go through shared memory, as is_staged of cuda/compiled_params.h."""
    return tuple(kind in _STAGED for kind in kinds_of(made, strides, n))


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


_STAGED = (("kColumns", True), ("kMatrix", True))


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
