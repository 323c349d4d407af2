"""Caches machine code compiled at run time, in memory and on disk.

A file is replaced as a whole and contains the hash of its name and its content. The cache ignores
files that are torn, foreign or unreadable. The files contain code, so the cache uses the folder and
its files only if they are the user's own.
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

# Raise this number when the content of entries changes.
_VERSION = "cubins-3"
_MAGIC = b"jax_tcgemm cubin\n"

# The most bytes of all entries. The least recently used entries are evicted first.
_MOST_BYTES = 256 * 2**20

# The most memory of this process. Lowering asks for a kernel, and so does each device that loads
# it.
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
        options: options of the compiler.
        what: the kernel's name in the log.

    Raises:
        CompileError: the source does not compile, or there is no compiler.
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
    """Makes machine code for all waiting threads; ``None`` if another was faster.

    If this thread is interrupted, one of the waiting threads makes it.
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
        # The new error has no traceback, which would keep the callers' objects alive.
        future.set_exception(nvrtc.CompileError(*error.args))
        raise
    finally:
        if not future.done():
            future.set_exception(RuntimeError("interrupted"))
        if _underway.get(key) is future:
            del _underway[key]


def _keep(key: str, made: bytes) -> None:
    """Stores machine code in memory and evicts the least recently used entries.

    The caller holds ``_lock``.
    """
    _memory[key] = made
    while sum(map(len, _memory.values())) > _MOST_KEPT_BYTES and len(_memory) > 1:
        _memory.popitem(last=False)


def clear_memory() -> None:
    """Forgets the machine code in this process's memory."""
    with _lock:
        _memory.clear()


def _start_anew() -> None:
    """Forgets locks that other threads held when this process was forked."""
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
    """Returns the folders of device headers; substitutes for host headers come first."""
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
    except Warning:  # raised by the user's filter; it must not end the user's trace
        log(text)


def _folder() -> pathlib.Path | None:
    """Returns the folder of entries, ``None`` if there is none to use.

    Only this user can write to the folder.
    """
    base = cache.base()
    if base is None:
        return None
    folder = base / _VERSION
    try:
        cache.make(base)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.geteuid() and not _is_own(status):
            # `_read` ignores files that others put there before, because others own them.
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
    """Checks if only this user can write to a file or folder."""
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
