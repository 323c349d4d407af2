"""What the tests on the GPU try each kernel with, and how accurate its results must be."""

from __future__ import annotations

import itertools
import math

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
    """Draws a few: nearly all of the time goes into compiling a program for each."""
    return [choices[i] for i in rng.permutation(len(choices))[:count]]


def residues(tile: int, unit: int, large: int) -> list[int]:
    """Extents around a tile, in multiples of what alignment allows."""
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
    """Returns what m, n and k must be multiples of: 16 bytes where they are contiguous."""
    chunk = 16 // config.element_bytes if config.copies_whole_chunks else 1
    m = chunk if transpose_a else 1
    n = 1 if transpose_b else chunk
    k = chunk if not transpose_a or transpose_b else 1
    return m, n, k


def accumulation_slack(config: KernelConfig, out_dtype, k: int, largest: float) -> float:
    """What the sums inside mma.sync may be off beyond the baseline's, where the result shows it.

    They are cut off after every instruction, at the accumulator's precision.
    """
    if config.algorithm == "F16_F16_F16":
        eps = jnp.finfo(jnp.float16).eps
    elif out_dtype == jnp.float32 and config.element_bytes == 2 and not config.rounds_sums:
        eps = jnp.finfo(jnp.float32).eps
    else:
        return 0.0
    return math.ceil(k / config.instruction_k) * float(eps) * largest


def baseline_precision(algorithm: str):
    """XLA computes some float32 products more accurately than TF32 unless told not to."""
    return algorithm if algorithm == "TF32_TF32_F32" else None


def luck_slack(algorithm: str, k: int, size: int) -> float:
    """What the baseline's error may fall short of its typical value where it is that of few sums.

    Of k products of normal numbers that are rounded to tf32's 11 bits (each by 0.42 units in the
    last place, root mean square); rounded once, as 16-bit results are, sums have no such part.
    """
    if algorithm != "TF32_TF32_F32" or size >= 64:
        return 0.0
    return 4 * 0.6 * 2.0**-11 * k**0.5


def poison(shape, dtype) -> None:
    """Leaves NaNs in the memory that the next results of this shape are likely to get."""
    values = np.full(shape, np.nan, dtype)  # copied: to fill it there is a program for each shape
    blocks = [jax.device_put(values) for _ in range(4)]
    jax.block_until_ready(blocks)
    for block in blocks:
        block.delete()


def in_float64(function, *args):
    """Returns what a function makes of float64 arrays on the CPU, as NumPy's.

    By one program; otherwise there would be one for each operation and shape.
    """
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda x: np.asarray(x).astype(np.float64), args)
        return jax.tree.map(np.asarray, jax.jit(function)(*wide))
