"""How a gemm, gated or not, is divided among devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.lowering import overlapped, overlapped_rows, reference
from jax_tcgemm.lowering.devices import program_of
from jax_tcgemm.lowering.fallback import possible_planes
from jax_tcgemm.lowering.overlapped import Exchange
from jax_tcgemm.partitioning.rules import Rule
from jax_tcgemm.partitioning.shard import Shard
from jax_tcgemm.partitioning.work import GATHER, GATHER_A, GATHER_B, SCATTER, SUM, Array, Work
from jax_tcgemm.problem.arithmetic import (
    accumulator_dtype,
    resolve_algorithm,
    resolve_run_time,
    types_of_parts,
)
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.spec import GemmSpec, check_config
from jax_tcgemm.problem.strides import ROLES, Operands

# The platforms with calls that transfer rows beside a product.
_PLATFORMS = ("cuda",)

# The products that gather an operand, and the operand.
_GATHERS = {
    GATHER: (overlapped_rows.gathered_product, "a"),
    GATHER_A: (functools.partial(overlapped.gathered_along_k, operand="a"), "a"),
    GATHER_B: (functools.partial(overlapped.gathered_along_k, operand="b"), "b"),
}

# The products whose parts of a sum travel.
_SCATTERS = {
    SCATTER: overlapped_rows.scattered_product,
    SUM: functools.partial(overlapped.scattered_product, kind=overlapped.SUM_OF_D),
}

# The operands that are multiplied; all others belong to the epilogue.
_FACTORS = ("a", "b", "b2")


def rule(bind: Any) -> Rule:
    """Returns the rule of ``gemm_p``; ``bind`` applies it to operands and a spec."""
    return Rule(accepts, work, functools.partial(_local, bind), (GemmSpec, Epilogue))


def accepts(spec: GemmSpec, types: Sequence[Any]) -> bool:
    """Checks if a kernel can compute this; XLA divides its own products itself."""
    x = spec.unflatten(types)
    arguments = (*types_of_parts(x.a.dtype, x.b.dtype, spec.out_dtype), spec.precision)
    if resolve_algorithm(*arguments) is not None:
        return True
    if spec.is_gated:
        return False
    is_quantized = spec.work == "none" and resolve_run_time(*arguments) is not None
    return is_quantized or possible_planes(*arguments) is not None


def _names(spec: GemmSpec, operand: str) -> tuple[str | None, ...]:
    """Returns the name of each dimension of an operand."""
    roles = (*(f"batch{i}" for i in range(spec.batch_ndim)), *getattr(ROLES, operand))
    pairs = zip(getattr(spec.axes, operand), roles, strict=True)
    return tuple(role for _, role in sorted(pair for pair in pairs if pair[0] is not None))


def result_dims(spec: GemmSpec) -> tuple[str, ...]:
    """Returns the name of each dimension of a result."""
    return (*(f"batch{i}" for i in range(spec.batch_ndim)), "m", "n")


def work(spec: GemmSpec, types: Sequence[Any]) -> Work:
    """Describes the product, given ``spec`` and the types of its operands."""
    arrays, extents = [], {}
    for name, each in zip(spec.operand_names, types, strict=True):
        dims = _names(spec, name)
        packs = spec.packed and name == "b"
        arrays.append(Array(dims, each.dtype.itemsize * (1 + packs), name))
        for dim, size in zip(dims, each.shape, strict=True):
            extents[dim] = size // 2 if packs and dim == "n" else size
    result = Array(result_dims(spec), spec.out_dtype.itemsize, "the result")
    return Work(
        extents=extents,
        operands=tuple(arrays),
        product=result,
        results=(result,) * spec.result_count,
        factors=frozenset(i for i, name in enumerate(spec.operand_names) if name in _FACTORS),
        operations=2.0 * _products_of_elements(spec) * math.prod(extents.values()),
        packed="n" if spec.packed else None,
        rows=result_dims(spec)[:-1],
        overlaps=_overlaps(spec, types),
    )


def _overlaps(spec: GemmSpec, types: Sequence[Any]) -> frozenset[str]:
    """Returns the transfers of rows that can run beside the product."""
    x = spec.unflatten(types)
    has_batch = any(axis is not None for axis in spec.axes.b[:-2])
    is_alike = x.a.dtype == x.b.dtype and x.a.dtype.itemsize == 2
    if has_batch or spec.packed or not is_alike:
        return frozenset()
    if spec.is_gated:
        return frozenset((GATHER,))
    # The gradient of a weight. Other operands that are divided along k are weights (FSDP). XLA runs
    # a reduce-scatter of the gradient beside other products.
    if (spec.axes.a, spec.axes.b) == ((1, 0), (0, 1)):
        return frozenset((GATHER, GATHER_A, GATHER_B) if spec.work == "none" else (GATHER,))
    # A product with a transposed weight is mostly the gradient of an activation. XLA runs its
    # all-reduce beside the gradient of the weight.
    is_transposed = spec.axes.b[-2:] != tuple(sorted(spec.axes.b[-2:]))
    return frozenset((GATHER, SCATTER, *(() if is_transposed else (SUM,))))


def _products_of_elements(spec: GemmSpec) -> int:
    """Returns the number of real products for each pair of elements of A and B."""
    if jnp.issubdtype(spec.out_dtype, jnp.complexfloating):
        return 4
    return 1 + spec.is_gated


def _local(bind: Any, shard: Shard, spec: GemmSpec, *operands: jax.Array) -> list[jax.Array]:
    x = spec.unflatten(operands)
    gathers = _GATHERS.get(shard.plan.overlap)
    if gathers is not None:
        product, operand = gathers
        results = _with_kernels(product, shard, spec, x)
        if results is not None:
            return results
        x = x._replace(**{operand: shard.gathered(getattr(x, operand))})
    x, products = summed(shard, spec, x, bind)
    if products is None:
        return bind(x, with_local_config(spec, x))
    return reference.epilogue(products, x, spec)


def summed(
    shard: Shard, spec: GemmSpec, x: Operands, bind: Any
) -> tuple[Operands, list[jax.Array] | None]:
    """Computes only the products if data has to travel between them and an epilogue.

    Args:
        shard: the shard of the device.
        spec: the static parameters.
        x: the operands of a device.
        bind: applies ``gemm_p``.

    Returns:
        The operands, of which a packed weight may have been exchanged. Then the products, or
        ``None`` if nothing has to travel.
    """
    is_exchanged = spec.packed and bool(shard.plan.layout["n"])
    if is_exchanged and shard.plan.smaller_packed().label == "b":
        x = x._replace(b=shard.halves_together(x.b, spec.axes.b[-1], "n"))
        is_exchanged = False
    if not is_exchanged and not shard.plan.summed_digits():
        return x, None
    factors = {
        name: shard.without_padding(getattr(x, name), getattr(spec.axes, name)[at], "k")
        for name, at in (("a", -1), ("b", -2), ("b2", -2))
        if getattr(x, name) is not None
    }
    x = x._replace(**factors)
    scattered = _SCATTERS.get(shard.plan.overlap)
    if scattered is not None:
        product = spec.product(out_dtype=_travelling_dtype(x, spec), config=spec.config_of_products)
        results = _with_kernels(scattered, shard, product, Operands(x.a, x.b))
        if results is not None:
            return x, results
    products = _products(x, with_local_config(spec, x), bind)
    if is_exchanged:
        (both,) = products
        products = [shard.halves_together(both, both.ndim - 1, "n")]
    if spec.packed:
        # The split comes before the sum, which may divide the columns of each.
        products = reference.halves(*products)
    return x, [shard.total(product) for product in products]


def _with_kernels(
    product: Callable[..., list[jax.Array] | str], shard: Shard, spec: GemmSpec, x: Operands
) -> list[jax.Array] | None:
    """Computes a product with a transfer beside it; ``None`` if XLA has to transfer the rows.

    Args:
        product: a function of ``lowering.overlapped``.
        shard: the shard of the device.
        spec: the primitive's parameters.
        x: the operands of the device.
    """
    local = with_local_config(spec, x)
    return with_transfer(lambda exchange: product(x, local, exchange), shard, result_dims(spec))


def with_transfer(
    compute: Callable[[Exchange], list[jax.Array] | str], shard: Shard, names: Sequence[str]
) -> list[jax.Array] | None:
    """Does the same for any function of the devices that exchange rows.

    Args:
        compute: returns the results, or why there is no such call.
        shard: the shard of the device.
        names: the names of a result's dimensions.
    """
    if shard.call.platform not in _PLATFORMS:
        return None
    with program_of(shard.call.devices, runs_here=True):
        results = compute(shard.exchange(names))
    if isinstance(results, str):
        log(f"the {shard.plan.overlap} is not overlapped after all: {results}")
        return None
    return results


def _products(x: Operands, spec: GemmSpec, bind: Any) -> list[jax.Array]:
    """Computes only the products; a packed weight gives one product of all columns."""
    dtype = _travelling_dtype(x, spec)
    if spec.packed:
        product = spec.product(out_dtype=dtype, config=spec.config_of_products)
        return bind(Operands(x.a, x.b), product)
    partial = spec.accumulators(out_dtype=dtype, config=spec.config_of_products)
    return bind(partial.select(x), partial)


def _travelling_dtype(x: Operands, spec: GemmSpec) -> np.dtype:
    """Returns the type in which parts of a sum are joined: that of jnp's programs.

    It is the result's type. Exception: float16 sums before an epilogue, which may overflow before
    it scales them down, are joined in the accumulator's type.
    """
    if spec.work == "none" or spec.out_dtype == jnp.bfloat16:
        return spec.out_dtype
    return accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)


def with_local_config(spec: GemmSpec, x: Operands) -> GemmSpec:
    """Drops a named configuration whose kernel cannot compute a device's part."""
    shapes = Operands(*(None if operand is None else operand.shape for operand in x))
    try:
        check_config(spec, Operands(x.a.dtype, x.b.dtype), shapes)
    except ValueError as error:
        log(f"of a device's part: {error}")
        return spec.replace(config=None)
    return spec
