from collections.abc import Callable
from typing import Any

from jax_tcgemm.kernels.choice_input import ChoiceInput

# Numbers of cuda/shared_limits.h.
VECTOR_COLUMNS: int
FIXUP_FLAG_BYTES: int
MAX_TMA_BATCH_RANK: int
PLANE_TILE_K: int
SPLIT_STATE_BYTES: int
MAX_COMPILED_OPERANDS: int
MAX_COMPILED_RESULTS: int
SCALE_BLOCK: int
PASS_BLOCK: tuple[int, int]

def registrations() -> dict[str, object]: ...
def kernel_names() -> list[str]: ...
def build_info() -> dict[str, str]: ...
def set_compiler(
    compile_kernel: Callable[[str, str, str, bool, int], bytes],
    begin: Callable[[str, str, str, bool, int], None],
) -> None:
    """Says who compiles kernels at run time: see ``jax_tcgemm/epilogue/compiler.py``.

    Args:
        compile_kernel: returns the machine code.
        begin: begins to compile the same, on another thread.
    """

def may_compile_rows() -> bool:
    """Says whether every kernel that was to be compiled for a row of the table could be."""

def release_unused_programs(used_digests: set[str], grace_seconds: float) -> None:
    """Releases the kernels of epilogues that were unused so long ago, and are not among these."""

def loaded_program_count() -> int:
    """Returns the number of epilogues whose kernels are loaded."""

def configure_gate(ordinal: int, gate: int, config: str) -> None:
    """Names what calls with ``config=MEASURED`` take behind a gate."""

def open_gates(ordinal: int, count: int) -> None:
    """Opens the first gates of a device, which ``jax_tcgemm_mark_v1`` enqueues, in their order."""

def stopwatch_seconds(ordinal: int) -> list[list[float]]:
    """Returns, for each gate of a device, the times between the marks behind it; forgets them.

    Raises:
        RuntimeError: CUDA failed.
    """

def device_properties(ordinal: int) -> dict[str, Any]:
    """Describes a GPU: sizes in bytes, the peaks ``clock_rate`` (Hz), ``memory_bandwidth`` (B/s).

    A peak is 0 where the driver does not say.
    """

def rank_configs(
    problem: ChoiceInput, dense_splits: bool = False, warp_bytes: int = 0
) -> list[tuple[str, float, bool]]:
    """Ranks the rows that can compute a problem on a device, the fastest first by the time model.

    Args:
        problem: the product and the device.
        dense_splits: whether to split k into other numbers of parts than powers of two.
        warp_bytes: shared memory that each warp needs for an epilogue that is compiled at run time.
            Rows without room for it are left out if others have room.

    Returns:
        The name of each (as for ``config=``), its expected cycles, and whether its blocks add up
        parts of k themselves. Without tuning, the handler takes the first one.

    Raises:
        ValueError: the problem names no known algorithm, layout or epilogue.
    """

def time_terms(problem: ChoiceInput) -> list[tuple[str, float, list[float]]]:
    """Returns, of all that can compute a problem, the model's cycles and what corrects them.

    Args:
        problem: the product and the device.

    Returns:
        For each configuration the cycles by the model alone, and the terms of which the logarithm
        of the correction is a linear function (``cuda/dispatch/time_correction.h``).
    """
