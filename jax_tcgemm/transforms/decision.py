"""Chooses between the competitors for a product by samples of their times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax_tcgemm.kernels.names import XLA, read_config
from jax_tcgemm.tools.benchmarking import Timing

# Competitors besides rows and XLA: the untuned choice, and XLA's composition with cuBLAS only. The
# latter compiles sooner than with XLA's autotuning.
UNTUNED = "untuned"
CUBLAS = "cublas"

# A smaller gain is noise.
_NOISE = 0.01
# If two blocks of samples differ by more, other processes used the GPU.
_STABLE = 0.05


@dataclasses.dataclass(frozen=True)
class Lead:
    """The time that XLA's composition saves in a program, compared with its time alone.

    XLA chooses the layouts of its own products, joins those that share an operand, fuses them with
    the operations around them, and runs them at the same time as others.

    Attributes:
        share: the saved part of the time.
        seconds: saved in addition.
    """

    share: float = 0.0
    seconds: float = 0.0

    def expected(self, alone: float) -> float:
        """Returns the seconds in a program that correspond to these seconds alone."""
        return (1 - self.share) * alone - self.seconds


_NO_LEAD = Lead()


def is_untuned(config: str) -> bool:
    """Returns true if the first candidate is the untuned choice: its split is a power of two."""
    return read_config(config)[1].bit_count() == 1


def decided(blocks: Sequence[Mapping[str, Timing]], lead: Lead = _NO_LEAD) -> tuple[str, bool]:
    """Returns the choice, and whether the blocks agree about its times.

    A row replaces the untuned choice only if it is faster by more than noise in each half of the
    blocks. XLA's composition replaces a row under the same condition. If the power limit changes
    the clock, samples of one kernel differ by up to a tenth.

    Args:
        blocks: two or more blocks of samples of all competitors.
        lead: what XLA's composition is expected to save in a program.
    """
    halves = [_joined(blocks[start::2]) for start in range(2)]
    choice = UNTUNED
    rows, of_xla = _challengers(blocks)
    for name in (*rows, *of_xla):
        saved = lead if name in of_xla else _NO_LEAD
        if all(_is_faster(half[name], half[choice], saved) for half in halves):
            choice = name
    # Compares ratios of times, because the power limit slows all competitors down.
    ratios = [
        [half[name].median / half[UNTUNED].median for half in halves]
        for name in {choice, *rows, *of_xla}
    ]
    return choice, all(max(each) <= (1 + _STABLE) * min(each) for each in ratios)


def is_clear(blocks: Sequence[Mapping[str, Timing]], lead: Lead = _NO_LEAD) -> bool:
    """Returns true if more samples would hardly change the choice or its gain."""
    times = _joined(blocks)
    choice = UNTUNED
    rows, of_xla = _challengers(blocks)
    for name in (*rows, *of_xla):
        noise = _noise(times[name], times[choice])
        saved = lead if name in of_xla else _NO_LEAD
        gain = 1 - saved.expected(times[name].median) / times[choice].median
        if noise > _NOISE and abs(gain - _NOISE) < noise:
            return False
        if gain > _NOISE:
            choice = name
    return True


def _joined(blocks: Sequence[Mapping[str, Timing]]) -> dict[str, Timing]:
    """Returns the samples of all blocks together."""
    return {
        name: Timing(sum((block[name].seconds for block in blocks), ()), blocks[0][name].method)
        for name in blocks[0]
    }


def _challengers(blocks: Sequence[Mapping[str, Timing]]) -> tuple[list[str], list[str]]:
    """Returns the fastest row, if there is one, and XLA's competitors, if they were timed."""
    times = _joined(blocks)
    of_xla = [name for name in (XLA, CUBLAS) if name in times]
    rows = times.keys() - {UNTUNED, *of_xla}
    return sorted(rows, key=lambda name: times[name].median)[:1], of_xla


def _is_faster(timing: Timing, than: Timing, saved: Lead) -> bool:
    most = (1 - max(_NOISE, _noise(timing, than))) * than.median
    return saved.expected(timing.median) < most


def _noise(one: Timing, other: Timing) -> float:
    """Returns about twice the relative standard error of the difference of two medians."""
    return 1.3 * (one.spread + other.spread) / math.sqrt(len(one.seconds))
