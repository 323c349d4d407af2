"""``gemm_p``, the primitive of a gemm, and its rule under each JAX transformation.

The primitive is one product, or the two of a gated layer, with an epilogue. The rules are the same
for both; rules specific to gated products are in ``gated.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_tcgemm import _compat
from jax_tcgemm.lowering import gemm as gemm_lowering
from jax_tcgemm.lowering import reference
from jax_tcgemm.partitioning import products, rules
from jax_tcgemm.primitives import gated, registration, transposition
from jax_tcgemm.primitives.tangents import linear_tangents, result_tangents, tangents_by_parts
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.epilogue import Use
from jax_tcgemm.problem.spec import GemmSpec, check_config, flatten
from jax_tcgemm.problem.strides import Operands, insert_batches

# Names of a layer before and after its activation, for the policies of jax.checkpoint.
PREACTIVATION = "tcgemm_preactivation"
ACTIVATION = "tcgemm_activation"

gemm_p = Primitive("tcgemm")
gemm_p.multiple_results = True


def bind(x: Operands, spec: GemmSpec, out_sharding: Any = None) -> list[jax.Array]:
    """Applies the primitive.

    Args:
        x: the operands; those that are ``None`` have no axes in ``spec``.
        spec: the static parameters.
        out_sharding: sharding of the results' types on a mesh with explicit axes. By default it is
            that of the same operations of JAX.

    Returns:
        The results that ``spec.epilogue`` requests.
    """
    return registration.bind(gemm_p, flatten(x), spec, _divided, out_sharding)


registration.evaluate_by_jit(gemm_p)


# Abstract evaluation


def _abstract_eval(*avals: Any, spec: GemmSpec) -> list[Any]:
    x = spec.unflatten(avals)
    shapes = Operands(*(None if aval is None else aval.shape for aval in x))
    check_config(spec, Operands(x.a.dtype, x.b.dtype), shapes)
    result = _compat.result_aval(avals, spec.result_shape(shapes), spec.out_dtype)
    return [result] * spec.result_count


gemm_p.def_abstract_eval(_abstract_eval)


registration.drop_unread_results(gemm_p, lambda spec: spec.operand_names)


# Forward derivative


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: GemmSpec
) -> tuple[list[Any], list[Any]]:
    """Derives the results from the pre-activations, which are requested as well."""
    epilogue = spec.epilogue
    x = spec.unflatten(primals)
    dx = spec.unflatten([None if type(t) is ad.Zero else t for t in tangents])
    if epilogue.is_linear:
        results = bind(x, spec)
        dz = linear_tangents(x, dx, spec, bind)
        every = [dz[0], *dz]  # if d is a result, it is z
    elif epilogue.is_derivative or epilogue.names(Use.FACTOR):
        return tangents_by_parts(x, dx, spec, bind)
    else:
        d, *saved = bind(x, spec.replace(results=(True,) * len(epilogue.results)))
        d = checkpoint_name(d, ACTIVATION)
        saved = [checkpoint_name(z, PREACTIVATION) for z in saved]
        results = epilogue.picked((d, *saved))
        every = result_tangents(x, dx, spec, saved, bind)
    wanted = zip(results, epilogue.picked(every), strict=True)
    return results, [jnp.zeros_like(y) if t is None else t for y, t in wanted]


ad.primitive_jvps[gemm_p] = _jvp


# Transposition


def _transpose(cotangents: Sequence[Any], *operands: Any, spec: GemmSpec) -> list[Any]:
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):
        return [None] * len(operands)
    transpose = gated.transpose if spec.is_gated else transposition.transpose
    results = transpose(cotangents, spec.unflatten(operands), spec, bind)
    return [results.get(name) for name in spec.operand_names]


ad.primitive_transposes[gemm_p] = _transpose


# Batching


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: GemmSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Adds an outermost batch dimension; the axes say where an operand has it."""
    x, dim = spec.unflatten(operands), spec.unflatten(dims)
    if all(d is None for d in dims):
        results = bind(x, spec)
        return results, [None] * len(results)
    x, dim = gated.with_like_weights(x, dim, spec, axis_data.size)
    batched = spec.replace(axes=insert_batches(spec.axes, dim))
    is_shared = dim.a is None and dim.b is None
    results = _shared_products(x, spec, batched) if is_shared else bind(x, batched)
    return reference.batch_dims(results, axis_data.size)


def _shared_products(x: Operands, spec: GemmSpec, batched: GemmSpec) -> list[jax.Array]:
    """Computes the products once for a batch that only the epilogue's operands have."""
    inner = spec.accumulators(
        out_dtype=accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype),
        config=spec.config_of_products,
    )
    products = [lax.expand_dims(product, (0,)) for product in bind(inner.select(x), inner)]
    return reference.epilogue(products, x, batched)


batching.fancy_primitive_batchers[gemm_p] = _batch


# Lowering


def _composed(*operands: jax.Array, spec: GemmSpec, as_jnp: bool = False) -> list[jax.Array]:
    if spec.is_gated and spec.epilogue.is_linear:
        return gated.products(spec.unflatten(operands), spec, bind)
    return reference.reference_gemm(*operands, spec=spec, as_jnp=as_jnp)


def _cuda(*operands: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    if spec.is_gated and spec.epilogue.is_linear:
        return gated.products(spec.unflatten(operands), spec, bind)
    return gemm_lowering.cuda_gemm(*operands, spec=spec)


_divided = functools.partial(_composed, as_jnp=True)

registration.lower(gemm_p, reference=_composed, cuda=_cuda, divided=_divided)
rules.register(gemm_p, products.rule(bind))
