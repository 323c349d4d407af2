"""``f'(z) (t + b)``, the tangent of an activation that follows a bias, and its transpose.

Both are primitives for the sake of the transpose, which is one kernel on a GPU. The kernel
multiplies a cotangent by the derivative and, in the same pass, sums the product over the rows. This
sum is the cotangent of the bias. All other rules are compositions of the parts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_tcgemm import _compat, _extension
from jax_tcgemm.lowering import devices
from jax_tcgemm.partitioning import activation_gradient as division
from jax_tcgemm.partitioning import rules
from jax_tcgemm.primitives import registration
from jax_tcgemm.problem.activations import Activation, resolve
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.spec import LARGE_MATRIX
from jax_tcgemm.problem.strides import MAX_EXTENT

# As in cuda/passes/activation_gradient.cu: elements that a thread reads at once, and columns of a
# block. _BLOCKS blocks keep every GPU busy if each has enough rows.
_COLUMNS = 8
_BLOCK_COLUMNS = 256
_BLOCKS = 1024
_BLOCK_ROWS = 64
_FLOAT32 = jnp.dtype(jnp.float32)

tangent_p = Primitive("tcgemm_activation_tangent")
gradient_p = Primitive("tcgemm_activation_gradient")
gradient_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class ActivationSpec:
    """The static parameters of both primitives.

    Attributes:
        activation: a key of ``ACTIVATIONS``, an ``Activation``, or ``None``.
        bias_dtypes: dtype of the bias's tangent, empty if there is none. (It is not ``None``, which
            NumPy takes for equal to float64, and so did JAX's caches.)
    """

    activation: str | Activation | None
    bias_dtypes: tuple[np.dtype, ...] = ()


def activation_tangent(
    activation: str | Activation | None,
    z: jax.Array,
    t: jax.Array,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Returns ``f'(z) (t + bias)``, rounded once.

    Args:
        activation: the activation ``f``.
        z: the pre-activation, ``(..., n)``.
        t: the tangent of ``z`` without the bias's part, of the same shape and dtype.
        bias: the bias's tangent, ``(n,)``.
    """
    spec = ActivationSpec(activation, () if bias is None else (bias.dtype,))
    return _bind_tangent([t, z] if bias is None else [t, bias, z], spec)


def _bind_tangent(operands: Sequence[jax.Array], spec: ActivationSpec) -> jax.Array:
    return registration.bind(tangent_p, operands, spec, _rematerialized_tangent)


def _bind_gradient(operands: Sequence[jax.Array], spec: ActivationSpec) -> list[jax.Array]:
    return registration.bind(gradient_p, operands, spec, _gradient)


def _tangent(*operands: jax.Array, spec: ActivationSpec) -> jax.Array:
    """Composes the tangent from ``t``, ``[bias]`` and ``z``."""
    *terms, z = operands
    dtype = accumulator_dtype(z.dtype, z.dtype, z.dtype)
    # All get one rank, because JAX can be configured to insist on it.
    wide = [lax.expand_dims(x.astype(dtype), range(z.ndim - x.ndim)) for x in terms]
    total = sum(wide[1:], wide[0])
    _, result = jax.jvp(resolve(spec.activation).reference, (z.astype(dtype),), (total,))
    return result.astype(z.dtype)


def _rematerialized_tangent(*operands: jax.Array, spec: ActivationSpec) -> jax.Array:
    """Does the same; a reverse pass keeps only ``z`` and no float32 intermediates."""
    composed = functools.partial(_tangent, spec=spec)
    return jax.checkpoint(composed, prevent_cse=False)(*operands)


def _gradient(g: jax.Array, z: jax.Array, *, spec: ActivationSpec) -> list[jax.Array]:
    """Composes the cotangents of ``t`` and of the bias from that of the tangent."""
    dtype = accumulator_dtype(z.dtype, z.dtype, z.dtype)
    activation = resolve(spec.activation)
    _, wide = jax.jvp(activation.reference, (z.astype(dtype),), (g.astype(dtype),))
    sums = [
        jnp.sum(wide, axis=tuple(range(z.ndim - 1))).astype(bias_dtype)
        for bias_dtype in spec.bias_dtypes
    ]
    return [wide.astype(z.dtype), *sums]


registration.evaluate_by_jit(tangent_p)
registration.evaluate_by_jit(gradient_p)


# Abstract evaluation


def _tangent_aval(*avals: Any, spec: ActivationSpec) -> Any:
    del spec
    return _compat.result_aval(avals, avals[-1].shape, avals[-1].dtype)


def _gradient_avals(g: Any, z: Any, *, spec: ActivationSpec) -> list[Any]:
    results = [(z.shape, z.dtype), *((z.shape[-1:], dtype) for dtype in spec.bias_dtypes)]
    return [_compat.result_aval((g, z), shape, dtype) for shape, dtype in results]


tangent_p.def_abstract_eval(_tangent_aval)
gradient_p.def_abstract_eval(_gradient_avals)


# Forward derivative


# Each primitive is linear in all operands but z.
registration.derive_linear(tangent_p, _tangent, lambda spec: 1 + len(spec.bias_dtypes))
registration.derive_linear(gradient_p, _gradient, lambda spec: 1)


# Transposition


def _tangent_transpose(cotangent: Any, *operands: Any, spec: ActivationSpec) -> list[Any]:
    *linear, z = operands
    wanted = [ad.is_undefined_primal(x) for x in linear]
    assert any(wanted), "linear in the tangents alone"
    if type(cotangent) is ad.Zero:
        return [None] * len(operands)
    if not wanted[-1]:
        spec = dataclasses.replace(spec, bias_dtypes=())
    results = _bind_gradient([cotangent, z], spec)
    padded = [*results, None, None][: len(operands)]
    return [x if is_wanted else None for x, is_wanted in zip(padded, [*wanted, False], strict=True)]


def _gradient_transpose(cotangents: Sequence[Any], g: Any, z: Any, *, spec: Any) -> list[Any]:
    assert ad.is_undefined_primal(g), "linear in the cotangent alone"
    of_t, *of_bias = map(ad.instantiate_zeros, cotangents)
    return [_bind_tangent([of_t, *of_bias, z], spec), None]


ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[gradient_p] = _gradient_transpose


# Batching


def _tangent_batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: ActivationSpec
) -> tuple[jax.Array, int | None]:
    """Turns the batch into rows, unless each has its own bias or they share ``z``."""
    if all(d is None for d in dims):
        return _bind_tangent(operands, spec), None
    t_dim, *bias_dim, z_dim = dims
    if z_dim is None or bias_dim not in ([], [None]):
        return jax.vmap(functools.partial(_tangent, spec=spec), tuple(dims))(*operands), 0
    t, *bias, z = operands
    t, z = _at_front(t, t_dim, axis_data), _at_front(z, z_dim, axis_data)
    return _bind_tangent([t, *bias, z], spec), 0


def _gradient_batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: ActivationSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Turns the batch into rows, unless each has its own sums or they share ``z``."""
    count = 1 + len(spec.bias_dtypes)
    if all(d is None for d in dims):
        return _bind_gradient(operands, spec), [None] * count
    if dims[1] is None or spec.bias_dtypes:
        composed = functools.partial(_gradient, spec=spec)
        return jax.vmap(composed, tuple(dims))(*operands), [0] * count
    moved = [_at_front(x, d, axis_data) for x, d in zip(operands, dims, strict=True)]
    return _bind_gradient(moved, spec), [0]


def _at_front(x: jax.Array, dim: int | None, axis_data: Any) -> jax.Array:
    return batching.bdim_at_front(x, dim, axis_data.size, axis_data.explicit_mesh_axis)


batching.fancy_primitive_batchers[tangent_p] = _tangent_batch
batching.fancy_primitive_batchers[gradient_p] = _gradient_batch


# Lowering


def _cuda_gradient(g: jax.Array, z: jax.Array, *, spec: ActivationSpec) -> list[jax.Array]:
    """Computes both cotangents on CUDA devices, by one kernel if the matrix is large."""
    if not _has_kernel(g, z):
        return _gradient(g, z, spec=spec)
    n = z.shape[-1]
    rows = z.size // n
    parts = max(1, min(_BLOCKS // math.ceil(n / _BLOCK_COLUMNS), rows // _BLOCK_ROWS))
    results = [jax.ShapeDtypeStruct(z.shape, z.dtype)]
    for bias_dtype in spec.bias_dtypes:
        dtype = bias_dtype if bias_dtype == z.dtype else _FLOAT32
        results.append(jax.ShapeDtypeStruct((n,), dtype))
        results.append(jax.ShapeDtypeStruct((parts, n), _FLOAT32))  # the workspace
    activation = resolve(spec.activation)
    p0, p1 = (*activation.parameters, 0.0, 0.0)[:2]
    dz, *sums = jax.ffi.ffi_call(_extension.ACTIVATION_GRADIENT_TARGET, results)(
        g,
        z,
        n=np.int64(n),
        parts=np.int64(parts),
        activation=activation.cpp_name,
        activation_p0=np.float32(p0),
        activation_p1=np.float32(p1),
    )
    # The workspace follows the sums; zip drops it, because no bias dtype is left for it.
    return [dz, *(x.astype(dtype) for x, dtype in zip(sums, spec.bias_dtypes, strict=False))]


def _has_kernel(g: jax.Array, z: jax.Array) -> bool:
    is_sized = all(isinstance(extent, int) for extent in z.shape)
    return (
        is_sized
        and z.size >= LARGE_MATRIX
        and z.shape[-1] % _COLUMNS == 0
        and z.shape[-1] <= MAX_EXTENT
        and z.dtype in (jnp.bfloat16, jnp.float16)
        and g.dtype == z.dtype
        and _extension.ACTIVATION_GRADIENT_TARGET in _extension.BUILT_TARGETS
        and devices.not_built_for() is None
    )


mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=False))
registration.lower(gradient_p, reference=_gradient, cuda=_cuda_gradient, is_product=False)
rules.register(gradient_p, division.rule(_bind_gradient, ActivationSpec))
