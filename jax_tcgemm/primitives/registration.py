"""Registration shared by all primitives of the package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from jax_tcgemm import _compat
from jax_tcgemm._compat import partitioner as xla
from jax_tcgemm.kernels.names import KERNEL
from jax_tcgemm.lowering import fallback
from jax_tcgemm.lowering.devices import program_of
from jax_tcgemm.partitioning import partitioner, rules


def bind(
    primitive: Primitive,
    operands: Sequence[jax.Array],
    spec: Any,
    composed: Callable[..., Any],
    out_sharding: Any = None,
    typed: Callable[..., Any] | None = None,
) -> Any:
    """Applies a primitive; inside, the explicit axes of a mesh are automatic.

    Args:
        primitive: the primitive.
        operands: its operands.
        spec: its static parameters.
        composed: does the same by operations of JAX; the results have the types of its results.
        out_sharding: sharding of the type of every result, in place of that.
        typed: gives the results their types in place of ``composed``.

    Returns:
        The results of the primitive.
    """
    if _compat.is_unreduced(*operands):
        call = _call(primitive, spec, operands)
        strict = _config(spec) == KERNEL
        fallback.report(call, "operands' types are sums over mesh axes", strict=strict)
        results = composed(*operands, spec=spec)
        return jax.tree.map(lambda x: _compat.resharded(x, out_sharding), results)

    if out_sharding is None and not _compat.is_sharded(*operands):
        return apply(primitive, operands, spec)

    def whole(*values: jax.Array) -> Any:
        return apply(primitive, values, spec)

    given = whole if out_sharding else functools.partial(typed or composed, spec=spec)
    shardings = _compat.shardings_of(given, *operands)
    if out_sharding is not None:
        shardings = jax.tree.map(lambda _: out_sharding, shardings)
    return apply(primitive, operands, spec, shardings)


def apply(
    primitive: Primitive, operands: Sequence[jax.Array], spec: Any, shardings: Any = None
) -> Any:
    """Binds a primitive.

    Args:
        primitive: the primitive.
        operands: its operands.
        spec: its static parameters.
        shardings: shardings of its results' types, if explicit axes are to be automatic inside.
    """

    def run(*values: jax.Array) -> Any:
        return primitive.bind(*_compat.match_varying(values), spec=spec)

    if shardings is None:
        return run(*operands)
    return _compat.with_automatic_axes(run, operands, shardings)


def abstract_function(
    primitive: Primitive, function: Callable[[Any], Any] = lambda spec: spec.function
) -> None:
    """Registers the abstract evaluation of a primitive that computes ``function(spec)``."""

    def avals(*operands: Any, spec: Any) -> list[Any]:
        results = function(spec).results
        return [_compat.result_aval(operands, x.shape, x.dtype) for x in results]

    primitive.def_abstract_eval(avals)


def check_reduced(what: str, operands: Sequence[Any], note: str = "") -> None:
    """Raises ``NotImplementedError`` if the type of an operand is a sum over mesh axes."""
    if _compat.is_unreduced(*operands):
        types = ", ".join(str(jax.typeof(x)) for x in operands)
        raise NotImplementedError(
            f"{what} operands whose types are sums over mesh axes ({types}){note}; use jax.reshard"
        )


def evaluate_by_jit(
    primitive: Primitive, computed: Callable[[Any], Any] = lambda spec: spec
) -> None:
    """Makes the primitive run outside of ``jit`` as one program for each ``spec``.

    Args:
        primitive: the primitive.
        computed: returns a ``spec`` that computes the same and has no custom derivatives.
    """

    def apply(*operands: jax.Array, spec: Any) -> Any:
        return primitive.bind(*operands, spec=spec)

    apply.__name__ = apply.__qualname__ = primitive.name
    _compat.mark_as_single_operation(apply)
    compiled = jax.jit(apply, static_argnames="spec")

    def evaluate(*operands: jax.Array, spec: Any) -> Any:
        # With jit disabled, this would recurse for ever.
        with jax.disable_jit(False):
            return compiled(*operands, spec=computed(spec))

    primitive.def_impl(evaluate)


def drop_unread_results(
    primitive: Primitive,
    select: Callable[[Any, Sequence[bool], int], tuple[Any, list[bool]] | None],
) -> None:
    """Makes the primitive compute only those of its results that are read.

    Args:
        primitive: the primitive.
        select: given a ``spec``, which of its results are read and the number of operands, returns
            the ``spec`` of these results and which operands it needs. ``None`` keeps all results.
    """

    def rule(used: Sequence[bool], *arguments: Any) -> tuple[list[bool], Any]:
        eqn = arguments[-1]  # jax 0.12 puts another argument before it
        every = [True] * len(eqn.invars)
        if not any(used):
            return [False] * len(every), None
        selected = select(eqn.params["spec"], used, len(every))
        if selected is None:
            return every, eqn
        spec, needed = selected
        eqn = eqn.replace(
            invars=[var for var, is_needed in zip(eqn.invars, needed, strict=True) if is_needed],
            outvars=[var for var, is_used in zip(eqn.outvars, used, strict=True) if is_used],
            params={**eqn.params, "spec": spec},
        )
        return needed, eqn

    pe.dce_rules[primitive] = rule


def derive_linear(
    primitive: Primitive, composed: Callable[..., Any], linear_count: Callable[[Any], int]
) -> None:
    """Registers the forward derivative of a primitive that is linear in its first operands.

    Args:
        primitive: the primitive.
        composed: as in ``bind``; the derivative by the other operands is that of these operations.
        linear_count: returns the number of linear operands for a ``spec``.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, spec: Any) -> tuple[Any, Any]:
        count = linear_count(spec)
        moves = [type(t) is not ad.Zero for t in tangents]
        result = primitive.bind(*primals, spec=spec)
        terms = []
        if any(moves[:count]):
            operands = [*map(ad.instantiate_zeros, tangents[:count]), *primals[count:]]
            terms.append(bind(primitive, operands, spec, composed))
        others = [i for i, moving in enumerate(moves) if moving and i >= count]
        if others:

            def of_others(*values: Any) -> Any:
                operands = list(primals)
                for i, value in zip(others, values, strict=True):
                    operands[i] = value
                return composed(*_compat.match_varying(operands), spec=spec)

            slopes = [tangents[i] for i in others]
            terms.append(jax.jvp(of_others, [primals[i] for i in others], slopes)[1])
        return result, jax.tree.map(lambda *term: sum(term[1:], term[0]), *terms)

    ad.primitive_jvps[primitive] = jvp


def batch(primitive: Primitive, rule: Callable[..., tuple[Any, Any]]) -> None:
    """Registers the batching rule of a primitive for operands of which at least one is mapped."""

    def batched(
        axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: Any
    ) -> tuple[Any, Any]:
        if any(dim is not None for dim in dims):
            return rule(axis_data, operands, dims, spec=spec)
        results = apply(primitive, operands, spec)
        return results, [None] * len(results) if primitive.multiple_results else None

    batching.fancy_primitive_batchers[primitive] = batched


def derive_first(primitive: Primitive) -> None:
    """Registers the derivative of a primitive with one result by its first operand alone."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, spec: Any) -> tuple[Any, Any]:
        (result,) = apply(primitive, primals, spec)
        if type(tangents[0]) is ad.Zero:
            return [result], [_compat.zero_of(result)]
        return [result], apply(primitive, [tangents[0], *primals[1:]], spec)

    ad.primitive_jvps[primitive] = jvp


def transpose_composition(primitive: Primitive, composed: Callable[..., Any]) -> None:
    """Registers the transpose of a primitive in the operands in which it is linear.

    A derivative is taken at known values and has its own primitives. This rule is for functions
    that are transposed directly, for example by ``jax.linear_transpose``.

    Args:
        primitive: the primitive.
        composed: as in ``bind``; the transpose is that of these operations.
    """

    def transpose(cotangents: Sequence[Any], *operands: Any, spec: Any) -> list[jax.Array | None]:
        is_linear = [ad.is_undefined_primal(x) for x in operands]
        avals = [x.aval for x in operands if ad.is_undefined_primal(x)]

        def of_linear(*values: Any) -> list[Any]:
            given = iter(values)
            pairs = zip(operands, is_linear, strict=True)
            return composed(*(next(given) if each else x for x, each in pairs), spec=spec)

        transposed = jax.linear_transpose(of_linear, *avals)
        found = iter(transposed([*map(ad.instantiate_zeros, cotangents)]))
        return [next(found) if each else None for each in is_linear]

    ad.primitive_transposes[primitive] = transpose


def lower(
    primitive: Primitive,
    *,
    reference: Callable[..., Any],
    cuda: Callable[..., Any],
    divided: Callable[..., Any] | None = None,
    is_product: bool = True,
) -> None:
    """Registers the lowering of a primitive by functions of its operands and ``spec``.

    If XLA divides the program among devices and the primitive has a rule in ``partitioning``, that
    rule divides one custom call.

    Args:
        primitive: the primitive.
        reference: lowers it for platforms other than CUDA.
        cuda: lowers it for CUDA.
        divided: lowers it for CUDA if XLA divides a call that has no rule; by default
            ``reference``. XLA cannot divide a custom call and would gather its operands on every
            device.
        is_product: whether a strict call (``fallback.is_strict``) takes no result of XLA's.
    """

    def rule(function: Callable[..., Any]) -> Callable[..., Any]:
        return mlir.lower_fun(function, multiple_results=primitive.multiple_results)

    def is_divided(context: Any, spec: Any, platform: str) -> bool:
        return (
            xla.partitioned_devices(context) > 1
            and rules.divides(platform)
            and rules.accepts(primitive, spec, context.avals_in)
        )

    def elsewhere(context: Any, *values: Any, **params: Any) -> Any:
        spec, platforms = params["spec"], _compat.platforms_of(context)
        if len(platforms) == 1 and is_divided(context, spec, platforms[0]):
            return partitioner.lower(primitive, platforms[0])(context, *values, **params)
        call = _call(primitive, spec, context.avals_in)
        fallback.report(call, "no kernels for this platform", strict=False)
        return rule(reference)(context, *values, **params)

    def on_cuda(context: Any, *values: Any, **params: Any) -> Any:
        devices = xla.partitioned_devices(context)
        if devices == 1:
            count = xla.program_devices(context)
            with program_of(count, runs_here=_compat.runs_here(context)):
                return rule(cuda)(context, *values, **params)
        if is_divided(context, params["spec"], "cuda"):
            return partitioner.lower(primitive, "cuda")(context, *values, **params)
        reason = f"no kernel to be divided among {devices} devices, "
        is_whole = divided is None or is_product
        reason += "XLA divides its own products" if is_whole else "its parts are divided"
        spec = params["spec"]
        strict = is_product and fallback.is_strict(_config(spec))
        fallback.report(_call(primitive, spec, context.avals_in), reason, strict=strict)
        return rule(divided or reference)(context, *values, **params)

    # JAX lowers the first rule once for all platforms of a program. CPUs need one of their own,
    # because JAX lacks some presets of precision there.
    mlir.register_lowering(primitive, elsewhere)
    mlir.register_lowering(primitive, elsewhere, platform="cpu")
    mlir.register_lowering(primitive, on_cuda, platform="cuda")


def _config(spec: Any) -> str | None:
    """Returns the configuration that a call requests; ``None`` if it cannot request any."""
    return getattr(spec, "config", None)


def _call(primitive: Primitive, spec: Any, operands: Sequence[Any]) -> str:
    types = ", ".join(f"{x.dtype}{list(x.shape)}" for x in operands)
    kind = "_gated" if getattr(spec, "is_gated", False) else ""
    return f"{primitive.name}{kind} {types}"
