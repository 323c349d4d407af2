"""The primitives of products, and their rule under each JAX transformation.

``gemm_p`` is one product, or the two of a gated layer, with an epilogue. ``ragged_dot_p`` and
``ragged_contraction_p`` are products over groups of rows. The rules are the same for all; those
specific to gated products are in ``gated.py``, those specific to groups in ``ragged.py``.
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
from jax.interpreters import ad

from jax_tcgemm import _compat
from jax_tcgemm.lowering import gemm as gemm_lowering
from jax_tcgemm.lowering import ragged as ragged_lowering
from jax_tcgemm.lowering import reference
from jax_tcgemm.lowering.ragged_reference import reference_product
from jax_tcgemm.partitioning import products, rules
from jax_tcgemm.partitioning import ragged as ragged_division
from jax_tcgemm.primitives import gated, ragged, registration, transposition
from jax_tcgemm.primitives.tangents import linear_tangents, result_tangents, tangents_by_parts
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.epilogue import Use
from jax_tcgemm.problem.spec import GemmSpec, check_config, flatten
from jax_tcgemm.problem.strides import Operands, insert_batches

# Names of a layer before and after its activation, for the policies of jax.checkpoint.
PREACTIVATION = "tcgemm_preactivation"
ACTIVATION = "tcgemm_activation"

gemm_p = Primitive("tcgemm")
ragged_dot_p = Primitive("tcgemm_ragged_dot")
ragged_contraction_p = Primitive("tcgemm_ragged_contraction")

# The primitive for each ``GemmSpec.grouped``.
_PRIMITIVES = {"none": gemm_p, "m": ragged_dot_p, "k": ragged_contraction_p}


def bind(x: Operands, spec: GemmSpec, out_sharding: Any = None) -> list[jax.Array]:
    """Applies the primitive of a product.

    Args:
        x: the operands; those that are ``None`` have no axes in ``spec``.
        spec: the static parameters.
        out_sharding: sharding of the results' types on a mesh with explicit axes. By default it is
            that of the same operations of JAX. With groups, rows are sharded like those of ``a``
            and columns like those of ``b``.

    Returns:
        The results that ``spec.epilogue`` requests.
    """
    primitive, operands = _PRIMITIVES[spec.grouped], flatten(x)
    if not spec.is_grouped:
        return registration.bind(primitive, operands, spec, _divided, out_sharding)
    sharding = ragged.result_sharding(operands, spec, out_sharding)
    shardings = None if sharding is None else [sharding] * spec.result_count
    return registration.apply(primitive, operands, spec, shardings)


# Abstract evaluation


def _abstract_eval(*avals: Any, spec: GemmSpec) -> list[Any]:
    x = spec.unflatten(avals)
    shapes = Operands(*(None if aval is None else aval.shape for aval in x))
    if not spec.is_grouped:
        check_config(spec, Operands(x.a.dtype, x.b.dtype), shapes)
    result = _compat.result_aval(avals, spec.result_shape(shapes), spec.out_dtype)
    return [result] * spec.result_count


def _read(spec: GemmSpec, used: Sequence[bool], _: int) -> tuple[GemmSpec, list[bool]]:
    """Returns the spec of the results that are read, and which operands they need."""
    remaining = iter(used)
    read = spec.only(tuple(wanted and next(remaining) for wanted in spec.epilogue.results))
    return read, [name in read.operand_names for name in spec.operand_names]


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


# Transposition


def _transpose(cotangents: Sequence[Any], *operands: Any, spec: GemmSpec) -> list[Any]:
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):
        return [None] * len(operands)
    transpose = gated.transpose if spec.is_gated else transposition.transpose
    transpose = ragged.transpose if spec.is_grouped else transpose
    results = transpose(cotangents, spec.unflatten(operands), spec, bind)
    return [results.get(name) for name in spec.operand_names]


# Batching


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: GemmSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Adds an outermost batch dimension; the axes say where an operand has it."""
    x, dim = spec.unflatten(operands), spec.unflatten(dims)
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


# Lowering


def _composed(*operands: jax.Array, spec: GemmSpec, as_jnp: bool = False) -> list[jax.Array]:
    if spec.is_gated and spec.epilogue.is_linear:
        return gated.products(spec.unflatten(operands), spec, bind)
    if spec.is_grouped:
        return reference_product(*operands, spec=spec)
    return reference.reference_gemm(*operands, spec=spec, as_jnp=as_jnp)


def _cuda(*operands: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    if spec.is_gated and spec.epilogue.is_linear:
        return gated.products(spec.unflatten(operands), spec, bind)
    lowering = ragged_lowering.cuda_ragged if spec.is_grouped else gemm_lowering.cuda_gemm
    return lowering(*operands, spec=spec)


_divided = functools.partial(_composed, as_jnp=True)

# Registration

for _primitive in _PRIMITIVES.values():
    _primitive.multiple_results = True
    registration.evaluate_by_jit(_primitive)
    _primitive.def_abstract_eval(_abstract_eval)
    registration.drop_unread_results(_primitive, _read)
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
    registration.lower(_primitive, reference=_composed, cuda=_cuda, divided=_divided)

registration.batch(gemm_p, _batch)
ragged.batch_one_by_one(ragged_dot_p)
ragged.batch_one_by_one(ragged_contraction_p)
rules.register(gemm_p, products.rule(bind))
rules.register(ragged_dot_p, ragged_division.dot_rule(bind))
rules.register(ragged_contraction_p, ragged_division.contraction_rule(bind))
