"""Packs weights before the loop that reads them in each turn.

A product with a stored weight in 4 bits packs the weight (``primitives.unpacked``). XLA does not
move that out of a loop, such as the one over the tokens of a decoder.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jax_tcgemm import _compat
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.primitives.unpacked import pack_p
from jax_tcgemm.problem.log import log
from jax_tcgemm.transforms.graph import Node
from jax_tcgemm.transforms.kernel_calls import traced_call

# Operations that move elements; those before the packing of a weight are moved with it.
_MOVES = jaxprs.VIEWS | {"transpose"} | jaxprs.VARYING
# Packed copies stay in memory while a loop runs. They may take this many bytes, and this share of
# the memory that JAX may use. A loop that would have more of them packs weights in each turn.
_MOST_BYTES = 8 << 30
_MOST_SHARE = 8
_OPTIONS = ("length", "reverse", "unroll", "_split_transpose")


class TooLargeError(Exception):
    """The weights that a loop would pack before its first turn would fill the memory."""


def kept_arguments(eqn: Any) -> tuple[bool, ...]:
    """Returns which arguments of the body of a ``scan`` or ``while`` are the same in each turn.

    None are if the loop cannot be written anew.
    """
    body, consts, carries = _parts(eqn)
    if not _is_plain(eqn, body):
        return (False,) * len(body.invars)
    carried = body.invars[consts : consts + carries]
    unchanged = [var is result for var, result in zip(carried, body.outvars, strict=False)]
    slices = len(body.invars) - consts - carries
    return (True,) * consts + tuple(unchanged) + (False,) * slices


def _parts(eqn: Any) -> tuple[Any, int, int]:
    """Returns the body of a loop, and the number of its constants and of its carries."""
    if eqn.primitive.name == "while":
        body, consts = jaxprs.jaxpr_of(eqn.params["body_jaxpr"]), eqn.params["body_nconsts"]
        return body, consts, len(body.invars) - consts
    is_stacked, is_sliced = jaxprs.scan_parts(eqn)
    carries = is_stacked.count(False)
    return jaxprs.jaxpr_of(eqn.params["jaxpr"]), is_sliced.count(False) - carries, carries


def _is_plain(eqn: Any, body: Any) -> bool:
    """Checks if ``lax.scan`` or ``lax.while_loop`` makes the loop again."""
    if jaxprs.has_input_effects(body):
        return False
    if eqn.primitive.name == "scan":
        return isinstance(eqn.params["length"], int)
    (condition,) = jaxprs.jaxpr_of(eqn.params["cond_jaxpr"]).outvars
    return condition.aval.shape == ()  # ``vmap`` makes others


def with_weights_packed_before(node: Node, eqn: Any, is_kept: Sequence[bool]) -> Any:
    """Returns a closed jaxpr that packs weights and then runs a loop; ``None`` if there is none.

    A weight is packed before the loop if each turn has the same one. A weight that ``scan`` slices
    is packed together with the others of its stack if a loop around this one passes that in each
    turn, so that it can be packed before that loop.

    Args:
        node: an operation that runs others.
        eqn: the same, with rewritten jaxprs.
        is_kept: for each input, whether a loop around the operation passes it in each turn.

    Raises:
        TooLargeError: the packed weights would fill the memory.
    """
    if node.name not in ("scan", "while"):
        return None
    body, consts, carries = _parts(eqn)
    if not _is_plain(eqn, body):
        return None
    arguments = list(is_kept[len(node.inputs) - len(body.invars) :])
    is_slice = [i >= consts + carries for i in range(len(arguments))]
    of_stacks = [each and kept for each, kept in zip(is_slice, arguments, strict=True)]
    once, each = _Packing.of(body, kept_arguments(eqn)), _Packing.of(body, of_stacks)
    size = once.bytes + each.bytes * eqn.params.get("length", 1)
    if size == 0:
        return None
    if size > _most_bytes():
        raise TooLargeError
    results = [*once.results, *each.results]
    log(f"fuse: packed before a {node.name}: {len(results)} of its weights")
    equal = once.equal | each.equal
    rest = [
        x.replace(invars=[_first(var, equal) for var in x.invars])
        for x in body.eqns
        if not any(var in equal for var in x.outvars)
    ]
    changes = {"outvars": [_first(var, equal) for var in body.outvars], "eqns": rest}
    new = body.replace(invars=[*results, *body.invars], **changes)
    loop = _Loop(eqn, new, consts, carries, once, each)
    return traced_call(node, lambda _, values: loop.run(values))


def _most_bytes() -> int:
    """Returns the most bytes of packed copies of a loop."""
    stats = [device.memory_stats() or {} for device in _compat.initialized_cuda_devices()]
    limits = [each["bytes_limit"] for each in stats if "bytes_limit" in each]
    return min([_MOST_BYTES, *(limit // _MOST_SHARE for limit in limits)])


def _first(var: Any, equal: Mapping[Any, Any]) -> Any:
    """Returns the first variable with the same packed values; all other variables as they are."""
    return var if isinstance(var, core.Literal) else equal.get(var, var)


@dataclasses.dataclass(frozen=True)
class _Packing:
    """The operations of a body that pack weights, and the moves of elements before them.

    Attributes:
        body: the body.
        arguments: the numbers of its arguments that the operations read.
        eqns: the operations.
        equal: for each variable of packed values, the first one with the same values.
    """

    body: Any
    arguments: list[int]
    eqns: list[Any]
    equal: dict[Any, Any]

    @staticmethod
    def of(body: Any, is_taken: Sequence[bool]) -> _Packing:
        """Finds the operations that pack the arguments that are taken."""
        # For each value, the argument that it is made of, and by which operations.
        found: dict[Any, tuple[int, list[Any]]] = {
            body.invars[i]: (i, []) for i, taken in enumerate(is_taken) if taken
        }
        equal: dict[Any, Any] = {}
        firsts: dict[Any, Any] = {}
        for eqn in body.eqns:
            if eqn.primitive is not pack_p and eqn.primitive.name not in _MOVES:
                continue
            source, *others = eqn.invars
            if others or isinstance(source, core.Literal) or source not in found:
                continue
            argument, path = found[source]
            (result,) = eqn.outvars
            found[result] = argument, [*path, eqn]
            if eqn.primitive is pack_p:
                made = [(each.primitive, tuple(sorted(each.params.items()))) for each in path]
                equal[result] = firsts.setdefault((argument, *made, eqn.params["spec"]), result)
        needed = {id(eqn) for var in firsts.values() for eqn in found[var][1]}
        eqns = [eqn for eqn in body.eqns if id(eqn) in needed]
        return _Packing(body, sorted({found[var][0] for var in equal}), eqns, equal)

    @property
    def results(self) -> list[Any]:
        """The variables of different packed values."""
        return list(dict.fromkeys(self.equal.values()))

    @property
    def bytes(self) -> int:
        return sum(math.prod(var.aval.shape) for var in self.results)

    def packed(self, values: Sequence[Any]) -> list[Any]:
        """Returns the packed values for arguments of the body."""
        return self._of(*[values[i] for i in self.arguments])

    def packed_stacks(self, values: Sequence[Any]) -> list[Any]:
        """Returns the packed values for all slices of the arguments, which are stacks."""
        return jax.vmap(self._of)(*[values[i] for i in self.arguments]) if self.results else []

    def _of(self, *values: Any) -> list[Any]:
        invars = [self.body.invars[i] for i in self.arguments]
        changes = {"constvars": [], "invars": invars, "eqns": self.eqns, "outvars": self.results}
        return jaxprs.eval_jaxpr(self.body.replace(**changes), (), *values)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop whose body has packed weights as its first arguments.

    Attributes:
        eqn: the loop before.
        body: its new body.
        consts: the number of other constants of the body.
        carries: the number of its carries.
        once: what packs the weights that are the same in each turn.
        each: what packs the weights that are slices.
    """

    eqn: Any
    body: Any
    consts: int
    carries: int
    once: _Packing
    each: _Packing

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Packs the weights and runs the loop."""
        return self._while(values) if self.eqn.primitive.name == "while" else self._scan(values)

    def _scan(self, values: Sequence[Any]) -> list[Any]:
        end = self.consts + self.carries
        shared, carry, slices = values[: self.consts], values[self.consts : end], values[end:]
        before, stacks = self.once.packed(values), self.each.packed_stacks(values)

        def turn(carry: list[Any], own: tuple[list[Any], list[Any]]) -> tuple[Any, Any]:
            packed, rest = own
            results = self._turn(*before, *packed, *shared, *carry, *rest)
            return results[: self.carries], results[self.carries :]

        params = self.eqn.params
        options = {name: params[name] for name in _OPTIONS if name in params}
        final, stacked = lax.scan(turn, [*carry], ([*stacks], [*slices]), **options)
        return [*final, *stacked]

    def _while(self, values: Sequence[Any]) -> list[Any]:
        first = self.eqn.params["cond_nconsts"]
        of_condition, arguments = values[:first], values[first:]
        shared, carry = arguments[: self.consts], arguments[self.consts :]
        before = self.once.packed(arguments)
        condition = self.eqn.params["cond_jaxpr"]
        holds = jaxprs.jaxpr_of(condition), getattr(condition, "consts", ())
        return lax.while_loop(
            lambda carry: jaxprs.eval_jaxpr(*holds, *of_condition, *carry)[0],
            lambda carry: self._turn(*before, *shared, *carry),
            [*carry],
        )

    def _turn(self, *arguments: Any) -> list[Any]:
        name = "body_jaxpr" if self.eqn.primitive.name == "while" else "jaxpr"
        consts = getattr(self.eqn.params[name], "consts", ())
        return jaxprs.eval_jaxpr(self.body, consts, *arguments)
