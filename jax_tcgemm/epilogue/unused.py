"""Releases kernels of epilogues that no program launches any more.

A process may compile another epilogue at each step, such as one with a constant of a schedule. Each
kernel takes 0.3 MB of host memory and 50 KB of GPU memory, so they would fill the memory. XLA does
not report when it deletes an executable. Therefore this module searches all executables for the
epilogues that they use, from time to time.
"""

from __future__ import annotations

import itertools
import re

from jax_tcgemm import _compat, _core
from jax_tcgemm.problem.log import log

# Executables are searched after so many compilations. Each kernel counts twice, because its
# compilation begins ahead of its use.
_EVERY = 1024

# After this time XLA has made the executable for which a kernel was loaded, and work that was
# enqueued before XLA deleted an executable is over.
_GRACE_SECONDS = 300.0

_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")

_compilations = itertools.count(1)


def note_compilation() -> None:
    """Counts a compilation, and releases unused kernels after every ``_EVERY``."""
    if next(_compilations) % _EVERY == 0:
        try:
            release()
        except Exception as error:  # The compilation is to go on.
            log(f"unused kernels were not released: {type(error).__name__}: {error}")


def release(grace_seconds: float = _GRACE_SECONDS) -> None:
    """Releases kernels that were found unused ``grace_seconds`` ago and still are."""
    texts = _compat.texts_of_executables()
    if texts is not None:
        used = {digest for text in texts for digest in _DIGEST.findall(text)}
        _core.release_unused_programs(used, grace_seconds)
