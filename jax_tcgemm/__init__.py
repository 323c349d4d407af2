"""Tensor-core GEMM for JAX: hand-written CUDA kernels as an ordinary JAX function."""

import importlib.metadata

import jax

from jax_tcgemm import _extension
from jax_tcgemm.api import gemm
from jax_tcgemm.contraction import dot_general

_extension.load()

__version__ = importlib.metadata.version("jax_tcgemm")


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns what ``jax.export.export(..., disabled_checks=)`` needs to export these functions.

    JAX exports only custom calls that it knows to be stable. The targets here carry a version in
    their names, which changes whenever their meaning does.

    Returns:
        One ``DisabledSafetyCheck`` for each custom-call target of this package.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(_extension.GEMM_TARGET)]


__all__ = ["__version__", "dot_general", "export_disabled_checks", "gemm"]
