"""Outcomes, layouts and environment variables of the programs that draw random products."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass
class Outcome:
    """The result of a problem: a word for the summary, and what is wrong, if anything is."""

    family: str
    wrong: str | None = None


def set_environment(jobs: int) -> None:
    """Sets variables that the backend reads when it starts, and that the processes' NumPy reads."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_autotune_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jobs:
        threads = max(1, (os.cpu_count() or 1) // jobs)
        for library in ("OPENBLAS", "OMP", "MKL"):
            os.environ.setdefault(f"{library}_NUM_THREADS", str(threads))


def stored(x: Any, letter: str) -> Any:
    return jnp.swapaxes(x, -1, -2) if letter == "t" else x
