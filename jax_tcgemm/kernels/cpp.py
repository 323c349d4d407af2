"""Rows of the kernel table as C++, for the build and for kernels compiled at run time."""

from __future__ import annotations

from jax_tcgemm.kernels.config import KernelConfig


def enumerator(enum: str, name: str) -> str:
    """Returns the C++ enumerator, such as ``Algorithm::kBf16Bf16F32``."""
    return f"{enum}::k" + "".join(part.capitalize() for part in name.split("_"))


def config(row: KernelConfig, epilogue: str | None = None) -> str:
    """Returns the row as an aggregate initialiser of ``KernelConfig``.

    Args:
        row: the row.
        epilogue: replaces the row's own epilogue.
    """
    fields = [
        enumerator("Arch", row.arch),
        enumerator("Algorithm", row.algorithm),
        row.tile_m,
        row.tile_n,
        row.tile_k,
        row.warps_m,
        row.warps_n,
        row.stages,
        enumerator("Loader", row.loader),
        str(row.promote).lower(),
        str(row.planes).lower(),
        str(row.pairs).lower(),
        row.cluster_m,
        row.cluster_n,
        row.split_k,
        enumerator("Schedule", row.schedule),
        str(row.gated).lower(),
        str(row.skinny).lower(),
        enumerator("Grouped", row.grouped),
        str(row.swap_ab).lower(),
        enumerator("EpilogueWork", epilogue or row.epilogue),
    ]
    return "{" + ", ".join(map(str, fields)) + "}"
