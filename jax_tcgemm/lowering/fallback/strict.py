"""Fallbacks are logged, or errors where a call or the environment forbids them."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.problem.log import log

# ``1``: lowering raises an error instead of a fallback.
SETTING = "JAX_TCGEMM_STRICT"


class FallbackError(ValueError):
    """No kernel computes what ``config="kernel"`` or ``JAX_TCGEMM_STRICT=1`` asks for.

    Example:
        >>> try:
        ...     y = gemm(x, w, config="kernel")
        ... except FallbackError:  # the message says why no kernel computes it
        ...     y = gemm(x, w)
    """


def is_strict(config: str | None) -> bool:
    """Checks if a call forbids a fallback to XLA.

    Args:
        config: the configuration that the call requests.
    """
    if config == kernel_names.XLA or _lenient.get():
        return False
    return config == kernel_names.KERNEL or os.environ.get(SETTING) == "1"


_lenient = contextvars.ContextVar("lenient", default=False)


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """Within this context no call is strict: measurements, and parts of what XLA divides."""
    token = _lenient.set(True)
    try:
        yield
    finally:
        _lenient.reset(token)


def report(call: str, reason: str, *, strict: bool) -> None:
    """Logs that XLA computes a call, and why.

    Raises:
        FallbackError: ``strict`` forbids the fallback.
    """
    if strict:
        raise FallbackError(
            f"{call}: no kernel computes this: {reason}; without config={kernel_names.KERNEL!r} "
            f"and {SETTING}=1 XLA does"
        )
    log(f"{call}: fallback to XLA: {reason}")
