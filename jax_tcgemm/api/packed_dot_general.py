"""``dot_general`` of an array and a weight that is not dequantized, on either side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_tcgemm.api import arguments, eager, weight_only, weights
from jax_tcgemm.api.scaled_dot import dimension_numbers_of
from jax_tcgemm.api.scaled_matrices import DimensionNumbers
from jax_tcgemm.problem.strides import Shape
from jax_tcgemm.quantized.arrays import is_quantized
from jax_tcgemm.quantized.packed import PackedWeight, is_weight


def packed_dot_general(
    dot: Callable[..., jax.Array],
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """``lax.dot_general`` of an array and a quantized weight.

    A packed weight ``(*batch, k, n)`` is multiplied as it is if k is contracted, all its other
    leading dimensions are batch dimensions, and the array is bfloat16 or float16. Otherwise it is
    dequantized to the dtype of the array.

    Args:
        dot: the function ``dot_general``.
        lhs: an array, a ``PackedWeight``, or a ``Quantized`` for which ``multiplied_weight``
            returns a weight.
        rhs: the same. One of the two is an array.
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
    are_weights = [is_weight(x) for x in (lhs, rhs)]
    if all(are_weights):
        raise TypeError(
            f"dot_general takes a PackedWeight beside an array, got {type(lhs)} and {type(rhs)}; "
            "accepted for two quantized operands: Quantized"
        )
    lhs, rhs = (
        x if is_weight else arguments.array(name, x)
        for name, x, is_weight in zip(("lhs", "rhs"), (lhs, rhs), are_weights, strict=True)
    )
    dims = dimension_numbers_of(dimension_numbers, _shape(lhs), _shape(rhs))
    x = rhs if are_weights[0] else lhs
    dtype = x.dtype if preferred_element_type is None else preferred_element_type
    options = {"dims": dims, "precision": precision, "dtype": jnp.dtype(dtype)}
    return _packed_dot_general(lhs, rhs, dot=dot, **options)


@eager.one_program("dot", "dims", "precision", "dtype")
def _packed_dot_general(
    lhs: Any, rhs: Any, *, dot: Any, dims: Any, precision: Any, dtype: np.dtype
) -> jax.Array:
    is_left = is_weight(lhs)
    w, x = (lhs, rhs) if is_left else (rhs, lhs)
    weight = multiplied_weight(lhs, rhs, dims, precision, dtype)
    if weight is not None:
        return _product(x, weight, dims, is_left, dtype)
    name = "rhs" if is_left else "lhs"
    array = weight_only.dequantized("lhs" if is_left else "rhs", w, name, x)
    operands = (array, x) if is_left else (x, array)
    return dot(*operands, dims, precision, dtype)


def multiplied_weight(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any,
    preferred: DTypeLike | None,
) -> weights.Weight | None:
    """Returns the weight that a primitive multiplies; ``None`` if there is none.

    Args:
        lhs: an array or a quantized weight. Types may take the places of arrays.
        rhs: the same.
        dimension_numbers: as in ``packed_dot_general``.
        precision: as in ``gemm``.
        preferred: dtype of the result; ``None`` means that of the array.

    Raises:
        TypeError: ``dimension_numbers`` does not fit.
    """
    are_weights = [is_weight(x) for x in (lhs, rhs)]
    own = are_weights.index(True)
    w, x = (lhs, rhs) if own == 0 else (rhs, lhs)
    if all(are_weights) or not hasattr(x, "dtype"):
        return None
    dims = dimension_numbers_of(dimension_numbers, _shape(lhs), _shape(rhs))
    contracted, batch = (pair[own] for pair in dims)
    rank = len(_shape(w))
    if isinstance(w, PackedWeight):
        is_matrix = contracted == (rank - 2,) and sorted(batch) == list(range(rank - 2))
        return weights.multiplied(w, x, precision) if is_matrix else None
    if rank != 2 or len(contracted) != 1 or batch:
        return None
    (k_dim,) = dims[0][1 - own]
    free = [extent for i, extent in enumerate(x.shape) if i != k_dim]
    rows = jax.ShapeDtypeStruct((*free, x.shape[k_dim]), x.dtype)
    return weights.multiplied(w, rows, precision, preferred, transposed=contracted == (1,))


def _shape(x: Any) -> Shape:
    """Returns the shape of an array or weight; objects of other libraries may have none."""
    return x.qvalue.shape if is_quantized(x) else x.shape


def _product(
    x: jax.Array, w: weights.Weight, dims: DimensionNumbers, is_left: bool, dtype: np.dtype
) -> jax.Array:
    """Multiplies by the weight as a matrix, and moves the result's dimensions."""
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
