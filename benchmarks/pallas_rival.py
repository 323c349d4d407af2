"""JAX's own Hopper kernels, written in Pallas, as a second rival."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from cases import Case

# tile_m, tile_n of one of the two warpgroups; the dimension along which the warpgroups lie side by
# side; the dimension along which two blocks form a cluster; stages.
_TILES = (
    (128, 128, "M", None, 4),
    (128, 128, "N", None, 4),
    (128, 128, "M", "N", 4),
    (128, 128, "N", "M", 4),
    (64, 256, "M", "M", 4),
    (64, 128, "M", None, 6),
    (64, 64, "N", None, 6),
)

# For the kernel for groups of rows: tile_m, tile_n, stages; and the number of column tiles before
# the next rows.
_RAGGED_TILES = ((128, 128, 6), (128, 192, 4), (64, 256, 4), (64, 128, 6))
_RAGGED_WIDTHS = (1, 4, 16)


def obstacle(case: Case) -> str | None:
    """Says why neither kernel applies to a case, or None."""
    if case.dtype not in ("bf16", "f16") or case.out:
        return "only 16-bit in and out"
    if case.epilogue != "none" or case.batch > 1 or case.step or case.function or case.dtype_b:
        return "only plain products"
    if case.layout != "nn":
        return "only operands that lie as given"
    return None


def candidates(case: Case) -> dict[str, Callable[[Any], Any]]:
    """Returns the case's kernel in each of the configurations that divide the case, by description.

    Raises:
        ImportError: this JAX does not have the kernel.
        ValueError: the kernel does not apply to the case.
    """
    reason = obstacle(case)
    if reason is not None:
        raise ValueError(reason)
    functions = _for_groups(case) if case.group_sizes else _for_products(case)
    if not functions:
        raise ValueError("no tile divides the case")
    return functions


def _for_products(case: Case) -> dict[str, Callable[[Any], Any]]:
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
    return functions


def _product(matmul: Callable, config: Any, arrays: dict[str, Any]) -> Any:
    return matmul(arrays["a"], arrays["b"], None, config)


def _for_groups(case: Case) -> dict[str, Callable[[Any], Any]]:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as pallas

    functions = {}
    for tile_m, tile_n, stages in _RAGGED_TILES:
        for width in _RAGGED_WIDTHS:
            if case.n % (tile_n * width) or case.k % 64:
                continue
            options = {
                "block_m": tile_m,
                "block_n": tile_n,
                "block_k": 64,
                "max_concurrent_steps": stages,
                "grid_block_n": width,
            }
            name = f"{tile_m}x{tile_n} width {width} stages {stages}"
            functions[name] = functools.partial(
                _product_of_groups, pallas.ragged_dot, options, case.group_sizes
            )
    return functions


def _product_of_groups(
    ragged_dot: Callable, options: dict[str, int], sizes: tuple[int, ...], arrays: dict[str, Any]
) -> Any:
    return ragged_dot(
        arrays["a"], arrays["b"], group_sizes=jnp.asarray(sizes, jnp.int32), **options
    )
