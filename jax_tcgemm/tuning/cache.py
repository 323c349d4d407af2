"""Stores measured choices on disk, one file each; any number of processes read and write them.

Writing replaces a whole file. A file that is unreadable, broken or of another problem counts as
missing. An entry that cannot be written is not stored. Root reads the files of all users; other
users read their own files and those of root.
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

# This variable names the folder, by default ~/.cache/jax_tcgemm. An empty value disables the files.
SETTING = "JAX_TCGEMM_CACHE_DIR"


class _File(NamedTuple):
    """The content of a file; ``seconds`` is the duration of the measurement."""

    device_kind: str
    problem: str
    entry: Entry
    seconds: float


_LEFT_SECONDS = 3600.0

# Raise this when the meaning of an entry changes; each version has a separate folder.
_VERSION = "tunings-2"


def base() -> pathlib.Path | None:
    """Returns the folder of all files that this package stores; ``None`` if files are disabled."""
    setting = os.environ.get(SETTING)
    if setting == "":
        return None
    try:
        return pathlib.Path(setting).expanduser() if setting else _default()
    except RuntimeError:  # there is no home directory
        return None


def make(within: pathlib.Path) -> None:
    """Makes the folder of all files that this package stores, accessible to this user only.

    An existing folder keeps its permissions.

    Raises:
        OSError: the folder cannot be made.
    """
    within.mkdir(mode=0o700, parents=True, exist_ok=True)


def folder() -> pathlib.Path | None:
    """Returns the folder of the entries; ``None`` if files are disabled."""
    within = base()
    return None if within is None else within / _VERSION


def _default() -> pathlib.Path:
    return pathlib.Path.home() / ".cache" / "jax_tcgemm"


def _path(within: pathlib.Path, device_kind: str, problem: str) -> pathlib.Path:
    name = hashlib.sha256(f"{device_kind}\n{problem}".encode()).hexdigest()
    return within / f"{name}.json"


def read(device_kind: str, problem: str) -> Entry | None:
    """Returns the stored entry of a problem; ``None`` if there is no current one."""
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
    """Stores an entry; returns ``None``, or why that failed.

    Args:
        device_kind: the kind of the GPU.
        problem: the result of ``problem_key``.
        entry: the choice and its times.
        seconds: the duration of the measurement.
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
    """Removes partial files that killed processes left an hour ago or earlier."""
    for path in within.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                path.unlink()


def everything() -> Tunings:
    """Returns all entries that can be read."""
    return Tunings({each[:2]: each.entry for each, _ in _files()})


def describe(device_kind: str) -> str:
    """Returns the number of stored products of a GPU, their dates and their measuring time."""
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
    """Returns the content of each readable file, and the time when it was written."""
    within = folder()
    found = []
    for path in [] if within is None else sorted(within.glob("*.json")):
        content = _read(path)
        if content is not None:
            try:
                found.append((content, path.stat().st_mtime))
            except OSError:  # another process has removed the file
                continue
    return found
