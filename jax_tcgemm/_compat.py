"""Everything here that JAX does not promise to keep: each private name is imported in this file.

Written against JAX 0.8, 0.10 and 0.11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src import sharding_impls as _sharding_impls
from jax._src import xla_bridge as _xla_bridge
from jax._src.lax import lax as _lax

# Tells ``jax.jit`` to leave nothing of itself within another trace. JAX 0.11 has several ways.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore


def canonicalize_precision(precision: Any) -> Any:
    """Returns ``precision`` as ``lax.dot_general`` would store it.

    ``None`` becomes the value of ``jax.default_matmul_precision``.

    Raises:
        ValueError: ``precision`` is none of what ``lax.dot_general`` takes.
    """
    canonical = _lax.canonicalize_precision(precision)
    return (jax.lax.Precision.DEFAULT,) * 2 if canonical is None else canonical


def mark_as_single_operation(function: Any) -> None:
    """Says that a function for ``jax.jit`` is one operation.

    Where ``jax.debug_nans`` or ``jax.debug_infs`` finds one in a result, JAX runs a function again
    operation by operation, but raises of such a one.
    """
    function._apply_primitive = True


def match_varying(operands: Sequence[Any]) -> Sequence[Any]:
    """Makes all operands vary over the same manual mesh axes, as every ``jax.lax`` function does.

    Inside ``shard_map`` with ``check_vma=True`` a primitive may not mix replicated and varying
    operands; the cast inserted here transposes to the sum over the mesh axes.
    """
    # The newer name first; JAX renamed it after 0.8.
    for name in ("auto_insert_reshard", "standard_insert_pvary"):
        if hasattr(_core, name):
            return getattr(_core, name)(*operands)
    return operands


def is_sharded(*operands: Any) -> bool:
    """Whether an operand's type says how it is sharded, under a mesh with explicit axes."""
    return any(_divides(jax.typeof(x).sharding.spec) for x in operands)


def typed_as(model: jax.Array, x: jax.Array) -> jax.Array:
    """Returns ``x``, of the shape of ``model``, sharded and varying over mesh axes as that is."""
    x = match_varying((model, x))[1]
    sharding = jax.typeof(model).sharding
    if jax.typeof(x).sharding == sharding:
        return x
    reshard = jax.reshard if hasattr(jax, "reshard") else jax.sharding.reshard  # before 0.9
    return reshard(x, sharding)


def _divides(spec: jax.sharding.PartitionSpec) -> bool:
    # Newer JAX has a name for the axes of each dimension, and refuses to iterate over some specs.
    axes = getattr(spec, "partitions", spec)
    return bool(spec.unreduced or spec.reduced or any(axis is not None for axis in axes))


def partitioned_devices(context: Any) -> int:
    """Returns among how many devices XLA divides what is lowered.

    Args:
        context: what a lowering rule is given.

    Returns:
        1 where each device's program is written out: on a single device, and within ``shard_map``
        over all axes of a mesh (``pmap`` alike).
    """
    axes = context.module_context.axis_context
    if isinstance(axes, _sharding_impls.ShardingContext):
        return axes.num_devices
    if isinstance(axes, _sharding_impls.SPMDAxisContext):
        shape = axes.mesh.shape
        return math.prod(shape[name] for name in shape if name not in axes.manual_axes)
    return 1


def result_aval(operands: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the abstract value of a result, which varies over the mesh axes that operands do.

    Its type is weak where those of all operands are, and it has theirs.

    Raises:
        ValueError: the operands lie in different memory spaces.
    """
    if len({x.memory_space for x in operands}) > 1:
        types = ", ".join(str(x) for x in operands)
        raise ValueError(
            f"all operands must lie in one memory space, got {types}; move those in host memory "
            "with jax.device_put"
        )
    weak_type = all(x.weak_type and x.dtype == dtype for x in operands)
    sharding = _core.get_cur_mesh_sharding(jax.sharding.PartitionSpec(*[None] * len(shape)))
    return operands[0].update(shape=shape, dtype=dtype, weak_type=weak_type, sharding=sharding)


def initialized_cuda_devices() -> list[Any]:
    """Returns this process's CUDA devices, or ``[]`` while no CUDA backend has been started."""
    if not _xla_bridge.backends_are_initialized():
        return []
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []
