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
_NOISE = 0.01
# Two blocks of samples that differ by more were taken on a GPU that others use.
_STABLE = 0.05


def is_untuned(config: str) -> bool:
    """Says whether the first candidate is the untuned choice, which splits k by doubling alone."""
    return read_config(config)[1].bit_count() == 1


def decided(blocks: Sequence[Mapping[str, Timing]]) -> tuple[str, bool]:
    """Names the choice, and says whether the blocks agree about the times behind it.

    The untuned choice stays unless a row is faster by more than noise in each half of the blocks,
    and so do rows beside XLA's composition. Where the power limit moves the clock, samples of one
    kernel differ by up to a tenth.

    Args:
        blocks: samples of all competitors, twice or more often.
    """
    halves = [_joined(blocks[start::2]) for start in range(2)]
    choice = UNTUNED
    rows, of_xla = _challengers(blocks)
    for name in (*rows, *of_xla):
        if all(_is_faster(half[name], half[choice]) for half in halves):
            choice = name
    # Relative to one another: the power limit slows all of them down.
    ratios = [
        [half[name].median / half[UNTUNED].median for half in halves]
        for name in {choice, *rows, *of_xla}
    ]
    return choice, all(max(each) <= (1 + _STABLE) * min(each) for each in ratios)


def is_clear(blocks: Sequence[Mapping[str, Timing]]) -> bool:
    """Says whether more samples would hardly change the choice, or what it is worth."""
    times = _joined(blocks)
    choice = UNTUNED
    rows, of_xla = _challengers(blocks)
    for name in (*rows, *of_xla):
        noise = _noise(times[name], times[choice])
        gain = 1 - times[name].median / times[choice].median
        if noise > _NOISE and abs(gain - _NOISE) < noise:
            return False
        if gain > _NOISE:
            choice = name
    return True


def _joined(blocks: Sequence[Mapping[str, Timing]]) -> dict[str, Timing]:
    """Returns the samples of all blocks."""
    return {
        name: Timing(sum((block[name].seconds for block in blocks), ()), blocks[0][name].method)
        for name in blocks[0]
    }


def _challengers(blocks: Sequence[Mapping[str, Timing]]) -> tuple[list[str], list[str]]:
    """Returns the fastest row, if there is one, and what there is of XLA."""
    times = _joined(blocks)
    of_xla = [name for name in (XLA, CUBLAS) if name in times]
    rows = times.keys() - {UNTUNED, *of_xla}
    return sorted(rows, key=lambda name: times[name].median)[:1], of_xla


def _is_faster(timing: Timing, than: Timing) -> bool:
    return timing.median < (1 - max(_NOISE, _noise(timing, than))) * than.median


def _noise(one: Timing, other: Timing) -> float:
    """About twice the standard error of the difference of two medians, relative to them."""
    return 1.3 * (one.spread + other.spread) / math.sqrt(len(one.seconds))
