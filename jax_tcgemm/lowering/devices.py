"""The GPUs that this process sees, on which what kernels there are may depend."""

from __future__ import annotations

from collections.abc import Callable

from jax_tcgemm import _compat

_OLDEST_COMPUTE_CAPABILITY = (8, 0)


def too_old_device() -> str | None:
    """Names a local GPU that no kernel runs on."""
    return local_device(lambda capability: capability < _OLDEST_COMPUTE_CAPABILITY)


def local_kind() -> str | None:
    """Returns the kind of the local GPUs, ``None`` if there are none or of several kinds."""
    kinds = {device.device_kind for device in _compat.initialized_cuda_devices()}
    return kinds.pop() if len(kinds) == 1 else None


def other_than(compute_capability: tuple[int, int]) -> str | None:
    """Names a local GPU of another compute capability."""
    return local_device(lambda capability: capability != compute_capability)


def local_device(matches: Callable[[tuple[int, ...]], bool]) -> str | None:
    """Names a local GPU whose compute capability matches.

    With no GPU here, the one that a program is lowered for is taken to have every kernel; what
    else may come computes the same by slow ones.
    """
    for device in _compat.initialized_cuda_devices():
        if matches(tuple(int(part) for part in str(device.compute_capability).split("."))):
            return device.device_kind
    return None
