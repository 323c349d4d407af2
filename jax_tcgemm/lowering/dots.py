"""``lax.dot_general`` with an accumulator of a given type, also where XLA lacks the types."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.problem.arithmetic import (
    at_least_8_bits,
    common_dtype,
    is_float8,
)


def alike(a: jax.Array, b: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns the operands of a product in one type, except for a pair of 8-bit floats.

    Args:
        a: the first factor.
        b: the second factor.
        dtype: the accumulator's type. If it is an integer, operands of two types are converted to
            it, as in ``lax.dot_general``. Otherwise they are converted to their common type, which
            rounds less.
    """
    if is_float8(a.dtype) and is_float8(b.dtype):
        return a, b
    is_exact = a.dtype != b.dtype and not jnp.issubdtype(dtype, jnp.inexact)
    common = dtype if is_exact else common_dtype(a.dtype, b.dtype)
    return a.astype(common), b.astype(common)


def dot(a: jax.Array, b: jax.Array, dimension_numbers: Any, precision: Any, dtype: np.dtype):
    """Returns ``lax.dot_general``, in other types if XLA's compiler would fail or be wrong.

    - CPU, 16-bit operands: converted to float32 first, which is exact. XLA's CPU compiler refuses
      to accumulate some of their products in float32.
    - CUDA, int8: multiplied as bfloat16, because products that XLA gives to cuBLAS come out twice
      as large (seen with JAX 0.11, on an H200).
    - Numbers of fewer than 8 bits: widened, because XLA's CPU compiler refuses most products of
      them.
    - Integers with a floating-point result: converted to it, because XLA's GPU compiler crashes on
      such products (seen with JAX 0.11).

    The platform is the one that the program is lowered for, not this process's.
    """

    def narrow(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, dimension_numbers, precision, dtype)

    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return lax.dot_general(a, b, dimension_numbers, precision, jnp.float32).astype(dtype)

    if not jnp.issubdtype(dtype, jnp.inexact):
        precision = lax.Precision.DEFAULT  # integers are exact, whatever the default is
    elif not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in (a, b)):
        a, b, precision = a.astype(dtype), b.astype(dtype), lax.Precision.HIGHEST
    wide = at_least_8_bits(dtype)
    if any(at_least_8_bits(x.dtype) != x.dtype for x in (a, b)):
        a, b = a.astype(wide), b.astype(wide)
    if wide != dtype:  # integers wrap in both
        return dot(a, b, dimension_numbers, precision, wide).astype(dtype)
    of_k = a.shape[dimension_numbers[0][0][0]]
    if all(x.dtype == jnp.int8 for x in (a, b)) and dtype == jnp.int32 and isinstance(of_k, int):
        exact = functools.partial(_dot_of_int8, dimension_numbers=dimension_numbers)
        return lax.platform_dependent(a, b, cuda=exact, default=narrow)
    if lacks_preset(precision, a.dtype, b.dtype):
        return by_preset(a, b, dimension_numbers, precision, dtype)
    is_narrow = all(jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2 for x in (a, b))
    if not is_narrow or dtype.itemsize > 4:
        return narrow(a, b)
    # The residuals are a and b, not their conversions on each platform.
    by_platform = functools.partial(lax.platform_dependent, cpu=widened, default=narrow)
    return jax.checkpoint(by_platform, prevent_cse=False)(a, b)


# JAX refuses most other presets on CPUs, and XLA some of them for few rows or columns.
_PRESETS_OF_CPUS = {
    lax.DotAlgorithmPreset.DEFAULT,
    lax.DotAlgorithmPreset.F16_F16_F16,
    lax.DotAlgorithmPreset.F32_F32_F32,
    lax.DotAlgorithmPreset.BF16_BF16_F32,
}
# Complex factors at these presets are multiplied at the default precision, at all others at the
# highest.
_ROUGH_PRESETS = {
    lax.DotAlgorithmPreset.DEFAULT,
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithmPreset.TF32_TF32_F32,
}


def lacks_preset(precision: Any, *dtypes: np.dtype) -> bool:
    """Checks for a preset that JAX or XLA may not have on CPUs.

    Args:
        precision: any precision.
        dtypes: dtypes of the factors. XLA drops the imaginary parts of complex ones at a preset
            (seen with JAX 0.8 and 0.12, on CPUs).
    """
    if not isinstance(precision, lax.DotAlgorithmPreset):
        return False
    is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
    return is_complex or precision not in _PRESETS_OF_CPUS


def by_preset(
    a: jax.Array,
    b: jax.Array,
    dimension_numbers: Any,
    precision: lax.DotAlgorithmPreset,
    dtype: np.dtype | None,
) -> jax.Array:
    """Returns ``lax.dot_general`` at a preset for which ``lacks_preset`` is true.

    CPUs multiply at the highest precision, other platforms at the preset. Exceptions on all
    platforms: BF16_BF16_F32_X9 is the highest precision, because XLA's own has errors of 1e-4 on
    GPUs, and complex factors are multiplied at the default or at the highest precision.
    """

    def product(a: jax.Array, b: jax.Array, precision: Any) -> jax.Array:
        return lax.dot_general(a, b, dimension_numbers, precision, dtype)

    exact = functools.partial(product, precision=lax.Precision.HIGHEST)
    if jnp.iscomplexobj(a) or jnp.iscomplexobj(b):
        is_rough = precision in _ROUGH_PRESETS
        return product(a, b, lax.Precision.DEFAULT) if is_rough else exact(a, b)
    if precision is lax.DotAlgorithmPreset.BF16_BF16_F32_X9:
        return exact(a, b)
    by_name = functools.partial(product, precision=precision)
    others = dict.fromkeys(("cuda", "rocm", "tpu"), by_name)
    by_platform = functools.partial(lax.platform_dependent, default=exact, **others)
    return jax.checkpoint(by_platform, prevent_cse=False)(a, b)


# The sum of _EXACT_K products of int8 is exact in float32. At most _MOST_WAITING bytes of such sums
# may wait to be added up.
_EXACT_K = 2**24 // 2**14
_MOST_WAITING = 2**28


def _dot_of_int8(a: jax.Array, b: jax.Array, dimension_numbers: Any) -> jax.Array:
    """Multiplies parts of k as bfloat16 and adds up their sums as int32."""
    ((of_a,), (of_b,)), (batch_a, batch_b) = dimension_numbers
    k = a.shape[of_a]
    parts = max(1, -(-k // _EXACT_K))

    def whole(a: jax.Array, b: jax.Array, batch: Any = (batch_a, batch_b), at: Any = (of_a, of_b)):
        numbers = (([at[0]], [at[1]]), batch)
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        precision = lax.Precision.DEFAULT
        return lax.dot_general(a, b, numbers, precision, jnp.float32).astype(jnp.int32)

    if parts == 1:
        return whole(a, b)
    size = -(-k // parts)
    a, b = (_divided(x, axis, parts, size) for x, axis in ((a, of_a), (b, of_b)))
    shape = jax.eval_shape(whole, a[0], b[0]).shape
    is_known = all(isinstance(extent, int) for extent in shape)
    if not is_known or 4 * parts * math.prod(shape) > _MOST_WAITING:
        first = whole(a[0], b[0])
        return lax.scan(lambda sum_, x: (sum_ + whole(*x), None), first, (a[1:], b[1:]))[0]
    batch = tuple((0, *(axis + 1 for axis in axes)) for axes in (batch_a, batch_b))
    return jnp.sum(whole(a, b, batch, (of_a + 1, of_b + 1)), axis=0, dtype=jnp.int32)


def _divided(x: jax.Array, axis: int, parts: int, size: int) -> jax.Array:
    """Divides an axis into parts, which become the first axis; pads with zeros."""
    missing = parts * size - x.shape[axis]
    x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
    x = x.reshape(*x.shape[:axis], parts, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)
