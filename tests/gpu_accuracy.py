"""The inputs with which GPU tests try each kernel, and the accuracy of its results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import clip, softcap
from jax_tcgemm.kernels.config import KernelConfig
from jax_tcgemm.problem.activations import ACTIVATIONS

LAYOUTS = list(itertools.product((False, True), repeat=2))
EVERY_ACTIVATION = [*ACTIVATIONS, softcap(1.5), clip(-0.75, 1.25)]
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def some(rng, choices, count=2):
    """Draws a few choices, since compiling a program for each takes nearly all of the time."""
    return [choices[i] for i in rng.permutation(len(choices))[:count]]


def residues(tile: int, unit: int, large: int) -> list[int]:
    """Returns extents around a tile, in multiples that alignment allows."""
    if unit == 1:
        return [0, 1, 7, tile - 1, tile, tile + 1, large + 3]
    return [0, unit, tile - unit, tile, tile + unit, large + unit]


def orientations(config: KernelConfig) -> list[tuple[int, int]]:
    """Returns the tile along m and n; a skinny row lays it along the longer of them."""
    tile = config.tile_m, config.tile_n
    if config.swap_ab:
        return [tile[::-1]]
    return [tile, tile[::-1]] if config.skinny else [tile]


def units(config: KernelConfig, transpose_a: bool, transpose_b: bool) -> tuple[int, int, int]:
    """Returns the units of m, n and k: 16 bytes if the dimension is contiguous."""
    chunk = 16 // config.element_bytes if config.copies_whole_chunks else 1
    m = chunk if transpose_a else 1
    n = 1 if transpose_b else chunk
    k = chunk if not transpose_a or transpose_b else 1
    return m, n, k


def accumulation_slack(config: KernelConfig, out_dtype, k: int, largest: float) -> float:
    """Returns the extra error of sums inside mma.sync, where the result shows it.

    The hardware truncates sums after every instruction, at the accumulator's precision.
    """
    if config.algorithm == "F16_F16_F16":
        eps = jnp.finfo(jnp.float16).eps
    elif out_dtype == jnp.float32 and config.element_bytes == 2 and not config.rounds_sums:
        eps = jnp.finfo(jnp.float32).eps
    else:
        return 0.0
    return math.ceil(k / config.instruction_k) * float(eps) * largest


def baseline_precision(algorithm: str):
    """Returns the baseline's precision: XLA may compute more accurately than TF32 by default."""
    return algorithm if algorithm == "TF32_TF32_F32" else None


def luck_slack(algorithm: str, k: int, size: int) -> float:
    """Returns how far the error of a baseline with few sums may lie below its typical error.

    The value is for k products of normal numbers, each rounded to tf32's 11 bits (0.42 units in the
    last place, root mean square). Sums that are rounded once, as 16-bit results are, have no such
    part.
    """
    if algorithm != "TF32_TF32_F32" or size >= 64:
        return 0.0
    return 4 * 0.6 * 2.0**-11 * k**0.5


def poison(shape, dtype) -> None:
    """Leaves NaNs in the memory that the next results of this shape are likely to get."""
    poison_buffers([math.prod(shape) * jnp.dtype(dtype).itemsize] * 4)


def poison_buffers(sizes: Iterable[int]) -> None:
    """Leaves NaNs in the memory that the next buffers of these bytes are likely to get."""
    # Copied from the host: filling on the device would compile a program for each shape. Bytes of
    # ones are NaN in every floating-point type.
    blocks = [jax.device_put(np.full(size, 0xFF, np.uint8)) for size in sizes]
    for block in jax.block_until_ready(blocks):
        block.delete()


def in_float64(function, *args):
    """Returns a function's results for float64 arrays on the CPU, as NumPy arrays.

    One program computes them; otherwise each operation and shape would compile a program.
    """
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda x: np.asarray(x).astype(np.float64), args)
        return jax.tree.map(np.asarray, jax.jit(function)(*wide))
