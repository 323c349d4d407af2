"""Measured choices on disk, one file each, which any number of processes read and write.

A file is replaced as a whole. What cannot be read, is broken or is of another problem is as if it
were not there; what cannot be written is left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib

from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.tunings import Tunings, write_atomically

# The folder, by default ~/.cache/jax_tcgemm; empty for none.
SETTING = "JAX_TCGEMM_CACHE_DIR"

# To be raised when what an entry says changes; a folder of its own for each.
_VERSION = "tunings-1"


def base() -> pathlib.Path | None:
    """Returns the folder of all that this package keeps, ``None`` for none."""
    setting = os.environ.get(SETTING)
    if setting == "":
        return None
    try:
        return pathlib.Path(setting).expanduser() if setting else _default()
    except RuntimeError:  # there is no home
        return None


def make(within: pathlib.Path) -> None:
    """Makes the folder of all that this package keeps, for this user alone unless it is there.

    Raises:
        OSError: it cannot be made.
    """
    within.mkdir(mode=0o700, parents=True, exist_ok=True)


def folder() -> pathlib.Path | None:
    """Returns where entries are kept, ``None`` for nowhere."""
    within = base()
    return None if within is None else within / _VERSION


def _default() -> pathlib.Path:
    return pathlib.Path.home() / ".cache" / "jax_tcgemm"


def _path(within: pathlib.Path, device_kind: str, problem: str) -> pathlib.Path:
    name = hashlib.sha256(f"{device_kind}\n{problem}".encode()).hexdigest()
    return within / f"{name}.json"


def read(device_kind: str, problem: str) -> Entry | None:
    """Returns the entry of a problem, if there is one that holds."""
    within = folder()
    if within is None:
        return None
    found = _read(_path(within, device_kind, problem))
    if found is None or found[:2] != (device_kind, problem) or not found[2].is_current:
        return None
    return found[2]


def _read(path: pathlib.Path) -> tuple[str, str, Entry] | None:
    try:
        content = json.loads(path.read_text())
        device_kind, problem = content["device"], content["problem"]
        if not (isinstance(device_kind, str) and isinstance(json.loads(problem), dict)):
            return None
        return device_kind, problem, Entry.from_json(content["entry"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def write(device_kind: str, problem: str, entry: Entry) -> str | None:
    """Keeps an entry; returns why it could not be, if it could not."""
    within = folder()
    if within is None:
        return f"{SETTING} is empty"
    content = {"device": device_kind, "problem": problem, "entry": entry.to_json()}
    try:
        make(within.parent)
        within.mkdir(exist_ok=True)
        write_atomically(_path(within, device_kind, problem), json.dumps(content))
    except OSError as error:
        return str(error)
    return None


def everything() -> Tunings:
    """Returns all entries that can be read."""
    within = folder()
    found = [] if within is None else map(_read, sorted(within.glob("*.json")))
    return Tunings({each[:2]: each[2] for each in found if each is not None})
