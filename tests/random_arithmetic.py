"""Random products of quantized, float32 and complex operands, compared with float64 on a GPU.

    python tests/random_arithmetic.py --kind eight --count 2000 --jobs 12
    python tests/random_arithmetic.py --kind precise --count 500 --jobs 12

``eight``: 8-bit operands with scales and epilogues. ``precise``: float32 by bfloat16 planes, and
complex64. The tolerance is a multiple of ``|A| |B|``, as in the documentation of ``gemm``.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import secrets
import sys
import time
import traceback

from random_outcome import Outcome, set_environment
from random_precise import precise
from random_quantized import eight

_KINDS = {"eight": eight, "precise": precise}


def _run(task: tuple[str, int, int]) -> Outcome:
    kind, seed, index = task
    try:
        outcome = _KINDS[kind](seed, index)
    except Exception:
        outcome = Outcome("raised", traceback.format_exc())
    if outcome.wrong:
        outcome.wrong = f"--kind {kind} --seed {seed} --start {index} --count 1: {outcome.wrong}"
    return outcome


def main(argv: list[str] | None = None) -> int:
    """Runs the problems; returns 1 if any is wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=_KINDS, required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    arguments = parser.parse_args(argv)
    tasks = [
        (arguments.kind, arguments.seed, i)
        for i in range(arguments.start, arguments.start + arguments.count)
    ]
    set_environment(arguments.jobs)
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    done, begin = 0, time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for outcome in pool.imap_unordered(_run, tasks):
            counts[outcome.family] += 1
            done += 1
            if outcome.wrong:
                wrong.append(outcome.wrong)
                print(outcome.wrong, flush=True)
            if time.perf_counter() - begin > arguments.seconds:
                break
    for family, count in sorted(counts.items()):
        print(f"{family}: {count}")
    print(f"{done} {arguments.kind} problems of seed {arguments.seed}, {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
