"""Lowering: on CUDA a gemm becomes one custom call, and the reference where there is no kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import _compat, _extension
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.kernels.table import by_name
from jax_tcgemm.lowering import reference
from jax_tcgemm.lowering.left_to_xla import left_to_xla
from jax_tcgemm.lowering.row_epilogue import lacks_epilogue
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.alignment import COPY_BYTES, misalignment, padding_bytes, split_bytes
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, resolve_algorithm
from jax_tcgemm.problem.spec import GatedSpec, GemmSpec, flatten, with_kernel_layouts
from jax_tcgemm.problem.strides import MAX_EXTENT, ROLES, Operands, StridedGemm, fold

# What the custom call takes; the kernel walks the batch with this many strides.
_MAX_BATCH_NDIM = 4

# The same of the kernels that load by TMA, and so of the fast ones for gated products; they need
# instructions of this compute capability alone.
_MAX_TMA_BATCH_NDIM = 3
_GATED_COMPUTE_CAPABILITY = (9, 0)

_OLDEST_COMPUTE_CAPABILITY = (8, 0)

# Rows up to which the time of a product is that of reading the weights.
_FEW_ROWS = 64

_FLOAT32 = jnp.dtype(jnp.float32)

# Operands that lie as another does, whose strides serve for both.
_ALIKE = ("b2", "c2")


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
    if algorithm is not None and obstacle is None and spec.config is None:
        obstacle = _quicker_in_xla(algorithm, spec, x)
    apart = algorithm is not None and obstacle is None and _is_finished_apart(x, spec, algorithm)
    how = f"{algorithm}, config {spec.config or 'by heuristic'}"
    log(_describe(x, spec, obstacle or how + ", epilogue in a pass after it" * apart))
    if algorithm is None or obstacle is not None:
        return reference.reference_gemm(*operands, spec=spec)
    _check_built(spec)
    if apart:
        return _finished_apart(x, spec, algorithm)
    return _custom_call(*_laid_out(x, spec), algorithm)


def cuda_gated(*operands: jax.Array, spec: GatedSpec) -> list[jax.Array]:
    """Computes the gated primitive on CUDA devices, where ``D`` is among its results.

    Raises:
        ValueError: ``spec.config`` names a kernel that this build leaves out.
    """
    x = spec.unflatten(operands)
    algorithm = resolve_algorithm(x.a.dtype, x.b.dtype, spec.out_dtype, spec.precision)
    obstacle = _obstacle(algorithm, spec, x)
    if algorithm is not None and obstacle is None:
        obstacle = _gated_obstacle(algorithm, spec, x)
    log(_describe(x, spec, obstacle or f"{algorithm}, config {spec.config or 'by heuristic'}"))
    if algorithm is None or obstacle is not None:
        return reference.reference_gated(*operands, spec=spec)
    _check_built(spec)
    saves = any(spec.results[1:])
    if spec.config is None and fold(spec.strided(_shapes(x))).m <= _FEW_ROWS:
        return _gated_by_products(x, spec, algorithm)
    results = _custom_call(x, dataclasses.replace(spec, results=(True, saves, saves)), algorithm)
    if not saves:
        return results
    return [result for result, wanted in zip(results, spec.results, strict=True) if wanted]


def _gated_by_products(x: Operands, spec: GatedSpec, algorithm: str) -> list[jax.Array]:
    """Computes a gated product of few rows, whose time is that of reading the weights.

    The kernels made for few rows have one weight: ``U`` first, rounded, which the second product
    takes as a factor; or of a packed weight both at once, rounded.
    """
    whole = tuple(range(spec.batch_ndim + 2))
    if spec.packed:
        both = spec.plain(out_dtype=spec.out_dtype)
        (product,) = _custom_call(*_laid_out(Operands(x.a, x.b), both), algorithm)
        g, u = reference.halves(product)
        return reference.gated_epilogue(g, u, x, spec)
    axes = spec.axes
    up = spec.plain(axes=Operands(axes.a, axes.b2, bias=axes.bias2))
    (u,) = _custom_call(*_laid_out(Operands(x.a, x.b2, bias=x.bias2), up), algorithm)
    gate = spec.plain(
        axes=Operands(axes.a, axes.b, c=whole, bias=axes.bias),
        activation=spec.activation,
        c_role="factor",
        save_preactivation=spec.results[1],
    )
    d, *g = _custom_call(*_laid_out(Operands(x.a, x.b, c=u, bias=x.bias), gate), algorithm)
    return [
        result for result, wanted in zip((d, *(g or [u]), u), spec.results, strict=True) if wanted
    ]


def _is_finished_apart(x: Operands, spec: GemmSpec, algorithm: str) -> bool:
    """Says whether ``spec.config`` names a row without the epilogue that is asked for."""
    if spec.config is None:
        return False
    written = dataclasses.replace(spec, out_dtype=_written_dtype(algorithm, spec))
    return lacks_epilogue(by_name(spec.config), fold(spec.strided(_shapes(x))), x, written)


def _finished_apart(x: Operands, spec: GemmSpec, algorithm: str) -> list[jax.Array]:
    """Computes the product by the row that is named, in float32, and the epilogue from that."""
    axes = Operands(spec.axes.a, spec.axes.b)
    product = GemmSpec(axes, _FLOAT32, spec.precision, config=spec.config)
    (accumulator,) = _custom_call(*_laid_out(Operands(x.a, x.b), product), algorithm)
    return reference.epilogue(accumulator, x, spec)


def _check_built(spec: GemmSpec) -> None:
    if spec.config is not None and spec.config not in _extension.KERNEL_NAMES:
        raise ValueError(
            f"config={spec.config!r} is not in this build of jax_tcgemm; accepted: None or "
            f"{sorted(_extension.KERNEL_NAMES)}"
        )


def _obstacle(algorithm: str | None, spec: GemmSpec, x: Operands) -> str | None:
    """Says why no kernel can be used, if none can."""
    if algorithm is None:
        return (
            f"reference: no kernel algorithm for {x.a.dtype} and {x.b.dtype} to {spec.out_dtype} "
            f"with precision {spec.precision}"
        )
    gated = isinstance(spec, GatedSpec)
    named = spec.config in _extension.KERNEL_NAMES
    if not (named or _extension.has_kernel(algorithm, gated=gated)):
        return f"reference: no{' gated' * gated} kernel for {algorithm} in this build"
    if spec.is_derivative and algorithm == "F16_F16_F16":
        return f"reference: no kernel for the {spec.c_role} epilogue in {algorithm}"
    if spec.axes.c2 is not None and spec.axes.c2 != spec.axes.c:
        return "reference: c and c2 lie differently"
    if not all(isinstance(extent, int) for extent in (*x.a.shape, *x.b.shape)):
        return "reference: symbolic shapes"
    if max((*x.a.shape, *x.b.shape)) > MAX_EXTENT:
        return "reference: an extent beyond 2^30"
    if _matrices(spec, x) > MAX_EXTENT:
        return "reference: a batch beyond 2^30"
    old = too_old_device()
    if old is not None:
        return f"reference: no kernel for {old}, whose compute capability is below 8.0"
    return None


def _matrices(spec: GemmSpec, x: Operands) -> int:
    """Returns how many matrices the batch of the custom call has, at most."""
    shapes = _shapes(x)
    gemm = spec.strided(shapes)
    folded = fold(gemm)
    # Operands that are copied first (`_laid_out`) may fold less: their rows no longer do.
    stay = with_kernel_layouts(spec, shapes)[0] == spec and len(folded.batch) <= _MAX_BATCH_NDIM
    return math.prod((folded if stay else gemm).batch)


def _quicker_in_xla(algorithm: str, spec: GemmSpec, x: Operands) -> str | None:
    """Says why XLA computes the gemm in less time, where a kernel could read the operands."""
    shapes = _shapes(x)
    if with_kernel_layouts(spec, shapes)[0] != spec:
        return None
    beside = x._replace(a=None, b=None, alpha=None)
    is_plain = not (any(operand is not None for operand in beside) or spec.activation)
    gemm = fold(spec.strided(shapes))
    reason = left_to_xla(algorithm, gemm, spec.out_dtype.itemsize, is_plain=is_plain)
    return reason and f"reference: {reason}"


def too_old_device() -> str | None:
    """Names a local GPU that no kernel runs on."""
    return local_device(lambda capability: capability < _OLDEST_COMPUTE_CAPABILITY)


def _gated_obstacle(algorithm: str, spec: GatedSpec, x: Operands) -> str | None:
    """Says why no gated kernel can be used, where an ordinary one could.

    Without a GPU here there may be one that has slow kernels alone, where the program is run; where
    it is known XLA is faster, and those have to be asked for by name.
    """
    if not spec.packed and spec.axes.b2 != spec.axes.b:
        return "reference: the two weights lie differently"
    gemm = fold(spec.strided(_shapes(x)))
    if gemm.k == 0:
        return "reference: nothing to multiply"
    takes_any = spec.config is not None and kernel_table.by_name(spec.config).is_fallback
    if len(gemm.batch) > (_MAX_BATCH_NDIM if takes_any else _MAX_TMA_BATCH_NDIM):
        return f"reference: {len(gemm.batch)} batch dimensions that do not fold"
    if with_kernel_layouts(spec, _shapes(x))[0] != spec:
        return "reference: an operand without a contiguous axis"
    if takes_any:
        return None
    other = local_device(lambda capability: capability != _GATED_COMPUTE_CAPABILITY)
    if other is not None:
        return f"reference: no gated kernel for {other}"
    itemsize = INPUT_DTYPES[algorithm].itemsize
    for name in ("a", "b"):
        what = misalignment(gemm, name, itemsize)
        if what is not None:
            return f"reference: {name} has {what}, off {COPY_BYTES} bytes"
    if _second_weight_offset(gemm, spec) * itemsize % COPY_BYTES:
        return f"reference: the second weight's columns begin off {COPY_BYTES} bytes"
    return None


def _second_weight_offset(gemm: StridedGemm, spec: GatedSpec) -> int:
    """Returns the elements from the start of a packed weight to its second half."""
    return gemm.n * gemm.strides.b[-1] if spec.packed else 0


def local_device(matches: Callable[[tuple[int, ...]], bool]) -> str | None:
    """Names a local GPU whose compute capability matches.

    With no GPU here, the one that a program is lowered for is taken to have every kernel; what
    else may come computes the same by slow ones.
    """
    for device in _compat.initialized_cuda_devices():
        if matches(tuple(int(part) for part in str(device.compute_capability).split("."))):
            return device.device_kind
    return None


def _custom_call(x: Operands, spec: GemmSpec, algorithm: str) -> list[jax.Array]:
    """Emits the custom call and the conversions that its element types need."""
    in_dtype = INPUT_DTYPES[algorithm]
    out_dtype = _written_dtype(algorithm, spec)
    x = _converted(x, in_dtype, out_dtype)
    shapes = _shapes(x)
    strided = fold(spec.strided(shapes))
    result = jax.ShapeDtypeStruct(spec.result_shape(shapes), out_dtype)
    results = (result,) * spec.result_count
    padding = workspace = 0
    if spec.config is None and not isinstance(spec, GatedSpec):
        padding = padding_bytes(strided, in_dtype.itemsize)
        workspace = padding + split_bytes(strided)
    call = jax.ffi.ffi_call(
        _extension.GEMM_TARGET,
        (*results, jax.ShapeDtypeStruct((workspace,), jnp.uint8)) if workspace else results,
        input_output_aliases={2: 0} if _can_overwrite_c(x, spec, result) else None,
    )
    attributes = _attributes(strided, spec, algorithm, padding, has_workspace=workspace > 0)
    outputs = call(*flatten(x), **attributes)
    return [output.astype(spec.out_dtype) for output in outputs[: len(results)]]


def _written_dtype(algorithm: str, spec: GemmSpec) -> np.dtype:
    """Returns the type in which a kernel writes D, which is then converted to any other."""
    return spec.out_dtype if spec.out_dtype in (INPUT_DTYPES[algorithm], _FLOAT32) else _FLOAT32


def _can_overwrite_c(x: Operands, spec: GemmSpec, result: jax.ShapeDtypeStruct) -> bool:
    """Says whether ``c``, the third operand, is to be overwritten and lies as the result does."""
    if x.c is None or not spec.overwrite_c:
        return False
    return x.c.dtype == result.dtype and spec.axes.c == tuple(range(len(result.shape)))


def _converted(x: Operands, in_dtype: np.dtype, out_dtype: np.dtype) -> Operands:
    """Converts operands to the element types that the kernels take."""

    def convert(name: str, operand: jax.Array | None) -> jax.Array | None:
        if operand is None:
            return None
        if name in ("a", "b", "b2"):
            return operand.astype(in_dtype)
        # The addends are of the result's type or float32; c and c2 of one.
        alike = {"c": (x.c, x.c2), "c2": (x.c, x.c2), "bias": (x.bias,), "bias2": (x.bias2,)}
        group = [other for other in alike.get(name, ()) if other is not None]
        if group and all(other.dtype == out_dtype for other in group):
            return operand
        return operand.astype(_FLOAT32)

    return Operands(*map(convert, x._fields, x))


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
    """Returns the attributes of the custom call; ``cuda/ffi/attributes.h`` has the same names."""
    has = {f"has_{name}": axes is not None for name, axes in spec.axes._asdict().items()}
    strides = {
        f"{name}_strides": np.asarray(values, np.int64)
        for name, values in gemm.strides._asdict().items()
        if name not in _ALIKE
    }
    activation = resolve(spec.activation)
    p0, p1 = (*activation.parameters, 0.0, 0.0)[:2]
    gated = isinstance(spec, GatedSpec)
    return {
        "m": np.int64(gemm.m),
        "n": np.int64(gemm.n),
        "k": np.int64(gemm.k),
        "batch_shape": np.asarray(gemm.batch, np.int64),
        **strides,
        **{name: present for name, present in has.items() if name not in ("has_a", "has_b")},
        "has_aux": spec.result_count > 1,
        "has_workspace": has_workspace,
        "padding_bytes": np.int64(padding),
        "alpha": np.float32(np.real(spec.alpha)),
        "beta": np.float32(np.real(spec.beta)),
        "c_role": spec.c_role,
        "activation": activation.cpp_name,
        "activation_p0": np.float32(p0),
        "activation_p1": np.float32(p1),
        "gated": gated,
        "b2_offset": np.int64(_second_weight_offset(gemm, spec) if gated else 0),
        "algorithm": algorithm,
        "config": spec.config or "",
    }


def _describe(x: Operands, spec: GemmSpec, decision: str) -> str:
    shapes = " x ".join(f"{operand.dtype}{list(operand.shape)}" for operand in (x.a, x.b))
    kind = "gated gemm" if isinstance(spec, GatedSpec) else "gemm"
    return f"{kind} {shapes} -> {spec.out_dtype}: {decision}"


@functools.cache
def log(line: str) -> None:
    """Prints a decision once, if ``JAX_TCGEMM_LOG=1``."""
    if os.environ.get("JAX_TCGEMM_LOG") == "1":
        print(f"jax_tcgemm: {line}", file=sys.stderr)
