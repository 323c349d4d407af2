"""The decision between competitors for a product, by samples of their times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax_tcgemm.kernels.names import XLA, read_config
from jax_tcgemm.tools.benchmarking import Timing

# Competitors beside rows and XLA: the untuned choice, and XLA's composition by cuBLAS alone,
# which is compiled sooner than where XLA autotunes.
UNTUNED = "untuned"
CUBLAS = "cublas"

# A smaller gain is noise.
_NOISE = 0.02
# Two blocks of samples that differ by more were taken on a GPU that others use.
_STABLE = 0.05


def is_untuned(config: str) -> bool:
    """Says whether the first candidate is the untuned choice, which splits k by doubling alone."""
    return read_config(config)[1].bit_count() == 1


def decided(blocks: Sequence[Mapping[str, Timing]]) -> tuple[str, bool]:
    """Names the choice, and says whether the blocks agree about the times behind it.

    The untuned choice stays unless a row is faster by more than noise in each block, and so do
    rows beside XLA's composition. Where the power limit moves the clock, samples of one kernel
    differ by up to a tenth.

    Args:
        blocks: samples of all competitors, twice.
    """
    medians = {
        name: math.prod(block[name].median for block in blocks) ** (1 / len(blocks))
        for name in blocks[0]
    }
    choice = UNTUNED
    of_xla = medians.keys() & {XLA, CUBLAS}
    rows = sorted(medians.keys() - of_xla - {UNTUNED}, key=medians.__getitem__)
    for name in (*rows[:1], *of_xla):
        if all(_is_faster(block[name], block[choice]) for block in blocks):
            choice = name
    # Relative to one another: the power limit slows all of them down.
    ratios = [
        [block[name].median / block[UNTUNED].median for block in blocks]
        for name in {choice, *rows[:1], *of_xla}
    ]
    return choice, all(max(each) <= (1 + _STABLE) * min(each) for each in ratios)


def _is_faster(timing: Timing, than: Timing) -> bool:
    # About twice the standard error of the difference of two medians of 16 samples.
    noise = max(_NOISE, (timing.spread + than.spread) / 3)
    return timing.median < (1 - noise) * than.median
