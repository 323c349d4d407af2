"""Lowering of a product with a user's epilogue to a custom call with its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_tcgemm import _compat, _extension
from jax_tcgemm.epilogue import compiler, translation
from jax_tcgemm.epilogue.program import Program
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels.arithmetic import ALL_ARITHMETIC, Arithmetic
from jax_tcgemm.kernels.names import KERNEL, XLA
from jax_tcgemm.lowering import devices, fallback, jit_problem, layout
from jax_tcgemm.lowering.custom_call import (
    second_weight_offset,
    shapes_of,
)
from jax_tcgemm.lowering.jit_call import Call
from jax_tcgemm.lowering.jit_rows import expected_row
from jax_tcgemm.lowering.jit_source import (
    MOST_WARP_BYTES,
    most_result_bytes,
    result_bytes,
    source_of,
    warp_bytes,
)
from jax_tcgemm.problem.alignment import bytes_of_added_parts
from jax_tcgemm.problem.arithmetic import resolve_algorithm, resolve_run_time
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.spec import GemmSpec, with_kernel_layouts
from jax_tcgemm.problem.strides import MAX_EXTENT, Shape, StridedGemm, fold_beside


def cuda_compiled(
    *operands: jax.Array, spec: CompiledSpec, composed: Callable[..., list[jax.Array]]
) -> list[jax.Array]:
    """Computes the primitives on CUDA devices.

    Args:
        *operands: operands of the product, then those of the function.
        spec: the static parameters.
        composed: computes the primitive by the product and operations of JAX.
    """
    is_empty = any(0 in x.shape for x in operands)
    strict = fallback.is_strict(spec.product.config) and not is_empty
    if spec.product.config == KERNEL:
        spec = spec.with_config(None)
    own, others = spec.split(operands)
    made = translation.translate(spec.function)
    told = ""
    if isinstance(made, str):
        call = made
    else:
        spec, plan, told = _tuned(operands, spec, made, strict)
        if not strict:
            plan = _slower(own, spec, plan) or plan
        call = _call_or_reason(spec, plan)
    kind = "gated gemm" if spec.is_gated else "gemm"
    kind = "gemm scaled by blocks" if spec.scaled else kind
    kind = "ragged dot" if spec.is_grouped else kind
    described = f"{kind} {_types(operands)} with a function"
    if isinstance(call, str):
        if isinstance(call, fallback.SlowerThanXla) and spec.product.config is None:
            fallback.report(f"{described}: the product and the function", call, strict=strict)
            return composed(*operands, spec=spec.with_config(XLA))
        fallback.report(f"{described}: the function", call + told, strict=strict)
        return composed(*operands, spec=spec)
    log(f"{described}: compiled into the kernel ({len(call.program.leaves)} operands){told}")
    return call.emit(own, others, spec)


def _slower(own: Sequence[Any], spec: CompiledSpec, plan: Call | str) -> str | None:
    """Returns why XLA takes less time for the product, whatever its function, if so.

    It may for few rows. GPUs other than Hopper's take only rows that a measurement or the call
    names, because nobody has timed functions there.
    """
    if isinstance(plan, str) or spec.product.config is not None:
        return None
    other = devices.other_than(devices.HOPPER)
    if other is not None:
        return fallback.SlowerThanXla(f"a function on {other} that was not tuned")
    if not plan.is_few:
        return None
    return fallback.slower_than_xla(plan.algorithm, spec.product, spec.product.unflatten(own))


def kernel_call(
    own: Sequence[Any], others: Sequence[Any], spec: CompiledSpec
) -> tuple[CompiledSpec, Call] | str:
    """Returns the custom call of a product with a function, although XLA may be faster.

    The call has no workspace, so it does not split k.

    Args:
        own: the types of the product's operands.
        others: the types of the function's operands.
        spec: the static parameters.

    Returns:
        ``spec`` with the fastest known configuration, and the call; or why there is none.
    """
    made = translation.translate(spec.function)
    if isinstance(made, str):
        return made
    other = devices.other_than(devices.HOPPER)
    if other is not None:
        return f"no kernel on {other}"
    if spec.product.config == KERNEL:
        spec = spec.with_config(None)
    spec, plan, _ = _tuned([*own, *others], spec, made, strict=True)
    if not isinstance(plan, str):
        plan = dataclasses.replace(plan, workspace_bytes=0)
    call = _call_or_reason(spec, plan)
    return call if isinstance(call, str) else (spec, call)


def _tuned(
    operands: Sequence[Any], spec: CompiledSpec, made: Program, strict: bool
) -> tuple[CompiledSpec, Call | str, str]:
    """Returns ``spec`` with the fastest measured configuration, a plan and a text.

    The plan is the result of ``planned`` for that ``spec``. The text says where the measurement was
    found.
    """
    own, _ = spec.split(operands)
    plan = planned(own, spec, made)
    if isinstance(plan, str) or spec.product.config is not None:
        return spec, plan, ""
    config, told = jit_problem.measured_config(
        operands, spec, plan.gemm, plan.algorithm, plan.source
    )
    if strict and config == XLA:
        return spec, plan, ""
    if config is None:
        return spec, plan, told
    spec = spec.with_config(config)
    return spec, planned(own, spec, made), told


def _call_or_reason(spec: CompiledSpec, plan: Call | str) -> Call | str:
    """Returns the custom call, or why there is none.

    The kernel is compiled first if that is possible now.
    """
    if isinstance(plan, str):
        return plan
    row = expected_row(plan, spec)
    if row is None and _compat.initialized_cuda_devices():
        return "no row of the kernel table has room for the function"
    return compiler.obstacle(plan.source, row, devices.compute_capability()) or plan


def planned(
    own: Sequence[Any], spec: CompiledSpec, made: Program, *, may_stream: bool = True
) -> Call | str:
    """Returns the custom call, or why there can be none.

    Args:
        own: operands of the product.
        spec: the static parameters.
        made: the translated function.
        may_stream: whether kernels for few 8-bit rows may read weights in place.
    """
    may_stream = may_stream and not spec.scaled and own[0].dtype.itemsize == 1
    plan = _planned(own, spec, made, may_stream)
    if isinstance(plan, str) and may_stream:  # the layout of the weights may be the reason
        return _planned(own, spec, made, may_stream=False)
    return plan


def _planned(own: Sequence[Any], spec: CompiledSpec, made: Program, may_stream: bool) -> Call | str:
    """Does the same without trying another value of ``may_stream``."""
    product = spec.product
    if product.config == XLA:
        return "by config"
    if _extension.COMPILED_TARGET not in _extension.BUILT_TARGETS:
        return "no kernels were built"
    a, b = own[:2]
    algorithm = _algorithm(a.dtype, b.dtype, product)
    if algorithm is None:
        return f"no kernel for functions of products of {a.dtype} and {b.dtype}"
    reason = _no_rows_here(spec, ALL_ARITHMETIC[algorithm])
    if reason is not None:
        return reason
    factors: dict[str, layout.Factor] = {}
    arithmetic = ALL_ARITHMETIC[algorithm]
    if arithmetic.at_run_time and arithmetic.k_major:
        if any(not isinstance(extent, int) for x in own for extent in x.shape):
            return "symbolic shapes"
        own, product, factors = layout.of_product(own, product, may_stream)
    scales = layout.scale_steps(own, spec)
    strided = _strided(own, product, made, [along_mn for along_mn, _ in scales])
    if isinstance(strided, str):
        return strided
    gemm, strides = strided
    made = made.folded(gemm)
    count = len(made.leaves)
    strides, beside = strides[:count], strides[count:]
    scale_strides = tuple(
        (*folded[: len(folded) - len(last)], *last)
        for folded, (_, last) in zip(beside, scales, strict=True)
    )
    offset = second_weight_offset(gemm, product)
    has_one_weight = not (spec.is_gated or product.is_grouped)
    is_plain = has_one_weight and a.dtype.itemsize == b.dtype.itemsize == 2
    reason = fallback.unfit_for_functions(
        gemm,
        offset,
        arithmetic.a.bytes,
        is_gated=spec.is_gated,
        is_grouped=product.is_grouped,
    )
    reason = reason or fallback.slower_function(gemm, made, is_plain)
    if reason is not None:
        return reason
    streams = any(factor.stays for factor in factors.values())
    kind = {"gated": spec.is_gated, "grouped": product.grouped, "streams": streams}
    most = most_result_bytes(algorithm, **kind)
    if result_bytes(made) > most:
        return f"results that take {result_bytes(made)} bytes of {most} a warp has"
    needed = warp_bytes(made, strides, gemm.n)
    if needed > MOST_WARP_BYTES:
        return f"operands and results that take {needed} bytes of {MOST_WARP_BYTES} a warp has"
    source_text = source_of(made, strides, gemm.n, batched=bool(gemm.batch), scaled=spec.scaled)
    ordered = tuple(factors.values())
    call = Call(made, source_text, gemm, strides, algorithm, needed, ordered, scale_strides)
    if not has_one_weight or arithmetic.a.bytes == 1:
        return call
    return dataclasses.replace(call, workspace_bytes=bytes_of_added_parts(gemm))


def _no_rows_here(spec: CompiledSpec, arithmetic: Arithmetic) -> str | None:
    """Returns why no row of a local GPU takes functions of such products, if so."""
    old = devices.local_device(lambda capability: capability < devices.AMPERE)
    if old is not None:
        return f"no kernel on {old}"
    other = devices.other_than(devices.HOPPER)
    if other is None:
        return None
    if spec.is_gated or spec.is_grouped or spec.scaled or arithmetic.at_run_time:
        return f"no kernel for functions of such products on {other}"
    return devices.not_built_for()


def _algorithm(a: np.dtype, b: np.dtype, product: GemmSpec) -> str | None:
    """Returns the arithmetic of a product that can have a compiled epilogue, if it can."""
    types = a, b, product.out_dtype, product.precision
    found = resolve_run_time(*types) or resolve_algorithm(*types)
    if found is None:
        return None
    row = ALL_ARITHMETIC[found]
    if row.rounds_operands and (product.is_gated or product.is_grouped):
        return None  # the table has no such rows
    return found if row.at_run_time or row.wgmma else None


def _strided(
    own: Sequence[Any], spec: GemmSpec, made: Program, beside: Sequence[Shape]
) -> tuple[StridedGemm, tuple[Shape, ...]] | str:
    """Returns the gemm and the strides of the leaves, or why there are none.

    The gemm is folded, except for groups, which stay its batch.

    Args:
        own: operands of the product, and any others that go with it.
        spec: the product.
        made: the program.
        beside: further strides along ``(*batch, m, n)``, folded like those of the leaves.
    """
    x = spec.unflatten(own[: len(spec.operand_names)])
    shapes = shapes_of(x)
    extents = (*x.a.shape, *x.b.shape)
    if not all(isinstance(extent, int) for extent in extents):
        return "symbolic shapes"
    if max(extents) > MAX_EXTENT:
        return "an extent beyond 2^30"
    if with_kernel_layouts(spec, shapes)[0] != spec:
        return "an operand without a contiguous axis"
    gemm = spec.strided(shapes)
    if spec.is_grouped:
        if made.reductions:
            return "a reduction over what groups divide"
        return gemm, tuple((0, *leaf.strides(2)) for leaf in made.leaves)
    leaves = tuple(leaf.strides(spec.batch_ndim + 2) for leaf in made.leaves)
    gemm, strides = fold_beside(gemm, (*leaves, *beside), keeps_rows=made.keeps_rows)
    if made.flat_rows and gemm.batch:
        return "an index along a batch"
    return gemm, strides


def _types(operands: Sequence[Any]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in operands)
