"""Fits the correction of the time model to times of rows, and reports its benefit.

Reads the output of ``time_rows`` (``benchmarks/time_rows.cc``), plain or gzipped. Writes the
weights that ``cuda/dispatch/time_correction.cc`` includes; products of few rows have separate
weights. The loss of a product is the time of the choice relative to the fastest timed row. The
correction's loss is for products that it was not fitted to, a third of them at a time.

    python -P benchmarks/fit_times.py benchmarks/results/rows_h200.csv.gz \
        benchmarks/results/rows_h100.csv.gz --out cuda/dispatch/time_weights.inc
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import gzip
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable

import numpy as np

from jax_tcgemm import _core
from jax_tcgemm.kernels.choice_input import ChoiceInput

# The penalty of the least squares, for terms of unit variance.
_RIDGE = 2.0
# A row with fewer timings gets no weights.
_LEAST_TIMINGS = 40
# The same value as in cuda/dispatch/time_correction.cc.
_MOST_CORRECTION = 0.5

_FOLDS = 3

Weights = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Timed:
    """A row that was timed for a product.

    Attributes:
        row: its name, without the split of k.
        cycles: the cycles of the time model alone.
        terms: the terms of ``_core.time_terms``.
        seconds: the measured time.
    """

    row: str
    cycles: float
    terms: np.ndarray
    seconds: float


@dataclasses.dataclass(frozen=True)
class Problem:
    """A line of ``time_rows``: TYPE LAYOUT M N K BATCH EPILOGUE."""

    type: str
    layout: str
    m: int
    n: int
    k: int
    batch: int
    epilogue: str

    @classmethod
    def from_line(cls, line: str) -> Problem:
        """Reads a line."""
        kind, layout, m, n, k, batch, epilogue = line.split()
        return cls(kind, layout, int(m), int(n), int(k), int(batch), epilogue)

    @property
    def has_few_rows(self) -> bool:
        """True if the model has separate weights for this number of rows or columns."""
        return min(self.m, self.n) <= _core.FEW_ROWS

    @property
    def regime(self) -> str:
        """The kind of product, for separate losses."""
        if self.batch > 1:
            return f"{self.type} batches"
        if self.has_few_rows:
            return f"{self.type} few rows"
        return f"{self.type} others"

    @property
    def choice_input(self) -> ChoiceInput:
        """The product as the input of a choice on a GPU of compute capability 9.0."""
        itemsize = 4 if self.type == "tf32" else 2
        row_a = self.m if self.layout[0] == "t" else self.k
        row_b = self.k if self.layout[1] == "t" else self.n
        return ChoiceInput(
            {"bf16": "BF16_BF16_F32", "f16": "F16_F16_F32", "tf32": "TF32_TF32_F32"}[self.type],
            self.m,
            self.n,
            self.k,
            self.batch,
            aligned=True,
            sm_count=132,
            shared_memory_per_block=227 * 1024,
            float32_result=self.epilogue == "f32",
            compute_capability=90,
            layout=self.layout,
            workspace_bytes=64 * 4 * self.m * self.n,
            epilogue={"bias": "sum", "bias+gelu": "any"}.get(self.epilogue, "none"),
            batch_rank=1 if self.batch > 1 else 0,
            row_alignment_a=math.gcd(128, row_a * itemsize),
            row_alignment_b=math.gcd(128, row_b * itemsize),
        )


def load(path: pathlib.Path) -> dict[Problem, list[Timed]]:
    """Reads times, by columns' names; it omits rows that the table no longer has."""
    times: dict[str, dict[str, float]] = collections.defaultdict(dict)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for line in csv.DictReader(file):
            times[line["problem"]][line["config"]] = 1e-6 * float(line["us"])
    result = {}
    for line, seconds in times.items():
        problem = Problem.from_line(line)
        result[problem] = [
            Timed(config.partition("/")[0], cycles, np.array(terms), seconds[config])
            for config, cycles, terms in _core.time_terms(problem.choice_input)
            if config in seconds
        ]
    return {problem: timed for problem, timed in result.items() if timed}


def fit(products: Iterable[tuple[Problem, list[Timed]]]) -> Weights:
    """Returns the weights of each row; weights for few rows have ``/few`` after the row's name."""
    by_regime: dict[bool, list[list[Timed]]] = {True: [], False: []}
    for problem, timed in products:
        by_regime[problem.has_few_rows].append(timed)
    few = _fit(by_regime[True])
    return _fit(by_regime[False]) | {f"{row}/few": weights for row, weights in few.items()}


def _fit(products: Iterable[list[Timed]]) -> Weights:
    """Returns the weights of each row by least squares, so that they are about 0 in the mean."""
    by_row: dict[str, list[Timed]] = collections.defaultdict(list)
    for timed in products:
        for each in timed:
            by_row[each.row].append(each)
    mean = np.mean([math.log(x.seconds / x.cycles) for timed in by_row.values() for x in timed])
    weights = {}
    for row, timed in sorted(by_row.items()):
        if len(timed) < _LEAST_TIMINGS:
            continue
        terms = np.array([each.terms for each in timed])
        wanted = np.array([math.log(each.seconds / each.cycles) for each in timed]) - mean
        # The first term is 1; its weight takes what the other, centred terms leave.
        center, scale = terms.mean(0), terms.std(0)
        scale[scale < 1e-9] = np.inf
        normal = (terms - center) / scale
        gram = normal.T @ normal + _RIDGE * np.eye(terms.shape[1])
        found = np.linalg.solve(gram, normal.T @ (wanted - wanted.mean())) / scale
        found[0] = wanted.mean() - center[1:] @ found[1:]
        weights[row] = found
    return weights


def modelled(each: Timed) -> float:
    """Returns the model's cycles."""
    return each.cycles


def corrected(weights: Weights, problem: Problem) -> Callable[[Timed], float]:
    """Returns a function that corrects the model's cycles for a product by these weights."""
    suffix = "/few" if problem.has_few_rows else ""

    def cycles(each: Timed) -> float:
        own = weights.get(each.row + suffix)
        if own is None:
            return each.cycles
        logarithm = float(own @ each.terms)
        return each.cycles * math.exp(min(max(logarithm, -_MOST_CORRECTION), _MOST_CORRECTION))

    return cycles


def loss(timed: list[Timed], cycles: Callable[[Timed], float]) -> float:
    """Returns the time of the choice by an estimate, divided by the fastest row's time."""
    return min(timed, key=cycles).seconds / min(each.seconds for each in timed)


def _table(losses: dict[str, list[tuple[float, float]]]) -> str:
    lines = [f"{'regime':<18}{'products':>9}{'model':>24}{'corrected':>24}"]
    for regime, pairs in sorted(losses.items()):
        line = f"{regime:<18}{len(pairs):>9}"
        for values in zip(*pairs, strict=True):
            mean = statistics.geometric_mean(values) - 1
            far = np.mean(np.array(values) > 1.2)
            line += f"{mean:>8.2%}{far:>8.1%}{max(values):>8.2f}"
        lines.append(line)
    lines.append("(mean loss, losses above 20 %, the worst)")
    return "\n".join(lines)


def main() -> None:
    """Fits, prints the losses, writes the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    files = [load(path) for path in args.files]
    problems = sorted({problem for file in files for problem in file}, key=str)
    fold = dict(
        zip(problems, np.random.default_rng(0).integers(_FOLDS, size=len(problems)), strict=True)
    )
    losses: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for held_out in range(_FOLDS):
        known = [pair for file in files for pair in file.items() if fold[pair[0]] != held_out]
        weights = fit(known)
        for file in files:
            for problem, timed in file.items():
                if fold[problem] == held_out:
                    estimate = corrected(weights, problem)
                    losses[problem.regime].append((loss(timed, modelled), loss(timed, estimate)))
    print(_table(losses))
    if args.out is not None:
        weights = fit(pair for file in files for pair in file.items())
        rows = [
            f'{{"{row}",\n {{{", ".join(f"{x:.6g}" for x in values)}}}}},\n'
            for row, values in sorted(weights.items())
        ]
        args.out.write_text("// Written by benchmarks/fit_times.py.\n" + "".join(rows))


if __name__ == "__main__":
    main()
