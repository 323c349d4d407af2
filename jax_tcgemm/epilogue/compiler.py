"""Kernels with a program in them: the whole source, compiled when XLA asks for a kernel."""

from __future__ import annotations

from jax_tcgemm import _core
from jax_tcgemm.epilogue import cubins, nvrtc, source
from jax_tcgemm.problem.log import log

_ARCHITECTURE = "sm_90a"


def compile_kernel(program: str, row: str, layout: str) -> bytes:
    """Returns the machine code; called by the extension, on any thread."""
    return cubins.cubin(source.of_kernel(program, row, layout), _ARCHITECTURE)


def install() -> None:
    """Tells the extension who compiles; called once, on import."""
    _core.set_compiler(compile_kernel)


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
