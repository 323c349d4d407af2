"""Wraps all JAX internals that may change: only this folder imports JAX's private names.

It is written against JAX 0.8, 0.10 and 0.11. Internals for jaxprs and for XLA's partitioner have
separate files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import literals as _literals
from jax._src import mesh as _mesh
from jax._src import profiler as _profiler
from jax._src import sharding_impls as _sharding_impls
from jax._src import xla_bridge as _xla_bridge
from jax._src.lax import lax as _lax
from jax.interpreters import ad

# Tells ``jax.jit`` to inline the function into an outer trace. JAX 0.11 has several inline modes.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore

_JITTED = type(jax.jit(lambda: None))

# Arrays on the host. JAX 0.8 wraps NumPy arrays in a class that does not inherit from
# ``np.ndarray``.
HOST_ARRAYS = (np.ndarray, _literals.TypedNdArray)


def canonicalize_precision(precision: Any) -> Any:
    """Returns ``precision`` as ``lax.dot_general`` would store it.

    ``None`` becomes the value of ``jax.default_matmul_precision``.

    Raises:
        ValueError: ``lax.dot_general`` does not accept ``precision``.
    """
    canonical = _lax.canonicalize_precision(precision)
    return (jax.lax.Precision.DEFAULT,) * 2 if canonical is None else canonical


def exchanged_precision(precision: Any) -> Any:
    """Returns the ``precision`` for exchanged operands."""
    if isinstance(precision, jax.lax.DotAlgorithm):
        return precision._replace(
            lhs_precision_type=precision.rhs_precision_type,
            rhs_precision_type=precision.lhs_precision_type,
            lhs_component_count=precision.rhs_component_count,
            rhs_component_count=precision.lhs_component_count,
        )
    return precision[::-1] if isinstance(precision, tuple) else precision


def option(name: str) -> Any:
    """Returns a JAX option, which a context manager of the same name sets."""
    return getattr(jax.config, name)


def trace_context() -> Any:
    """Returns a hashable value of all options and contexts that affect tracing."""
    return _config.trace_context()


def is_tracing() -> bool:
    """Returns true if JAX traces or transforms the caller."""
    return not _core.trace_state_clean()


def is_jitted(function: Any) -> bool:
    """Returns true if a function is a result of ``jax.jit``."""
    return isinstance(function, _JITTED)


def mark_as_single_operation(function: Any) -> None:
    """Marks a function for ``jax.jit`` as a single operation.

    If ``jax.debug_nans`` or ``jax.debug_infs`` finds a NaN or an infinity in a result, JAX runs a
    function again operation by operation. For a marked function, JAX raises an error instead.
    """
    function._apply_primitive = True


def match_varying(operands: Sequence[Any]) -> Sequence[Any]:
    """Makes all operands vary over the same manual mesh axes, as every ``jax.lax`` function does.

    Inside ``shard_map`` with ``check_vma=True`` a primitive may not mix replicated and varying
    operands. The transpose of the inserted cast is the sum over the mesh axes.
    """
    # JAX renamed this function after 0.8; the newer name comes first.
    for name in ("auto_insert_reshard", "standard_insert_pvary"):
        if hasattr(_core, name):
            return getattr(_core, name)(*operands)
    return operands


def is_sharded(*operands: Any) -> bool:
    """Returns true if an operand's type is sharded, under a mesh with explicit axes."""
    return any(is_sharded_type(jax.typeof(x)) for x in operands)


def is_sharded_type(aval: Any) -> bool:
    """Returns true if an array's type is sharded, see ``is_sharded``."""
    return _divides(aval.sharding.spec)


def typed_as(model: jax.Array, x: jax.Array) -> jax.Array:
    """Returns ``x``, of ``model``'s shape, with ``model``'s sharding and varying mesh axes."""
    x = match_varying((model, x))[1]
    sharding = jax.typeof(model).sharding
    if jax.typeof(x).sharding == sharding or not is_sharded(model, x):
        return x
    return resharded(x, sharding)


def resharded(x: jax.Array, sharding: Any) -> jax.Array:
    """Returns ``x`` with a type of this sharding; returns it unchanged for ``None``."""
    reshard = jax.reshard if hasattr(jax, "reshard") else jax.sharding.reshard  # before 0.9
    return x if sharding is None else reshard(x, sharding)


def constrained(x: jax.Array, sharding: Any) -> jax.Array:
    """Returns ``x`` with a constraint on its sharding; on explicit axes, with a type that has it.

    Args:
        x: an array.
        sharding: a ``PartitionSpec`` or ``NamedSharding``.

    Raises:
        ValueError: the sharding does not fit the array or the mesh.
    """
    mesh = getattr(sharding, "mesh", jax.typeof(x).sharding.mesh)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    spec = getattr(sharding, "spec", sharding)
    named = jax.tree.leaves(tuple(spec)) if isinstance(spec, jax.sharding.PartitionSpec) else []
    is_automatic = any(kinds.get(axis) == jax.sharding.AxisType.Auto for axis in named)
    if is_automatic or jax.sharding.AxisType.Explicit not in kinds.values():
        return jax.lax.with_sharding_constraint(x, sharding)
    return resharded(x, sharding)


def is_unreduced(*operands: Any) -> bool:
    """Returns true if an operand's type is unreduced or reduced over mesh axes."""
    return any(_leaves_sums(jax.typeof(x).sharding) for x in operands)


def _leaves_sums(sharding: Any) -> bool:
    return bool(sharding.spec.unreduced or sharding.spec.reduced)


def out_sharding_of(sharding: Any, name: str) -> Any:
    """Returns the canonical form of a public function's ``out_sharding=``; ``None`` for ``None``.

    Raises:
        NotImplementedError: the sharding is unreduced or reduced over mesh axes.
        TypeError: the argument is no sharding.
        ValueError: the sharding does not fit the mesh, or names axes that are not explicit.
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
    """Returns a sharding whose dimensions are divided like given dimensions of operands.

    If several dimensions have the same mesh axis, it divides the first of them.

    Args:
        operands: arrays, some with sharded types.
        sources: for each dimension of the result, an operand and its dimension; ``None`` for an
            undivided dimension.
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
    """Returns the shardings of the types of a function's results."""
    # ``jax.eval_shape`` gives no shardings if some axes of the mesh are not explicit.
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
    mesh = jax.sharding.get_abstract_mesh()  # JAX 0.8.0 gives constants an empty one
    none = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    found = [none if x.sharding.mesh.empty else x.sharding for x in jaxpr.out_avals]
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def with_automatic_axes(function: Callable[..., Any], operands: Any, shardings: Any) -> Any:
    """Calls a function with the explicit axes of the mesh made automatic.

    Args:
        function: the function; inside it, the operands' types have no shardings.
        operands: its arguments.
        shardings: the ``NamedSharding`` of each result's type, in the structure of the results.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in pairs if kind == jax.sharding.AxisType.Explicit)
    automatic = jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)
    return automatic(*operands)


def _divides(spec: jax.sharding.PartitionSpec) -> bool:
    # Newer JAX has an attribute for the axes of each dimension, and cannot iterate over some specs.
    axes = getattr(spec, "partitions", spec)
    return bool(spec.unreduced or spec.reduced or any(axis is not None for axis in axes))


def result_aval(operands: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the abstract value of a result, which varies over the operands' mesh axes.

    Its type is weak if all operands have weak types and the result's dtype.

    Raises:
        ValueError: the operands are in different memory spaces.
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
    """Returns the symbolic zero tangent of a constant value."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def initialized_cuda_devices() -> list[Any]:
    """Returns this process's CUDA devices, or ``[]`` while no CUDA backend has been started."""
    if not _xla_bridge.backends_are_initialized():
        return []
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


def texts_of_executables() -> list[str] | None:
    """Returns the HLO of all executables on this process's CUDA devices.

    ``None`` if any of them gives no HLO.
    """
    devices = initialized_cuda_devices()
    if not devices:
        return []
    try:
        executables = devices[0].client.live_executables()
        return [module.to_string() for each in executables for module in each.hlo_modules()]
    except Exception:
        return None


def runs_here(context: Any) -> bool:
    """Returns true if a lowered program runs on this process's CUDA devices, as far as JAX tells.

    Args:
        context: the context of a lowering rule.
    """
    module = context.module_context
    if module.lowering_parameters.for_export:
        return False
    own = [getattr(device, "client", None) for device in initialized_cuda_devices()]
    return module.backend is None or module.backend in own


def is_exported(context: Any) -> bool:
    """Returns true if a lowering rule lowers a program for ``jax.export``."""
    return context.module_context.lowering_parameters.for_export


def is_profiling() -> bool:
    """Returns true while ``jax.profiler`` records."""
    state: Any = _profiler._profile_state
    # JAX renamed the attribute after 0.8.
    return any(getattr(state, name, None) for name in ("session", "profile_session"))


def platforms_of(context: Any) -> Sequence[str]:
    """Returns the platforms for which a lowering rule must emit code."""
    return context.platforms or context.module_context.platforms


def has_manual_axes() -> bool:
    """Returns true if the current trace is inside ``shard_map``."""
    return bool(_mesh.get_abstract_mesh().manual_axes)


def is_unchecked_manual() -> bool:
    """Returns true inside ``shard_map`` with ``check_vma=False``."""
    return has_manual_axes() and not _config._check_vma.value


def has_explicit_axes() -> bool:
    """Returns true if the mesh of the current trace has explicit axes."""
    return jax.sharding.AxisType.Explicit in _mesh.get_abstract_mesh().axis_types


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Returns a context without the mesh of the surrounding trace."""
    return _mesh.use_abstract_mesh(_mesh.empty_abstract_mesh)


def write_shared(key: str, value: str) -> bool:
    """Writes a value for all ``jax.distributed`` processes; ``False`` if the key has one."""
    client: Any = _distributed.global_state.client
    try:
        client.key_value_set(key, value)
    except Exception as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise
    return True


def read_shared(key: str, seconds: float) -> str | None:
    """Waits for a value that a ``jax.distributed`` process writes; ``None`` after a timeout."""
    client: Any = _distributed.global_state.client
    try:
        return client.blocking_key_value_get(key, round(1000 * seconds))
    except Exception as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise
