"""Finds NVRTC, the compiler library, in JAX or a toolkit, and calls it by ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

_OLDEST = (12, 5)
_RTLD_NOLOAD = 4
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")

# Options of every kernel.
OPTIONS = ("--std=c++20", "-default-device")


# One element for each thread for which NVRTC works.
_at_work: list[None] = []
# NVRTC's own locks stay locked in a process that was forked while NVRTC worked.
_is_locked = False


class CompileError(Exception):
    """NVRTC refused a source; the message is its log."""


class Nvrtc:
    """The compiler.

    Attributes:
        version: CUDA's version.
        headers: the folder with CUDA's own headers.
        digest: a text that differs if the compiler, its options or CUDA's headers differ.
    """

    def __init__(self, library: ctypes.CDLL, headers: pathlib.Path):
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)
        self.headers = headers
        self.digest = self._digest()

    def compile(
        self,
        source: str,
        architecture: str,
        include: Sequence[pathlib.Path] = (),
        options: Sequence[str] = (),
    ) -> bytes:
        """Returns the machine code of a source; several threads may compile at once.

        Args:
            source: C++.
            architecture: such as ``"sm_90a"``.
            include: folders of headers, searched before CUDA's own.
            options: further options.

        Raises:
            CompileError: the source does not compile, or this process was forked while its parent
                compiled.
        """
        if _is_locked:
            raise CompileError("NVRTC cannot be used: this process was forked while it compiled")
        _at_work.append(None)
        try:
            return self._compiled(source, architecture, include, options)
        finally:
            _at_work.pop()

    def _compiled(
        self,
        source: str,
        architecture: str,
        include: Sequence[pathlib.Path],
        options: Sequence[str],
    ) -> bytes:
        library = self._library
        folders = [f"-I{folder}" for folder in (*include, self.headers)]
        every = [f"--gpu-architecture={architecture}", *OPTIONS, *options, *folders]
        encoded = (ctypes.c_char_p * len(every))(*(option.encode() for option in every))
        program = ctypes.c_void_p()
        self._check(
            library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
            )
        )
        try:
            if library.nvrtcCompileProgram(program, len(every), encoded):
                raise CompileError(self._text(program, "ProgramLog").decode(errors="replace"))
            return self._text(program, "CUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _digest(self) -> str:
        digest = hashlib.sha256("\0".join((*map(str, self.version), *OPTIONS)).encode())
        # Releases of one version differ in the build identifier, at either end of the file.
        digest.update(_ends(_file_of(self._library.nvrtcVersion)))
        for name in _HEADERS:
            for path in (self.headers / name, (self.headers / name).with_suffix(".hpp")):
                digest.update(path.read_bytes() if path.exists() else b"none")
        return digest.hexdigest()

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, result: int) -> None:
        if result:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise CompileError(self._library.nvrtcGetErrorString(result).decode())


def _note_locks() -> None:
    global _is_locked
    _is_locked = _is_locked or bool(_at_work)
    _at_work.clear()


os.register_at_fork(after_in_child=_note_locks)


class _Symbol(ctypes.Structure):
    """``Dl_info`` of ``dladdr(3)``."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file_of(function: Any) -> str | None:
    """Returns the path of the library that contains a function, ``None`` if unknown."""
    symbol = _Symbol()
    address = ctypes.cast(function, ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(address, ctypes.byref(symbol)) or symbol.file is None:
        return None
    return os.fsdecode(symbol.file)


def _ends(path: str | None) -> bytes:
    """Returns a file's beginning and end; no bytes if the file cannot be read."""
    size = 2**16
    try:
        with open(path or "", "rb") as file:
            beginning = file.read(size)
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return beginning + file.read()
    except OSError:
        return b""


@functools.cache
def find() -> Nvrtc | str:
    """Returns the compiler, or says why there is none."""
    library = _load()
    if library is None:
        return "no NVRTC (pip install nvidia-cuda-nvrtc)"
    headers = next((h for h in _header_folders() if all((h / n).exists() for n in _HEADERS)), None)
    if headers is None:
        return f"no folder with CUDA's {_HEADERS[0]}; pip install nvidia-cuda-runtime"
    nvrtc = Nvrtc(library, headers)
    if nvrtc.version < _OLDEST:
        return f"NVRTC of CUDA {nvrtc.version}, older than {_OLDEST}"
    return nvrtc


def _load() -> ctypes.CDLL | None:
    """Loads the first library found: in this process, wheels, a toolkit, the system."""
    for name in _NAMES:
        library = _opened(name, _RTLD_NOLOAD)
        if library is not None:
            return library
    for folder in _library_folders():
        for name in _NAMES:
            if (folder / name).exists():
                # NVRTC looks for its builtins only where the loader does.
                for builtins in folder.glob("libnvrtc-builtins.so.*"):
                    _opened(str(builtins))
                library = _opened(str(folder / name))
                if library is not None:
                    return library
    return next((found for name in _NAMES if (found := _opened(name))), None)


def _opened(name: str, flags: int = 0) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL | flags)
    except OSError:
        return None


def _wheels(*parts: str) -> Iterator[pathlib.Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        yield from (pathlib.Path(root, part) for part in parts)


def _toolkits() -> Iterator[pathlib.Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(name):
            yield pathlib.Path(root)
    if nvcc := shutil.which("nvcc"):
        yield pathlib.Path(nvcc).resolve().parents[1]
    yield pathlib.Path("/usr/local/cuda")


def _library_folders() -> Iterator[pathlib.Path]:
    yield from _wheels("cu13/lib", "cuda_nvrtc/lib")
    for root in _toolkits():
        yield from (root / "lib64", root / "targets/x86_64-linux/lib")


def _header_folders() -> Iterator[pathlib.Path]:
    yield from _wheels("cu13/include", "cuda_runtime/include")
    for root in _toolkits():
        yield from (root / "include", root / "targets/x86_64-linux/include")
