"""Lowering of products with weights in 4 bits that the program stores unpacked.

For few rows and a large weight, a pass packs the weight (``cuda/passes/pack_values.h``), and the
kernels for packed weights multiply. Otherwise the weight is dequantized.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import _compat, _extension
from jax_tcgemm.kernels import packed as kernels
from jax_tcgemm.lowering import dots, packed, packed_layout
from jax_tcgemm.lowering.gemm import cuda_gemm
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.packed import TILE, PackedSpec, UnpackedSpec, tiles
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

# Packing and multiplying takes less time than XLA needs for up to this many rows, if the weight has
# at least this many values (lab/packed_weights.md, H200).
_MOST_ROWS = 256
_LEAST_VALUES = 12 << 20
# The pass reads rows of a weight in vectors of this many values.
_VECTOR = 32


def reference(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    *zero: jax.Array,
    spec: UnpackedSpec,
) -> list[jax.Array]:
    """Computes ``x @ ((values - zero) * scale)``.

    Args:
        x: ``(..., k)``, bfloat16 or float16.
        values: ``(k, n)``, or ``(n, k)`` if ``spec.transposed``; int4 or uint4.
        scale: ``(groups, n)``.
        *zero: zero points ``(groups, n)`` in int4 or uint4, if there are any.
        spec: the primitive's parameters.

    Returns:
        One array ``(..., n)`` of ``spec.out_dtype``. Each dequantized weight is rounded once, to
        the dtype of ``x``. Sums are float32.
    """
    w = _dequantized(x.dtype, values, scale, *zero, transposed=spec.transposed)
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    sums = dots.dot(x, w, dims, lax.Precision.DEFAULT, jnp.dtype(jnp.float32))
    return [sums.astype(spec.out_dtype)]


def _dequantized(
    dtype: np.dtype, values: jax.Array, scale: jax.Array, *zero: jax.Array, transposed: bool
) -> jax.Array:
    """Returns the weight ``(k, n)``; the dtype of the scale and this one hold all values."""
    q = lax.transpose(values, (1, 0)) if transposed else values
    wide = jnp.promote_types(dtype, scale.dtype)
    w = q.astype(wide)
    for each in zero:
        w = w - packed_layout.along_k(each.astype(wide), q.shape[0])
    return (w * packed_layout.along_k(scale.astype(wide), q.shape[0])).astype(dtype)


def product_of_dequantized(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    *zero: jax.Array,
    spec: UnpackedSpec,
) -> tuple[Operands, GemmSpec]:
    """Returns the operands and parameters of an ordinary product with the dequantized weight.

    The arguments are those of ``reference``.
    """
    w = _dequantized(x.dtype, values, scale, *zero, transposed=spec.transposed)
    axes = Operands(tuple(range(x.ndim)), (*(None,) * (x.ndim - 2), 0, 1))
    precision = _compat.canonicalize_precision(None)
    return Operands(x, w), GemmSpec(axes, spec.out_dtype, precision)


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
    if spec.k * spec.n < _LEAST_VALUES:
        return f"{spec.k} x {spec.n} weights are few"
    rows = x.size // spec.k
    if not 0 < rows <= _MOST_ROWS:
        return f"{rows} rows"
    if spec.k % TILE or (spec.k if transposed else spec.n) % _VECTOR:
        return f"k={spec.k}, n={spec.n}"
    row = kernels.choose(spec.bits, rows, spec.n, spec.k, spec.group)
    assert row is not None, rows
    return packed.unfit_row(row, x.dtype, scale.dtype, spec)


def lower_cuda(
    x: jax.Array,
    values: jax.Array,
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
    types = _types(of_packed, scale)
    reason = unfit(x, scale, of_packed, transposed=spec.transposed)
    reason = reason or packed.unfit(rows, *types, of_packed)
    if reason is None:
        found, told = packed.planned(rows, *types, of_packed)
        if isinstance(found, packed.Call):
            log(f"{call}: packed by a kernel, config {found.config}{told}")
            arrays = _packed(values, of_packed, transposed=spec.transposed)
            zero_point = zero[0] if zero else None
            strips = packed_layout.pack_scales(scale, zero_point, of_packed.qtype)
            return [found.emit(rows, arrays, strips).reshape(*x.shape[:-1], of_packed.n)]
        reason = found
    log(f"{call}: dequantized by XLA: {reason}")
    operands, product = product_of_dequantized(x, values, scale, *zero, spec=spec)
    return cuda_gemm(operands.a, operands.b, spec=product)


def _types(spec: PackedSpec, scale: jax.Array) -> tuple[Any, Any]:
    """Returns the types of the packed values and scales."""
    n_tiles = tiles(spec.n)
    values = (n_tiles, tiles(spec.k), 128, 4 * spec.bits)
    strips = (n_tiles, spec.groups, 1 + spec.has_zeros, TILE)
    return (
        jax.ShapeDtypeStruct(values, jnp.uint8),
        jax.ShapeDtypeStruct(strips, scale.dtype),
    )


def _packed(values: jax.Array, spec: PackedSpec, *, transposed: bool) -> jax.Array:
    """Emits the pass that packs values; does the same as ``packed_layout.pack_values``."""
    result = jax.ShapeDtypeStruct((tiles(spec.n), tiles(spec.k), 128, 16), jnp.uint8)
    call = jax.ffi.ffi_call(_extension.PACK_TARGET, result)
    return call(values, n=np.int64(spec.n), k=np.int64(spec.k), transposed=transposed)
