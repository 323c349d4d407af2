"""The custom call that XLA's partitioner passes to us, and how it is divided.

In a program that XLA divides among devices, a primitive is one custom call with its own name and
with the primitive's parameters as text. A sharding rule says how its dimensions correspond, and
Shardy propagates shardings by it. XLA's partitioner then asks how to divide the call. The answer is
the program of one device: it gathers data from other devices, applies the primitive to parts, and
joins sums. The program depends only on the text and the shardings. So programs can be exported,
kept in a cache and compiled without devices.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jax_tcgemm import _compat
from jax_tcgemm._compat import partitioner as xla
from jax_tcgemm.kernels.table import TABLE_DIGEST
from jax_tcgemm.lowering import fallback
from jax_tcgemm.partitioning import overlap
from jax_tcgemm.partitioning.mesh import read_shardings, write_sharding
from jax_tcgemm.partitioning.plan import make_plan
from jax_tcgemm.partitioning.rules import REVISION, Call, parameter_classes, rule_of
from jax_tcgemm.partitioning.shard import AXIS, Shard
from jax_tcgemm.partitioning.work import Plan
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.serialize import from_json, to_json
from jax_tcgemm.tuning.tunings import active, recalled, remembered

TARGET = "jax_tcgemm_partitioned_v1"


# Lowering


def lower(primitive: Primitive, platform: str) -> Callable[..., Any]:
    """Returns the rule that lowers a primitive to the custom call."""

    def lowering(context: Any, *values: Any, spec: Any) -> Any:
        rule = rule_of(primitive.name)
        told = rule.told(spec)
        work = rule.work(told, context.avals_in)
        call = Call(
            primitive.name,
            told,
            platform,
            *xla.devices_of(context),
            x64=_compat.option("jax_enable_x64"),
            revision=REVISION,
            tunings=remembered(active()),
            kernels=TABLE_DIGEST,
            against=overlap.obstacle(context, work, platform),
        )
        return xla.emit_partitioned(
            context,
            values,
            TARGET,
            to_json(call),
            operands=[array.dims for array in work.operands],
            results=[array.dims for array in work.results],
            summed=work.summed,
            numbered=bool(call.groups),
        )

    return lowering


# Callbacks of XLA's partitioner


def _read_call(text: bytes | str) -> Call:
    text = text.decode() if isinstance(text, bytes) else text
    return from_json(text, parameter_classes())


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
    return xla.xla_client.HloSharding.tuple_sharding(shape, shardings)


def _planned(
    call: Call, shapes: Sequence[Any], shardings: Sequence[Any], result: Any, wanted: Any
) -> Plan:
    """Plans a call; ``wanted`` is the result's sharding, ``None`` if it is to be found."""
    result_shapes, result_shardings = _elements(result, wanted)
    if call.groups:  # drop the result by which XLA numbers the devices
        result_shapes, result_shardings = result_shapes[1:], result_shardings[1:]
    every = [*shapes, *result_shapes]
    ranks = [len(shape.dimensions()) for shape in every]
    devices, tilings = read_shardings([*shardings, *result_shardings], ranks, call.group_size)
    work = call.rule.work(call.spec, _types(shapes))
    count = len(shapes)
    results = None if wanted is None else tilings[count:]
    return make_plan(work, devices, tilings[:count], results, call.against)


_Division = tuple[bytes, list[Any], Any]

# The divisions of calls, each with its log line. A program may have many equal calls, and each
# division takes 10 ms.
_DIVISIONS: dict[tuple[Any, ...], tuple[_Division, str]] = {}
_MOST_DIVISIONS = 4096


def _partition(
    shapes: Sequence[Any], shardings: Sequence[Any], result: Any, wanted: Any, text: bytes
) -> _Division:
    key = (text, *map(str, (*shapes, *shardings, result, wanted)))
    known = _DIVISIONS.get(key)
    if known is None:
        division, line, is_reusable = divide(shapes, shardings, result, wanted, text)
        if not is_reusable:
            log(line)
            return division
        known = division, line
        if len(_DIVISIONS) >= _MOST_DIVISIONS:
            _DIVISIONS.clear()
        _DIVISIONS[key] = known
    division, line = known
    log(line)
    return division


def divide(
    shapes: Sequence[Any], shardings: Sequence[Any], result: Any, wanted: Any, text: bytes
) -> tuple[_Division, str, bool]:
    """Divides a call among devices.

    Args:
        shapes: XLA's shapes of the operands.
        shardings: shardings of the operands.
        result: shape of the result, a tuple's for several results.
        wanted: requested sharding of the result.
        text: parameters of the call.

    Returns:
        The division, a log line about it, and whether other calls can have the same division. The
        division is the serialized program of one device, the shardings of its operands, and the
        sharding of its result.
    """
    call = _read_call(text)
    plan = _planned(call, shapes, shardings, result, wanted)
    write = functools.partial(write_sharding, devices=plan.devices, xla_client=xla.xla_client)
    operands = list(map(write, plan.operand_tilings))
    results = list(map(write, plan.result_tilings))
    if call.groups:
        results.insert(0, write(((),)))
    local = [
        jax.ShapeDtypeStruct(sharding.tile(shape).dimensions(), shape.numpy_dtype())
        for sharding, shape in zip(operands, shapes, strict=True)
    ]
    shard = Shard(call, plan)

    def program(*values: jax.Array) -> list[jax.Array]:
        results = call.rule.local(shard, call.spec, *values)
        return [jnp.zeros(1, jnp.int32), *results] if call.groups else results

    with _own_configuration(call):
        module = xla.program_of_one_device(program, local, AXIS, call.devices, call.platform)
    division = module, operands, _packed(result, results)
    # A product with a transfer beside it has a number of its own.
    return division, _described(call, plan, _types(shapes)), not plan.overlap


def _infer(shapes: Sequence[Any], shardings: Sequence[Any], result: Any, text: bytes) -> Any:
    """Returns the sharding of a result by itself, for GSPMD, which has no sharding rules."""
    call = _read_call(text)
    plan = _planned(call, shapes, shardings, result, None)
    tilings = [*([((),)] if call.groups else []), *plan.result_tilings]
    return _packed(result, [write_sharding(t, plan.devices, xla.xla_client) for t in tilings])


def _propagate(sharding: Any, shape: Any, text: bytes) -> Any:
    """Returns the sharding that a user of the result requests."""
    del shape, text
    return sharding


def _printing_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Prints errors, because XLA may then end the process (under GSPMD it does)."""

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
    xla.register_partitioner(
        TARGET, _propagate, _printing_errors(_partition), _printing_errors(_infer)
    )


@contextlib.contextmanager
def _own_configuration(call: Call) -> Iterator[None]:
    """Restores the configuration in which the primitive was traced, on any thread."""
    with (
        recalled(call.tunings),
        fallback.lenient(),  # an error here would end the process
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
        f"{moved or 'no collectives'}" + f"; {plan.note}" * bool(plan.note)
    )
