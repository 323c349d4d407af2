"""How a gemm, gated or not, with a user's function as its epilogue is divided.

The product is divided as without a function (``products.py``), and each device applies the function
to its part. Reductions over rows or columns are joined over devices. Values that follow from them
are computed after that.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue import portable, rng, translation
from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.epilogue.part import Part
from jax_tcgemm.epilogue.portable import Joined, Number, Operation, PortableFunction
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels.names import NO_ROWS, XLA
from jax_tcgemm.lowering.overlapped import Exchange
from jax_tcgemm.lowering.overlapped_function import gathered_function
from jax_tcgemm.partitioning import products
from jax_tcgemm.partitioning.rules import Rule
from jax_tcgemm.partitioning.shard import Shard
from jax_tcgemm.partitioning.work import GATHER, SCATTER, SUM, Array, Work
from jax_tcgemm.problem.arithmetic import accumulator_dtype, is_quantized
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.problem.strides import Operands


@dataclasses.dataclass(frozen=True)
class DividedSpec:
    """``CompiledSpec`` in the form that the custom call carries.

    Attributes:
        product: the product.
        function: the epilogue.
        unfused: as in ``CompiledSpec``. It is ``function`` where XLA can only round the product:
            for example, if values follow from joined reductions, because ``Part.after`` takes
            the reductions in their types in ``function``.
    """

    product: GemmSpec
    function: PortableFunction
    unfused: PortableFunction | None = None


_Apply = Callable[[Sequence[jax.Array], CompiledSpec], list[jax.Array]]
_Multiply = Callable[[Operands, GemmSpec], list[jax.Array]]


def rule(apply: _Apply, multiply: _Multiply) -> Rule:
    """Returns the rule of ``compiled_p``.

    Args:
        apply: binds ``compiled_p`` to operands and a spec.
        multiply: binds ``gemm_p``.
    """
    local = functools.partial(_local, apply, multiply)
    classes = (DividedSpec, PortableFunction, Operation, Number, Joined, GemmSpec, Epilogue)
    return Rule(_accepts, _work, local, classes, _told)


def _portable(spec: CompiledSpec) -> PortableFunction | str:
    return portable.portable(spec.function, products.result_dims(spec.product))


def _unfused(spec: CompiledSpec, function: PortableFunction) -> PortableFunction | None:
    """Returns the function with which XLA computes the same values of a device's part."""
    if spec.unfused is None:
        return None
    unfused = portable.portable(spec.unfused, products.result_dims(spec.product))
    if function.joined or isinstance(unfused, str) or _places(unfused) != _places(function):
        return function
    return unfused


def _places(function: PortableFunction) -> list[int | None]:
    """Returns each result's place among the values that are computed within the kernel."""
    made = function.made_within
    return [made.index(x) if isinstance(x, int) and x in made else None for x in function.results]


def _accepts(spec: CompiledSpec, types: Sequence[Any]) -> bool:
    """Checks if a kernel can compute this; XLA divides all else itself."""
    own, others = spec.split(types)
    if spec.scaled or not products.accepts(spec.product, own):
        return False
    has_keys = any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in others)
    reason = "random numbers" if has_keys else translation.translate(spec.function)
    if not isinstance(reason, str):
        reason = _portable(spec)
    if isinstance(reason, str):
        log(f"the product is divided without its function, which XLA divides: {reason}")
        return False
    return True


def _told(spec: CompiledSpec) -> DividedSpec:
    function = _portable(spec)
    assert isinstance(function, PortableFunction)
    return DividedSpec(spec.product, function, _unfused(spec, function))


def _work(spec: DividedSpec, types: Sequence[Any]) -> Work:
    function, count = spec.function, len(spec.product.operand_names)
    work = products.work(spec.product, types[:count])
    others = tuple(
        Array(portable.dim_names(dims), each.dtype.itemsize, f"operand {i} of the function")
        for i, (dims, each) in enumerate(
            zip(function.arguments[function.accumulators :], types[count:], strict=True)
        )
    )
    results = tuple(
        Array(portable.dim_names(dims), spec.product.out_dtype.itemsize, "the result")
        for dims in function.result_dims
    )
    return dataclasses.replace(
        work,
        operands=(*work.operands, *others),
        results=results,
        whole=work.whole.union(*(each.over for each in function.joined)),
        overlaps=work.overlaps & {SCATTER, SUM, *((GATHER,) if _is_by_rows(function) else ())},
    )


def _is_by_rows(function: PortableFunction) -> bool:
    """Checks if the rows of a function's results can be computed apart."""
    names = {operation.name for operation in function.operations}
    return not function.joined and not names & {"iota", *rng.DRAWS, *rng.KEYS}


def _local(
    apply: _Apply, multiply: _Multiply, shard: Shard, spec: DividedSpec, *operands: jax.Array
) -> list[jax.Array]:
    function, count = spec.function, len(spec.product.operand_names)
    own, others = operands[:count], operands[count:]
    wide = accumulator_dtype(own[0].dtype, own[1].dtype, spec.product.out_dtype)
    # 8-bit kernels exist only with functions.
    of_8_bits = is_quantized(own[0].dtype, own[1].dtype) and spec.product.config != XLA
    alone = spec.product
    if of_8_bits and alone.config not in NO_ROWS:
        alone = alone.replace(config=None)
    alone, x = alone.replace(out_dtype=wide), spec.product.unflatten(own)
    names = products.result_dims(spec.product)
    extents = {name: shard.plan.part(name, after_sum=True) for name in names}
    # Computed outside the function, because a kernel cannot ask which device it runs on.
    starts = {name: shard.start(name, after_sum=True) for name in names}
    part = Part(function, extents, starts)
    if not of_8_bits:
        spec = dataclasses.replace(spec, product=products.with_local_config(spec.product, x))
    made = None
    if shard.plan.overlap == GATHER:
        made = products.with_transfer(
            lambda exchange: _beside_gather(part, spec, x, wide, others, exchange), shard, names
        )
        if made is None:
            x = x._replace(a=shard.gathered(x.a))
    if made is None:
        x, sums = products.summed(shard, alone, x, multiply)
        if sums is None:
            made = apply(*_within_kernel(part, spec, x, wide, others))
        else:
            made = part.within(*sums, *others)
    return part.after(part.joined(made, shard.joined), others)


def _within_kernel(
    part: Part, spec: DividedSpec, x: Operands, wide: Any, others: Sequence[jax.Array]
) -> tuple[list[jax.Array], CompiledSpec]:
    """Returns the operands and the spec of the product with the function's part."""
    count = part.function.accumulators
    accumulator = jax.ShapeDtypeStruct(tuple(part.extents.values()), wide)
    types = [accumulator] * count + [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in others]
    function, held = functions.trace(part.within, types, count)
    made = CompiledSpec(spec.product, function)
    if spec.unfused is not None:
        own = dataclasses.replace(part, function=spec.unfused)
        types[:count] = [accumulator.update(dtype=spec.product.out_dtype)] * count
        made = made.replace(unfused=_unfused_part(part, own, wide, types, held))
    return [*flatten(x), *others, *held], made


def _unfused_part(
    part: Part, own: Part, wide: Any, types: Sequence[Any], held: Sequence[jax.Array]
) -> EpilogueFunction | None:
    """Returns the part of the function that XLA computes.

    Args:
        part: the part within a kernel.
        own: the part in the operations of the user's program, or ``part``.
        wide: type of the accumulators within a kernel.
        types: types of the products as the program stores them, and of the operands.
        held: the arrays that the part within a kernel closes over.
    """
    count = part.function.accumulators

    def rounded(*values: jax.Array) -> list[jax.Array]:
        return part.within(*(z.astype(wide) for z in values[:count]), *values[count:])

    for within in (rounded,) if own.function == part.function else (own.within, rounded):
        function, arrays = functions.trace(within, types, count)
        if len(arrays) == len(held) and all(map(operator.is_, arrays, held)):
            return function
    return None


def _beside_gather(
    part: Part,
    spec: DividedSpec,
    x: Operands,
    wide: Any,
    others: Sequence[jax.Array],
    exchange: Exchange,
) -> list[jax.Array] | str:
    """Computes the same of all rows, of which ``x.a`` has those of this device."""
    operands, whole = _within_kernel(part, spec, x, wide, others)
    count = len(flatten(x))
    return gathered_function(operands[:count], operands[count:], whole, exchange)
