"""``ragged_dot`` of an array and packed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments, weight_only
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.api.quantized_ragged_dot import finished_by, groups_of_rows, of_rows
from jax_tcgemm.primitives import packed_ragged
from jax_tcgemm.problem.arithmetic import at_least_float32
from jax_tcgemm.quantized.packed import PackedWeight


def packed_ragged_dot(
    lhs: jax.Array,
    rhs: PackedWeight,
    group_sizes: jax.Array,
    *,
    bias: Any,
    activation: Any,
    preferred: DTypeLike | None,
    config: str | None,
    out_sharding: Any,
    epilogue: Callable[..., Any] | None,
    epilogue_operands: Sequence[Any],
) -> Any:
    """Computes ``ragged_dot`` of an array and packed weights.

    The epilogue is computed in float32 from float32 sums.

    Args:
        lhs: ``(m, k)``, bfloat16 or float16.
        rhs: ``(g, k, n)``.
        group_sizes: ``(g,)``, int32.
        bias: as in ``ragged_dot``.
        activation: as in ``ragged_dot``.
        preferred: ``preferred_element_type`` of ``ragged_dot``.
        config: as in ``gemm``.
        out_sharding: as in ``ragged_dot``.
        epilogue: as in ``ragged_dot``.
        epilogue_operands: as in ``ragged_dot``.
    """
    out_dtype = weight_only.out_dtype_of(lhs, preferred)
    wide = at_least_float32(out_dtype)
    arguments.check_activation(activation, out_dtype)
    has_rest = epilogue is not None or bias is not None or activation is not None
    spec = rhs.spec(wide if has_rest else out_dtype, config)
    weight_only.check_config(spec)
    values, scales = map(lax.stop_gradient, (rhs.values, rhs.scales))
    sharding = _compat.out_sharding_of(out_sharding, "ragged_dot")
    if epilogue is not None:
        epilogues.check_alone(
            "ragged_dot", bias=bias, activation=activation, out_sharding=out_sharding
        )
    operands = (lhs, values, scales, group_sizes)
    (z,) = packed_ragged.bind(spec, *operands, out_sharding=sharding)
    if epilogue is not None:
        return weight_only.applied([z], epilogue, epilogue_operands, preferred)
    if not has_rest or rhs.shape[0] == 0:  # without a group, all rows are zero
        return z.astype(out_dtype)
    of_row, is_inside = groups_of_rows(group_sizes, lhs.shape[0])
    terms = []
    if bias is not None:
        shape = (rhs.shape[0], spec.n)
        terms.append(of_rows(arguments.vector("bias", bias, shape, out_dtype), shape, of_row))
    return finished_by(activation, jnp.dtype(out_dtype))(z, is_inside, *terms)
