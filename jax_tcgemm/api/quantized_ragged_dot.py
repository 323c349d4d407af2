"""``ragged_dot`` of quantized operands: the scales become part of its epilogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.api import arguments
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.api.scaled_dot import common_of, is_native_pair, result_dtype
from jax_tcgemm.problem.activations import Activation, resolve
from jax_tcgemm.quantized import arrays
from jax_tcgemm.quantized.scaled_array import ScaledArray


def quantized_ragged_dot(
    dot: Callable[..., Any],
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    bias: Any,
    activation: str | Activation | None,
    preferred_element_type: Any,
    epilogue: Callable[..., Any] | None,
    epilogue_operands: Sequence[Any],
    **options: Any,
) -> Any:
    """Computes ``ragged_dot`` of operands of which at least one is quantized.

    Two float8 or two int8 operands are multiplied directly if no scale changes along k and there
    are no zero points. Others are dequantized.

    Args:
        dot: the function ``ragged_dot``.
        lhs: ``(m, k)``.
        rhs: ``(g, k, n)``, or ``(g, n, k)``.
        group_sizes: as in ``ragged_dot``.
        bias: as in ``ragged_dot``.
        activation: as in ``ragged_dot``.
        preferred_element_type: as in ``ragged_dot``.
        epilogue: as in ``ragged_dot``.
        epilogue_operands: as in ``ragged_dot``.
        **options: further arguments of ``dot``.
    """
    if epilogue is not None:
        epilogues.check_alone("ragged_dot", bias=bias, activation=activation)
        epilogues.check_function(epilogue)
    dtype = jnp.dtype(
        result_dtype(lhs, rhs) if preferred_element_type is None else preferred_element_type
    )
    arguments.check_scaled(dtype)
    arguments.check_activation(activation, dtype)
    a, b = ScaledArray.of(lhs), ScaledArray.of(rhs)
    if len(a.shape) != 2 or len(b.shape) != 3:
        raise ValueError(
            f"lhs must be (m, k) and rhs (g, k, n), got lhs.shape={a.shape} and rhs.shape={b.shape}"
        )
    k_axis = 2 if options["transpose_rhs"] else 1
    is_native = (
        is_native_pair(a.dtype, b.dtype)
        and a.zero_point is None
        and b.zero_point is None
        and a.is_constant_along(1)
        and b.is_constant_along(k_axis)
        and b.shape[0] > 0
    )
    if not is_native:
        wide = result_dtype(lhs, rhs) if epilogue is not None else dtype
        common = common_of(a.dtype, b.dtype, jnp.dtype(wide))
        return dot(
            a.dequantized(common),
            b.dequantized(common),
            group_sizes,
            bias=bias,
            activation=activation,
            preferred_element_type=preferred_element_type if epilogue is not None else dtype,
            epilogue=epilogue,
            epilogue_operands=epilogue_operands,
            **options,
        )
    m, groups = a.shape[0], b.shape[0]
    of_row, is_inside = groups_of_rows(arguments.array("group_sizes", group_sizes), m)
    scales = _along_results(a, b, k_axis, of_row)
    if epilogue is None:
        n = b.shape[3 - k_axis]
        shape = groups, n
        terms = []
        if bias is not None:
            terms.append(of_rows(arguments.vector("bias", bias, shape, dtype), shape, of_row))
        epilogue_operands = (is_inside, *terms)
        epilogue = finished_by(activation, dtype)

    def of_product(product: jax.Array, scales: Sequence[jax.Array], *others: Any) -> Any:
        product = product.astype(jnp.float32)
        for scale in scales:
            product = product * scale
        return epilogue(product, *others)

    return dot(
        a.value,
        b.value,
        group_sizes,
        epilogue=of_product,
        epilogue_operands=(scales, *epilogue_operands),
        preferred_element_type=preferred_element_type,
        **options,
    )


def finished_by(activation: str | Activation | None, dtype: np.dtype) -> Callable[..., jax.Array]:
    """Returns the epilogue of a scaled product; it sets rows beyond all groups to zero."""

    def finished(product: jax.Array, is_inside: jax.Array, *bias: jax.Array) -> jax.Array:
        for each in bias:
            product = product + each
        if activation is not None:
            product = resolve(activation).reference(product)
        return jnp.where(is_inside, product, 0).astype(dtype)

    return finished


def groups_of_rows(sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """Returns the group of each row, ``(m,)``, and whether the row has one, ``(m, 1)``."""
    ends = jnp.cumsum(jnp.clip(sizes, 0, m).astype(jnp.int32))
    rows = jnp.arange(m, dtype=jnp.int32)
    group = jnp.searchsorted(ends, rows, side="right", method="compare_all")
    return jnp.minimum(group, sizes.shape[0] - 1), (rows < ends[-1])[:, None]


def of_rows(values: Any, shape: tuple[int, int], of_row: jax.Array) -> jax.Array:
    """Returns the bias of each row's group."""
    values = arguments.array("bias", values).astype(jnp.float32)
    return jnp.broadcast_to(values, shape)[of_row]


def _along_results(
    a: ScaledArray, b: ScaledArray, k_axis: int, of_row: jax.Array
) -> list[jax.Array]:
    """Returns scales that broadcast to ``(m, n)``."""
    scales = []
    if a.scale is not None:
        rows = (a.shape[0] if a.scale.shape[0] != 1 else 1, 1)
        scales.append(arrays.spread(a.scale.astype(jnp.float32), rows))
    if b.scale is not None:
        columns = b.shape[3 - k_axis] if b.scale.shape[3 - k_axis] != 1 else 1
        scale = b.scale.astype(jnp.float32).squeeze(k_axis)
        groups = b.shape[0] if scale.shape[0] != 1 else 1
        scale = arrays.spread(scale, (groups, columns))
        # Scales that differ between groups are read along with the results.
        scales.append(scale[of_row] if groups > 1 else scale)
    return scales
