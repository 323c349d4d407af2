"""One choice for all processes of a program, whatever order they lower products in.

Processes of ``jax.distributed`` share a store of keys and values in which nothing is overwritten:
the first to ask computes, and what is written first decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from jax_tcgemm import _compat

# Seconds that a process waits for another before it writes that there is no value.
PATIENCE = 20.0

_NOTHING = "none"


def agreed(key: str, compute: Callable[[], str | None]) -> str | None:
    """Returns what all processes take for a key.

    Args:
        key: any text.
        compute: returns the value, where this process is the first to ask for it.

    Returns:
        The value of the process that was first, ``None`` if it had none within ``PATIENCE``.
    """
    name = f"jax_tcgemm/{hashlib.sha256(key.encode()).hexdigest()}"
    if _compat.write_shared(f"{name}/asked", "yes"):
        value = None
        try:
            value = compute()
        finally:  # or the others wait in vain
            _compat.write_shared(name, value or _NOTHING)
    elif _compat.read_shared(name, PATIENCE) is None:
        _compat.write_shared(name, _NOTHING)
    value = _compat.read_shared(name, PATIENCE)
    return None if value == _NOTHING else value
