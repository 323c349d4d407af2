"""Tensor-core GEMM for JAX: hand-written CUDA kernels as an ordinary JAX function."""

import importlib.metadata
import sys

import jax

from jax_tcgemm import _clone

_clone.hand_over(sys.modules[__name__])

import jax_tcgemm.checkpoints as checkpoints
from jax_tcgemm import _extension
from jax_tcgemm.api.delayed_scaling import DelayedScale, Fp8State
from jax_tcgemm.api.dot_general import dot_general
from jax_tcgemm.api.fp8 import fp8_dot, fp8_dot_general
from jax_tcgemm.api.gated_gemm import gated_gemm
from jax_tcgemm.api.gemm import gemm
from jax_tcgemm.api.mlp import gated_mlp, mlp
from jax_tcgemm.api.quantization import quantize
from jax_tcgemm.api.ragged_dot import gated_ragged_dot, ragged_dot
from jax_tcgemm.api.scaled_dot import scaled_dot
from jax_tcgemm.epilogue import compiler
from jax_tcgemm.lowering.fallback import FallbackError
from jax_tcgemm.partitioning import partitioner
from jax_tcgemm.primitives.gemm import ACTIVATION, PREACTIVATION
from jax_tcgemm.problem.activations import clip, softcap
from jax_tcgemm.quantized.arrays import Quantized
from jax_tcgemm.quantized.packed import PackedWeight, pack, pack_params, unpack
from jax_tcgemm.transforms.fuse import fuse
from jax_tcgemm.transforms.tune import tune
from jax_tcgemm.tuning.tunings import Tunings

_extension.load()
partitioner.install()
compiler.install()

__version__ = importlib.metadata.version("jax_tcgemm")


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns the ``disabled_checks`` that ``jax.export.export`` needs for this package.

    JAX exports only custom calls that it knows to be stable. The targets of this package carry a
    version in their names, which changes whenever their meaning changes.

    Returns:
        One ``DisabledSafetyCheck`` for each custom-call target of this package.

    Example:
        >>> checks = export_disabled_checks()
        >>> exported = jax.export.export(jax.jit(gemm), disabled_checks=checks)(x, w)
        >>> y = jax.export.deserialize(exported.serialize()).call(x, w)
    """
    names = (*_extension.TARGETS, partitioner.TARGET)
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]


__all__ = [
    "ACTIVATION",
    "PREACTIVATION",
    "DelayedScale",
    "FallbackError",
    "Fp8State",
    "PackedWeight",
    "Quantized",
    "Tunings",
    "__version__",
    "checkpoints",
    "clip",
    "dot_general",
    "export_disabled_checks",
    "fp8_dot",
    "fp8_dot_general",
    "fuse",
    "gated_gemm",
    "gated_mlp",
    "gated_ragged_dot",
    "gemm",
    "mlp",
    "pack",
    "pack_params",
    "quantize",
    "ragged_dot",
    "scaled_dot",
    "softcap",
    "tune",
    "unpack",
]


def __dir__() -> list[str]:
    """Returns the public names alone."""
    return __all__
