"""Private JAX names for calls that XLA's partitioner divides by this package's rules."""

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

# Provides XLA's shardings, and registers this package's rules with XLA's partitioner.
xla_client: Any = _client


def devices_of(context: Any) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Returns the number of a program's devices, and the groups in which XLA divides it.

    Args:
        context: the context of a lowering rule.

    Returns:
        The number, and the devices of each group if some mesh axes are manual; no groups if XLA
        divides all axes.
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
    """Returns among how many devices XLA divides the operation that is lowered.

    Args:
        context: the context of a lowering rule.

    Returns:
        The number. It is 1 if the program is already that of one device: on a single device, inside
        ``shard_map`` over all axes of a mesh, and inside ``pmap``.
    """
    if not _is_known(context):
        return 1
    devices, groups = devices_of(context)
    return len(groups[0]) if groups else devices


def program_devices(context: Any) -> int:
    """Returns the number of devices of the program that is lowered; 1 for ``pmap``.

    Args:
        context: the context of a lowering rule.
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
        context: the context of a lowering rule.
        values: the operands.
        target: the name of the partitioner.
        text: the text that is passed to the partitioner.
        operands: the names of the operands' dimensions; ``None`` for a dimension that stays whole.
        results: the names of the results' dimensions, likewise.
        summed: the names that no result has.
        numbered: whether XLA divides the call again in groups of devices. XLA numbers the devices
            of a group by the layout of the first result. An additional replicated result, which
            comes first, keeps their order.

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
    """Returns the serialized program of one device of a manually divided program.

    Args:
        function: computes the program; its collectives run over ``axis``.
        operands: the types of its operands.
        axis: the name of the axis of all devices.
        devices: the number of devices.
        platform: the platform for which the program is lowered.
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
    """Registers the partitioner of a custom call in all present and future clients.

    Args:
        target: the name of the custom call.
        propagate: returns the sharding that a result's user asks for, given the user's sharding.
        partition: divides a call.
        infer: returns the result's sharding, given the operands' shardings.
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
    # Plugins, such as CUDA's, have separate registries.
    _xla_bridge.register_plugin_callbacks(register)
