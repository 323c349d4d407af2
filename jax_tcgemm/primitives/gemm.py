"""``gemm_p``, the primitive of a gemm, and its rule under each JAX transformation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from jax_tcgemm import _compat
from jax_tcgemm.lowering import gemm as gemm_lowering
from jax_tcgemm.lowering import reference
from jax_tcgemm.primitives import registration
from jax_tcgemm.primitives.activation_gradient import activation_tangent
from jax_tcgemm.primitives.transposition import transpose_operands
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.spec import GemmSpec, check_config, flatten
from jax_tcgemm.problem.strides import FACTORS, Operands, insert_batches

# What the policies of jax.checkpoint know a layer by, before and after its activation.
PREACTIVATION = "tcgemm_preactivation"
ACTIVATION = "tcgemm_activation"

gemm_p = Primitive("tcgemm")
gemm_p.multiple_results = True


_divided = functools.partial(reference.reference_gemm, divided=True)


def bind(x: Operands, spec: GemmSpec) -> list[jax.Array]:
    """Applies the primitive.

    Args:
        x: the operands; those that are ``None`` have no axes in ``spec``.
        spec: the static parameters.

    Returns:
        ``[d]``, or two results; see ``GemmSpec``.
    """
    return registration.bind(gemm_p, flatten(x), spec, _divided)


registration.evaluate_by_jit(gemm_p)


# Abstract evaluation


def _abstract_eval(*avals: Any, spec: GemmSpec) -> list[Any]:
    x = spec.unflatten(avals)
    shapes = Operands(*(None if aval is None else aval.shape for aval in x))
    check_config(spec, Operands(x.a.dtype, x.b.dtype), shapes)
    result = _compat.result_aval(avals, spec.result_shape(shapes), spec.out_dtype)
    return [result] * spec.result_count


gemm_p.def_abstract_eval(_abstract_eval)


def _dce(used: Sequence[bool], *arguments: Any) -> tuple[list[bool], Any]:
    """Drops the result that nobody reads: the kernel then doesn't compute or store it."""
    eqn = arguments[-1]  # jax 0.12 puts another argument before it
    if not any(used):
        return [False] * len(eqn.invars), None
    spec = eqn.params["spec"]
    if all(used) or not spec.save_preactivation:
        return [True] * len(eqn.invars), eqn
    spec, kept = dataclasses.replace(spec, save_preactivation=False), spec.axes
    if not used[0]:
        if spec.c_role == "residual":  # which only the other result needs
            kept = kept._replace(c=None, beta=None)
        spec = dataclasses.replace(spec, axes=kept, activation=None, c_role="add")
    # By name of the operands that there were, whether they are needed.
    needed = [
        now is not None
        for now, before in zip(kept, eqn.params["spec"].axes, strict=True)
        if before is not None
    ]
    eqn = eqn.replace(
        invars=[var for var, is_needed in zip(eqn.invars, needed, strict=True) if is_needed],
        outvars=[var for var, is_used in zip(eqn.outvars, used, strict=True) if is_used],
        params={**eqn.params, "spec": spec},
    )
    return needed, eqn


pe.dce_rules[gemm_p] = _dce


# Forward derivative


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: GemmSpec
) -> tuple[list[Any], list[Any]]:
    """Derives ``d = f(z)`` by ``d' = f'(z) z'``, plus ``beta * C'`` where C is a residual.

    The fused gemm gives ``z`` as its second result, rounded as ``d`` is; ``z'`` is linear gemms.
    """
    x = spec.unflatten(primals)
    dx = spec.unflatten([None if type(t) is ad.Zero else t for t in tangents])
    if spec.is_derivative:
        return _jvp_of_derivative(x, dx, spec)
    if spec.activation is None and spec.c_role == "add":
        dz = linear_tangent(x, dx, spec)
        return bind(x, spec), [dz] * (1 + spec.save_preactivation)
    d, z = bind(x, dataclasses.replace(spec, save_preactivation=True))
    d, z = checkpoint_name(d, ACTIVATION), checkpoint_name(z, PREACTIVATION)
    terms = []
    if spec.c_role == "residual":
        terms = _addend_tangents(x, dx._replace(bias=None), spec)
        x, dx = x._replace(c=None, beta=None), dx._replace(c=None, beta=None)
        spec = dataclasses.replace(spec, axes=spec.axes._replace(c=None, beta=None))
    dz, dd = jnp.zeros_like(z), None
    if any(t is not None for t in dx):
        dx, bias = _without_bias(dx, spec)
        dz = linear_tangent(x, dx, spec)
        dd = activation_tangent(spec.activation, z, dz, bias)
    count = 1 + spec.save_preactivation
    return [d, z][:count], [_sum(dd, terms, x, spec), dz][:count]


def _without_bias(dx: Operands, spec: GemmSpec) -> tuple[Operands, jax.Array | None]:
    """Takes the bias's tangent out, where it is to be added by what follows the product.

    Its transpose is then the sum that one kernel forms together with ``f'(z)`` times a cotangent.
    There has to be a product, ``z'`` itself must not be asked for, and the bias be one row.
    """
    has_product = any(getattr(dx, name) is not None for name in FACTORS)
    is_row = dx.bias is not None and dx.bias.ndim == 1 and spec.axes.bias[-1] == 0
    if not is_row or not has_product or spec.save_preactivation:
        return dx, None
    return dx._replace(bias=None), dx.bias


def linear_tangent(x: Operands, dx: Operands, spec: GemmSpec) -> jax.Array:
    """Returns the tangent of the pre-activation, a product for each factor that has one.

    Args:
        x: the operands.
        dx: their tangents, ``None`` where that is zero; at least one is not.
        spec: the primitive's parameters; C, where there is one, is added to the product.
    """
    axes = spec.axes
    total = None
    for name in FACTORS:
        factor = getattr(dx, name)
        if factor is None:
            continue
        operands = Operands(
            *(
                operand if key in FACTORS else None
                for key, operand in zip(x._fields, x, strict=True)
            )
        )._replace(**{name: factor})
        if total is None:  # the first product takes the tangents of c and bias along
            operands = operands._replace(
                c=dx.c, bias=dx.bias, beta=None if dx.c is None else x.beta
            )
            beta, c_axes = spec.beta, axes.c
        else:
            operands = operands._replace(c=total)
            beta, c_axes = 1.0, tuple(range(spec.batch_ndim + 2))
        operand_axes = Operands(
            *(
                None if operand is None else present
                for operand, present in zip(operands, axes._replace(c=c_axes), strict=True)
            )
        )
        product = spec.linear(axes=operand_axes, beta=beta, overwrite_c=total is not None)
        (total,) = bind(operands, product)
    terms = _addend_tangents(x, dx if total is None else dx._replace(c=None, bias=None), spec)
    return _sum(total, terms, x, spec)


def _addend_tangents(x: Operands, dx: Operands, spec: GemmSpec) -> list[jax.Array]:
    """Returns the elementwise terms of the tangent of ``beta * C + bias``."""
    dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
    terms = reference.addends(Operands(None, None, dx.c, dx.bias, beta=x.beta), spec, dtype)
    if dx.beta is not None:
        terms += reference.addends(Operands(None, None, x.c, beta=dx.beta), spec, dtype)
    return terms


def _sum(total: jax.Array | None, terms: list[jax.Array], x: Operands, spec: GemmSpec) -> jax.Array:
    """Adds elementwise terms to a sum of products, or broadcasts them where there is none."""
    if not terms:
        assert total is not None, "the tangent of a gemm with no nonzero tangent"
        return total
    z = sum(terms[1:], terms[0])
    if total is not None:
        z = total.astype(z.dtype) + z
    shapes = Operands(*(None if operand is None else jnp.shape(operand) for operand in x))
    return reference.convert(jnp.broadcast_to(z, spec.result_shape(shapes)), spec.out_dtype)


def _jvp_of_derivative(
    x: Operands, dx: Operands, spec: GemmSpec
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Derives what is itself part of a derivative, as the composition of its pieces."""
    present = [t is not None for t in dx]

    def composed(*varied: Any) -> list[jax.Array]:
        values = iter(varied)
        y = Operands(*(next(values) if p else o for p, o in zip(present, x, strict=True)))
        axes = spec.axes._replace(c=None, c2=None)
        dtype = accumulator_dtype(y.a.dtype, y.b.dtype, spec.out_dtype)
        (z,) = bind(y._replace(c=None, c2=None), spec.linear(axes=axes, out_dtype=dtype))
        return reference.cotangents(z, y, spec)

    varied = [operand for operand, p in zip(x, present, strict=True) if p]
    return jax.jvp(composed, varied, [t for t in dx if t is not None])


ad.primitive_jvps[gemm_p] = _jvp


# Transposition


def _transpose(cotangents: Sequence[Any], *operands: Any, spec: GemmSpec) -> list[Any]:
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):
        return [None] * len(operands)
    return transpose_operands(cotangents, spec.unflatten(operands), spec, bind)


ad.primitive_transposes[gemm_p] = _transpose


# Batching


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: GemmSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Adds an outermost batch dimension; where an operand has it is a matter of its axes."""
    x, dim = spec.unflatten(operands), spec.unflatten(dims)
    if all(d is None for d in dims):
        results = bind(x, spec)
        return results, [None] * len(results)
    batched = dataclasses.replace(spec, axes=insert_batches(spec.axes, dim))
    is_shared = dim.a is None and dim.b is None
    results = _one_product(x, spec, batched) if is_shared else bind(x, batched)
    return reference.batch_dims(results, axis_data.size)


def _one_product(x: Operands, spec: GemmSpec, batched: GemmSpec) -> list[jax.Array]:
    """Computes one product for a batch that only the epilogue's operands have."""
    dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
    product = dataclasses.replace(
        spec.linear(axes=Operands(spec.axes.a, spec.axes.b), out_dtype=dtype, alpha=1.0),
        config=spec.config,
    )
    (accumulator,) = bind(Operands(x.a, x.b), product)
    return reference.epilogue(lax.expand_dims(accumulator, (0,)), x, batched)


batching.fancy_primitive_batchers[gemm_p] = _batch


registration.lower(
    gemm_p, reference=reference.reference_gemm, cuda=gemm_lowering.cuda_gemm, divided=_divided
)
