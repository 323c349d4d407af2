"""Lowering: on CUDA a gemm becomes one custom call, and the reference where there is no kernel."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import _compat, _extension, reference
from jax_tcgemm.alignment import COPY_BYTES, padding_bytes, split_bytes
from jax_tcgemm.epilogues import ACTIVATIONS
from jax_tcgemm.spec import (
    INPUT_DTYPES,
    GemmSpec,
    flatten,
    resolve_algorithm,
    with_kernel_layouts,
)
from jax_tcgemm.strides import ROLES, Operands, StridedGemm, fold

# What the custom call takes; the kernel walks the batch with this many strides.
_MAX_BATCH_NDIM = 4

_OLDEST_COMPUTE_CAPABILITY = (8, 0)

_FLOAT32 = jnp.dtype(jnp.float32)


def portable_gemm(*operands: jax.Array, spec: GemmSpec, widen: bool = False) -> list[jax.Array]:
    """Computes the primitive on a platform without kernels; see ``reference.reference_gemm``."""
    log(_describe(spec.unflatten(operands), spec, "reference: no kernels for this platform"))
    return reference.reference_gemm(*operands, spec=spec, widen=widen)


def cuda_gemm(*operands: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """Computes the primitive on CUDA devices; see ``reference.reference_gemm`` for what that is.

    Args:
        *operands: the primitive's operands.
        spec: the primitive's parameters.

    Raises:
        ValueError: ``spec.config`` names a kernel that this build leaves out.
    """
    x = spec.unflatten(operands)
    algorithm = resolve_algorithm(x.a.dtype, x.b.dtype, spec.out_dtype, spec.precision)
    obstacle = _obstacle(algorithm, spec, x)
    log(_describe(x, spec, obstacle or f"{algorithm}, config {spec.config or 'by heuristic'}"))
    if algorithm is None or obstacle is not None:
        return reference.reference_gemm(*operands, spec=spec)
    if spec.config is not None and spec.config not in _extension.KERNEL_NAMES:
        raise ValueError(
            f"config={spec.config!r} is not in this build of jax_tcgemm; accepted: None or "
            f"{sorted(_extension.KERNEL_NAMES)}"
        )
    return _custom_call(x, spec, algorithm)


def _obstacle(algorithm: str | None, spec: GemmSpec, x: Operands) -> str | None:
    """Says why no kernel can be used, if none can."""
    if algorithm is None:
        return (
            f"reference: no kernel algorithm for {x.a.dtype} and {x.b.dtype} to {spec.out_dtype} "
            f"with precision {spec.precision}"
        )
    if not _extension.has_kernel(algorithm):
        return f"reference: no kernel for {algorithm} in this build"
    if not all(isinstance(extent, int) for extent in (*x.a.shape, *x.b.shape)):
        return "reference: symbolic shapes"
    old = _device_without_kernels()
    if old is not None:
        return f"reference: no kernel for {old}, whose compute capability is below 8.0"
    return None


def _device_without_kernels() -> str | None:
    """Names a local GPU that is too old; with no GPU here, the target is taken to be new enough."""
    for device in _compat.initialized_cuda_devices():
        capability = tuple(int(part) for part in str(device.compute_capability).split("."))
        if capability < _OLDEST_COMPUTE_CAPABILITY:
            return device.device_kind
    return None


def _custom_call(x: Operands, spec: GemmSpec, algorithm: str) -> list[jax.Array]:
    """Emits the custom call and the conversions that its element types need."""
    in_dtype = INPUT_DTYPES[algorithm]
    out_dtype = spec.out_dtype if spec.out_dtype in (in_dtype, _FLOAT32) else _FLOAT32
    x = Operands(
        a=x.a.astype(in_dtype),
        b=x.b.astype(in_dtype),
        c=_as_epilogue_operand(x.c, out_dtype),
        bias=_as_epilogue_operand(x.bias, out_dtype),
        alpha=None if x.alpha is None else x.alpha.astype(_FLOAT32),
        beta=None if x.beta is None else x.beta.astype(_FLOAT32),
    )
    x, spec = _laid_out(x, spec)
    shapes = _shapes(x)
    strided = fold(spec.strided(shapes))
    result = jax.ShapeDtypeStruct(spec.result_shape(shapes), out_dtype)
    results = (result,) * (1 + spec.save_preactivation)
    padding = workspace = 0
    if spec.config is None:
        padding = padding_bytes(strided, in_dtype.itemsize)
        workspace = -(-padding // COPY_BYTES) * COPY_BYTES + split_bytes(strided)
    call = jax.ffi.ffi_call(
        _extension.GEMM_TARGET,
        (*results, jax.ShapeDtypeStruct((workspace,), jnp.uint8)) if workspace else results,
    )
    attributes = _attributes(strided, spec, algorithm, padding, has_workspace=workspace > 0)
    outputs = call(*flatten(x), **attributes)
    return [output.astype(spec.out_dtype) for output in outputs[: len(results)]]


def _as_epilogue_operand(x: jax.Array | None, out_dtype: np.dtype) -> jax.Array | None:
    """Converts ``c`` or ``bias`` to float32 unless it is of the result's type already."""
    return x if x is None or x.dtype == out_dtype else x.astype(_FLOAT32)


def _shapes(x: Operands) -> Operands:
    return Operands(*(None if operand is None else operand.shape for operand in x))


def _laid_out(x: Operands, spec: GemmSpec) -> tuple[Operands, GemmSpec]:
    """Copies the operands that the kernel cannot read where they are; there is seldom one."""
    spec, permutations = with_kernel_layouts(spec, _shapes(x))
    x = Operands(
        *(
            operand if order is None else lax.transpose(operand, order)
            for operand, order in zip(x, permutations, strict=True)
        )
    )
    if len(fold(spec.strided(_shapes(x))).batch) <= _MAX_BATCH_NDIM:
        return x, spec
    return _with_dense_batch(x, spec)


def _with_dense_batch(x: Operands, spec: GemmSpec) -> tuple[Operands, GemmSpec]:
    """Broadcasts every operand over the whole batch, which then folds into one dimension."""
    gemm = spec.strided(_shapes(x))
    extents = {"m": gemm.m, "n": gemm.n, "k": gemm.k}
    dense, axes = [], []
    for operand, operand_axes, roles in zip(x, spec.axes, ROLES, strict=True):
        if operand is None:
            dense.append(None)
            axes.append(None)
            continue
        shape = (*gemm.batch, *(extents[role] for role in roles))
        dense.append(jnp.broadcast_to(reference.aligned(operand, operand_axes), shape))
        axes.append(tuple(range(len(shape))))
    return Operands(*dense), dataclasses.replace(spec, axes=Operands(*axes))


def _attributes(
    gemm: StridedGemm, spec: GemmSpec, algorithm: str, padding: int, has_workspace: bool
) -> dict[str, Any]:
    """Returns the attributes of the custom call; ``cuda/ffi_handler.cc`` reads the same names."""
    has = {f"has_{name}": axes is not None for name, axes in spec.axes._asdict().items()}
    strides = {
        f"{name}_strides": np.asarray(values, np.int64)
        for name, values in gemm.strides._asdict().items()
    }
    activation = "" if spec.activation is None else ACTIVATIONS[spec.activation].cpp_name
    return {
        "m": np.int64(gemm.m),
        "n": np.int64(gemm.n),
        "k": np.int64(gemm.k),
        "batch_shape": np.asarray(gemm.batch, np.int64),
        **strides,
        **{name: present for name, present in has.items() if name not in ("has_a", "has_b")},
        "has_aux": spec.save_preactivation,
        "has_workspace": has_workspace,
        "padding_bytes": np.int64(padding),
        "alpha": np.float32(np.real(spec.alpha)),
        "beta": np.float32(np.real(spec.beta)),
        "activation": activation,
        "algorithm": algorithm,
        "config": spec.config or "",
    }


def _describe(x: Operands, spec: GemmSpec, decision: str) -> str:
    shapes = " x ".join(f"{operand.dtype}{list(operand.shape)}" for operand in (x.a, x.b))
    return f"gemm {shapes} -> {spec.out_dtype}: {decision}"


@functools.cache
def log(line: str) -> None:
    """Prints a decision once, if ``JAX_TCGEMM_LOG=1``."""
    if os.environ.get("JAX_TCGEMM_LOG") == "1":
        print(f"jax_tcgemm: {line}", file=sys.stderr)
