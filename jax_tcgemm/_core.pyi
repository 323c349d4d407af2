from collections.abc import Callable
from typing import Any

def registrations() -> dict[str, object]: ...
def kernel_names() -> list[str]: ...
def build_info() -> dict[str, str]: ...
def set_compiler(compiler: Callable[[str, str, str], bytes]) -> None:
    """Says who compiles kernels at run time, of a program, a row's name and a layout."""

def device_properties(ordinal: int) -> dict[str, Any]: ...
def rank_configs(
    algorithm: str,
    m: int,
    n: int,
    k: int,
    batch: int,
    aligned: bool,
    sm_count: int,
    shared_memory_per_block: int,
    float32_result: bool = False,
    compute_capability: int = 80,
    layout: str = "nn",
    workspace_bytes: int = 0,
    epilogue: str = "none",
    gated: bool = False,
    grouped: str = "none",
    max_cluster_size: int = 0,
    batch_rank: int = 0,
    row_alignment_a: int = 128,
    row_alignment_b: int = 128,
    d_by_tma: bool = True,
    has_c: bool = False,
    c_by_tma: bool = True,
    dense_splits: bool = False,
    compiled: bool = False,
    warp_bytes: int = 0,
) -> list[tuple[str, float, bool]]:
    """Names what can compute a problem on a device, the fastest first by the time model.

    The first is what is taken untuned. That looks at parts of k that are powers of two; with
    ``dense_splits`` others are among them. With ``compiled``, the epilogue is compiled at run time
    and needs so many bytes of shared memory for a warp: rows without room are left out if others
    have it.

    Returns:
        Of each its name (as for ``config=``), expected cycles, and whether its blocks add up parts
        of k themselves. Nothing without kernels in the extension.
    """
