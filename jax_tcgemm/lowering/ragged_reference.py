"""Products over groups in ``jax.numpy``: their definition and lowering without a kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import _compat
from jax_tcgemm.lowering import dots, reference
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, accumulator_dtype, resolve_algorithm
from jax_tcgemm.problem.spec import GemmSpec

_FLOAT32 = jnp.dtype(jnp.float32)

# Groups that the reference computes in one iteration of a loop. Each iteration costs a GPU 10 us.
_UNROLL = 8


def group_bounds(group_sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the begin and end of each group, int32; sizes are clamped to the rows."""
    sizes = jnp.clip(group_sizes, 0, rows).astype(jnp.uint32)
    # The sum of two cannot overflow, however many groups there are.
    ends = lax.associative_scan(lambda x, y: jnp.minimum(x + y, jnp.uint32(rows)), sizes)
    ends = ends.astype(jnp.int32)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def reference_product(*operands: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """Computes either product, by ``reference_dot`` or ``reference_contraction``."""
    product = reference_dot if spec.grouped == "m" else reference_contraction
    return product(*operands, spec=spec)


def reference_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *bias: jax.Array,
    spec: GemmSpec,
) -> list[jax.Array]:
    """Computes the ragged product group after group, each for all rows.

    Args:
        lhs: ``(m, k)``.
        rhs: ``(g, k, n)``, or ``(g, n, k)``.
        group_sizes: ``(g,)``, int32.
        *bias: ``(g, n)``, if there is one.
        spec: the primitive's parameters.

    Returns:
        ``[d]``, or ``d`` and the pre-activation, each ``(m, n)``.
    """
    lhs, rhs, precision, dtype = _exact_factors(lhs, rhs, spec)
    rows = lax.broadcasted_iota(jnp.int32, (lhs.shape[0], 1), 0)
    contract = ((1,), (1 if spec.transposes_b else 0,)), ((), ())
    wide = accumulator_dtype(dtype, dtype, spec.out_dtype)

    def add_group(z: jax.Array, group: Any) -> tuple[jax.Array, None]:
        weight, begin, end, *bias = group
        own = dots.dot(lhs, weight, contract, precision, dtype).astype(wide)
        own = sum((row[None].astype(wide) for row in bias), own)
        return jnp.where((begin <= rows) & (rows < end), own, z), None

    n = rhs.shape[1 if spec.transposes_b else 2]
    z, *_ = _compat.match_varying((jnp.zeros((lhs.shape[0], n), wide), lhs, rhs))
    bounds = group_bounds(group_sizes, lhs.shape[0])
    z, _ = lax.scan(add_group, z, (rhs, *bounds, *bias), unroll=_UNROLL)
    d = z
    if spec.activation is not None:
        in_group = rows < bounds[1][-1] if rhs.shape[0] else jnp.zeros_like(rows, bool)
        d = jnp.where(in_group, resolve(spec.activation).reference(z), 0)
    results = spec.epilogue.picked((d, z))
    return [reference.convert(result, spec.out_dtype) for result in results]


def reference_contraction(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    spec: GemmSpec,
) -> list[jax.Array]:
    """Computes ``lhs[group].T @ rhs[group]`` for each group of rows, ``[(g, k, n)]``.

    Args:
        lhs: ``(m, k)``.
        rhs: ``(m, n)``.
        group_sizes: ``(g,)``, int32.
        spec: the primitive's parameters.
    """
    lhs, rhs, precision, dtype = _exact_factors(lhs, rhs, spec)
    rows = lax.broadcasted_iota(jnp.int32, (lhs.shape[0], 1), 0)

    def of_group(_: None, group: Any) -> tuple[None, jax.Array]:
        begin, end = group
        inside = (begin <= rows) & (rows < end)
        # Both are masked, because values outside the group may be infinite.
        x, y = jnp.where(inside, lhs, 0), jnp.where(inside, rhs, 0)
        d = dots.dot(x, y, (((0,), (0,)), ((), ())), precision, dtype)
        return None, reference.convert(d, spec.out_dtype)

    bounds = group_bounds(group_sizes, lhs.shape[0])
    return [lax.scan(of_group, None, bounds, unroll=_UNROLL)[1]]


def _exact_factors(
    lhs: jax.Array, rhs: jax.Array, spec: GemmSpec
) -> tuple[jax.Array, jax.Array, Any, np.dtype]:
    """Returns factors, precision and accumulator dtype for ``lax.dot_general``."""
    algorithm = resolve_algorithm(lhs.dtype, rhs.dtype, spec.out_dtype, spec.precision)
    dtype = accumulator_dtype(lhs.dtype, rhs.dtype, spec.out_dtype)
    if algorithm is None:
        return *dots.alike(lhs, rhs, dtype), spec.precision, dtype
    # The algorithm is spelled out in dtypes: XLA's CPU compiler knows few of the presets.
    lhs, rhs = (x.astype(INPUT_DTYPES[algorithm]) for x in (lhs, rhs))
    return lhs, rhs, lax.Precision.DEFAULT, _FLOAT32
