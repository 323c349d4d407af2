"""Compiles kernels that the build lacks, from source, when XLA asks for them."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import os
import re
import threading

from jax_tcgemm import _compat, _core
from jax_tcgemm.epilogue import cubins, nvrtc, source, unused
from jax_tcgemm.problem.log import log

# Divisions and square roots of user functions are accurate to 2 ulp, as in XLA. All else follows
# IEEE.
_FUNCTION_OPTIONS = ("--prec-div=false", "--prec-sqrt=false")

# A thread takes some 100 MB while it compiles.
_MOST_THREADS = 8

# The arguments of `compile_kernel`.
_Kernel = tuple[str, str, str, bool, int]


def compile_kernel(
    program: str, row: str, layout: str, has_program: bool = True, capability: int = 90
) -> bytes:
    """Returns a kernel's machine code; the extension calls this on any thread.

    Args:
        program: the epilogue in C++. If ``has_program`` is false: the known facts about an epilogue
            of the package, as ``cuda/dispatch/run_time_row.cc`` writes them.
        row: the name of a row of the kernel table, or ``source.PASS``.
        layout: ``"n"`` or ``"t"`` for each of ``a`` and ``b``.
        has_program: whether ``program`` is an epilogue in C++.
        capability: the compute capability of the GPU, ten times the major number plus the minor.

    Raises:
        CompileError: the source does not compile, or there is no compiler.
    """
    architecture = "sm_90a" if capability == 90 else f"sm_{capability}"
    what = f"{row} ({layout})"
    if has_program:
        unused.note_compilation()
        _refuse_directives(program)
        text = source.of_kernel(program, row, layout)
        return cubins.cubin(text, architecture, _FUNCTION_OPTIONS, f"an epilogue into {what}")
    try:
        return cubins.cubin(source.of_row(program, row, layout), architecture, what=what)
    except nvrtc.CompileError as error:
        log(f"{what} cannot be compiled, kernels of the build take its place: {error}")
        raise


# An exported program may come from anywhere, and it contains the source of epilogues. Directives in
# that source could include files of this machine. Each of these texts begins a directive or hides
# its beginning.
_DIRECTIVES = ("#", "%:", "??", "\\", "_Pragma")
_OWN_DIRECTIVE = re.compile(r"^#pragma unroll$", re.MULTILINE)


def _refuse_directives(program: str) -> None:
    others = _OWN_DIRECTIVE.sub("", program)
    found = [each for each in _DIRECTIVES if each in others]
    if found:
        raise nvrtc.CompileError(f"the source of an epilogue has {found}, which none of ours has")


class _Compilations:
    """Compiles kernels on other threads, each kernel once."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(_MOST_THREADS, "jax_tcgemm compiles")
        self._lock = threading.Lock()
        self._begun: set[_Kernel] = set()
        self._waiting: collections.deque[_Kernel] = collections.deque()
        self._busy = 0

    def begin(self, kernel: _Kernel) -> None:
        with self._lock:
            if kernel in self._begun:
                return
            self._begun.add(kernel)
            self._waiting.append(kernel)
            if self._busy == _MOST_THREADS:
                return
            self._busy += 1
        self._submit()

    def _submit(self) -> None:
        # The pool accepts no more kernels once the interpreter ends. The interpreter waits only
        # for kernels that are already compiling.
        with contextlib.suppress(RuntimeError):
            self._pool.submit(self._compile_next)

    def _compile_next(self) -> None:
        with self._lock:
            if not self._waiting:
                self._busy -= 1
                return
            kernel = self._waiting.popleft()
        try:
            with contextlib.suppress(Exception):  # the kernel's user gets it again
                compile_kernel(*kernel)
        finally:
            with self._lock:
                self._begun.discard(kernel)
            self._submit()


@functools.cache
def _compilations() -> _Compilations:
    return _Compilations()


# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=_compilations.cache_clear)


def begin(
    program: str, row: str, layout: str, has_program: bool = True, capability: int = 90
) -> None:
    """Begins ``compile_kernel`` on another thread.

    The next call of ``compile_kernel`` for the same kernel waits for that thread.
    """
    _compilations().begin((program, row, layout, has_program, capability))


def may_compile_rows() -> bool:
    """Checks if kernels that the build lacks may be compiled on this process's GPUs.

    A process without a GPU returns true: another process will compile them.
    """
    if not _compat.initialized_cuda_devices():
        return True
    return _core.may_compile_rows() and not isinstance(nvrtc.find(), str)


def install() -> None:
    """Registers the compiler with the extension; called once, on import."""
    _core.set_compiler(compile_kernel, begin)


def obstacle(
    program: str, expected: tuple[str, str] | None, capability: int | None = None
) -> str | None:
    """Returns why a program cannot be compiled, ``None`` if it can.

    Args:
        program: as ``program_source.of_program`` returns it.
        expected: the row and layout that will be compiled first, with ``source.PASS`` in place of a
            row for a pass. ``None`` if this process has no GPU, so that another one compiles it.
        capability: as in ``compile_kernel``; by default Hopper's.
    """
    if expected is None:
        return None
    found = nvrtc.find()
    if isinstance(found, str):
        return found
    try:
        compile_kernel(program, *expected, capability=capability or 90)
    except nvrtc.CompileError as error:
        log(f"NVRTC refused an epilogue for {expected[0]}:\n{error}")
        return "NVRTC refused it"
    return None
