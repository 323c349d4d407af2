"""``gated_gemm_p``, the primitive of two products of one left operand, and its rules.

``D = activation(G) * U`` with ``G = A @ B + bias`` and ``U = A @ B2 + bias2``. Any of ``D``, ``G``
and ``U`` may be results: the derivative asks the kernel for all three in one pass. ``G`` and ``U``
without ``D`` are what the tangent of ``A`` goes through, and ordinary products.
"""

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
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.primitives import registration
from jax_tcgemm.primitives.gemm import ACTIVATION, PREACTIVATION
from jax_tcgemm.primitives.transposition import transpose_pair
from jax_tcgemm.problem.activations import Activation, resolve
from jax_tcgemm.problem.arithmetic import accumulator_dtype, common_dtype
from jax_tcgemm.problem.spec import GatedSpec, check_config, flatten
from jax_tcgemm.problem.strides import Operands, insert_batches

gated_gemm_p = Primitive("tcgemm_gated")
gated_gemm_p.multiple_results = True

_PAIR = (False, True, True)


def bind(x: Operands, spec: GatedSpec) -> list[jax.Array]:
    """Applies the primitive.

    Args:
        x: the operands; those that are ``None`` have no axes in ``spec``.
        spec: the static parameters.

    Returns:
        Those of ``[d, g, u]`` that ``spec`` asks for.
    """
    return registration.bind(gated_gemm_p, flatten(x), spec, _divided)


registration.evaluate_by_jit(gated_gemm_p)


# Abstract evaluation


def _abstract_eval(*avals: Any, spec: GatedSpec) -> list[Any]:
    x = spec.unflatten(avals)
    shapes = Operands(*(None if aval is None else aval.shape for aval in x))
    check_config(spec, Operands(x.a.dtype, x.b.dtype), shapes)
    result = _compat.result_aval(avals, spec.result_shape(shapes), spec.out_dtype)
    return [result] * spec.result_count


gated_gemm_p.def_abstract_eval(_abstract_eval)


def _dce(used: Sequence[bool], *arguments: Any) -> tuple[list[bool], Any]:
    """Drops the results that nobody reads."""
    eqn = arguments[-1]  # jax 0.12 puts another argument before it
    if not any(used):
        return [False] * len(eqn.invars), None
    remaining = iter(used)
    spec = eqn.params["spec"]
    results = tuple(is_result and next(remaining) for is_result in spec.results)
    spec = dataclasses.replace(spec, results=results)
    if not spec.results[0]:
        spec = dataclasses.replace(spec, activation=None, config=None)
    eqn = eqn.replace(
        outvars=[var for var, is_used in zip(eqn.outvars, used, strict=True) if is_used],
        params={**eqn.params, "spec": spec},
    )
    return [True] * len(eqn.invars), eqn


pe.dce_rules[gated_gemm_p] = _dce


# Forward derivative


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: GatedSpec
) -> tuple[list[Any], list[Any]]:
    """Derives ``d = f(g) u`` by ``d' = f'(g) g' u + f(g) u'``.

    The fused gemm gives ``g`` and ``u`` beside ``d``; their tangents are linear gemms.
    """
    x = spec.unflatten(primals)
    dx = spec.unflatten([None if type(t) is ad.Zero else t for t in tangents])
    dg, du = linear_tangents(x, dx, spec)
    if not spec.results[0]:
        d_tangent, results = None, bind(x, spec)
    else:
        d, g, u = bind(x, dataclasses.replace(spec, results=(True, True, True)))
        d = checkpoint_name(d, ACTIVATION)
        g, u = checkpoint_name(g, PREACTIVATION), checkpoint_name(u, PREACTIVATION)
        d_tangent = product_tangent(spec.activation, g, u, dg, du)
        results = [r for r, wanted in zip((d, g, u), spec.results, strict=True) if wanted]
    wanted = [t for t, wanted in zip((d_tangent, dg, du), spec.results, strict=True) if wanted]
    return results, [
        jnp.zeros_like(result) if tangent is None else tangent
        for result, tangent in zip(results, wanted, strict=True)
    ]


# Rematerialized, so that the reverse pass keeps g and u alone.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def product_tangent(
    activation: str | Activation | None,
    g: jax.Array,
    u: jax.Array,
    dg: jax.Array | None,
    du: jax.Array | None,
) -> jax.Array:
    """Returns ``f'(g) dg u + f(g) du`` in the type of ``g``, rounded once; None for a zero."""
    dtype = accumulator_dtype(g.dtype, g.dtype, g.dtype)
    activated = resolve(activation).reference
    f, df = activated(g.astype(dtype)), None
    terms = []
    if dg is not None:
        f, df = jax.jvp(activated, (g.astype(dtype),), (dg.astype(dtype),))
        terms.append(df * u.astype(dtype))
    if du is not None:
        terms.append(f * du.astype(dtype))
    return sum(terms[1:], terms[0]).astype(g.dtype)


def linear_tangents(
    x: Operands, dx: Operands, spec: GatedSpec
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the tangents of ``G`` and ``U``, ``None`` where one is zero.

    Args:
        x: the operands.
        dx: their tangents, ``None`` where that is zero.
        spec: the primitive's parameters.
    """
    terms: tuple[list[jax.Array], list[jax.Array]] = ([], [])
    if dx.a is not None:
        axes = Operands(spec.axes.a, spec.axes.b, b2=spec.axes.b2)
        pair = dataclasses.replace(spec, axes=axes, results=_PAIR, activation=None, config=None)
        for part, term in zip(terms, bind(Operands(dx.a, x.b, b2=x.b2), pair), strict=True):
            part.append(term)
    if spec.packed and dx.b is not None:
        (both,) = gemm_primitive.bind(Operands(x.a, dx.b), spec.plain())
        for part, term in zip(terms, reference.halves(both), strict=True):
            part.append(term)
    elif not spec.packed:
        for part, weight, axes in zip(
            terms, (dx.b, dx.b2), (spec.axes.b, spec.axes.b2), strict=True
        ):
            if weight is not None:
                plain = spec.plain(axes=Operands(spec.axes.a, axes))
                part += gemm_primitive.bind(Operands(x.a, weight), plain)
    dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
    for part, name in zip(terms, ("bias", "bias2"), strict=True):
        if getattr(dx, name) is not None:
            part.append(reference.over_result(name, dx, spec, dtype))
    shape = spec.result_shape(Operands(*(None if o is None else jnp.shape(o) for o in x)))
    dg, du = (_sum(part, shape, dtype, spec) for part in terms)
    return dg, du


def _sum(
    terms: list[jax.Array], shape: tuple[int, ...], dtype: Any, spec: GatedSpec
) -> jax.Array | None:
    if len(terms) < 2 and all(term.shape == shape for term in terms):
        return terms[0] if terms else None
    total = sum((term.astype(dtype) for term in terms[1:]), terms[0].astype(dtype))
    return reference.convert(jnp.broadcast_to(total, shape), spec.out_dtype)


ad.primitive_jvps[gated_gemm_p] = _jvp


# Transposition


def _transpose(cotangents: Sequence[Any], *operands: Any, spec: GatedSpec) -> list[Any]:
    x = spec.unflatten(operands)
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):
        return [None] * len(operands)
    linear = [name for name, o in x._asdict().items() if ad.is_undefined_primal(o)]
    if linear == ["a"] and spec.results == _PAIR:
        results = {"a": transpose_pair(cotangents, x, spec, gemm_primitive.bind)}
    else:
        results = _transpose_in_second_weight(cotangents, x, linear, spec)
    names = (name for name, axes in spec.axes._asdict().items() if axes is not None)
    return [results.get(name) for name in names]


def _transpose_in_second_weight(
    cotangents: Sequence[Any], x: Operands, linear: list[str], spec: GatedSpec
) -> dict[str, jax.Array]:
    """Returns the cotangents of the second weight and its bias, by which ``D`` is linear.

    Of what a user transposes: the reverse pass of a derivative goes through the pair of products.
    """
    assert set(linear) <= {"b2", "bias2"}, f"{spec} is transposed in {linear}"
    remaining = iter(cotangents)
    of_d, _, of_u = (next(remaining) if wanted else None for wanted in spec.results)
    dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
    terms = []
    if of_d is not None and type(of_d) is not ad.Zero:
        gate_axes = Operands(spec.axes.a, spec.axes.b, bias=spec.axes.bias)
        gate = spec.plain(axes=gate_axes, out_dtype=dtype)
        (g,) = gemm_primitive.bind(Operands(x.a, x.b, bias=x.bias), gate)
        terms.append(of_d.astype(dtype) * resolve(spec.activation).reference(g))
    if of_u is not None and type(of_u) is not ad.Zero:
        terms.append(of_u.astype(dtype))

    def second_product(*values: Any) -> jax.Array:
        y = x._replace(**dict(zip(linear, values, strict=True)))
        axes = Operands(spec.axes.a, spec.axes.b2, bias=spec.axes.bias2)
        return gemm_primitive.bind(Operands(y.a, y.b2, bias=y.bias2), spec.plain(axes=axes))[0]

    transposed = jax.linear_transpose(second_product, *(getattr(x, name).aval for name in linear))
    if not terms:  # the gate's product alone has a cotangent, and does not depend on these
        return {}
    cotangent = reference.convert(sum(terms[1:], terms[0]), spec.out_dtype)
    return dict(zip(linear, transposed(cotangent), strict=True))


ad.primitive_transposes[gated_gemm_p] = _transpose


# Batching


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: GatedSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Adds an outermost batch dimension; where an operand has it is a matter of its axes."""
    x, dim = spec.unflatten(operands), spec.unflatten(dims)
    if all(d is None for d in dims):
        results = bind(x, spec)
        return results, [None] * len(results)
    if not spec.packed and (dim.b is None) != (dim.b2 is None):
        # The kernel walks both weights with one set of strides.
        lone = "b" if dim.b is None else "b2"
        repeated = jnp.broadcast_to(getattr(x, lone), (axis_data.size, *getattr(x, lone).shape))
        x, dim = x._replace(**{lone: repeated}), dim._replace(**{lone: 0})
    batched = dataclasses.replace(spec, axes=insert_batches(spec.axes, dim))
    is_shared = dim.a is None and dim.b is None
    results = _one_pair(x, spec, batched) if is_shared else bind(x, batched)
    return reference.batch_dims(results, axis_data.size)


def _one_pair(x: Operands, spec: GatedSpec, batched: GatedSpec) -> list[jax.Array]:
    """Computes one pair of products for a batch that only the biases have."""
    pair = dataclasses.replace(
        spec,
        axes=spec.axes._replace(bias=None, bias2=None),
        out_dtype=accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype),
        results=_PAIR,
        activation=None,
        config=None,
    )
    gate, up = bind(x._replace(bias=None, bias2=None), pair)
    gate, up = (lax.expand_dims(accumulator, (0,)) for accumulator in (gate, up))
    return reference.gated_epilogue(gate, up, x, batched)


batching.fancy_primitive_batchers[gated_gemm_p] = _batch


# Lowering


def _products(*operands: jax.Array, spec: GatedSpec) -> list[jax.Array]:
    """Computes ``G``, ``U`` or both, without ``D``, as ordinary products with a bias."""
    x = spec.unflatten(operands)
    if not spec.packed:
        results = []
        for wanted, b, bias in zip(spec.results[1:], ("b", "b2"), ("bias", "bias2"), strict=True):
            if wanted:
                axes = Operands(spec.axes.a, getattr(spec.axes, b), bias=getattr(spec.axes, bias))
                named = Operands(x.a, getattr(x, b), bias=getattr(x, bias))
                results += gemm_primitive.bind(named, spec.plain(axes=axes))
        return results
    axes, bias = Operands(spec.axes.a, spec.axes.b), None
    if x.bias is not None or x.bias2 is not None:
        bias, bias_axes = _packed_bias(x, spec)
        axes = axes._replace(bias=bias_axes)
    (both,) = gemm_primitive.bind(Operands(x.a, x.b, bias=bias), spec.plain(axes=axes))
    pair = reference.halves(both)
    return [result for result, wanted in zip(pair, spec.results[1:], strict=True) if wanted]


def _packed_bias(x: Operands, spec: GatedSpec) -> tuple[jax.Array, Any]:
    """Returns both biases side by side, zeros for one that is absent, and their axes."""
    shapes = Operands(*(None if o is None else o.shape for o in x))
    gemm = spec.strided(shapes)
    present = [axes for axes in (spec.axes.bias, spec.axes.bias2) if axes is not None]
    is_batched = any(axis is not None for axes in present for axis in axes[:-1])
    batch = gemm.batch if is_batched else ()
    halves = []
    for name in ("bias", "bias2"):
        own, own_axes = getattr(x, name), getattr(spec.axes, name)
        if own is None:
            halves.append(jnp.zeros((*batch, gemm.n), spec.out_dtype))
            continue
        own = reference.aligned(own, own_axes)
        halves.append(jnp.broadcast_to(own if batch else own.reshape(-1), (*batch, gemm.n)))
    dtype = common_dtype(*(half.dtype for half in halves))
    bias = jnp.concatenate([half.astype(dtype) for half in halves], axis=-1)
    missing = (None,) * (len(gemm.batch) - len(batch))
    return bias, (*missing, *range(bias.ndim))


def _composed(*operands: jax.Array, spec: GatedSpec, divided: bool = False) -> list[jax.Array]:
    if not spec.results[0]:
        return _products(*operands, spec=spec)
    return reference.reference_gated(*operands, spec=spec, divided=divided)


_divided = functools.partial(_composed, divided=True)


def _cuda(*operands: jax.Array, spec: GatedSpec) -> list[jax.Array]:
    if not spec.results[0]:
        return _products(*operands, spec=spec)
    return gemm_lowering.cuda_gated(*operands, spec=spec)


registration.lower(gated_gemm_p, reference=_composed, cuda=_cuda, divided=_divided)
