"""Where the choice of a product is looked for: active tunings, files, what comes with the package.

First of them is ``config=``, which needs no lookup, and last the time model, which no lookup finds.
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

# "off": neither files nor what comes with the package; "read": these; "tune": as well, products
# that nothing is known of are measured where a program first has them.
SETTING = "JAX_TCGEMM_TUNING"
MODES = ("off", "read", "tune")

# Set by pytest; the first since 8.2.
_PYTEST = ("PYTEST_VERSION", "PYTEST_CURRENT_TEST")
# Options of XLA after which programs are to be the same every time: names and values.
_REPRODUCIBLE = {
    "xla_gpu_deterministic_ops": "true",
    "xla_gpu_exclude_nondeterministic_ops": "true",
    "xla_gpu_autotune_level": "0",
}
_TRUE = ("", "1", "true")
_TRANSFERS = ("host_to_device", "device_to_device", "device_to_host")


@dataclasses.dataclass(frozen=True)
class Product:
    """A product as a program has it.

    Attributes:
        primitive: name of the primitive.
        spec: its parameters.
        types: those of its operands.
        problem: what it is known by; see ``problem_key``.
    """

    primitive: str
    spec: Any
    types: tuple[jax.ShapeDtypeStruct, ...]
    problem: str


class Recorder(Tunings):
    """Active where a program is lowered to see its products; nothing is found in it.

    Attributes:
        products: those there were, each once.
    """

    is_final = True

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[str, Product] = {}

    @functools.cached_property
    def digest(self) -> str:
        """Another for each, so that every program is lowered anew."""
        return f"recording {uuid.uuid4()}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The outcome of a measurement.

    Attributes:
        entry: the choice and its times.
        is_certain: whether it may be kept for other processes: a GPU that others use meanwhile
            gives times that do not agree.
    """

    entry: Entry
    is_certain: bool


# Measures a product, for "tune", with so many seconds left for all; set by what can.
measure: Callable[[Product, float], Measured | None] | None = None


def mode(*, runs_here: bool = True) -> str:
    """Returns the setting, by default ``"tune"`` unless something speaks against measuring.

    Args:
        runs_here: as of ``find``.

    Raises:
        ValueError: there is no such setting.
    """
    setting = os.environ.get(SETTING)
    if not setting:
        return "tune" if runs_here and why_not_measured() is None else "read"
    if setting not in MODES:
        raise ValueError(f"{SETTING}={setting!r} must be one of {MODES}")
    return setting


def why_not_measured() -> str | None:
    """Says why nothing is measured in this process unless the setting asks for it; or ``None``."""
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
    """Returns what is known of a product, and where that was found.

    Args:
        device_kind: of the local GPUs; ``None`` if there are none or of several kinds.
        product: as lowering has it.
        runs_here: whether the program is for these GPUs, and is not exported. Otherwise a product
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
    # What all processes find alike.
    if alone or len({device.device_kind for device in jax.devices()}) == 1:
        entry = packaged(device_kind).find(device_kind, product.problem)
        if entry is not None:
            return entry, "the package"
        if how == "tune":
            entry = (_measured if alone else _agreed)(device_kind, product)
            return None if entry is None else (entry, "a measurement")
    return None


# Seconds of a process that it may spend on measuring, and how long a thread waits for another's.
BUDGET_SETTING = "JAX_TCGEMM_TUNING_SECONDS"
_BUDGET = 5.0
_PATIENCE = 2.0

# One measurement at a time, those of ``tune`` included, each problem once in a process, whether or
# not there are files.
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
    """Measures a product, unless that was done; ``None`` if it cannot be."""
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
    """Returns what all processes of the program take, which a file or a measurement of one says."""
    key = device_kind, product.problem
    if key not in _AGREED:
        try:
            text = agreement.agreed("\n".join(key), lambda: _own_text(*key, product))
            entry = None if text is None else Entry.from_json(json.loads(text))
        except Exception as error:  # A process that is gone, say: the program is still to run.
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
    except Exception as error:  # Out of memory, say: the user's program is still to run.
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
    """Returns what comes with the package for a kind of device."""
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"
    file = importlib.resources.files("jax_tcgemm.tuning").joinpath(name)
    return Tunings.from_text(file.read_text(), name) if file.is_file() else Tunings()
