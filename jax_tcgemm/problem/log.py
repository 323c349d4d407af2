"""Log lines of ``JAX_TCGEMM_LOG=1``: how each product is computed, and why."""

from __future__ import annotations

import functools
import os
import sys


def log(line: str) -> None:
    """Prints a decision once, if ``JAX_TCGEMM_LOG=1``."""
    if os.environ.get("JAX_TCGEMM_LOG") == "1":
        print_once(line)


@functools.lru_cache(maxsize=10_000)
def print_once(line: str) -> None:
    """Prints a line, unless it is among the last ones that were printed."""
    print(f"jax_tcgemm: {line}", file=sys.stderr)
