"""JAX's own Hopper kernel, written in Pallas, as a second rival."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cases import Case

# tile_m, tile_n of one of the two warpgroups; the dimension along which they lie side by side; the
# dimension along which two blocks form a cluster; stages.
_TILES = (
    (128, 128, "M", None, 4),
    (128, 128, "N", None, 4),
    (128, 128, "M", "N", 4),
    (128, 128, "N", "M", 4),
    (64, 256, "M", "M", 4),
    (64, 128, "M", None, 6),
    (64, 64, "N", None, 6),
)


def obstacle(case: Case) -> str | None:
    """Says why the kernel does not apply to a case, or None."""
    if case.dtype not in ("bf16", "f16") or case.out:
        return "only 16-bit in and out"
    if case.epilogue != "none" or case.batch > 1 or case.group_sizes or case.step:
        return "only plain products"
    if case.layout != "nn":
        return "only operands that lie as given"
    return None


def candidates(case: Case) -> dict[str, Callable[[Any], Any]]:
    """Returns the kernel in each of the configurations that divide the case, by description.

    Raises:
        ImportError: this JAX does not have the kernel.
        ValueError: the kernel does not apply to the case.
    """
    reason = obstacle(case)
    if reason is not None:
        raise ValueError(reason)
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as pallas

    functions = {}
    for tile_m, tile_n, side, cluster, stages in _TILES:
        rows = tile_m * (1 + (side == "M")) * (1 + (cluster == "M"))
        columns = tile_n * (1 + (side == "N")) * (1 + (cluster == "N"))
        if case.m % rows or case.n % columns or case.k % 64:
            continue
        config = pallas.TuningConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=64,
            max_concurrent_steps=stages,
            grid_minor_dim=pallas.MatmulDimension.M,
            grid_tile_width=8,
            wg_dimension=pallas.MatmulDimension[side],
            cluster_dimension=None if cluster is None else pallas.MatmulDimension[cluster],
        )
        name = f"{tile_m}x{tile_n} wg {side} cluster {cluster} stages {stages}"
        functions[name] = functools.partial(_product, pallas.matmul, config)
    if not functions:
        raise ValueError("no tile divides the case")
    return functions


def _product(matmul: Callable, config: Any, arrays: dict[str, Any]) -> Any:
    return matmul(arrays["a"], arrays["b"], None, config)
