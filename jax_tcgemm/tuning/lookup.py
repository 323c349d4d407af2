"""Looks up the choice for a product: active tunings, files, choices shipped with the package.

``config=`` takes precedence over all of them. If no lookup finds a choice, the time model decides.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import jax

from jax_tcgemm import _compat
from jax_tcgemm.problem.log import log
from jax_tcgemm.tuning import agreement, cache
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.tunings import Tunings, active

# "off": neither files nor the package's choices are used. "read": both are used. "tune": also, a
# product without a known choice is measured when a program first contains it.
SETTING = "JAX_TCGEMM_TUNING"
MODES = ("off", "read", "tune")

# pytest sets these variables, the first since version 8.2.
_PYTEST = ("PYTEST_VERSION", "PYTEST_CURRENT_TEST")
# XLA options (names and values) by which a user asks for reproducible programs.
_REPRODUCIBLE = {
    "xla_gpu_deterministic_ops": "true",
    "xla_gpu_exclude_nondeterministic_ops": "true",
    "xla_gpu_autotune_level": "0",
}
_TRUE = ("", "1", "true")
_TRANSFERS = ("host_to_device", "device_to_device", "device_to_host")


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of a program.

    Attributes:
        primitive: the name of its primitive.
        spec: the parameters of the primitive.
        types: the types of the operands.
        problem: the text that identifies the problem; see ``problem_key``.
    """

    primitive: str
    spec: Any
    types: tuple[jax.ShapeDtypeStruct, ...]
    problem: str


class Recorder(Tunings):
    """Tunings without entries that record the products of a program while it is lowered.

    Attributes:
        products: the recorded products, each once.
    """

    is_final = True

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[str, Product] = {}

    @functools.cached_property
    def digest(self) -> str:
        """A unique text for each recorder, so that JAX lowers every program again."""
        return f"recording {uuid.uuid4()}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The outcome of a measurement.

    Attributes:
        entry: the choice and its times.
        is_certain: whether the entry may be stored for other processes. If others use the GPU
            during the measurement, the times do not agree.
    """

    entry: Entry
    is_certain: bool


# Measures a product for "tune"; the number is the seconds left for all products. The module
# ``transforms.measure`` sets this function.
measure: Callable[[Product, float], Measured | None] | None = None


def mode(*, runs_here: bool = True) -> str:
    """Returns the tuning mode; the default is ``"tune"``, or ``"read"`` if nothing may be measured.

    Args:
        runs_here: as for ``find``.

    Raises:
        ValueError: the setting is no mode.
    """
    setting = os.environ.get(SETTING)
    if not setting:
        return "tune" if runs_here and why_not_measured() is None else "read"
    if setting not in MODES:
        raise ValueError(f"{SETTING}={setting!r} must be one of {MODES}")
    return setting


def why_not_measured() -> str | None:
    """Returns why this process measures nothing unless the setting asks for it; else ``None``."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return "CI is set"
    if any(name in os.environ for name in _PYTEST):
        return "pytest runs"
    for word in os.environ.get("XLA_FLAGS", "").split():
        name, _, value = word.removeprefix("--").partition("=")
        wanted = _REPRODUCIBLE.get(name)
        if wanted is not None and (value if value not in _TRUE else "true") == wanted:
            return f"XLA_FLAGS has {word}"
    for name in _TRANSFERS:
        guard = _compat.option(f"jax_transfer_guard_{name}")
        if guard not in (None, "allow"):
            return f"jax_transfer_guard_{name} is {guard!r}"
    return "jax.profiler records" if _compat.is_profiling() else None


def find(
    device_kind: str | None, product: Product, *, runs_here: bool = True
) -> tuple[Entry, str] | None:
    """Returns the entry of a product and its source; ``None`` if there is no entry.

    Args:
        device_kind: the kind of the local GPUs; ``None`` if there are none or several kinds.
        product: the product, as the lowering describes it.
        runs_here: whether the program is for these GPUs and is not exported. Otherwise a product
            is measured only if the setting asks for it.
    """
    tunings = active()
    if isinstance(tunings, Recorder):
        tunings.products[product.problem] = product
        return None
    if tunings is not None:
        entry = tunings.find(device_kind, product.problem)
        if entry is not None:
            return entry, "active tunings"
        if tunings.is_final:
            return None
    how = mode(runs_here=runs_here)
    if how == "off" or device_kind is None:
        return None
    alone = not jax.distributed.is_initialized()
    entry = cache.read(device_kind, product.problem) if alone else None
    if entry is not None:
        return entry, "a file"
    # All processes find the same choices here.
    if alone or len({device.device_kind for device in jax.devices()}) == 1:
        entry = packaged(device_kind).find(device_kind, product.problem)
        if entry is not None:
            return entry, "the package"
        if how == "tune":
            entry = (_measured if alone else _agreed)(device_kind, product)
            return None if entry is None else (entry, "a measurement")
    return None


# The seconds that a process may spend on measuring, and how long a thread waits for another
# thread's measurement.
BUDGET_SETTING = "JAX_TCGEMM_TUNING_SECONDS"
_BUDGET = 15.0
_PATIENCE = 2.0

# Only one measurement runs at a time, including those of ``tune``. A process measures each problem
# once, with or without files.
MEASURING = threading.Lock()
_MEASURED: dict[tuple[str, str], Entry | None] = {}
_SPENT = [0.0]
# The choices that the processes of a program agreed on.
_AGREED: dict[tuple[str, str], Entry | None] = {}


def budget() -> float:
    """Returns the seconds that this process may spend on measuring.

    Raises:
        ValueError: the setting is no number.
    """
    setting = os.environ.get(BUDGET_SETTING)
    try:
        return float(setting) if setting else _BUDGET
    except ValueError:
        raise ValueError(f"{BUDGET_SETTING}={setting!r} must be a number of seconds") from None


def _measured(device_kind: str, product: Product) -> Entry | None:
    """Returns the entry of a product, measured at most once; ``None`` if that fails."""
    key = device_kind, product.problem
    if key in _MEASURED or measure is None:
        return _MEASURED.get(key)
    if not MEASURING.acquire(timeout=_PATIENCE):
        log(f"{product.problem} is not measured: another thread measures")
        return None
    try:
        return _MEASURED[key] if key in _MEASURED else _measure_now(*key, product, measure)
    finally:
        MEASURING.release()


def _agreed(device_kind: str, product: Product) -> Entry | None:
    """Returns the entry that all processes use, from a file or a measurement of one process."""
    key = device_kind, product.problem
    if key not in _AGREED:
        try:
            text = agreement.agreed("\n".join(key), lambda: _own_text(*key, product))
            entry = None if text is None else Entry.from_json(json.loads(text))
        except Exception as error:  # The program must run even if, say, a process is gone.
            log(f"no agreement about {product.problem}: {type(error).__name__}: {error}")
            entry = None
        _AGREED[key] = entry if entry is not None and entry.is_current else None
    return _AGREED[key]


def _own_text(device_kind: str, problem: str, product: Product) -> str | None:
    entry = cache.read(device_kind, problem) or _measured(device_kind, product)
    return None if entry is None else json.dumps(entry.to_json())


def _measure_now(
    device_kind: str,
    problem: str,
    product: Product,
    measure: Callable[[Product, float], Measured | None],
) -> Entry | None:
    most = budget()
    if _SPENT[0] >= most:
        return None
    begun = time.perf_counter()
    try:
        measured = measure(product, most - _SPENT[0])
    except Exception as error:  # The user's program must run even if, say, memory runs out here.
        log(f"{problem} could not be measured: {type(error).__name__}: {error}")
        measured = None
    took = time.perf_counter() - begun
    _SPENT[0] += took
    if _SPENT[0] >= most:
        log(f"{BUDGET_SETTING}={most:g} are spent: other products take the model's choice")
    entry = None if measured is None else measured.entry
    _MEASURED[device_kind, problem] = entry
    if measured is None:
        return None
    kept = measured.is_certain
    reason = "its times scatter"
    if kept:
        reason = cache.write(device_kind, problem, measured.entry, took)
    if reason is not None:
        log(f"a measured choice is not kept in a file: {reason}")
    return entry


@functools.cache
def packaged(device_kind: str) -> Tunings:
    """Returns the tunings that the package ships for a kind of device."""
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"
    file = importlib.resources.files("jax_tcgemm.tuning").joinpath(name)
    return Tunings.from_text(file.read_text(), name) if file.is_file() else Tunings()
