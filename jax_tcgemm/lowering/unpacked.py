"""Lowering of products with weights in 4 bits that the program stores unpacked.

For few rows and a large weight, one operation packs the values by a pass
(``cuda/passes/pack_values.h``), and another one multiplies by the kernels for packed weights. If
there are none, it dequantizes the values, and XLA drops the operation that packs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import _compat, _core, _extension
from jax_tcgemm.kernels import packed as kernels
from jax_tcgemm.lowering import devices, dots, fallback, packed_layout
from jax_tcgemm.lowering import packed as few_rows
from jax_tcgemm.lowering.gemm import cuda_gemm
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.packed import TILE, LayoutSpec, PackedSpec, UnpackedSpec, tiles
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, Shape

# Packing and multiplying takes less time than XLA needs for up to this many rows, if the weight has
# at least this many values (lab/packed_weights.md, H200).
_MOST_ROWS = 256
LEAST_VALUES = 12 << 20
# The pass reads rows of a weight in vectors of this many values.
_VECTOR = 32


def reference(
    x: jax.Array,
    values: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    *zero: jax.Array,
    spec: UnpackedSpec,
) -> list[jax.Array]:
    """Computes ``x @ ((values - zero) * scale)``.

    Args:
        x: ``(..., k)``, bfloat16 or float16.
        values: ``(k, n)``, or ``(n, k)`` if ``spec.transposed``; int4 or uint4.
        packed: the packed values, which are not read here.
        scale: ``(groups, n)``.
        *zero: zero points ``(groups, n)`` in int4 or uint4, if there are any.
        spec: the primitive's parameters.

    Returns:
        One array ``(..., n)`` of ``spec.out_dtype``. Each dequantized weight is rounded once, to
        the dtype of ``x``. Sums are float32.
    """
    del packed
    w = _dequantized(x.dtype, values, scale, *zero, transposed=spec.transposed)
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    sums = dots.dot(x, w, dims, lax.Precision.DEFAULT, jnp.dtype(jnp.float32))
    return [sums.astype(spec.out_dtype)]


def _dequantized(
    dtype: np.dtype, values: jax.Array, scale: jax.Array, *zero: jax.Array, transposed: bool
) -> jax.Array:
    """Returns the weight ``(k, n)``, computed in a dtype that holds all scales and rounded once."""
    q = lax.transpose(values, (1, 0)) if transposed else values
    wide = dtype if scale.dtype == dtype else jnp.dtype(jnp.float32)
    w = q.astype(wide)
    for each in zero:
        w = w - packed_layout.along_k(each.astype(wide), q.shape[0])
    return (w * packed_layout.along_k(scale.astype(wide), q.shape[0])).astype(dtype)


def dequantized(
    multiply: Callable[..., list[jax.Array]], *operands: jax.Array, spec: UnpackedSpec
) -> list[jax.Array]:
    """Does the same as ``reference``, but not by XLA, which is faster, if a fallback is an error.

    Args:
        multiply: computes a product from ``Operands`` and a ``GemmSpec``.
        *operands: the arguments of ``reference``.
        spec: the primitive's parameters.
    """
    if not fallback.is_strict(None):
        return reference(*operands, spec=spec)
    x, values, _, *parts = operands
    w = _dequantized(x.dtype, values, *parts, transposed=spec.transposed)
    axes = Operands(tuple(range(x.ndim)), (*(None,) * (x.ndim - 2), 0, 1))
    precision = _compat.canonicalize_precision(None)
    return list(multiply(Operands(x, w), GemmSpec(axes, spec.out_dtype, precision)))


def unfit(x: Any, scale: Any, spec: PackedSpec, *, transposed: bool) -> str | None:
    """Returns why the program should not pack a weight for a product, ``None`` if it should.

    Args:
        x: the left operand ``(..., k)``, or its type.
        scale: the scales, or their type.
        spec: the parameters of the product with the packed weight.
        transposed: as in ``UnpackedSpec``.
    """
    if spec.bits != 4:
        return f"values of {spec.qtype}"
    if not all(isinstance(extent, int) for extent in (*x.shape, spec.n, spec.k)):
        return "symbolic shapes"
    if spec.k * spec.n < LEAST_VALUES:
        return f"{spec.k} x {spec.n} weights are few"
    rows = x.size // spec.k
    if not 0 < rows <= _MOST_ROWS:
        return f"{rows} rows"
    if spec.k % TILE or (spec.k if transposed else spec.n) % _VECTOR:
        return f"k={spec.k}, n={spec.n}"
    row = kernels.choose(spec.bits, rows, spec.n, spec.k, spec.group)
    assert row is not None, rows
    return few_rows.unfit_row(row, x.dtype, scale.dtype, spec)


def lower_cuda(
    x: jax.Array,
    values: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    *zero: jax.Array,
    spec: UnpackedSpec,
) -> list[jax.Array]:
    """Computes the product on CUDA devices; arguments and results are those of ``reference``.

    Roundings are those of ``lowering.packed.lower_cuda``.
    """
    of_packed = spec.packed(values, scale, zero)
    call = f"tcgemm_unpacked {of_packed.qtype} {x.dtype}{list(x.shape)} n={of_packed.n}"
    rows = x.reshape(-1, of_packed.k)
    strips = packed_layout.pack_scales(scale, zero[0] if zero else None, of_packed.qtype)
    reason = unfit(x, scale, of_packed, transposed=spec.transposed)
    reason = reason or few_rows.unfit(rows, packed, strips, of_packed)
    if reason is None:
        found, told = few_rows.planned(rows, packed, strips, of_packed)
        if isinstance(found, few_rows.Call):
            log(f"{call}: packed by a kernel, config {found.config}{told}")
            return [found.emit(rows, packed, strips).reshape(*x.shape[:-1], of_packed.n)]
        reason = found
    log(f"{call}: dequantized: {reason}")
    by_kernel = lambda x, spec: cuda_gemm(x.a, x.b, spec=spec)  # noqa: E731
    return dequantized(by_kernel, x, values, packed, scale, *zero, spec=spec)


# Packing


def packed_shape(values: Any, spec: LayoutSpec) -> Shape:
    """Returns the shape of packed values; see ``packed_layout``."""
    *batch, k, n = values.shape
    k, n = (n, k) if spec.transposed else (k, n)
    return (*batch, tiles(n), tiles(k), 128, 16)


def pack(values: jax.Array, *, spec: LayoutSpec) -> jax.Array:
    """Packs int4 or uint4 values ``(..., k, n)``, or ``(..., n, k)`` if transposed."""
    return packed_layout.pack_values(jnp.swapaxes(values, -1, -2) if spec.transposed else values)


def pack_cuda(values: jax.Array, *, spec: LayoutSpec) -> jax.Array:
    """Does the same on CUDA devices, by a kernel for the weights that ``unfit`` accepts."""
    *batch, rows, columns = values.shape
    k, n = (columns, rows) if spec.transposed else (rows, columns)
    count = math.prod(batch)
    if (
        not all(isinstance(extent, int) for extent in values.shape)
        or k % TILE
        or columns % _VECTOR
        or not 0 < count <= _core.MAX_GRID_ROWS
        or not 0 < tiles(rows) <= _core.MAX_GRID_ROWS
        or _extension.PACK_TARGET not in _extension.BUILT_TARGETS
        or devices.not_built_for() is not None
    ):
        return pack(values, spec=spec)
    result = jax.ShapeDtypeStruct(packed_shape(values, spec), jnp.uint8)
    extents = {"batch": np.int64(count), "n": np.int64(n), "k": np.int64(k)}
    call = jax.ffi.ffi_call(_extension.PACK_TARGET, result)
    return call(values, transposed=spec.transposed, **extents)
