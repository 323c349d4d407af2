"""Machine code compiled at run time, kept in memory and on disk.

A file is replaced as a whole and says what it and its name must hash to; what is torn, foreign or
not to be read is as if it were not there. What is kept is code: the folder and each file in it are
the user's own, or are not used.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import os
import pathlib
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence

from jax_tcgemm import _core
from jax_tcgemm.epilogue import nvrtc
from jax_tcgemm.problem.log import log
from jax_tcgemm.tuning import cache

# To be raised when what an entry says changes.
_VERSION = "cubins-3"
_MAGIC = b"jax_tcgemm cubin\n"

# Of all entries; those used longest ago go first.
_MOST_BYTES = 256 * 2**20

# The most of this process's memory. Lowering asks for a kernel, and each device that loads it does.
_MOST_KEPT_BYTES = 64 * 2**20

_memory: collections.OrderedDict[str, bytes] = collections.OrderedDict()
_underway: dict[str, concurrent.futures.Future[bytes]] = {}
_lock = threading.Lock()


def cubin(
    source: str, architecture: str, options: Sequence[str] = (), what: str = "a kernel"
) -> bytes:
    """Returns the machine code of a source, compiled once for all processes of a user.

    Args:
        source: C++, which may include the package's device headers.
        architecture: such as ``"sm_90a"``.
        options: of the compiler.
        what: what the log calls it.

    Raises:
        CompileError: it does not compile, or there is no compiler.
    """
    key = _key(source, architecture, options)
    while True:
        with _lock:
            if key in _memory:
                _memory.move_to_end(key)
                return _memory[key]
            others = _underway.get(key)
        if others is None:
            made = _make_for_all(key, source, architecture, options, what)
            if made is not None:
                return made
        else:
            concurrent.futures.wait([others])
            if others.exception() is None or isinstance(others.exception(), nvrtc.CompileError):
                return others.result()


def _make_for_all(
    key: str, source: str, architecture: str, options: Sequence[str], what: str
) -> bytes | None:
    """Makes what other threads then wait for as well; ``None`` if one of them was faster.

    If this is interrupted, one of those that wait makes it.
    """
    future: concurrent.futures.Future[bytes] = concurrent.futures.Future()
    try:
        if _underway.setdefault(key, future) is not future:
            return None
        made = _memory.get(key) or _read_or_compile(key, source, architecture, options, what)
        with _lock:
            _keep(key, made)
        future.set_result(made)
        return made
    except nvrtc.CompileError as error:
        # Without its traceback, which would keep what the callers hold.
        future.set_exception(nvrtc.CompileError(*error.args))
        raise
    finally:
        if not future.done():
            future.set_exception(RuntimeError("interrupted"))
        if _underway.get(key) is future:
            del _underway[key]


def _keep(key: str, made: bytes) -> None:
    """Keeps machine code in memory, and forgets what was used longest ago; under ``_lock``."""
    _memory[key] = made
    while sum(map(len, _memory.values())) > _MOST_KEPT_BYTES and len(_memory) > 1:
        _memory.popitem(last=False)


def clear_memory() -> None:
    """Forgets what this process has compiled."""
    with _lock:
        _memory.clear()


def _start_anew() -> None:
    """Forgets locks that other threads of the parent process held when this one was forked."""
    global _lock
    _lock = threading.Lock()
    _underway.clear()


os.register_at_fork(after_in_child=_start_anew)


def _compiler() -> nvrtc.Nvrtc:
    found = nvrtc.find()
    if isinstance(found, str):
        raise nvrtc.CompileError(found)
    return found


def _key(source: str, architecture: str, options: Sequence[str]) -> str:
    parts = (_VERSION, architecture, *options, _compiler().digest, _headers_digest(), source)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def include_folders() -> tuple[pathlib.Path, ...]:
    """Returns where the device headers lie, those that stand in for the host's first."""
    root = pathlib.Path(_core.__file__).parent / "include"
    return root / "nvrtc", root


@functools.cache
def _headers_digest() -> str:
    digest = hashlib.sha256()
    root = include_folders()[1]
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_or_compile(
    key: str, source: str, architecture: str, options: Sequence[str], what: str
) -> bytes:
    folder = _folder()
    if folder is not None:
        found = _read(folder / key)
        if found is not None:
            return found
    begin = time.perf_counter()
    made = _compiler().compile(source, architecture, include_folders(), options)
    log(f"compiled {what} for {architecture} in {time.perf_counter() - begin:.2f} s")
    if folder is not None:
        _write(folder, key, made)
    return made


@functools.cache
def _warn(message: str) -> None:
    text = f"jax_tcgemm keeps no compiled epilogues on disk: {message}"
    try:
        warnings.warn(text, stacklevel=2)
    except Warning:  # an error by the user's filter, which is not to end the user's trace
        log(text)


def _folder() -> pathlib.Path | None:
    """Returns the folder of entries, which is this user's alone, or ``None`` for none."""
    base = cache.base()
    if base is None:
        return None
    folder = base / _VERSION
    try:
        cache.make(base)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.geteuid() and not _is_own(status):
            # What others put there before is their own, so that `_read` does not take it.
            folder.chmod(0o700)
            status = folder.stat()
        if not _is_own(status):
            _warn(f"{folder} is another user's, or others can write to it")
            return None
    except OSError as error:
        _warn(f"{folder}: {error.strerror}")
        return None
    return folder


def _is_own(status: os.stat_result) -> bool:
    """Whether this user alone can write to a file or folder."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode() + payload).digest()


def _read(path: pathlib.Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            if not _is_own(os.fstat(file.fileno())):
                return None
            content = file.read()
        head = len(_MAGIC) + hashlib.sha256().digest_size
        payload = content[head:]
        if content[:head] != _MAGIC + _digest(path.name, payload) or not payload:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return payload
    except OSError:
        return None


def _write(folder: pathlib.Path, key: str, made: bytes) -> None:
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".writing-", dir=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + _digest(key, made) + made)
        os.replace(temporary, folder / key)
        _evict(folder)
    except OSError as error:
        _warn(f"{folder}: {error.strerror}")
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _evict(folder: pathlib.Path) -> None:
    entries = sorted(_entries(folder), reverse=True)
    total = 0
    for _, size, path in entries:
        total += size
        if total > _MOST_BYTES:
            with contextlib.suppress(OSError):
                path.unlink()


def _entries(folder: pathlib.Path) -> Iterator[tuple[float, int, pathlib.Path]]:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            status = path.stat()
            yield status.st_mtime, status.st_size, path
