"""The C++ of a program for operands as they lie: of a product, and of a pass of its own."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from jax_tcgemm.epilogue import source
from jax_tcgemm.epilogue.program import Leaf, Program
from jax_tcgemm.problem.alignment import COPY_BYTES
from jax_tcgemm.problem.strides import Shape


def source_of(
    made: Program, strides: Sequence[Shape], n: int, *, batched: bool, scaled: bool = False
) -> str:
    """Returns the C++ of a program.

    Args:
        made: the program.
        strides: of each leaf, in elements along ``(*batch, m, n)``.
        n: columns of the results.
        batched: whether there is more than one matrix.
        scaled: whether the factors have scales by blocks.
    """
    whole = [n * result.dtype.itemsize % COPY_BYTES == 0 for result in made.matrices]
    return source.of_program(
        made, kinds_of(made, strides, n), whole, batched=batched, scaled=scaled
    )


def staged_of(made: Program, strides: Sequence[Shape], n: int) -> tuple[bool, ...]:
    """Says which leaves are read through shared memory; as is_staged of cuda/compiled_params.h."""
    return tuple(kind in _STAGED for kind in kinds_of(made, strides, n))


_STAGED = (("kColumns", True), ("kMatrix", True))


def kinds_of(made: Program, strides: Sequence[Shape], n: int) -> list[tuple[str, bool]]:
    """Says of each leaf along what it moves, and whether by vectors."""
    pairs = zip(made.leaves, strides, strict=True)
    return [(_along(steps), _is_vector(leaf, steps, n)) for leaf, steps in pairs]


def _along(strides: Shape) -> str:
    """Says along what an operand moves, by its steps along (*batch, m, n)."""
    if strides[-2] == 0:
        return "kNothing" if strides[-1] == 0 else "kColumns"
    return "kRows" if strides[-1] == 0 else "kMatrix"


def _is_vector(leaf: Leaf, strides: Shape, n: int) -> bool:
    """Whether 16 bytes of neighbouring columns are contiguous, and aligned."""
    size = jnp.dtype(leaf.dtype).itemsize
    steps = (*strides[:-1], n)
    return strides[-1] == 1 and all(step * size % COPY_BYTES == 0 for step in steps)
