"""Kernels of epilogues that no program launches any more, and when they are released.

A process that compiles another epilogue at each step, such as one with a constant of a schedule,
would fill its memory: 0.3 MB of the host's and 50 KB of the GPU's for each. XLA does not say when
an executable goes, so that from time to time all that are there are asked for their epilogues.
"""

from __future__ import annotations

import itertools
import re

from jax_tcgemm import _compat, _core

# Compilations after which executables are asked: each is said twice, for it begins beforehand.
_EVERY = 1024

# What was enqueued before an executable went is over by then.
_GRACE_SECONDS = 60.0

_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")

_compilations = itertools.count(1)


def note_compilation() -> None:
    """Counts a compilation, and now and then releases what is unused."""
    if next(_compilations) % _EVERY == 0:
        release()


def release(grace_seconds: float = _GRACE_SECONDS) -> None:
    """Releases kernels that were found unused before, ``grace_seconds`` ago, and still are."""
    texts = _compat.texts_of_executables()
    if texts is not None:
        used = {digest for text in texts for digest in _DIGEST.findall(text)}
        _core.release_unused_programs(used, grace_seconds)
