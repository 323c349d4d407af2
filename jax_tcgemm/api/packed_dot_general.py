"""``dot_general`` of an array and a packed weight, on either side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_tcgemm.api import arguments, eager, weight_only
from jax_tcgemm.api.scaled_dot import dimension_numbers_of
from jax_tcgemm.api.scaled_matrices import DimensionNumbers
from jax_tcgemm.quantized.packed import PackedWeight


def packed_dot_general(
    dot: Callable[..., jax.Array],
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """``lax.dot_general`` of an array and a packed weight ``(*batch, k, n)``.

    The packed weight is multiplied as it is if k is contracted, all its other leading dimensions
    are batch dimensions, and the array is bfloat16 or float16. Otherwise it is dequantized to the
    dtype of the array.

    Args:
        dot: the function ``dot_general``.
        lhs: an array or a ``PackedWeight``.
        rhs: the other of the two.
        dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
        precision: as in ``gemm``.
        preferred_element_type: dtype of the result; ``None`` means that of the array.

    Returns:
        An array with the batch dimensions, then the free dimensions of ``lhs``, then those of
        ``rhs``.

    Raises:
        TypeError: both operands are packed, a dtype is not accepted, or ``dimension_numbers`` does
            not fit.
    """
    are_packed = [isinstance(x, PackedWeight) for x in (lhs, rhs)]
    others = [x for x, is_packed in zip((lhs, rhs), are_packed, strict=True) if not is_packed]
    if not others or weight_only.is_weight(others[0]):
        raise TypeError(
            f"dot_general takes a PackedWeight beside an array, got {type(lhs)} and {type(rhs)}; "
            "accepted for two quantized operands: Quantized"
        )
    lhs, rhs = (
        x if is_packed else arguments.array(name, x)
        for name, x, is_packed in zip(("lhs", "rhs"), (lhs, rhs), are_packed, strict=True)
    )
    dims = dimension_numbers_of(dimension_numbers, lhs.shape, rhs.shape)
    dtype = others[0].dtype if preferred_element_type is None else preferred_element_type
    options = {"dims": dims, "precision": precision, "dtype": jnp.dtype(dtype)}
    return _packed_dot_general(lhs, rhs, dot=dot, **options)


@eager.one_program("dot", "dims", "precision", "dtype")
def _packed_dot_general(
    lhs: Any, rhs: Any, *, dot: Any, dims: Any, precision: Any, dtype: np.dtype
) -> jax.Array:
    is_left = isinstance(lhs, PackedWeight)
    w, x = (lhs, rhs) if is_left else (rhs, lhs)
    name = "rhs" if is_left else "lhs"
    if not (weight_only.has_primitive(w, x, precision) and _is_matrix_product(w, dims, is_left)):
        array = weight_only.dequantized("lhs" if is_left else "rhs", w, name, x)
        operands = (array, x) if is_left else (x, array)
        return dot(*operands, dims, precision, dtype)
    return _product(x, w, dims, is_left, dtype)


def _is_matrix_product(w: PackedWeight, dims: DimensionNumbers, is_left: bool) -> bool:
    """Checks if k is what is contracted, and all before it is the batch."""
    contracted, batch = (pair[0 if is_left else 1] for pair in dims)
    return contracted == (w.ndim - 2,) and sorted(batch) == list(range(w.ndim - 2))


def _product(
    x: jax.Array, w: PackedWeight, dims: DimensionNumbers, is_left: bool, dtype: np.dtype
) -> jax.Array:
    """Multiplies by the packed weight as a matrix, and moves the result's dimensions."""
    (k_dim,), x_batch = (pair[1 if is_left else 0] for pair in dims)
    w_batch = dims[1][0 if is_left else 1]
    order = [w_batch.index(i) for i in range(len(w_batch))]  # the batch in the weight's order
    free = [i for i in range(x.ndim) if i != k_dim and i not in x_batch]
    rows = lax.transpose(x, (*(x_batch[i] for i in order), *free, k_dim))
    count = len(order)
    shape = rows.shape[count:-1]
    if count and len(shape) != 1:
        rows = rows.reshape(*rows.shape[:count], -1, rows.shape[-1])
    elif not shape:
        rows = rows.reshape(1, rows.shape[-1])
    z = weight_only.product(rows, w, dtype)
    z = z.reshape(*z.shape[:count], *shape, z.shape[-1])
    batch = [order.index(i) for i in range(count)]
    others = list(range(count, z.ndim))
    if is_left:
        others = [others[-1], *others[:-1]]
    return lax.transpose(z, (*batch, *others))
