"""Small cases of the benchmark."""

from __future__ import annotations

import dataclasses

import cases

CASES = cases.load_cases()
UNSUPPORTED = dataclasses.replace(
    next(case for case in CASES if case.group_sizes), suite="none", layout="tn"
)


def tiny(case: cases.Case, **changes) -> cases.Case:
    """Returns the same kind of case with hardly anything to compute."""
    small = {"m": 5, "n": 7, "k": 6, "batch": min(case.batch, 3)}
    if case.step:  # with few elements, the rival's roundings may dominate
        small |= {"m": 64, "n": 96, "k": 48}
    if case.scale == "blocks":
        small |= {"m": 5, "n": 256, "k": 256}
    if case.is_packed:
        small |= {"m": 5, "n": 70, "k": 256}
    return dataclasses.replace(case, **{**small, **changes})
