"""Products of complex64 as one real float32 product, twice as large along n and along k.

A complex number is a pair of real numbers. So A ``(m, k)`` is a real ``(m, 2 k)`` in place, and D
``(m, n)`` a real ``(m, 2 n)``. Each number of B stands for ``[[Re, Im], [-Im, Re]]``. Kernels for
pairs read B in this form, and the pass that splits planes writes it in this form. For other layouts
XLA expands B first. These are four real products with one sum for each part, so errors are those of
the real product of the same name.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm import _extension
from jax_tcgemm.lowering import reference
from jax_tcgemm.lowering.custom_call import (
    attributes,
    shapes_of,
    workspace_bytes,
)
from jax_tcgemm.lowering.fallback import no_complex_kernel, possible_planes
from jax_tcgemm.problem.arithmetic import resolve_algorithm, types_of_parts
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, StridedGemm, fold, strided_gemm

_FLOAT32 = jnp.dtype(jnp.float32)


def is_complex(x: Operands, spec: GemmSpec) -> bool:
    """Checks if this is a product of two complex64 operands."""
    types = (x.a.dtype, x.b.dtype, spec.out_dtype)
    return types_of_parts(*types) != types


def by_real_product(
    x: Operands, spec: GemmSpec, *, strict: bool = False
) -> tuple[list[jax.Array] | None, str]:
    """Computes a gemm of complex64, or returns why XLA has to.

    Args:
        x: the operands.
        spec: the primitive's parameters.
        strict: whether a kernel is to compute what XLA computes in less time, too.

    Returns:
        The results, or ``None`` for a fallback. Then a text: how they are computed, or why not.
    """
    types = (*types_of_parts(x.a.dtype, x.b.dtype, spec.out_dtype), spec.precision)
    planes = possible_planes(*types)
    algorithm = planes.name if planes is not None else resolve_algorithm(*types)
    in_pairs = algorithm is not None and _takes_pairs(x, spec, algorithm)
    reason = no_complex_kernel(x, spec, algorithm, planes, in_pairs=in_pairs, strict=strict)
    if reason is not None or algorithm is None:
        return None, f"{reason}"
    by_pairs = planes is not None or in_pairs
    a, b, real, gemm = _as_real(x, spec, by_pairs=by_pairs)
    padding, workspace = workspace_bytes(gemm, real, _FLOAT32.itemsize, planes)
    result = jax.ShapeDtypeStruct(spec.result_shape(shapes_of(x)), jnp.complex64)
    room = (jax.ShapeDtypeStruct((workspace,), jnp.uint8),) if workspace else ()
    call = jax.ffi.ffi_call(_extension.GEMM_TARGET, (result, *room))
    named = attributes(
        gemm, real, algorithm, padding, has_workspace=workspace > 0, pairs_of_b=by_pairs
    )
    product, *_ = call(a, b, **named)
    return reference.epilogue([product], x, spec), f"complex numbers as pairs, {algorithm}"


def _takes_pairs(x: Operands, spec: GemmSpec, algorithm: str) -> bool:
    """Checks if a kernel reads B in place.

    That needs a contiguous n, and rows of A and B that are multiples of 16 bytes.
    """
    k, n = spec.axes.b[-2:]
    if k is None or n != x.b.ndim - 1 or not _extension.has_pairs_kernel(algorithm):
        return False
    return x.b.shape[k] % 2 == 0 and x.b.shape[n] % 2 == 0


def _as_real(
    x: Operands, spec: GemmSpec, *, by_pairs: bool
) -> tuple[jax.Array, jax.Array, GemmSpec, StridedGemm]:
    """Returns the operands, the parameters of the real product, and its folded form.

    Args:
        x: the operands.
        spec: the primitive's parameters.
        by_pairs: whether to leave B as it is, unless neither k nor n is contiguous.
    """
    a, a_axes = x.a, spec.axes.a
    if a_axes[-1] != a.ndim - 1:
        a, a_axes = _in_order(a, a_axes)
    if not by_pairs:
        b, b_axes = _expanded(x.b, spec.axes.b)
    elif x.b.ndim - 1 in spec.axes.b[-2:]:
        b, b_axes = x.b, spec.axes.b
    else:
        b, b_axes = _in_order(x.b, spec.axes.b)
    real = GemmSpec(Operands(a_axes, b_axes), _FLOAT32, spec.precision)
    pairs = strided_gemm(real.axes, Operands(a.shape, b.shape))
    gemm = dataclasses.replace(
        pairs, k=2 * pairs.k, strides=pairs.strides._replace(a=_in_parts(pairs.strides.a, -1))
    )
    if by_pairs:
        contiguous = -1 if b_axes[-1] == b.ndim - 1 else -2
        strides = gemm.strides._replace(b=_in_parts(pairs.strides.b, contiguous))
        gemm = dataclasses.replace(gemm, n=2 * gemm.n, strides=strides)
    return a, b, real, fold(gemm)


def _in_order(
    x: jax.Array, axes: tuple[int | None, ...]
) -> tuple[jax.Array, tuple[int | None, ...]]:
    """Transposes an operand so that its axes come in the order of ``axes``."""
    kept = [axis for axis in axes if axis is not None]
    moved = tuple(None if axis is None else kept.index(axis) for axis in axes)
    return lax.transpose(x, kept), moved


def _in_parts(strides: tuple[int, ...], contiguous: int) -> tuple[int, ...]:
    """Returns strides of complex numbers as strides of their parts."""
    parts = [2 * stride for stride in strides]
    parts[contiguous] = 1
    return tuple(parts)


def _expanded(
    b: jax.Array, axes: tuple[int | None, ...]
) -> tuple[jax.Array, tuple[int | None, ...]]:
    """Returns a real B of twice the extents along k and n, and its axes.

    The contiguous axis stays contiguous.
    """
    *batch, k, n = axes
    assert k is not None
    assert n is not None
    is_k_major = k == b.ndim - 1
    last, other = (k, n) if is_k_major else (n, k)
    kept = [axis for axis in batch if axis is not None]
    b = lax.transpose(b, (*kept, other, last))
    re, im = lax.real(b), lax.imag(b)
    # (..., other, 2, last, 2): if B is k-major, a row belongs to the real parts of D, the next one
    # to the imaginary parts. Otherwise a row multiplies the real parts of A, the next one the
    # imaginary parts.
    pairs = ((re, -im), (im, re)) if is_k_major else ((re, im), (-im, re))
    rows = [jnp.stack(pair, -1) for pair in pairs]
    both = jnp.stack(rows, -3)
    shape = (*b.shape[:-2], 2 * b.shape[-2], 2 * b.shape[-1])
    places = tuple(None if axis is None else kept.index(axis) for axis in batch)
    rank = len(kept)
    matrix = (rank + 1, rank) if is_k_major else (rank, rank + 1)
    return lax.reshape(both, shape), (*places, *matrix)
