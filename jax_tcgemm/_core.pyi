from typing import Any

def registrations() -> dict[str, object]: ...
def kernel_names() -> list[str]: ...
def build_info() -> dict[str, str]: ...
def device_properties(ordinal: int) -> dict[str, Any]: ...
def choose_config(
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
) -> str: ...
