"""The GPUs that this process sees; they may decide which kernels there are."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jax_tcgemm import _compat, _core, _extension
from jax_tcgemm.epilogue import compiler
from jax_tcgemm.kernels.arithmetic import Arithmetic
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.entry import Entry

# Compute capabilities with tensor cores for the arithmetic. Most kernels are made for HOPPER.
_TURING = (7, 5)
AMPERE = (8, 0)
HOPPER = (9, 0)


@dataclasses.dataclass(frozen=True)
class _Program:
    """The program that is lowered.

    Attributes:
        device_count: number of devices on which it runs.
        runs_here: whether these devices belong to this process; ``False`` for an exported program.
    """

    device_count: int = 1
    runs_here: bool = True


_HERE = _Program()
_PROGRAM = contextvars.ContextVar("_PROGRAM", default=_HERE)


@contextlib.contextmanager
def program_of(device_count: int, *, runs_here: bool) -> Iterator[None]:
    """Sets the program of which this context lowers each device's part; see ``_Program``."""
    token = _PROGRAM.set(_Program(device_count, runs_here))
    try:
        yield
    finally:
        _PROGRAM.reset(token)


def is_one_of_several() -> bool:
    """Checks if the lowered code may run beside collectives."""
    return _PROGRAM.get().device_count > 1


def is_program_here() -> bool:
    """Checks if the program that is lowered runs on devices of this process."""
    return _PROGRAM.get().runs_here


def find_choice(product: lookup.Product) -> tuple[Entry, str] | None:
    """Returns the tuning entry of a product on the local GPUs, and where it was found."""
    return lookup.find(local_kind(), product, runs_here=_PROGRAM.get().runs_here)


def too_old_for(row: Arithmetic) -> str | None:
    """Returns why a local GPU has no kernels with this arithmetic, if one has none."""
    oldest = _TURING if row.turing else AMPERE
    old = local_device(lambda capability: capability < oldest)
    if old is not None:
        major, minor = oldest
        return f"no kernel for {old}: {row.name} needs compute capability {major}.{minor}"
    return not_built_for()


def not_built_for() -> str | None:
    """Returns why this build has no machine code for a local GPU, if it has none."""
    old = local_device(lambda capability: not _extension.is_built_for(capability))
    if old is None:
        return None
    return f"no kernel for {old} in this build; set CUDAARCHS to its compute capability"


def local_kind() -> str | None:
    """Returns the kind of the local GPUs; ``None`` without GPUs or with several kinds."""
    kinds = {device.device_kind for device in _compat.initialized_cuda_devices()}
    return kinds.pop() if len(kinds) == 1 else None


def are_all(compute_capability: tuple[int, int]) -> bool:
    """Checks if there are local GPUs, all of this compute capability."""
    return bool(_compat.initialized_cuda_devices()) and other_than(compute_capability) is None


def other_than(compute_capability: tuple[int, int]) -> str | None:
    """Returns the kind of a local GPU of another compute capability, if there is one."""
    return local_device(lambda capability: capability != compute_capability)


def local_device(matches: Callable[[tuple[int, ...]], bool]) -> str | None:
    """Returns the kind of a local GPU whose compute capability matches, if there is one.

    Without a local GPU, the GPU that a program is lowered for is assumed to have every kernel.
    Other GPUs compute the same by slow kernels.
    """
    for device in _compat.initialized_cuda_devices():
        if matches(tuple(int(part) for part in str(device.compute_capability).split("."))):
            return device.device_kind
    return None


def compute_capability() -> int | None:
    """Returns the compute capability of the first local GPU, ``10 * major + minor``."""
    gpus = _compat.initialized_cuda_devices()
    if not gpus:
        return None
    return _core.device_properties(gpus[0].local_hardware_id)["compute_capability"]


def has_kernel(
    algorithm: str, *, work: str = "none", gated: bool = False, grouped: str = "none"
) -> bool:
    """Checks if a kernel for such products is in the build or can be compiled here.

    The arguments are those of ``_extension.has_kernel``.
    """
    kind: dict[str, Any] = {"work": work, "gated": gated, "grouped": grouped}
    if _extension.has_kernel(algorithm, **kind, may_compile=False):
        return True
    return _extension.has_kernel(algorithm, **kind) and compiler.may_compile_rows()
