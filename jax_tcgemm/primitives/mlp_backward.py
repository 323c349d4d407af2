"""``mlp_tangent_p``: takes the tangent of a hidden layer through activation and product.

It is ``activation'(Z) * T @ W``, or ``(activation'(G) * U * TG + activation(G) * TU) @ W`` for a
gated layer. It is a primitive for the sake of its transpose, which is one gemm with the derivative
of the activation in its epilogue. All other rules are compositions of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_tcgemm import _compat
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.primitives import registration
from jax_tcgemm.primitives.activation_gradient import activation_tangent
from jax_tcgemm.primitives.gated import product_tangent
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, insert_batches

mlp_tangent_p = Primitive("tcgemm_hidden_tangent")


def bind(
    tangents: Sequence[jax.Array], saved: Sequence[jax.Array], w: jax.Array, spec: GemmSpec
) -> jax.Array:
    """Applies the primitive.

    Args:
        tangents: ``[t]``, or ``[tg, tu]`` for a gated layer.
        saved: the pre-activations ``[z]`` or ``[g, u]``; like the tangents ``(*batch, m, k)``.
        w: the second factor, with its axes in any order.
        spec: parameters of the product. Its epilogue is a ``"derivative"`` or
            ``"gated_derivative"``, which the transpose computes. Its ``axes`` are those of the
            hidden layer and of ``w``.

    Returns:
        ``(*batch, m, n)``.
    """
    return registration.bind(mlp_tangent_p, [*tangents, *saved, w], spec, _composed)


def _split(operands: Sequence[Any], spec: GemmSpec) -> tuple[list[Any], list[Any], Any]:
    """Returns the tangents, the pre-activations and ``w``."""
    *hidden, w = operands
    count = _hidden_count(spec)
    return hidden[:count], hidden[count:], w


def _hidden_count(spec: GemmSpec) -> int:
    """Returns the number of arrays of a hidden layer, and so of its tangent."""
    return spec.result_count


def _composed(*operands: jax.Array, spec: GemmSpec) -> jax.Array:
    tangents, saved, w = _split(operands, spec)
    function = product_tangent if len(saved) == 2 else activation_tangent
    t = function(spec.activation, *saved, *tangents)
    return gemm_primitive.bind(Operands(t, w), spec.linear())[0]


registration.evaluate_by_jit(mlp_tangent_p)


# Abstract evaluation


def _abstract_eval(*avals: Any, spec: GemmSpec) -> Any:
    shape = spec.result_shape(Operands(avals[0].shape, avals[-1].shape))
    return _compat.result_aval(avals, shape, spec.out_dtype)


mlp_tangent_p.def_abstract_eval(_abstract_eval)


# Forward derivative

# The primitive is linear in the tangents of the layer; their tangents are tangents of tangents.
registration.derive_linear(mlp_tangent_p, _composed, _hidden_count)


# Transposition


def _transpose(cotangent: Any, *operands: Any, spec: GemmSpec) -> list[Any]:
    tangents, saved, w = _split(operands, spec)
    linear = [ad.is_undefined_primal(t) for t in tangents]
    assert any(linear), "linear in the tangents of the hidden layer alone"
    if type(cotangent) is ad.Zero:
        return [None] * len(operands)
    dense = tuple(range(spec.batch_ndim + 2))
    *batch, rows, columns = spec.axes.b
    axes = Operands(dense, (*batch, columns, rows))
    x = Operands(cotangent, w)
    if spec.activation is not None or len(saved) == 2:
        axes = axes._replace(c=dense, c2=dense if len(saved) == 2 else None)
        x = x._replace(c=saved[0], c2=saved[1] if len(saved) == 2 else None)
    else:
        spec = spec.linear()
    aval = next(t.aval for t, is_linear in zip(tangents, linear, strict=True) if is_linear)
    results = gemm_primitive.bind(x, spec.replace(axes=axes, out_dtype=aval.dtype))
    wanted = [r if is_linear else None for r, is_linear in zip(results, linear, strict=True)]
    return [*wanted, *[None] * (len(operands) - len(wanted))]


ad.primitive_transposes[mlp_tangent_p] = _transpose


# Batching


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: GemmSpec
) -> tuple[jax.Array, int | None]:
    """Adds an outermost batch dimension, which all operands of the hidden layer have."""
    if all(d is None for d in dims):
        return registration.bind(mlp_tangent_p, operands, spec, _composed), None
    *hidden, w = operands
    *hidden_dims, w_dim = dims
    hidden = [
        batching.bdim_at_front(x, d, axis_data.size, axis_data.explicit_mesh_axis)
        for x, d in zip(hidden, hidden_dims, strict=True)
    ]
    axes = insert_batches(Operands(spec.axes.a, spec.axes.b), Operands(0, w_dim))
    spec = spec.replace(axes=axes)
    return registration.bind(mlp_tangent_p, [*hidden, w], spec, _composed), 0


batching.fancy_primitive_batchers[mlp_tangent_p] = _batch


# Lowering

mlir.register_lowering(mlp_tangent_p, mlir.lower_fun(_composed, multiple_results=False))
