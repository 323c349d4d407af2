"""Lowering of products with packed weights: the reference, and CUDA."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import _compat, _core, _extension
from jax_tcgemm.epilogue import compiler, source
from jax_tcgemm.kernels import packed as kernels
from jax_tcgemm.kernels import packed_configs
from jax_tcgemm.kernels.names import XLA
from jax_tcgemm.lowering import devices, dots, fallback, packed_layout, packed_problem
from jax_tcgemm.lowering.gemm import cuda_gemm
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.packed import TILE, PackedSpec
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import MAX_EXTENT, Operands

_FLOATS = ("bfloat16", "float16", "float32")
# The reason why no kernel multiplies nothing; no strict call fails for it.
EMPTY = "an empty operand"
# The reason of a fallback that a measurement chose.
MEASURED = "it was measured to be faster"
# The kernel that dequantizes reads one scale for this many rows of a weight.
_UNPACKED_ROWS = 16


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
    more rows it multiplies by dequantized weights, which are rounded once. With many rows, one
    kernel dequantizes the weight for an ordinary product.
    """
    call = f"tcgemm_packed {spec.qtype} {x.dtype}{list(x.shape)} n={spec.n}"
    reason, told = unfit(x, values, scales, spec), ""
    if reason is None:
        found, told = planned(x, values, scales, spec)
        if isinstance(found, Call):
            log(f"{call}: config {found.config}{told}")
            return [found.emit(x, values, scales)]
        w = MEASURED if found == MEASURED else dequantized(values, scales, spec, x.dtype)
        if not isinstance(w, str):
            log(f"{call}: dequantized by a kernel: {found}{told}")
            return _product(x, w, spec)
        reason = w
    strict = fallback.is_strict(spec.config) and reason != EMPTY
    fallback.report(call, reason + told, strict=strict)
    return reference(x, values, scales, spec=spec)


def planned(x: Any, values: Any, scales: Any, spec: PackedSpec) -> tuple[Call | str, str]:
    """Returns the custom call of a product, or why there is none; and where a choice was found.

    Args:
        x: the left operand, as in ``reference``, or its type.
        values: packed values, or their type.
        scales: packed scales, or their type.
        spec: the primitive's parameters.
    """
    count, m = _matrices(x, values)
    operands = (x, values, scales)
    config, told = packed_problem.measured_config(
        packed_problem.PLAIN, operands, spec, m, count=count
    )
    if config == XLA:
        return MEASURED, told
    return _few_rows(x, values, scales, spec, config), told


def _product(x: jax.Array, w: jax.Array, spec: PackedSpec) -> list[jax.Array]:
    """Multiplies by a dequantized weight ``(*batch, n, k)``."""
    count = x.ndim - 2
    batch = tuple(range(count)) if w.ndim > 2 else (None,) * count
    axes = Operands(tuple(range(x.ndim)), (*batch, w.ndim - 1, w.ndim - 2))
    precision = _compat.canonicalize_precision(None)
    return cuda_gemm(x, w, spec=GemmSpec(axes, spec.out_dtype, precision))


@dataclasses.dataclass(frozen=True)
class Call:
    """A custom call that is ready to be emitted.

    Attributes:
        spec: the primitive's parameters.
        row: the configuration of the kernel.
        shape: the number of matrices (or of experts), and of rows of each (or of all).
        is_batched: whether each matrix has a weight of its own.
        program: what the kernel is compiled for.
        target: name of the custom call.
    """

    spec: PackedSpec
    row: kernels.PackedRow
    shape: tuple[int, int]
    is_batched: bool
    program: str
    target: str = _extension.PACKED_TARGET

    @property
    def config(self) -> str:
        """The value of ``config=`` that names the kernel."""
        return packed_configs.config_of(self.spec.bits, self.row)

    def emit(
        self, x: jax.Array, values: jax.Array, scales: jax.Array, *sizes: jax.Array
    ) -> jax.Array:
        """Emits the call and returns its result, ``(*batch, m, n)``."""
        result = jax.ShapeDtypeStruct((*x.shape[:-1], self.spec.n), self.spec.out_dtype)
        call = jax.ffi.ffi_call(self.target, result)
        return call(x, values, scales, *sizes, **self._attributes(x.dtype, scales.dtype))

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


def unfit(x: Any, values: Any, scales: Any, spec: PackedSpec) -> str | None:
    """Returns why no kernel of this package reads a packed weight, ``None`` if one does."""
    if spec.config == "xla":
        return "as requested"
    if not all(isinstance(extent, int) for extent in (*x.shape, *values.shape)):
        return "symbolic shapes"
    if x.dtype.name not in _FLOATS[:2]:
        return f"a left operand of {x.dtype}"
    if scales.dtype.name not in _FLOATS or spec.out_dtype.name not in _FLOATS:
        return f"scales of {scales.dtype}, a result of {spec.out_dtype}"
    if 0 in (*x.shape, *values.shape, spec.n):
        return EMPTY
    if spec.k % TILE:
        return f"k={spec.k} is not a multiple of {TILE}"
    if max(math.prod(x.shape[:-1]), spec.n, spec.k) > MAX_EXTENT:
        return "extents beyond the kernel's"
    if max(math.prod(values.shape[:-4]), -(-spec.n // TILE)) > _core.MAX_GRID_ROWS:
        return "more weights or columns than the kernel's"
    if _extension.PACKED_TARGET not in _extension.BUILT_TARGETS:
        return "no kernels were built"
    other = devices.other_than(devices.HOPPER)
    return None if other is None else f"no kernel on {other}"


def _matrices(x: Any, values: Any) -> tuple[int, int]:
    """Returns the number of matrices that have a weight each, and the rows of each."""
    *batch, rows, _ = x.shape
    return (math.prod(batch), rows) if values.ndim > 4 else (1, math.prod(batch) * rows)


def _few_rows(x: Any, values: Any, scales: Any, spec: PackedSpec, config: str | None) -> Call | str:
    """Returns the custom call that multiplies a few rows, or why there is none."""
    count, m = _matrices(x, values)
    untuned = kernels.choose(spec.bits, m, spec.n, spec.k, spec.group, count)
    row = row_of(config, spec, untuned, f"{m} rows")
    if isinstance(row, str):
        return row
    program = program_of(row, x.dtype, scales.dtype, spec)
    if isinstance(program, NoProgram):
        return program.reason
    return Call(spec, row, (count, m), values.ndim > 4, program)


def row_of(
    config: str | None,
    spec: PackedSpec,
    untuned: kernels.PackedRow | None,
    many: str,
    weights: int = 1,
) -> kernels.PackedRow | str:
    """Returns the configuration of a kernel, or why the weight is dequantized.

    The untuned choice takes the place of a row that does not compute the product, such as a part of
    a product that is divided among devices.

    Args:
        config: the requested or measured configuration.
        spec: the parameters of the product.
        untuned: the choice of the table, ``None`` to dequantize.
        many: why the table dequantizes.
        weights: number of weights whose products a function gets.
    """
    if config == packed_configs.DEQUANTIZED:
        return config
    row = packed_configs.find(config, spec.bits, weights)
    if row is not None and row.takes(spec.group, spec.k):
        return row
    return many if untuned is None else untuned


@dataclasses.dataclass(frozen=True)
class NoProgram:
    """Why no kernel is compiled for a configuration."""

    reason: str


def program_of(
    row: kernels.PackedRow,
    dtype: np.dtype,
    scale: np.dtype,
    spec: PackedSpec,
    *,
    ragged: bool = False,
) -> str | NoProgram:
    """Returns the program of a kernel, which is compiled if that is possible now.

    Args:
        row: its configuration.
        dtype: dtype of the left operand.
        scale: dtype of the scales.
        spec: the primitive's parameters.
        ragged: whether groups of rows have a weight each.
    """
    reason = unfit_row(row, dtype, scale, spec)
    if reason is not None:
        return NoProgram(reason)
    names = (spec.qtype, dtype.name, scale.name, spec.out_dtype.name)
    group = None if spec.group == spec.k else spec.group
    program = kernels.program(row, *names, zeros=spec.has_zeros, group=group, ragged=ragged)
    reason = not_compiled(program, source.PACKED)
    return program if reason is None else NoProgram(reason)


def unfit_row(
    row: kernels.PackedRow, dtype: np.dtype, scale: np.dtype, spec: PackedSpec
) -> str | None:
    """Returns why a configuration does not compute a product, ``None`` if it does.

    The arguments are those of ``program_of``.
    """
    if not row.takes(spec.group, spec.k):
        return f"groups of {spec.group} rows"
    if dtype == jnp.float16 and scale != dtype and not row.sums_are_scaled:
        return f"scales of {scale} may not fit into float16"
    return None


def dequantized(
    values: jax.Array, scales: jax.Array, spec: PackedSpec, dtype: np.dtype
) -> jax.Array | str:
    """Returns the dequantized weight ``(*batch, n, k)`` of a kernel, or why there is none."""
    if spec.group % _UNPACKED_ROWS:
        return f"groups of {spec.group} rows"
    names = (spec.qtype, dtype.name, scales.dtype.name, dtype.name)
    group = kernels.UNPACK.stage_k
    program = kernels.program(kernels.UNPACK, *names, zeros=spec.has_zeros, group=group)
    reason = not_compiled(program, source.UNPACK)
    if reason is not None:
        return reason
    batch = values.shape[:-4]
    result = jax.ShapeDtypeStruct((*batch, spec.n, spec.k), dtype)
    numbers = {"batch": math.prod(batch), "n": spec.n, "k": spec.k, "group": spec.group}
    attributes = {name: np.int64(number) for name, number in numbers.items()} | {
        "has_zeros": spec.has_zeros,
        "format": spec.qtype,
        "output": dtype.name,
        "scale": scales.dtype.name,
        "digest": source.digest(program),
    }
    return jax.ffi.ffi_call(_extension.UNPACK_TARGET, result)(values, scales, **attributes)


def not_compiled(program: str, row: str) -> str | None:
    """Returns why a kernel cannot be compiled, ``None`` if it can."""
    is_here = bool(_compat.initialized_cuda_devices())
    return compiler.obstacle(program, (row, row) if is_here else None)
