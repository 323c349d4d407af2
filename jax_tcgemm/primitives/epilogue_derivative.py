"""The derivative of an epilogue at known values, and its transpose.

Both are primitives for the sake of the transpose, which is one pass over the matrices on a GPU.
That pass is compiled from the function, or from the activation's. It reads each matrix once and, in
the same pass, computes the sums for the cotangents of smaller operands, such as a bias. All other
rules are those of the function.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_tcgemm.epilogue import linear
from jax_tcgemm.epilogue.linear import LinearSpec
from jax_tcgemm.epilogue.spec import CompiledSpec, PackedFunctionSpec
from jax_tcgemm.lowering import jit_pass
from jax_tcgemm.lowering.jit_pass import PassSpec
from jax_tcgemm.partitioning import passes as division
from jax_tcgemm.partitioning import rules
from jax_tcgemm.primitives import registration
from jax_tcgemm.problem.activations import Activation


class _FunctionPrimitive:
    """A primitive that computes a function, the field ``name`` of its ``spec``."""

    def __init__(self, primitive: Primitive, name: str) -> None:
        primitive.multiple_results = True
        self.primitive = primitive
        self._function = operator.attrgetter(name)
        registration.abstract_function(primitive, self._function)

    def bind(self, operands: Sequence[Any], spec: LinearSpec | PassSpec) -> list[jax.Array]:
        """Applies the primitive."""
        return registration.bind(self.primitive, operands, spec, self.composed, typed=self._typed)

    def composed(self, *operands: Any, spec: LinearSpec | PassSpec) -> list[Any]:
        """Computes the function in operations of JAX, which can be differentiated."""
        return self._function(spec)(*operands)

    def _typed(self, *operands: Any, spec: LinearSpec | PassSpec) -> list[Any]:
        return self._function(spec).of_shardings(*operands)

    def computed(self, *operands: Any, spec: LinearSpec | PassSpec) -> list[Any]:
        """Does the same when a program is lowered."""
        return self._function(spec).computed(*operands)


tangent_p = Primitive("tcgemm_epilogue_tangent")
pullback_p = Primitive("tcgemm_epilogue_pullback")
# A device's part of a transpose. Nothing differentiates or maps it.
pass_p = Primitive("tcgemm_epilogue_pass")
_TANGENT = _FunctionPrimitive(tangent_p, "tangent")
_PULLBACK = _FunctionPrimitive(pullback_p, "pullback")
_PASS = _FunctionPrimitive(pass_p, "function")


def tangents(
    spec: CompiledSpec | PackedFunctionSpec, wide: Any, values: Sequence[Any], slopes: Sequence[Any]
) -> list[Any]:
    """Returns the tangents of the epilogue's results that are floating-point numbers.

    Args:
        spec: the product and its epilogue.
        wide: type of the accumulators, which are given rounded.
        values: the accumulators, the operands and the masks.
        slopes: the tangents of ``values``, ``None`` for zero.
    """
    moving = [i for i, slope in enumerate(slopes) if slope is not None]
    derivative, needed, held = linear.of_epilogue(spec.function, wide, values, moving)
    given = [*(slopes[i] for i in moving), *(values[i] for i in needed), *held]
    return _TANGENT.bind(given, derivative)


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
    terms = [t] if bias is None else [t, bias]
    derivative, needed = linear.of_activation(activation, z, terms)
    return _TANGENT.bind([*terms, *([z] * len(needed))], derivative)[0]


def _cuda_pullback(*operands: jax.Array, spec: LinearSpec) -> list[jax.Array]:
    return jit_pass.cuda_pass(*operands, spec=PassSpec(spec.pullback, spec.shape))


# Transposition


def _tangent_transpose(cotangents: Sequence[Any], *operands: Any, spec: LinearSpec) -> list[Any]:
    slopes, values = operands[: spec.slopes], operands[spec.slopes :]
    wanted = [ad.is_undefined_primal(x) for x in slopes]
    if not all(wanted) and not spec.has_opaque_rule:
        spec, kept = spec.of_slopes(wanted)
        values = [values[i] for i in kept]
    results = linear.of_wanted(_of_cotangents(cotangents, values, spec), wanted)
    return results + [None] * (len(operands) - len(slopes))


def _of_cotangents(
    cotangents: Sequence[Any], values: Sequence[Any], spec: LinearSpec
) -> list[jax.Array | None]:
    given = [type(x) is not ad.Zero for x in cotangents]
    if not any(given):
        return [None] * spec.slopes
    if spec.has_opaque_rule:
        operands = [*map(ad.instantiate_zeros, cotangents), *values]
        pullback, held = spec.transposed()
        # The primitive has no operands for arrays that the rule closes over.
        return list(pullback(*operands, *held) if held else _PULLBACK.bind(operands, spec))
    if not all(given):
        spec = spec.of_results(given)
    nonzero = [x for x, is_given in zip(cotangents, given, strict=True) if is_given]
    return list(_PULLBACK.bind([*nonzero, *values], spec))


def _pullback_transpose(cotangents: Sequence[Any], *operands: Any, spec: LinearSpec) -> list[Any]:
    count = len(spec.tangent.results)
    linear_operands, values = operands[:count], operands[count:]
    wanted = [ad.is_undefined_primal(x) for x in linear_operands]
    if spec.has_opaque_rule:
        raise NotImplementedError(
            "second derivatives of an epilogue with a jax.custom_vjp; accepted: the same function "
            "after the product, without epilogue="
        )
    slopes = map(ad.instantiate_zeros, cotangents)
    made = iter(_TANGENT.bind([*slopes, *values], spec.of_results(wanted)))
    return [next(made) if is_wanted else None for is_wanted in wanted] + [None] * len(values)


# Dead code elimination


def _read_cotangents(
    spec: LinearSpec, used: Sequence[bool], count: int
) -> tuple[LinearSpec, list[bool]] | None:
    """Returns the spec of the cotangents that are read, and which operands they need."""
    if spec.has_opaque_rule:
        return None
    before = len(spec.tangent.results)
    spec, kept = spec.of_slopes(used)
    return spec, [i < before or i - before in kept for i in range(count)]


# Batching


def _tangent_batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: LinearSpec
) -> tuple[list[jax.Array], list[int | None]]:
    results = _TANGENT.bind(operands, spec.mapped(dims, axis_data.size))
    return results, [0] * len(results)


def _pullback_batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: LinearSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Maps the transpose: each matrix of the batch has its own cotangents."""
    size, count = axis_data.size, len(spec.tangent.results)
    if spec.has_opaque_rule:
        return jax.vmap(spec.pullback, tuple(dims), axis_size=size)(*operands), [0] * spec.slopes
    moved = [
        x
        if dim is None and i >= count  # a value that the whole batch shares
        else batching.bdim_at_front(x, dim, size, axis_data.explicit_mesh_axis)
        for i, (x, dim) in enumerate(zip(operands, dims, strict=True))
    ]
    of_values = [None if dim is None else 0 for dim in dims[count:]]
    mapped = spec.mapped([*[0] * spec.slopes, *of_values], size)
    return _PULLBACK.bind(moved, mapped), [0] * spec.slopes


# Registration

registration.evaluate_by_jit(tangent_p, lambda spec: spec.without_rules)
registration.evaluate_by_jit(pullback_p, lambda spec: spec.without_rules)
registration.derive_linear(tangent_p, _TANGENT.composed, lambda spec: spec.slopes)
registration.derive_linear(pullback_p, _PULLBACK.composed, lambda spec: len(spec.tangent.results))
registration.drop_unread_results(pullback_p, _read_cotangents)
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[pullback_p] = _pullback_transpose
registration.batch(tangent_p, _tangent_batch)
registration.batch(pullback_p, _pullback_batch)
registration.lower(tangent_p, reference=_TANGENT.computed, cuda=_TANGENT.computed, is_product=False)
registration.lower(pullback_p, reference=_PULLBACK.computed, cuda=_cuda_pullback, is_product=False)
registration.lower(pass_p, reference=_PASS.computed, cuda=jit_pass.cuda_pass, is_product=False)
rules.register(pullback_p, division.rule(_PASS.bind))
