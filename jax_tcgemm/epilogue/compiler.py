"""Kernels that the build lacks: their whole source, compiled when XLA asks for a kernel."""

from __future__ import annotations

import concurrent.futures
import functools
import threading

from jax_tcgemm import _compat, _core
from jax_tcgemm.epilogue import cubins, nvrtc, source
from jax_tcgemm.problem.log import log

# Divisions and square roots of functions to 2 ulp, as XLA has them; all else is as IEEE says.
_FUNCTION_OPTIONS = ("--prec-div=false", "--prec-sqrt=false")

# Each takes some 100 MB while it compiles.
_MOST_THREADS = 8
_begun: set[tuple[str, str, str, bool, int]] = set()


def compile_kernel(
    program: str, row: str, layout: str, has_program: bool = True, capability: int = 90
) -> bytes:
    """Returns the machine code of a kernel; called by the extension, on any thread.

    Args:
        program: C++ of the epilogue; or what is known of one that the package has, as
            ``cuda/dispatch/run_time_row.cc`` writes it.
        row: the name of a row of the kernel table, or ``source.PASS``.
        layout: of ``a`` and ``b``, ``"n"`` or ``"t"`` each.
        has_program: which of the two ``program`` is.
        capability: the compute capability of the GPU, ten times the major number plus the minor.

    Raises:
        CompileError: it does not compile, or there is no compiler.
    """
    architecture = "sm_90a" if capability == 90 else f"sm_{capability}"
    what = f"{row} ({layout})"
    if has_program:
        text = source.of_kernel(program, row, layout)
        return cubins.cubin(text, architecture, _FUNCTION_OPTIONS, f"an epilogue into {what}")
    try:
        return cubins.cubin(source.of_row(program, row, layout), architecture, what=what)
    except nvrtc.CompileError as error:
        log(f"{what} cannot be compiled, kernels of the build take its place: {error}")
        raise


@functools.cache
def _pool() -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(_MOST_THREADS, "jax_tcgemm compiles")


def begin(program: str, row: str, layout: str, has_program: bool, capability: int) -> None:
    """Begins ``compile_kernel`` on another thread; the next call of it will wait for that."""
    kernel = (program, row, layout, has_program, capability)
    if kernel not in _begun:
        _begun.add(kernel)
        _pool().submit(_compile_until_exit, *kernel)


def _compile_until_exit(
    program: str, row: str, layout: str, has_program: bool, capability: int
) -> None:
    """Compiles a kernel, unless the interpreter ends, which waits for what has begun."""
    if threading.main_thread().is_alive():
        compile_kernel(program, row, layout, has_program, capability)


def may_compile_rows() -> bool:
    """Says whether kernels that the build lacks may be compiled on this process's GPUs.

    Without a GPU here they may: another process will compile them.
    """
    if not _compat.initialized_cuda_devices():
        return True
    return _core.may_compile_rows() and not isinstance(nvrtc.find(), str)


def install() -> None:
    """Tells the extension who compiles; called once, on import."""
    _core.set_compiler(compile_kernel, begin)


def obstacle(program: str, expected: tuple[str, str] | None) -> str | None:
    """Says why a program cannot be compiled, if it cannot.

    Args:
        program: as ``source.of_program`` returns it.
        expected: the row and layout that will be compiled first, ``source.PASS`` in place of a row;
            ``None`` where there is no GPU here, so that another process compiles it.
    """
    if expected is None:
        return None
    found = nvrtc.find()
    if isinstance(found, str):
        return found
    try:
        compile_kernel(program, *expected)
    except nvrtc.CompileError as error:
        log(f"NVRTC refused an epilogue for {expected[0]}:\n{error}")
        return "NVRTC refused it"
    return None
