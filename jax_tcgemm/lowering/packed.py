"""Lowering of products with packed weights: the reference, and CUDA."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import _compat, _extension
from jax_tcgemm.epilogue import compiler, source
from jax_tcgemm.kernels import packed as kernels
from jax_tcgemm.lowering import devices, dots, fallback, packed_layout
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.packed import TILE, PackedSpec
from jax_tcgemm.problem.strides import MAX_EXTENT

_FLOATS = ("bfloat16", "float16", "float32")
# The grid has at most this many blocks along a batch.
_MOST_BATCH = 65535


def reference(
    x: jax.Array, values: jax.Array, scales: jax.Array, *, spec: PackedSpec
) -> list[jax.Array]:
    """Computes ``x @ W`` of a dequantized weight.

    Args:
        x: ``(*batch, m, k)``, floating-point numbers.
        values: ``(*batch, ceil(n / 64), ceil(k / 64), 128, bytes)``, or the same without a batch.
        scales: ``(*batch, ceil(n / 64), groups, c, 64)``, with the batch of ``values``.
        spec: the primitive's parameters.

    Returns:
        One array ``(*batch, m, n)`` of ``spec.out_dtype``. Each dequantized weight is rounded at
        most once, to the dtype of ``x``. Sums are float32 (or wider), rounded once.
    """
    w = packed_layout.dequantized(values, scales, spec, x.dtype)
    batch = tuple(range(w.ndim - 2))
    dimension_numbers = (((x.ndim - 1,), (w.ndim - 2,)), (batch, batch))
    is_narrow = x.dtype.itemsize == 2
    sums = jnp.dtype(jnp.float32) if is_narrow else x.dtype
    precision = lax.Precision.DEFAULT if is_narrow else lax.Precision.HIGHEST
    return [dots.dot(x, w, dimension_numbers, precision, sums).astype(spec.out_dtype)]


def lower_cuda(
    x: jax.Array, values: jax.Array, scales: jax.Array, *, spec: PackedSpec
) -> list[jax.Array]:
    """Computes the product on CUDA devices; operands and results are those of ``reference``.

    Up to 16 rows, a kernel multiplies by the exact values, and scales the sums in float32. With
    more rows it multiplies by dequantized weights; scales of another dtype than that of ``x`` are
    rounded to it first.
    """
    call = f"tcgemm_packed {spec.qtype} {x.dtype}{list(x.shape)} n={spec.n}"
    found = _call_or_reason(x, values, scales, spec)
    if isinstance(found, str):
        fallback.report(call, found, strict=fallback.is_strict(spec.config))
        return reference(x, values, scales, spec=spec)
    log(f"{call}: kernel for {found.row.tokens} rows, {found.row.split_k} parts of k")
    return [found.emit(x, values, scales)]


@dataclasses.dataclass(frozen=True)
class _Call:
    """A custom call that is ready to be emitted.

    Attributes:
        spec: the primitive's parameters.
        row: the configuration of the kernel.
        shape: the number of matrices, and of rows of each.
        is_batched: whether each matrix has a weight of its own.
        program: what the kernel is compiled for.
    """

    spec: PackedSpec
    row: kernels.PackedRow
    shape: tuple[int, int]
    is_batched: bool
    program: str

    def emit(self, x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
        """Emits the call and returns its result, ``(*batch, m, n)``."""
        result = jax.ShapeDtypeStruct((*x.shape[:-1], self.spec.n), self.spec.out_dtype)
        call = jax.ffi.ffi_call(_extension.PACKED_TARGET, result)
        return call(x, values, scales, **self._attributes(x.dtype, scales.dtype))

    def _attributes(self, activation: np.dtype, scale: np.dtype) -> dict[str, Any]:
        """Returns the ``PackedAttributes`` of ``cuda/ffi/packed.cc``."""
        spec, (batch, m) = self.spec, self.shape
        numbers = {"batch": batch, "m": m, "n": spec.n, "k": spec.k, "group": spec.group}
        numbers |= dataclasses.asdict(self.row)
        return {name: np.int64(number) for name, number in numbers.items()} | {
            "has_zeros": spec.has_zeros,
            "weights_move": self.is_batched,
            "format": spec.qtype,
            "activation": activation.name,
            "scale": scale.name,
            "output": spec.out_dtype.name,
            "digest": source.digest(self.program),
        }


def _call_or_reason(
    x: jax.Array, values: jax.Array, scales: jax.Array, spec: PackedSpec
) -> _Call | str:
    """Returns the custom call, or why there is none."""
    if spec.config == "xla":
        return "as requested"
    if not all(isinstance(extent, int) for extent in (*x.shape, *values.shape)):
        return "symbolic shapes"
    *batch, rows, k = x.shape
    is_batched = values.ndim > 4
    count, m = (math.prod(batch), rows) if is_batched else (1, math.prod(batch) * rows)
    reason = _unfit_types(x, scales, spec) or _unfit_extents(count, m, spec)
    if reason is not None:
        return reason
    row = kernels.choose(spec.bits, m, spec.n, k)
    if row is None:
        return f"more than {kernels.MOST_ROWS} rows"
    if spec.group not in (*kernels.GROUPS, k) and spec.group % row.stage_k:
        return f"groups of {spec.group} rows"
    if x.dtype == jnp.float16 and scales.dtype != x.dtype and not row.sums_are_scaled:
        return f"scales of {scales.dtype} may not fit into float16"
    reason = _unavailable()
    if reason is not None:
        return reason
    names = (spec.qtype, x.dtype.name, scales.dtype.name, spec.out_dtype.name)
    program = kernels.program(row, *names, zeros=spec.has_zeros, group=spec.group)
    is_here = bool(_compat.initialized_cuda_devices())
    reason = compiler.obstacle(program, (source.PACKED, source.PACKED) if is_here else None)
    return reason or _Call(spec, row, (count, m), is_batched, program)


def _unfit_types(x: jax.Array, scales: jax.Array, spec: PackedSpec) -> str | None:
    if x.dtype.name not in _FLOATS[:2]:
        return f"a left operand of {x.dtype}"
    if scales.dtype.name not in _FLOATS or spec.out_dtype.name not in _FLOATS:
        return f"scales of {scales.dtype}, a result of {spec.out_dtype}"
    return None


def _unfit_extents(count: int, m: int, spec: PackedSpec) -> str | None:
    if 0 in (count, m, spec.n, spec.k):
        return "an empty operand"
    if spec.k % TILE:
        return f"k={spec.k} is not a multiple of {TILE}"
    if max(m, spec.n, spec.k) > MAX_EXTENT or count > _MOST_BATCH:
        return "extents beyond the kernel's"
    return None


def _unavailable() -> str | None:
    if _extension.PACKED_TARGET not in _extension.BUILT_TARGETS:
        return "no kernels were built"
    other = devices.other_than(devices.HOPPER)
    return None if other is None else f"no kernel on {other}"
