from collections.abc import Callable
from typing import Any

from jax_tcgemm.kernels.choice_input import ChoiceInput

# Constants of C++; most are in cuda/shared_limits.h.
MOST_SPLITS: int
VECTOR_COLUMNS: int
FIXUP_FLAG_BYTES: int
FEW_ROWS: int
MAX_BATCH_RANK: int
MAX_TMA_BATCH_RANK: int
MAX_GRID_ROWS: int
PLANE_TILE_K: int
SPLIT_STATE_BYTES: int
MAX_COMPILED_OPERANDS: int
MAX_COMPILED_RESULTS: int
SCALE_BLOCK: int
PASS_BLOCK: tuple[int, int]
MOST_PEERS: int
NO_LINK: int
SLOW_LINK: int
NVLINK: int

def registrations() -> dict[str, object]: ...
def kernel_names() -> list[str]: ...

class RowFacts:
    """Abilities of a row of the kernel table, whatever the product.

    Attributes:
        splits_k: whether it can multiply parts of k, as ``config="NAME/splits=N"`` asks.
        adds_parts: whether the blocks that multiply parts of k may also add them up.
        takes_functions: whether it can be compiled with a function that reduces nothing.
        takes_reductions: whether it can be compiled with a function that reduces its results.
        warp_buffer_bytes: shared memory of a warp for the operands and results of a function; 0
            if it has none.
        shared_memory_bytes: shared memory of a block.
    """

    splits_k: bool
    adds_parts: bool
    takes_functions: bool
    takes_reductions: bool
    warp_buffer_bytes: int
    shared_memory_bytes: int

def row_facts(name: str) -> RowFacts:
    """Returns the facts of a row. A row that this build left out can do nothing."""

def build_info() -> dict[str, str]: ...
def set_compiler(
    compile_kernel: Callable[[str, str, str, bool, int], bytes],
    begin: Callable[[str, str, str, bool, int], None],
) -> None:
    """Sets the functions that compile kernels at run time; see ``epilogue/compiler.py``.

    Args:
        compile_kernel: returns the machine code.
        begin: starts the same compilation on another thread.
    """

def may_compile_rows() -> bool:
    """Checks if every kernel compilation for a row of the table has succeeded."""

def release_unused_programs(used_digests: set[str], grace_seconds: float) -> None:
    """Releases the kernels of epilogues that have been unused for some time.

    Args:
        used_digests: digests of the epilogues to keep.
        grace_seconds: how long an epilogue must have been unused.
    """

def loaded_program_count() -> int:
    """Returns the number of epilogues whose kernels are loaded."""

def overlapped_number_reads() -> int:
    """Returns how often a host has waited for the number of its GPU in a program."""

def limit_overlap_buffers(most_bytes: int) -> None:
    """Makes larger buffers of overlapped products fail as if there were no memory, for tests."""

def link_of(ordinals: list[int]) -> int:
    """Returns how GPUs reach each other's memory: the slowest link of two of them.

    Args:
        ordinals: the GPUs' ordinals.

    Returns:
        ``NO_LINK``, ``SLOW_LINK`` or ``NVLINK``.
    """

def configure_gate(ordinal: int, gate: int, config: str) -> None:
    """Sets the configuration that calls with ``config=MEASURED`` use behind a gate."""

def open_gates(ordinal: int, count: int) -> None:
    """Opens the first ``count`` gates of a device, which ``jax_tcgemm_mark_v1`` enqueues."""

def stopwatch_seconds(ordinal: int) -> list[list[float]]:
    """Returns, for each gate of a device, the times between the marks behind it.

    The marks are then forgotten.

    Raises:
        RuntimeError: CUDA failed.
    """

def device_properties(ordinal: int) -> dict[str, Any]:
    """Returns the properties of a GPU.

    Sizes are in bytes. The peaks are ``clock_rate`` (Hz) and ``memory_bandwidth`` (B/s). A peak is
    0 if the driver does not report it.
    """

def rank_configs(
    problem: ChoiceInput,
    dense_splits: bool = False,
    warp_bytes: int = 0,
    result_bytes: int = 0,
    config: str = "",
) -> list[tuple[str, float, bool]]:
    """Returns the rows that can compute a problem on a device, fastest first by the time model.

    Args:
        problem: the product and the device.
        dense_splits: whether to split k also into numbers of parts that are not powers of two.
        warp_bytes: shared memory that each warp needs for an epilogue that is compiled at run time.
            Rows without room for it are left out if others have room.
        result_bytes: the part for the results. Rows without room for it are left out.
        config: the name of a row, as for ``config=``, for an epilogue that is compiled at run time.
            If the row can compute the problem, it is the only one, with 0 cycles.

    Returns:
        For each row its name (as for ``config=``), its expected cycles, and whether its blocks add
        up parts of k themselves. Without tuning, the handler takes the first one.

    Raises:
        ValueError: the problem names no known algorithm, layout or epilogue.
    """

def time_terms(problem: ChoiceInput) -> list[tuple[str, float, list[float]]]:
    """Returns the cycles of the time model and its correction terms for every configuration.

    Args:
        problem: the product and the device.

    Returns:
        For each configuration that can compute the problem: its name, the cycles by the model
        alone, and the terms of the correction. The logarithm of the correction is a linear function
        of these terms (``cuda/dispatch/time_correction.h``).
    """
