"""Private names of JAX for what XLA's partitioner divides by our rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import custom_partitioning_sharding_rule as _sharding_rule
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.lib import xla_client as _client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir import ir as _ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import hlo as _hlo

from jax_tcgemm._compat import option

# XLA's shardings, and where its partitioner is told of ours.
xla_client: Any = _client


def devices_of(context: Any) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Returns on how many devices a program runs, and the groups among which XLA divides it.

    Args:
        context: what a lowering rule is given.

    Returns:
        The number, and the devices of each group where some axes of a mesh are divided by hand; no
        group where XLA divides all.
    """
    axes = context.module_context.axis_context
    if isinstance(axes, _sharding_impls.ShardingContext):
        return axes.num_devices, ()
    shape, by_hand = axes.mesh.shape, axes.manual_axes
    numbers = np.arange(axes.mesh.size).reshape(tuple(shape.values()))
    order = sorted(range(len(shape)), key=lambda i: tuple(shape)[i] not in by_hand)
    groups = math.prod(extent for name, extent in shape.items() if name in by_hand)
    if groups == 1:
        return axes.mesh.size, ()
    return axes.mesh.size, tuple(map(tuple, numbers.transpose(order).reshape(groups, -1).tolist()))


def partitioned_devices(context: Any) -> int:
    """Returns among how many devices XLA divides what is lowered.

    Args:
        context: what a lowering rule is given.

    Returns:
        1 where each device's program is written out: on a single device, and within ``shard_map``
        over all axes of a mesh (``pmap`` alike).
    """
    if not _is_known(context):
        return 1
    devices, groups = devices_of(context)
    return len(groups[0]) if groups else devices


def program_devices(context: Any) -> int:
    """Returns on how many devices the program runs that is lowered; of ``pmap``'s, 1.

    Args:
        context: what a lowering rule is given.
    """
    return devices_of(context)[0] if _is_known(context) else 1


def _is_known(context: Any) -> bool:
    known = (_sharding_impls.ShardingContext, _sharding_impls.SPMDAxisContext)
    return isinstance(context.module_context.axis_context, known)


def emit_partitioned(
    context: Any,
    values: Sequence[Any],
    target: str,
    text: str,
    *,
    operands: Sequence[Sequence[str | None]],
    results: Sequence[Sequence[str | None]],
    summed: Sequence[str],
    numbered: bool = False,
) -> Any:
    """Emits a custom call that a registered partitioner divides.

    Args:
        context: what a lowering rule is given.
        values: the operands.
        target: the name of the partitioner.
        text: what it is told.
        operands: the names of their dimensions, ``None`` for one that stays whole.
        results: those of the results.
        summed: the names that no result has.
        numbered: whether XLA divides the call anew in groups of devices. It numbers those of a
            group as the first result lies: an additional one, which is whole, keeps their order.

    Returns:
        The results, without the additional one.
    """
    types = [
        _ir.RankedTensorType.get(x.shape, _mlir.dtype_to_ir_type(x.dtype))
        for x in context.avals_out
    ]
    if numbered:
        types.insert(0, _ir.RankedTensorType.get((1,), _mlir.dtype_to_ir_type(np.dtype(np.int32))))
        results = [(None,), *results]
    call = _hlo.CustomCallOp(
        types,
        list(values),
        call_target_name=_ir.StringAttr.get(target),
        has_side_effect=_ir.BoolAttr.get(False),
        api_version=_ir.IntegerAttr.get(_ir.IntegerType.get_signless(32), 2),
        called_computations=_ir.ArrayAttr.get([]),
        backend_config=_ir.StringAttr.get(text),
        operand_layouts=None,
        result_layouts=None,
    )
    if option("jax_use_shardy_partitioner"):
        whole: list[str] = []

        def mapping(dims: Sequence[str | None]) -> Any:
            names = []
            for name in dims:
                if name is None:
                    name = f"whole{len(whole)}"
                    whole.append(name)
                names.append(name)
            return _sharding_rule.ArrayMapping(*names)

        rule = _sharding_rule.SdyShardingRule(
            tuple(map(mapping, operands)),
            tuple(map(mapping, results)),
            reduction_factors=tuple(summed),
            need_replication_factors=tuple(whole),
        )
        call.attributes["sdy.sharding_rule"] = _sharding_rule.sdy_sharding_rule_to_mlir(
            rule, [value.type for value in values], list[Any](types)
        )
    return list(call.results)[numbered:]


def program_of_one_device(
    function: Callable[..., Any],
    operands: Sequence[jax.ShapeDtypeStruct],
    axis: str,
    devices: int,
    platform: str,
) -> bytes:
    """Returns what each device does, serialised, of a program divided by hand.

    Args:
        function: computes it; collectives are those over ``axis``.
        operands: the types of its operands.
        axis: name of the axis along which all devices lie.
        devices: how many there are.
        platform: what it is lowered for.
    """
    jaxpr = jax.make_jaxpr(function, axis_env=[(axis, devices)])(*operands)
    mesh = _mesh.AbstractMesh((devices,), (axis,))
    context = _sharding_impls.SPMDAxisContext(mesh, frozenset({axis}))  # pyright: ignore
    with _core.extend_axis_env_nd([(axis, devices)]):
        module = _mlir.build_mlir_module_helper(
            jaxpr, name="part", platforms=[platform], backend=None, axis_context=context
        )
    return _mlir.module_to_bytecode(module)


def register_partitioner(
    target: str, propagate: Callable[..., Any], partition: Callable[..., Any], infer: Any
) -> None:
    """Registers what XLA's partitioner calls for a custom call, in each client there is or will be.

    Args:
        target: name of the custom call.
        propagate: what a result's user asks for, of its sharding.
        partition: divides a call.
        infer: the result's sharding, of those of the operands.
    """
    register = functools.partial(
        xla_client.register_custom_call_partitioner,
        name=target,
        prop_user_sharding=propagate,
        partition=partition,
        infer_sharding_from_operands=infer,
        can_side_effecting_have_replicated_sharding=False,
    )
    register()
    # Plugins, as CUDA's is, have registries of their own.
    _xla_bridge.register_plugin_callbacks(register)
