"""Measured choices on disk, one file each, which any number of processes read and write.

A file is replaced as a whole. One that cannot be read, is broken or of another problem is as if it
were not there; what cannot be written is left out. Root reads files of all users, others their own
and those of root.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import os
import pathlib
import time
from typing import NamedTuple

from jax_tcgemm.problem.log import log
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.tunings import PARTIAL, Tunings, write_atomically

# The folder, by default ~/.cache/jax_tcgemm; empty for none.
SETTING = "JAX_TCGEMM_CACHE_DIR"


class _File(NamedTuple):
    """The content of a file; ``seconds`` is what measuring took."""

    device_kind: str
    problem: str
    entry: Entry
    seconds: float


_LEFT_SECONDS = 3600.0

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
    if found is None or found[:2] != (device_kind, problem) or not found.entry.is_current:
        return None
    return found.entry


def _read(path: pathlib.Path) -> _File | None:
    try:
        with path.open() as file:
            owner = os.fstat(file.fileno()).st_uid
            if owner != os.geteuid() and 0 not in (owner, os.geteuid()):
                log(f"{path.parent} has files of another user ({owner}), which are not read")
                return None
            content = json.load(file)
        device_kind, problem = content["device"], content["problem"]
        if not (isinstance(device_kind, str) and isinstance(json.loads(problem), dict)):
            return None
        seconds = float(content.get("seconds", 0.0))
        return _File(device_kind, problem, Entry.from_json(content["entry"]), seconds)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def write(device_kind: str, problem: str, entry: Entry, seconds: float = 0.0) -> str | None:
    """Keeps an entry; returns why it could not be, if it could not.

    Args:
        device_kind: of the GPU.
        problem: as of ``problem_key``.
        entry: what was found.
        seconds: what measuring it took.
    """
    within = folder()
    if within is None:
        return f"{SETTING} is empty"
    content = {"device": device_kind, "problem": problem, "entry": entry.to_json()}
    content["seconds"] = seconds
    try:
        make(within.parent)
        within.mkdir(exist_ok=True)
        _remove_leftovers(within)
        write_atomically(_path(within, device_kind, problem), json.dumps(content))
    except OSError as error:
        return str(error)
    return None


@functools.cache
def _remove_leftovers(within: pathlib.Path) -> None:
    """Removes what processes that were killed an hour ago or earlier have left half written."""
    for path in within.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                path.unlink()


def everything() -> Tunings:
    """Returns all entries that can be read."""
    return Tunings({each[:2]: each.entry for each, _ in _files()})


def describe(device_kind: str) -> str:
    """Says how many products of a GPU are kept, when they were measured, and how long that took."""
    within = folder()
    if within is None:
        return "no files"
    found = [(each, time) for each, time in _files() if each.device_kind == device_kind]
    text = f"{len(found)} in {within}"
    if not found:
        return text
    first, last = (
        datetime.datetime.fromtimestamp(bound(time for _, time in found)).strftime("%Y-%m-%d %H:%M")
        for bound in (min, max)
    )
    took = sum(each.seconds for each, _ in found)
    return f"{text}, measured from {first} to {last} in {took:.1f} s"


def _files() -> list[tuple[_File, float]]:
    """Returns what can be read, and when it was written."""
    within = folder()
    found = []
    for path in [] if within is None else sorted(within.glob("*.json")):
        content = _read(path)
        if content is not None:
            try:
                found.append((content, path.stat().st_mtime))
            except OSError:  # removed since
                continue
    return found
