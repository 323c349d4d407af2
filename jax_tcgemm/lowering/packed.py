"""Lowering of products with packed weights: the reference, and CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.lowering import dots, fallback, packed_layout
from jax_tcgemm.problem.packed import PackedSpec


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
    """Computes the product on CUDA devices; operands and results are those of ``reference``."""
    call = f"tcgemm_packed {spec.qtype} {x.dtype}{list(x.shape)} n={spec.n}"
    reason = "no kernel for packed weights"
    fallback.report(call, reason, strict=fallback.is_strict(spec.config))
    return reference(x, values, scales, spec=spec)
