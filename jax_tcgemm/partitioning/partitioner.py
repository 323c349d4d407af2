"""The custom call that XLA's partitioner hands to us, and what becomes of it.

In a program that XLA divides among devices a primitive is one custom call of a name of its own,
with the primitive's parameters as text. How its dimensions go together is said by a sharding rule,
by which Shardy propagates shardings; XLA's partitioner then asks how the call is to be divided. The
answer is the program of one device: what lies elsewhere is gathered first, the primitive is applied
to parts, and sums are joined. All of that is made from the text and the shardings, so that programs
can be exported, kept in a cache and compiled without devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jax_tcgemm import _compat
from jax_tcgemm.lowering.log import log
from jax_tcgemm.partitioning.mesh import Digits, read_shardings, write_sharding
from jax_tcgemm.partitioning.plan import Plan, Work, make_plan
from jax_tcgemm.problem.serialize import from_json, to_json

TARGET = "jax_tcgemm_partitioned_v1"

# Which platforms' products are divided by the rules here: CUDA's by default, "everywhere" all (for
# tests, and to see on a CPU what a program does on GPUs), "never" none, which leaves XLA's own.
SETTING = "JAX_TCGEMM_PARTITION"

_AXIS = "devices"


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a primitive is divided.

    Attributes:
        accepts: whether operands of these types can be divided so; of the spec and the types.
        work: describes it; of the spec and the types of the call's operands.
        local: computes the results of one device; of a ``Shard``, the spec and its operands.
        classes: the dataclasses of its spec.
    """

    accepts: Callable[[Any, Sequence[Any]], bool]
    work: Callable[[Any, Sequence[Any]], Work]
    local: Callable[..., list[jax.Array]]
    classes: tuple[type, ...]


_RULES: dict[str, Rule] = {}


def register(primitive: Primitive, rule: Rule) -> None:
    """Says how a primitive is divided."""
    _RULES[primitive.name] = rule


@dataclasses.dataclass(frozen=True)
class Call:
    """What the custom call is told, as text.

    Attributes:
        primitive: its name.
        spec: its static parameters.
        platform: what the program is lowered for.
        devices: how many devices the program runs on.
        groups: the devices of each part of a mesh that is divided by hand (``shard_map``) in some
            of its axes, in each of which XLA divides the call anew; empty if there are none.
        x64: whether there are 64-bit types.
    """

    primitive: str
    spec: Any
    platform: str
    devices: int
    groups: tuple[tuple[int, ...], ...]
    x64: bool

    @property
    def rule(self) -> Rule:
        """How the primitive is divided."""
        return _RULES[self.primitive]

    @property
    def group_size(self) -> int:
        """How many devices the call is divided among."""
        return len(self.groups[0]) if self.groups else self.devices


def divides(platform: str) -> bool:
    """Says whether products are divided by the rules here on a platform.

    Raises:
        ValueError: the environment variable has another value than those it may have.
    """
    setting = os.environ.get(SETTING) or "cuda"
    if setting not in ("cuda", "everywhere", "never"):
        raise ValueError(f"{SETTING}={setting!r}; accepted: cuda, everywhere, never")
    return setting == "everywhere" or setting == platform


# Lowering


def accepts(primitive: Primitive, spec: Any, operands: Sequence[Any]) -> bool:
    """Says whether there is a rule for these operands of a primitive."""
    rule = _RULES.get(primitive.name)
    are_known = all(isinstance(extent, int) for x in operands for extent in x.shape)
    return rule is not None and are_known and rule.accepts(spec, operands)


def lower(primitive: Primitive, platform: str) -> Callable[..., Any]:
    """Returns the rule that lowers a primitive to the custom call."""

    def lowering(context: Any, *values: Any, spec: Any) -> Any:
        rule = _RULES[primitive.name]
        avals = context.avals_in
        call = Call(
            primitive.name,
            spec,
            platform,
            *_compat.devices_of(context),
            x64=_compat.option("jax_enable_x64"),
        )
        work = rule.work(spec, avals)
        return _compat.emit_partitioned(
            context,
            values,
            TARGET,
            to_json(call),
            operands=[array.dims for array in work.operands],
            results=[array.dims for array in work.results],
            summed=work.summed,
        )

    return lowering


# XLA's partitioner asks


def _read_call(text: bytes | str) -> Call:
    text = text.decode() if isinstance(text, bytes) else text
    classes = {each for rule in _RULES.values() for each in rule.classes}
    return from_json(text, (Call, *classes))


def _types(shapes: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(s.dimensions(), s.numpy_dtype()) for s in shapes]


def _elements(shape: Any, sharding: Any = None) -> tuple[list[Any], list[Any]]:
    """Returns the shapes of a result, which may be a tuple, and their shardings."""
    if not shape.is_tuple():
        return [shape], [sharding]
    shapes = list(shape.tuple_shapes())
    return shapes, [None] * len(shapes) if sharding is None else sharding.tuple_elements()


def _packed(shape: Any, shardings: list[Any]) -> Any:
    if not shape.is_tuple():
        return shardings[0]
    return _compat.xla_client.HloSharding.tuple_sharding(shape, shardings)


def _planned(
    call: Call, shapes: Sequence[Any], shardings: Sequence[Any], result: Any, wanted: Any
) -> Plan:
    """Plans a call; ``wanted`` is the result's sharding, ``None`` if that is to be found."""
    result_shapes, result_shardings = _elements(result, wanted)
    every = [*shapes, *result_shapes]
    ranks = [len(shape.dimensions()) for shape in every]
    devices, tilings = read_shardings([*shardings, *result_shardings], ranks, call.group_size)
    work = call.rule.work(call.spec, _types(shapes))
    count = len(shapes)
    return make_plan(work, devices, tilings[:count], None if wanted is None else tilings[count:])


# What alike calls became, of which a program may have many: one takes 10 ms.
_Division = tuple[bytes, list[Any], Any]
_DIVISIONS: dict[tuple[Any, ...], _Division] = {}
_MOST_DIVISIONS = 4096


def _partition(
    shapes: Sequence[Any], shardings: Sequence[Any], result: Any, wanted: Any, text: bytes
) -> _Division:
    key = (text, *map(str, (*shapes, *shardings, result, wanted)))
    if key not in _DIVISIONS:
        if len(_DIVISIONS) == _MOST_DIVISIONS:
            _DIVISIONS.clear()
        _DIVISIONS[key] = divide(shapes, shardings, result, wanted, text)
    return _DIVISIONS[key]


def divide(
    shapes: Sequence[Any], shardings: Sequence[Any], result: Any, wanted: Any, text: bytes
) -> _Division:
    """Divides a call among devices.

    Args:
        shapes: XLA's, of the operands.
        shardings: how they lie.
        result: the result's shape, of several that of a tuple.
        wanted: how it is to lie.
        text: what the call was told.

    Returns:
        The program of one device, serialised; how it takes its operands; how its results lie.
    """
    call = _read_call(text)
    plan = _planned(call, shapes, shardings, result, wanted)
    log(_described(call, plan, _types(shapes)))
    write = functools.partial(write_sharding, devices=plan.devices, xla_client=_compat.xla_client)
    operands = list(map(write, plan.operand_tilings))
    results = list(map(write, plan.result_tilings))
    local = [
        jax.ShapeDtypeStruct(sharding.tile(shape).dimensions(), shape.numpy_dtype())
        for sharding, shape in zip(operands, shapes, strict=True)
    ]
    shard = Shard(call, plan)

    def program(*values: jax.Array) -> list[jax.Array]:
        return call.rule.local(shard, call.spec, *values)

    with _own_configuration(call):
        module = _compat.program_of_one_device(program, local, _AXIS, call.devices, call.platform)
    return module, operands, _packed(result, results)


def _infer(shapes: Sequence[Any], shardings: Sequence[Any], result: Any, text: bytes) -> Any:
    """Returns how a result lies by itself, for GSPMD, which has no sharding rules."""
    plan = _planned(_read_call(text), shapes, shardings, result, None)
    return _packed(
        result,
        [write_sharding(t, plan.devices, _compat.xla_client) for t in plan.result_tilings],
    )


def _propagate(sharding: Any, shape: Any, text: bytes) -> Any:
    """Returns what a user of the result asks of it."""
    del shape, text
    return sharding


def _or_abort(function: Callable[..., Any]) -> Callable[..., Any]:
    """Prints what goes wrong before XLA, which knows no exceptions, ends the process."""

    @functools.wraps(function)
    def guarded(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException:
            print("jax_tcgemm: a product could not be divided among devices", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            raise

    return guarded


def install() -> None:
    """Registers the functions that XLA's partitioner calls; called once, on import."""
    _compat.register_partitioner(TARGET, _propagate, _or_abort(_partition), _or_abort(_infer))


@contextlib.contextmanager
def _own_configuration(call: Call) -> Iterator[None]:
    """Traces as the primitive was, whatever thread this is and whatever its user has set."""
    with (
        _compat.no_mesh(),
        jax.disable_jit(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision(None),
        jax.debug_nans(False),
        jax.enable_x64(call.x64),
    ):
        yield


def _described(call: Call, plan: Plan, types: Sequence[Any]) -> str:
    operands = ", ".join(f"{x.dtype}{list(x.shape)}" for x in types)
    layout = {name: plan.devices.parts(digits) for name, digits in plan.layout.items() if digits}
    parts = ", ".join(f"{name} by {count}" for name, count in layout.items()) or "nothing"
    moved = ", ".join(f"{what} ({size / 2**20:.3g} MiB)" for what, size in plan.moved)
    return (
        f"{call.primitive} {operands}: on {plan.devices.count} devices, dividing {parts}; "
        f"{moved or 'no collectives'}"
    )


# The program of one device


@dataclasses.dataclass(frozen=True)
class Shard:
    """What a device knows of the division while it computes its part.

    Attributes:
        call: the custom call.
        plan: how it is divided.
    """

    call: Call
    plan: Plan

    def _groups(self, digits: Digits) -> list[list[int]]:
        groups = self.plan.devices.groups(digits)
        if not self.call.groups:
            return groups
        return [[own[i] for i in group] for own in self.call.groups for group in groups]

    def _value(self, digits: Digits) -> jax.Array:
        """Returns the number that this device's digits form, int32."""
        values = np.zeros(self.call.devices, np.int32)
        own = self.plan.devices.values(digits)
        for group in self.call.groups or (tuple(range(self.call.devices)),):
            values[list(group)] = own
        return jnp.asarray(values)[lax.axis_index(_AXIS)]

    def start(self, name: str, *, after_sum: bool = False) -> jax.Array | int:
        """Returns where this device's part of a dimension begins, int32.

        Args:
            name: of the dimension.
            after_sum: whether that of a result is meant, which the sum may divide further.
        """
        digits, beyond = self.plan.layout[name], self.plan.scattered.get(name, ())
        part = self.plan.part(name)
        start = self._value(digits) * part if digits else 0
        if beyond and after_sum:
            start = start + self._value(beyond) * -(-part // self.plan.devices.parts(beyond))
        return start

    def without_padding(self, x: jax.Array, axis: int, name: str) -> jax.Array:
        """Zeros what lies beyond the end of a dimension: XLA leaves anything there."""
        if self.plan.is_even(name):
            return x
        left = self.plan.work.extents[name] - self.start(name)
        index = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(index < left, x, jnp.zeros_like(x))

    def total(self, x: jax.Array, result: int = 0) -> jax.Array:
        """Joins what devices have of a sum: of all of it, or each the part that it is to have."""
        digits = self.plan.summed_digits(result)
        dims = self.plan.work.results[result].dims
        for axis, name in enumerate(dims):
            own = self.plan.scattered.get(name, ()) if name is not None else ()
            if own and set(own) <= set(digits):
                digits = tuple(digit for digit in digits if digit not in own)
                parts = self.plan.devices.parts(own)
                x = lax.pad(
                    x,
                    x.dtype.type(0),
                    [(0, -x.shape[axis] % parts if i == axis else 0, 0) for i in range(x.ndim)],
                )
                x = lax.psum_scatter(
                    x,
                    _AXIS,
                    scatter_dimension=axis,
                    axis_index_groups=self._groups(own),
                    tiled=True,
                )
        return lax.psum(x, _AXIS, axis_index_groups=self._groups(digits)) if digits else x

    def halves_together(self, x: jax.Array, axis: int, name: str) -> jax.Array:
        """Gives a device its parts of both halves of what lies side by side and is divided as one.

        Of ``p`` devices the first have parts of the one half, the last of the other: of halves of
        parts, device ``d`` has numbers ``2 d`` and ``2 d + 1`` and needs ``d`` and ``p + d``.

        Args:
            x: a device's part.
            axis: along which.
            name: of the dimension that each half is.
        """
        groups = self._groups(self.plan.layout[name])
        p = len(groups[0])
        half = x.shape[axis] // 2
        has = lax.split(x, (half, half), axis=axis)

        def received(wanted: int, slot: int) -> jax.Array:
            pairs = [
                (group[(wanted * p + d) // 2], group[d])
                for group in groups
                for d in range(slot, p, 2)
            ]
            return lax.ppermute(has[slot], _AXIS, pairs)

        # Each comes from one slot, according to whether the device's number is even; 0 elsewhere.
        return jnp.concatenate([received(i, 0) + received(i, 1) for i in (0, 1)], axis=axis)
