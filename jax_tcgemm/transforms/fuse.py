"""``fuse``: a function whose products are this package's, each with what becomes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _compat
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.api import arguments
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.api.dot_general import dot_general
from jax_tcgemm.api.gated_gemm import gated_operands
from jax_tcgemm.api.ragged_dot import ragged_dot
from jax_tcgemm.epilogue import translation
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.lowering import compiled as compiled_lowering
from jax_tcgemm.primitives import compiled
from jax_tcgemm.primitives import ragged as ragged_primitive
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.ragged import RaggedSpec
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.problem.strides import Operands
from jax_tcgemm.transforms.fused import Fused
from jax_tcgemm.transforms.graph import Node, Value, evaluate, graph_of, inner_nodes
from jax_tcgemm.transforms.matrix_form import RaggedForm, ragged_form
from jax_tcgemm.transforms.products import HALF_TYPES, is_on_device, is_typed
from jax_tcgemm.transforms.region_function import region_function
from jax_tcgemm.transforms.regions import with_regions

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_PRODUCTS = frozenset({"dot_general", "ragged_dot_general"})
# Operations that run other operations, which are looked into.
_LOOKED_INTO = jaxprs.OTHER_CALLS | {"scan", "while", "cond", "shard_map"}


def fuse(f: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Makes a function compute its matrix products by this package's kernels.

    ``f`` is any function of JAX; nothing in it has to be written for this package. Each
    ``lax.dot_general`` in it, from ``@``, ``jnp.einsum``, or a layer of a library, becomes
    ``jax_tcgemm.dot_general``, and ``lax.ragged_dot`` this package's. What follows a product of
    16-bit operands element by element, say a bias, an activation, dropout, a residual, or on the
    way back the derivative of an activation and the sums for the gradient of a bias, becomes its
    epilogue, compiled into the kernel (see ``epilogue=`` of ``gemm``), where that moves fewer
    bytes. Two products of one operand that are joined so, as in a gated layer, become one kernel.
    This goes through ``jit``, ``scan``, ``while_loop``, ``cond``, ``jax.checkpoint`` and
    ``shard_map``; within ``custom_jvp`` and ``custom_vjp`` all stays as it is.

    Apply it last: to a whole training step, after ``jax.grad``, and before ``jax.jit``. Like
    ``jit`` it traces ``f``, at each call: ``jax.jit(fuse(f))`` does so once. What is no array is
    passed to ``f`` as it is. The result can be differentiated and batched, but then what ``fuse``
    sees is the forward pass alone.

    Results are those of ``f`` up to rounding: between a product and what is written, what is
    bfloat16 in ``f`` is float32, as in a fusion of XLA's. ``JAX_TCGEMM_LOG=1`` prints what became
    of each product.

    Args:
        f: a function of pytrees of arrays.

    Returns:
        A function of the same arguments and results.
    """

    @functools.wraps(f)
    def fused(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(x, (jax.Array, np.ndarray)) for x in leaves]

        def of_arrays(*arrays: Any) -> Any:
            given = iter(arrays)
            every = [next(given) if each else x for x, each in zip(leaves, is_array, strict=True)]
            own, named = jax.tree.unflatten(tree, every)
            return f(*own, **named)  # pyright: ignore[reportCallIssue]

        arrays = [jnp.asarray(x) for x, each in zip(leaves, is_array, strict=True) if each]
        closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        results = _computed(closed.jaxpr, closed.consts, arrays)
        results = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return fused


def _computed(
    jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], is_stacked: Sequence[bool] = ()
) -> list[Any]:
    """Evaluates a jaxpr by the products of this package."""
    return evaluate(with_regions(graph_of(jaxpr, consts, is_stacked)), values, _applied)


def _applied(item: Node | Fused, values: list[Any]) -> Sequence[Any]:
    node = item.products[0] if isinstance(item, Fused) else item
    with jaxprs.as_part_of((*node.within, node.eqn)):
        if isinstance(item, Fused):
            return _of_region(item, values)
        return _of_node(item, values)


def _of_node(node: Node, values: Sequence[Any]) -> Sequence[Any]:
    if node.name in _PRODUCTS and is_on_device(node):
        return [_product(node, values)]
    if node.name not in _LOOKED_INTO or not _has_products(node.eqn):
        return jaxprs.bind_again(node.eqn, values, match=False)
    if node.name == "shard_map":
        inner = jaxprs.jaxpr_of(node.params["jaxpr"])
        return jaxprs.by_shards(node.eqn, lambda *xs: _computed(inner, (), xs), values)
    is_stacked = _stacked(node.eqn) if node.name == "scan" else ()
    params = {key: _rewritten(value, is_stacked) for key, value in node.params.items()}
    return jaxprs.bind_again(node.eqn.replace(params=params), values, match=False)


def _has_products(eqn: Any) -> bool:
    return any(each.primitive.name in _PRODUCTS for each in inner_nodes(eqn, _LOOKED_INTO))


def _stacked(eqn: Any) -> list[bool]:
    """Says which results of the body of a ``scan`` it stacks."""
    inner = jaxprs.jaxpr_of(eqn.params["jaxpr"]).outvars
    pairs = zip(inner, eqn.outvars, strict=True)
    return [len(one.aval.shape) < len(every.aval.shape) for one, every in pairs]


def _rewritten(value: Any, is_stacked: Sequence[bool] = ()) -> Any:
    """Returns what is a jaxpr, or a tuple of them, with products of this package."""
    if type(value) is tuple and value and all(jaxprs.jaxpr_of(x) is not None for x in value):
        return tuple(map(_rewritten, value))
    jaxpr = jaxprs.jaxpr_of(value)
    if jaxpr is None:
        return value
    consts = getattr(value, "consts", ())

    def function(*values: Any) -> list[Any]:
        return _computed(jaxpr, consts, values, is_stacked)

    made = jaxprs.with_jaxpr(value, jax.make_jaxpr(function)(*(var.aval for var in jaxpr.invars)))
    return value if made is None else made


def _product(node: Node, values: Sequence[Any]) -> jax.Array:
    if node.name == "dot_general":
        untyped = {} if is_typed(node) else {"out_sharding": None}
        return dot_general(*values, **{**node.params, **untyped})
    form = ragged_form(node.params)
    lhs, rhs, group_sizes = values
    if form is None or lhs.dtype not in HALF_TYPES or rhs.dtype != lhs.dtype:
        return jaxprs.bind_again(node.eqn, values, match=False)[0]
    options = {
        "precision": node.params["precision"],
        "preferred_element_type": node.params["preferred_element_type"],
    }
    if not form.contracts_groups:
        return ragged_dot(*values, transpose_rhs=form.transpose_rhs, **options)
    # The gradient of the weights.
    precision = _compat.canonicalize_precision(node.params["precision"])
    spec = RaggedSpec(jnp.dtype(node.outputs[0].dtype), precision)
    return ragged_primitive.contraction(spec, lhs, rhs, group_sizes.astype(jnp.int32))[0]


# Regions


def _of_region(fused: Fused, values: list[Any]) -> Sequence[Any]:
    """Computes a region by one kernel, or by the product and then the rest."""
    wide = _as_wide_product(fused, values)
    if wide is not None:
        return [wide]
    call = _call(fused, values)
    what = ", ".join(f"{x.dtype}{list(x.shape)}" for x in values[: fused.factors])
    names = " ".join(node.name for node in fused.nodes)
    if not isinstance(call, str):
        log(f"fuse: {what}: epilogue of {len(fused.outputs)} results: {names}")
        return compiled.bind(*call)
    log(f"fuse: {what}: no epilogue ({call}): {names}")
    return _apart(fused, values)


def _as_wide_product(fused: Fused, values: Sequence[Any]) -> jax.Array | None:
    """Computes what is only written in float32, ``None`` where there is more to it."""
    names = [node.name for node in fused.nodes]
    if names != ["convert_element_type"] or [x.dtype for x in fused.outputs] != [jnp.float32]:
        return None
    if isinstance(fused.form, RaggedForm):
        return None
    (node,) = fused.products
    changes = {"preferred_element_type": jnp.dtype(jnp.float32), "out_sharding": None}
    return dot_general(*values[:2], **{**node.params, **changes})


def _call(fused: Fused, values: Sequence[Any]) -> tuple[list[jax.Array], CompiledSpec] | str:
    """Returns operands and parameters of the primitive, or why a kernel cannot compute it all."""
    if _compat.is_sharded(*values):
        return "a mesh with explicit axes"
    own, spec = _factors(fused, values[: fused.factors])
    shape = fused.accumulators[0].shape
    every, compiled_spec, _ = epilogues.traced(
        own, spec, shape, region_function(fused), values[fused.factors :], None
    )
    made = translation.translate(compiled_spec.function)
    if isinstance(made, str):
        return made
    plan = compiled_lowering.planned(compiled_spec.split(every)[0], compiled_spec, made)
    return str(plan) if isinstance(plan, str) else (every, compiled_spec)


def _factors(
    fused: Fused, values: Sequence[Any]
) -> tuple[Sequence[jax.Array], GemmSpec | RaggedSpec]:
    """Returns the operands of the product, or of the two of a gated one, and what is multiplied."""
    form, params = fused.form, fused.products[0].params
    precision = _compat.canonicalize_precision(params["precision"])
    out_dtype = fused.products[0].outputs[0].dtype
    if isinstance(form, RaggedForm):
        lhs, rhs, group_sizes = values
        sizes = group_sizes.astype(jnp.int32)
        return (lhs, rhs, sizes), RaggedSpec(jnp.dtype(out_dtype), precision, form.transpose_rhs)
    a, b = form.factors(*values[:2])
    if len(fused.products) == 2:
        _, b2 = form.factors(values[0], values[2])
        operands, spec = gated_operands(
            *(a, b, b2, None, None),
            transpose_w=form.transpose_b,
            precision=precision,
            preferred_element_type=out_dtype,
        )
        spec = spec.accumulators(config=None)
        return flatten(spec.select(operands)), spec
    batch, m, n, k = arguments.extents(a, b, form.transpose_a, form.transpose_b)
    (a, a_axes), (b, b_axes) = (
        arguments.placed(a, (*batch, m, k), form.transpose_a),
        arguments.placed(b, (*batch, k, n), form.transpose_b),
    )
    return (a, b), GemmSpec(Operands(a_axes, b_axes), jnp.dtype(out_dtype), precision)


def _apart(fused: Fused, values: Sequence[Any]) -> list[Any]:
    """Computes the products, and then the rest as it is written."""
    env = dict(zip(fused.inputs, values, strict=True))
    for product, value in zip(fused.products, fused.accumulators, strict=True):
        env[value] = _product(product, [env[x] for x in product.inputs])
    for node in fused.nodes:
        inputs = [env[x] if isinstance(x, Value) else x.val for x in node.inputs]
        with jaxprs.as_part_of((*node.within, node.eqn)):
            results = jaxprs.bind_again(node.eqn, inputs, match=False)
        env.update(zip(node.outputs, results, strict=True))
    return [env[x] for x in fused.outputs]
