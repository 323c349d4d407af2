"""Everything here that JAX does not promise to keep: each private name is imported in this file.

Written against JAX 0.8, 0.10 and 0.11.
"""

from __future__ import annotations

import contextlib
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
from jax._src.lax import lax as _lax
from jax._src.lib import xla_client as _client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir import ir as _ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax.interpreters import ad
from jax.interpreters import partial_eval as _partial_eval

# XLA's shardings, and where its partitioner is told of ours.
xla_client: Any = _client

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


def option(name: str) -> Any:
    """Returns one of the options of JAX that a context manager of its name sets."""
    return getattr(jax.config, name)


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
    if jax.typeof(x).sharding == sharding or not is_sharded(model, x):
        return x
    return resharded(x, sharding)


def resharded(x: jax.Array, sharding: Any) -> jax.Array:
    """Returns ``x`` with a type that is sharded so; as it is for ``None``."""
    if sharding is None:
        return x
    reshard = jax.reshard if hasattr(jax, "reshard") else jax.sharding.reshard  # before 0.9
    return reshard(x, sharding)


def is_unreduced(*operands: Any) -> bool:
    """Whether an operand's type says that it is a sum over mesh axes yet to be made, or was one."""
    return any(_leaves_sums(jax.typeof(x).sharding) for x in operands)


def _leaves_sums(sharding: Any) -> bool:
    return bool(sharding.spec.unreduced or sharding.spec.reduced)


def out_sharding_of(sharding: Any, name: str) -> Any:
    """Returns what ``out_sharding=`` of a public function asks for, ``None`` for nothing.

    Raises:
        NotImplementedError: it leaves sums over axes of the mesh to be made.
        TypeError: it is no sharding.
        ValueError: it does not go with the mesh, or names axes that are not explicit.
    """
    sharding = _sharding_impls.canonicalize_sharding(sharding, name)
    if sharding is not None and _leaves_sums(sharding):
        raise NotImplementedError(
            f"{name}: out_sharding={sharding.spec} leaves sums to be made; jax.lax.dot_general and "
            "jax_tcgemm.dot_general take it"
        )
    return sharding


def sharding_from(
    operands: Sequence[Any], sources: Sequence[tuple[int, int] | None]
) -> jax.sharding.NamedSharding:
    """Returns the sharding of a type each dimension of which is divided as one of an operand is.

    An axis of the mesh divides the first dimension that has it.

    Args:
        operands: of which some have sharded types.
        sources: the operand and its dimension for each dimension; ``None`` for an undivided one.
    """
    sharded = next(x for x in operands if is_sharded(x))
    used: set[str] = set()
    dims: list[tuple[str, ...]] = []
    for source in sources:
        axes: Any = None
        if source is not None:
            spec = jax.typeof(operands[source[0]]).sharding.spec
            axes = tuple(getattr(spec, "partitions", spec))[source[1]]
        axes = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        dims.append(tuple(name for name in axes if name not in used))
        used.update(axes)
    spec = jax.sharding.PartitionSpec(*(axes or None for axes in dims))
    return jax.sharding.NamedSharding(jax.typeof(sharded).sharding.mesh, spec)


def shardings_of(function: Callable[..., Any], *operands: Any) -> Any:
    """Returns the shardings of a function's results' types."""
    # ``jax.eval_shape`` knows none where some axes of the mesh are not explicit.
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
    return jax.tree.unflatten(jax.tree.structure(shapes), [x.sharding for x in jaxpr.out_avals])


def with_automatic_axes(function: Callable[..., Any], operands: Any, shardings: Any) -> Any:
    """Calls a function within which the explicit axes of the mesh are automatic.

    Args:
        function: called with the operands, whose types do not say there how they are sharded.
        operands: its arguments.
        shardings: the ``NamedSharding`` of each result's type, in the structure of the results.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in pairs if kind == jax.sharding.AxisType.Explicit)
    automatic = jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)
    return automatic(*operands)


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
    known = (_sharding_impls.ShardingContext, _sharding_impls.SPMDAxisContext)
    if not isinstance(context.module_context.axis_context, known):
        return 1
    devices, groups = devices_of(context)
    return len(groups[0]) if groups else devices


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


def zero_of(primal: Any) -> Any:
    """Returns the tangent of what does not move."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def initialized_cuda_devices() -> list[Any]:
    """Returns this process's CUDA devices, or ``[]`` while no CUDA backend has been started."""
    if not _xla_bridge.backends_are_initialized():
        return []
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


# What XLA's partitioner divides by our rules


def platforms_of(context: Any) -> Sequence[str]:
    """Returns the platforms that a lowering rule is to serve."""
    return context.platforms or context.module_context.platforms


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


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Forgets the mesh that surrounds what is traced."""
    return _mesh.use_abstract_mesh(_mesh.empty_abstract_mesh)


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


def jaxpr_of(value: Any) -> Any:
    """Returns the jaxpr that a parameter of an operation is, ``None`` where it is none.

    Closed ones are a type of their own before JAX 0.12.
    """
    inner = getattr(value, "jaxpr", value)
    return inner if hasattr(inner, "eqns") else None


def without_unused(jaxpr: Any, needed: int) -> tuple[Any, list[bool]]:
    """Returns a jaxpr without what its results do not need, and which arguments it still has.

    Args:
        jaxpr: the operations.
        needed: how many of the first arguments stay.
    """
    stay = [i < needed for i in range(len(jaxpr.invars))]
    return _partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=stay)


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *values: Any) -> list[Any]:
    """Evaluates a jaxpr."""
    return list(_core.eval_jaxpr(jaxpr, consts, *values))


def bind_again(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Applies the operation of an equation to other values, which may vary over mesh axes."""
    values = match_varying(values) if len(values) > 1 else values
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # before 0.12
    results = eqn.primitive.bind(*functions, *values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def is_rule(value: Any) -> bool:
    """Whether a parameter of an operation is a function, wrapped or not."""
    return hasattr(value, "transforms") or (callable(value) and not isinstance(value, type))
