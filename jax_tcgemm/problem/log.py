"""What ``JAX_TCGEMM_LOG=1`` prints: how each product is computed, and why."""

from __future__ import annotations

import functools
import os
import sys


@functools.cache
def log(line: str) -> None:
    """Prints a decision once, if ``JAX_TCGEMM_LOG=1``."""
    if os.environ.get("JAX_TCGEMM_LOG") == "1":
        print(f"jax_tcgemm: {line}", file=sys.stderr)
