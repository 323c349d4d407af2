"""A function of JAX as an epilogue: traced once, without calls, its closed-over arrays operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from jax_tcgemm import _compat
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.epilogue import draws

# Operations that stand for what is in them, by the name of the parameter that holds it.
_CALLS = ("call_jaxpr", "fun_jaxpr", "jaxpr")


@dataclasses.dataclass(frozen=True, eq=False)
class EpilogueFunction:
    """What becomes of the accumulators, as a value that ``jit`` can key on.

    Attributes:
        jaxpr: the function, of the accumulators, then its operands; without constants.
        accumulators: how many of its operands are accumulators.
        text: what it computes and how it is differentiated: equal functions have equal texts.
    """

    jaxpr: core.ClosedJaxpr
    accumulators: int
    text: str = dataclasses.field(repr=False)

    def __eq__(self, other: object) -> bool:
        """Whether both compute and differentiate the same."""
        return isinstance(other, EpilogueFunction) and (self.text, self.accumulators) == (
            other.text,
            other.accumulators,
        )

    def __hash__(self) -> int:
        return hash(self.text)

    def __call__(self, *values: Any) -> list[Any]:
        """Computes the results by operations of JAX, which can be differentiated."""
        return core.jaxpr_as_fun(self.jaxpr)(*values)

    def computed(self, *values: Any) -> list[Any]:
        """Computes the results where nothing is differentiated any more.

        Within ``shard_map``, too, whose operands vary over mesh axes where the traced ones did not.
        """
        return evaluate(self.flat.jaxpr, self.flat.consts, values)

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of the results."""
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.out_avals)

    @functools.cached_property
    def flat(self) -> core.ClosedJaxpr:
        """The same without calls: of ``jit``, of custom derivatives, of ``jax.checkpoint``."""
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.in_avals]

        def inlined(*values: Any) -> list[Any]:
            return evaluate(self.jaxpr.jaxpr, self.jaxpr.consts, values)

        return jax.make_jaxpr(inlined)(*avals)

    def mapped(self, dims: Sequence[int | None], size: int) -> EpilogueFunction:
        """Returns the same for a batch in front of each result.

        Args:
            dims: where the operands have the batch's dimension.
            size: of the batch.
        """
        batched = jax.vmap(self, in_axes=tuple(dims), out_axes=0, axis_size=size)
        avals = []
        for aval, dim in zip(self.jaxpr.in_avals, dims, strict=True):
            shape = aval.shape if dim is None else (*aval.shape[:dim], size, *aval.shape[dim:])
            avals.append(jax.ShapeDtypeStruct(shape, aval.dtype))
        function, _ = trace(batched, avals, self.accumulators)
        return function

    @functools.cached_property
    def differentiable(self) -> core.ClosedJaxpr:
        """The same without calls, but for those with a derivative of their own."""
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.in_avals]

        def inlined(*values: Any) -> list[Any]:
            return evaluate(self.jaxpr.jaxpr, self.jaxpr.consts, values, kept=jaxprs.CUSTOM_CALLS)

        return jax.make_jaxpr(inlined)(*avals)

    @functools.cached_property
    def masks(self) -> tuple[Any, ...]:
        """Variables of ``differentiable`` that random numbers decide, yes or no, for each result.

        A byte each, which take less time to be read again than to be drawn again.
        """
        jaxpr = self.differentiable.jaxpr
        shape = jaxpr.invars[0].aval.shape
        dependent, drawn = set(jaxpr.invars[: self.accumulators]), set()
        masks: dict[Any, None] = {}
        for eqn in jaxpr.eqns:
            taken = [x for x in eqn.invars if not isinstance(x, core.Literal)]
            if any(x in dependent for x in taken):
                dependent.update(eqn.outvars)
                masks.update(dict.fromkeys(x for x in taken if x in drawn and _is_mask(x, shape)))
            elif eqn.primitive.name in draws.DRAWS or any(x in drawn for x in taken):
                drawn.update(eqn.outvars)
        return tuple(masks)

    def with_residuals(self, dtype: Any) -> EpilogueFunction:
        """Returns the same with what derivatives need as further results.

        These are the accumulators, in another type, and the masks.
        """
        jaxpr, masks = self.differentiable, self.masks

        def both(*values: Any) -> list[Any]:
            env: dict[Any, Any] = {}
            results = evaluate(jaxpr.jaxpr, jaxpr.consts, values, kept=jaxprs.CUSTOM_CALLS, env=env)
            accumulators = (x.astype(dtype) for x in values[: self.accumulators])
            return [*results, *accumulators, *(env[mask] for mask in masks)]

        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.in_avals]
        function, _ = trace(both, avals, self.accumulators)
        return function

    def of_masks(self, *values: Any) -> list[Any]:
        """Computes the results where the masks are known.

        Args:
            *values: the accumulators, the operands, the masks.
        """
        jaxpr, count = self.differentiable, len(self.jaxpr.in_avals)
        env = dict(zip(self.masks, values[count:], strict=True))
        return evaluate(
            jaxpr.jaxpr, jaxpr.consts, values[:count], kept=jaxprs.CUSTOM_CALLS, env=env
        )

    def only(self, wanted: Sequence[bool]) -> EpilogueFunction:
        """Returns the same with some of the results alone."""

        def picked(*values: Any) -> list[Any]:
            return [x for x, is_wanted in zip(self(*values), wanted, strict=True) if is_wanted]

        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.in_avals]
        function, _ = trace(picked, avals, self.accumulators)
        return function

    def without_unused(self, needed: int) -> tuple[EpilogueFunction, list[int]]:
        """Returns the same without what its results do not need, and the operands that are left.

        Args:
            needed: how many of the first operands stay.
        """
        whole = self.differentiable
        jaxpr, is_used = jaxprs.without_unused(whole.jaxpr, needed)
        closed = core.ClosedJaxpr(jaxpr, whole.consts)
        function = EpilogueFunction(closed, self.accumulators, _text(closed))
        return function, [i for i, each in enumerate(is_used) if each]


def trace(
    function: Callable[..., Any], avals: Sequence[Any], accumulators: int
) -> tuple[EpilogueFunction, list[Any]]:
    """Traces a function of accumulators and operands, which returns a list.

    Args:
        function: what is traced.
        avals: types of its arguments.
        accumulators: how many of them are accumulators.

    Returns:
        The epilogue, whose operands are ``draws.words`` of the arguments, and those of the arrays
        that the function closes over, its further operands.
    """
    closed = _traced(function, avals)
    consts = list(closed.consts)
    types = [*avals, *map(jax.typeof, consts)]
    is_key = [draws.is_key(each.dtype) for each in types]

    def of_words(*values: Any) -> list[Any]:
        arrays = [draws.wrapped(x) if wrap else x for x, wrap in zip(values, is_key, strict=True)]
        return jaxprs.eval_jaxpr(closed.jaxpr, arrays[len(avals) :], *arrays[: len(avals)])

    if consts or any(is_key):
        closed = jax.make_jaxpr(of_words)(*map(draws.word_type, types))
    return EpilogueFunction(closed, accumulators, _text(closed)), draws.words(consts)


def _traced(function: Callable[..., Any], avals: Sequence[Any]) -> core.ClosedJaxpr:
    """Traces what holds for any mesh."""
    try:
        with _compat.no_mesh():
            return jax.make_jaxpr(function)(*avals)
    except Exception:
        # Within ``shard_map`` it may close over what varies: a type for which it takes a mesh.
        if not _compat.has_manual_axes():
            raise
    closed = jax.make_jaxpr(function)(*avals)
    with _compat.no_mesh():
        return core.ClosedJaxpr(_of_no_axes(closed.jaxpr), closed.consts)


def _of_no_axes(jaxpr: Any) -> Any:
    """Returns a jaxpr anew, whose values vary over no mesh axes."""
    count = len(jaxpr.constvars)
    variables = [*jaxpr.constvars, *jaxpr.invars]

    def again(*values: Any) -> list[Any]:
        return evaluate(
            jaxpr, values[:count], values[count:], jaxprs.CUSTOM_CALLS, forget_axes=True
        )

    types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in variables]
    anew = jax.make_jaxpr(again)(*types).jaxpr
    return anew.replace(constvars=anew.invars[:count], invars=anew.invars[count:])


def _text(closed: core.ClosedJaxpr) -> str:
    """Returns what distinguishes a function from others: its operations, in their order."""
    lines: list[str] = []
    _write(closed.jaxpr, lines)
    return "\n".join(lines)


def _write(jaxpr: Any, lines: list[str]) -> None:
    names: dict[Any, str] = {}

    def name(atom: Any) -> str:
        if isinstance(atom, core.Literal):
            return f"{atom.val!r}:{atom.aval.str_short()}"
        return f"{names.setdefault(atom, f'v{len(names)}')}:{atom.aval.str_short()}"

    lines.append("in " + " ".join(map(name, jaxpr.invars)))
    for eqn in jaxpr.eqns:
        lines.append(
            f"{eqn.primitive.name} {' '.join(map(name, eqn.invars))} -> "
            f"{' '.join(map(name, eqn.outvars))}"
        )
        for key, value in sorted(eqn.params.items()):
            inner = jaxprs.jaxpr_of(value)
            if inner is not None:
                lines.append(f"  {key} of")
                _write(inner, lines)
            else:
                lines.append(f"  {key}={_named(value)}")
    lines.append("out " + " ".join(map(name, jaxpr.outvars)))


def _named(value: Any) -> str:
    """Returns a parameter as text; of a rule for derivatives which object it is.

    JAX wraps rules anew for each trace, with arguments that they may have (nondiff_argnums).
    """
    return f"rule {id(value):x}" if jaxprs.is_rule(value) else repr(value)


def _is_mask(var: Any, shape: tuple[int, ...]) -> bool:
    return var.aval.shape == shape and var.aval.dtype == bool


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    values: Sequence[Any],
    kept: frozenset[str] = frozenset(),
    env: dict[Any, Any] | None = None,
    forget_axes: bool = False,
) -> list[Any]:
    """Evaluates a jaxpr with what calls stand for in their place.

    Args:
        jaxpr: the operations.
        consts: its constants.
        values: its arguments.
        kept: names of calls that stay.
        env: variables that are known; all others are added.
        forget_axes: whether it varies over mesh axes, of which there are none here.
    """
    env = {} if env is None else env
    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        if any(var not in env for var in eqn.outvars):
            values = [*map(read, eqn.invars)]
            env.update(zip(eqn.outvars, apply(eqn, values, kept, forget_axes), strict=True))
    return [*map(read, jaxpr.outvars)]


def apply(
    eqn: Any,
    values: Sequence[Any],
    kept: frozenset[str] = frozenset(),
    forget_axes: bool = False,
) -> list[Any]:
    """Evaluates one operation, with what a call stands for in its place."""
    if forget_axes and eqn.primitive.name in jaxprs.VARYING:
        return list(values)
    if eqn.primitive.name in jaxprs.CALLS - kept:
        for key in _CALLS:
            if key not in eqn.params:
                continue
            called = eqn.params[key]
            inner = jaxprs.jaxpr_of(called)
            consts = getattr(called, "consts", ())
            return evaluate(inner, consts, values, kept, forget_axes=forget_axes)
    if forget_axes:
        params = {key: _parameter_of_no_axes(value) for key, value in eqn.params.items()}
        eqn = eqn.replace(params=params)
    return jaxprs.bind_again(eqn, values)


def _parameter_of_no_axes(value: Any) -> Any:
    """Returns what is a jaxpr anew."""
    if type(value) is tuple:  # of branches
        return tuple(map(_parameter_of_no_axes, value))
    jaxpr = jaxprs.jaxpr_of(value)
    if jaxpr is None:
        return value
    anew = _of_no_axes(jaxpr)
    return core.ClosedJaxpr(anew, value.consts) if hasattr(value, "consts") else anew
