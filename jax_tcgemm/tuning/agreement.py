"""Makes all processes of a program use the same choice, in any order of lowering.

Processes of ``jax.distributed`` share a key-value store that never overwrites a value. The first
process that asks for a key computes the value, and the first written value counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from jax_tcgemm import _compat

# After this many seconds of waiting for another process, a process writes that there is no value.
PATIENCE = 20.0

_NOTHING = "none"


def agreed(key: str, compute: Callable[[], str | None]) -> str | None:
    """Returns the value that all processes use for a key.

    Args:
        key: any text.
        compute: returns the value; called if this process is the first to ask for it.

    Returns:
        The value of the first process; ``None`` if it wrote none within ``PATIENCE``.
    """
    name = f"jax_tcgemm/{hashlib.sha256(key.encode()).hexdigest()}"
    if _compat.write_shared(f"{name}/asked", "yes"):
        value = None
        try:
            value = compute()
        finally:  # the other processes wait for a value, even after an error
            _compat.write_shared(name, value or _NOTHING)
    elif _compat.read_shared(name, PATIENCE) is None:
        _compat.write_shared(name, _NOTHING)
    value = _compat.read_shared(name, PATIENCE)
    return None if value == _NOTHING else value
