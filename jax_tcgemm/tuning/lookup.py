"""Where the choice of a product is looked for: active tunings, files, what comes with the package.

First of them is ``config=``, which needs no lookup, and last the time model, which no lookup finds.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import os
import re
import threading
import uuid
from collections.abc import Callable
from typing import Any

import jax

from jax_tcgemm.problem.log import log
from jax_tcgemm.tuning import cache
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.tunings import Tunings, active

# "off": neither files nor what comes with the package; "read", the default; "tune": as well,
# products that nothing is known of are measured where a program of one process first has them.
SETTING = "JAX_TCGEMM_TUNING"
_MODES = ("off", "read", "tune")


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


# Measures a product, for "tune"; set by what can.
measure: Callable[[Product], Entry] | None = None


def mode() -> str:
    """Returns the setting.

    Raises:
        ValueError: there is no such setting.
    """
    setting = os.environ.get(SETTING) or "read"
    if setting not in _MODES:
        raise ValueError(f"{SETTING}={setting!r} must be one of {_MODES}")
    return setting


def find(device_kind: str | None, product: Product) -> tuple[Entry, str] | None:
    """Returns what is known of a product, and where that was found."""
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
    how = mode()
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
    if how == "tune" and alone:
        entry = _measured(device_kind, product)
        return None if entry is None else (entry, "a measurement")
    return None


# One measurement at a time, each problem once in a process, whether or not there are files.
_MEASURING = threading.Lock()
_MEASURED: dict[tuple[str, str], Entry | None] = {}


def _measured(device_kind: str, product: Product) -> Entry | None:
    """Measures a product, unless that was done; ``None`` if it cannot be."""
    key = device_kind, product.problem
    with _MEASURING:
        if key in _MEASURED or measure is None:
            return _MEASURED.get(key)
        try:
            entry = measure(product)
        except Exception as error:  # Out of memory, say: the user's program is still to run.
            log(f"{product.problem} could not be measured: {type(error).__name__}: {error}")
            entry = None
        _MEASURED[key] = entry
        problem = None if entry is None else cache.write(*key, entry)
        if problem is not None:
            log(f"a measured choice is not kept in a file: {problem}")
        return entry


@functools.cache
def packaged(device_kind: str) -> Tunings:
    """Returns what comes with the package for a kind of device."""
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"
    file = importlib.resources.files("jax_tcgemm.tuning").joinpath(name)
    return Tunings.from_text(file.read_text(), name) if file.is_file() else Tunings()
