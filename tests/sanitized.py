"""Checks rows of the kernel table one after the other, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/sanitized.py 'sm90_bf16_64x*,simt_*' 60

The arguments are globs over row names, and a time limit in seconds.
"""

from __future__ import annotations

import fnmatch
import sys
import time

import numpy as np

from jax_tcgemm import _core
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.tools import selftest


def main() -> int:
    globs, seconds = sys.argv[1].split(","), float(sys.argv[2])
    built = frozenset(_core.kernel_names())
    rows = [
        row
        for row in kernel_table.CONFIGS
        if row.name in built and row.goes_by_name
        if any(fnmatch.fnmatch(row.name, glob) for glob in globs)
    ]
    end = time.monotonic() + seconds
    rng = np.random.default_rng()
    checked, failures = 0, []
    for row in rows:
        if time.monotonic() > end:
            break
        # The first problem has whole tiles only, the others have any extents.
        for plain in (True, False, False):
            problem = selftest.draw_problem(row, rng, plain=plain)
            wrong = selftest.check(problem, use_config=True)
            if wrong:
                failures.append(f"{problem.describe()}: {wrong}")
        checked += 1
    print(*failures, f"{checked} of {len(rows)} rows checked, {len(failures)} wrong", sep="\n")
    return 1 if failures or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
