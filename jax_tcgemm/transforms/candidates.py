"""Selects the configurations to time for a product: those that the time model puts near best."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tcgemm import _core
from jax_tcgemm.epilogue import compiler, translation
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels import names
from jax_tcgemm.kernels.arithmetic import ARITHMETIC
from jax_tcgemm.kernels.choice_input import ChoiceInput
from jax_tcgemm.kernels.names import read_config
from jax_tcgemm.lowering import jit_epilogue, jit_rows
from jax_tcgemm.lowering.jit_call import Call
from jax_tcgemm.lowering.row_epilogue import c_by_tma
from jax_tcgemm.problem.alignment import (
    COPY_BYTES,
    LINE_BYTES,
    layouts,
    misalignment,
    most_split_bytes,
    padding_bytes,
    row_alignment,
    unaligned_stride,
)
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, resolve_algorithm, written_dtype
from jax_tcgemm.problem.spec import GemmSpec, flatten, with_kernel_layouts
from jax_tcgemm.problem.strides import Operands, fold
from jax_tcgemm.tuning.lookup import Product

# The model's error is seldom above ``_FACTOR`` for the best configuration of a kind, and seldom
# above ``_NEAR`` for others of that kind.
_FACTOR, _NEAR = 2.0, 1.3
# On 1,800 recorded products, the best of this many takes 0.15 % longer than the best of all rows.
MOST = 10
# At most this many rows are few.
_MOST_FEW_ROWS = 64
# The algorithm whose rows have bfloat16 relatives.
_HALF = "F16_F16_F32"
# Further splits of one row take about the same time as the first ones.
_MOST_SPLITS_OF_A_ROW = 2


def is_batch_of_few_rows(product: Product) -> bool:
    """Returns true for a batch of products of 2 to 64 rows, as in a decode step."""
    if product.primitive != "gemm":
        return False
    problem = _of_gemm(product, is_hopper=True)
    return problem["batch"] > 1 and 2 <= problem["m"] <= _MOST_FEW_ROWS


def candidates(product: Product, device: Mapping[str, Any], most: int = MOST) -> list[str]:
    """Returns the names of configurations, the fastest first by the time model.

    Args:
        product: the product to compute.
        device: the result of ``_core.device_properties``.
        most: the maximum number of names.
    """
    if product.spec.function is not None:
        return _of_compiled(product, device, most)
    return _spread(_ranked(product, device, run_time_rows=compiler.may_compile_rows()), most)


def built_candidates(product: Product, device: Mapping[str, Any], most: int = MOST) -> list[str]:
    """Returns the candidates that the build contains; none for the user's own epilogue.

    Kernels are left out if the model puts them far behind a kernel that must be compiled first.

    Args:
        product: the product to compute.
        device: the result of ``_core.device_properties``.
        most: the maximum number of names.
    """
    if product.spec.function is not None:
        return []
    possible = _ranked(product, device, run_time_rows=True)
    near = {config for config, cycles, _ in possible if cycles <= _FACTOR * possible[0][1]}
    built = _ranked(product, device, run_time_rows=False)
    return _spread([each for each in built if each[0] in near], most)


def algorithm_of(product: Product) -> str:
    """Returns the name of the algorithm (the types and precision) of a product."""
    return json.loads(product.problem)["algorithm"]


def relative(product: Product) -> Product | None:
    """Returns a similar product for which the build has rows.

    It is the product without its epilogue, in bfloat16 instead of float16. Rows rank about equally
    for both products. ``None`` if it would equal the product, or if there is none, as for 8-bit
    operands.
    """
    spec, types = product.spec, product.types
    if spec.function is not None:
        types, _ = spec.split(types)
        spec = spec.product
    if types[0].dtype.itemsize < 2:
        return None
    if spec.is_grouped:
        primitive = product.primitive.replace("compiled_ragged", "ragged_dot")
    else:
        x = spec.unflatten(types[: len(spec.operand_names)])
        spec = spec.accumulators(config=None)
        primitive, types = "gemm", tuple(flatten(spec.select(x)))
    if algorithm_of(product) == _HALF:
        is_wide = spec.out_dtype.itemsize > 2
        out = spec.out_dtype if is_wide else jnp.dtype(jnp.bfloat16)
        precision = (jax.lax.Precision.DEFAULT,) * 2  # instead of a float16 preset
        spec = dataclasses.replace(spec, out_dtype=out, precision=precision)
        types = tuple(
            jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.dtype == jnp.float16 else x.dtype)
            for x in types
        )
    if (spec, types) == (product.spec, product.types):
        return None
    return Product(primitive, spec, types, product.problem)


def rows_of_relative(
    product: Product, configs: Sequence[str], device: Mapping[str, Any]
) -> list[str]:
    """Returns a product's configurations that correspond to those of its relative.

    Others are left out if they cannot compute the product, or less accurately than it should be.

    Args:
        product: the product to compute.
        configs: configurations of ``relative(product)``.
        device: the result of ``_core.device_properties``.
    """
    if algorithm_of(product) == _HALF:
        configs = [config.replace("_bf16_", "_f16_") for config in configs]
    if product.spec.function is None:
        ranked = _ranked(product, device, run_time_rows=compiler.may_compile_rows())
    else:
        calls = _calls(product)
        ranked = [x for call in calls for x in jit_rows.ranked_rows(call, product.spec, device)]
    possible = {name for name, _, _ in ranked}
    return [config for config in configs if config in possible]


def _spread(ranked: Sequence[tuple[str, float, bool]], most: int) -> list[str]:
    """Returns the configurations near the best, and the best of each kind and split."""
    chosen: list[str] = []
    of_row: dict[str, int] = {}
    kinds: set[tuple[Any, ...]] = set()
    for config, cycles, _ in ranked:
        row, splits = read_config(config)
        if cycles > _FACTOR * ranked[0][1] or len(chosen) == most:
            break
        found = names.by_name(row)
        kind = found.arch, found.schedule, found.skinny, found.swap_ab, splits
        if kind in kinds and cycles > _NEAR * ranked[0][1]:
            continue
        if splits > 1:
            of_row[row] = of_row.get(row, 0) + 1
        if of_row.get(row, 0) <= _MOST_SPLITS_OF_A_ROW:
            kinds.add(kind)
            chosen.append(config)
    return chosen


def _ranked(
    product: Product, device: Mapping[str, Any], *, run_time_rows: bool
) -> list[tuple[str, float, bool]]:
    is_hopper = device["compute_capability"] == 90
    problem = _of_groups(product) if product.spec.is_grouped else _of_gemm(product, is_hopper)
    choice = ChoiceInput(
        **problem,
        sm_count=device["sm_count"],
        shared_memory_per_block=device["shared_memory_per_block"],
        compute_capability=device["compute_capability"],
        run_time_rows=run_time_rows,
    )
    return _core.rank_configs(choice, dense_splits=True)


def _of_compiled(product: Product, device: Mapping[str, Any], most: int) -> list[str]:
    """Returns the candidates for a product with the user's own epilogue.

    For few rows of 8-bit operands, separate kernels read the weights as stored or transposed. The
    model does not compare the times of the two groups, so the result has some of each.
    """
    calls = _calls(product)
    chosen: list[str] = []
    for call in calls:
        ranked = jit_rows.ranked_rows(call, product.spec, device)
        near = [name for name, cycles, _ in ranked if cycles <= _FACTOR * ranked[0][1]]
        chosen += _with_both_kinds(near, most // len(calls))
    return chosen


def _calls(product: Product) -> list[Call]:
    """Returns the calls of a product with a function, one for each layout that kernels may read."""
    spec: CompiledSpec = product.spec
    own, _ = spec.split(product.types)
    made = translation.translate(spec.function)
    assert not isinstance(made, str), product  # lowering looks up only functions that translate
    calls: dict[str, Call] = {}
    for may_stream in (True, False):
        call = jit_epilogue.planned(own, spec, made, may_stream=may_stream)
        assert not isinstance(call, str), product
        calls.setdefault(call.layout, call)
    return list(calls.values())


def _with_both_kinds(rows: Sequence[str], most: int) -> list[str]:
    """Returns the first rows, but a later one for the last if no other is (or is not) skinny."""
    chosen = list(rows[:most])
    kinds = {_is_skinny(row) for row in chosen}
    other = next((row for row in rows if _is_skinny(row) not in kinds), None)
    return chosen if other is None or most < 2 else [*chosen[:-1], other]


def _is_skinny(config: str) -> bool:
    return names.by_name(read_config(config)[0]).skinny


def _of_gemm(product: Product, is_hopper: bool) -> dict[str, Any]:
    """Returns the model's input, like ``choice_input`` of ``cuda/dispatch/dispatch.cc``."""
    spec: GemmSpec = product.spec
    x: Operands = spec.unflatten(product.types)
    algorithm = _algorithm(product, x.a, x.b)
    shapes = Operands(*(None if operand is None else operand.shape for operand in x))
    spec, permutations = with_kernel_layouts(spec, shapes)
    shapes = Operands(
        *(
            shape if order is None else tuple(shape[axis] for axis in order)
            for shape, order in zip(shapes, permutations, strict=True)
        )
    )
    gemm = fold(spec.strided(shapes))
    itemsize = INPUT_DTYPES[algorithm].itemsize
    out = written_dtype(algorithm, spec.out_dtype)
    fits_tma = len(gemm.batch) <= _core.MAX_TMA_BATCH_RANK
    # As pad_unaligned_operands of cuda/dispatch/operand_copies.cc.
    by_tma = is_hopper and fits_tma and ARITHMETIC[algorithm].wgmma
    may_pad = not spec.is_gated and padding_bytes(gemm, itemsize) > 0
    odd = {name for name in ("a", "b") if misalignment(gemm, name, itemsize)}
    odd_for_tma = {name for name in odd if unaligned_stride(gemm, name, itemsize)}
    padded = (odd_for_tma if by_tma else odd) if may_pad else set()
    return {
        "algorithm": algorithm,
        "m": gemm.m,
        "n": gemm.n,
        "k": gemm.k,
        "batch": math.prod(gemm.batch),
        "batch_rank": len(gemm.batch),
        "aligned": odd <= padded,
        "tma_addressable": odd_for_tma <= padded and fits_tma,
        "float32_result": out.itemsize > itemsize,
        "layout": layouts(gemm),
        "workspace_bytes": 0 if spec.is_gated else most_split_bytes(gemm),
        "epilogue": spec.work,
        "gated": spec.is_gated,
        "row_alignment_a": row_alignment(gemm, "a", itemsize, is_padded="a" in padded),
        "row_alignment_b": row_alignment(gemm, "b", itemsize, is_padded="b" in padded),
        "d_by_tma": gemm.n * out.itemsize % COPY_BYTES == 0,
        "has_c": x.c is not None,
        "c_by_tma": c_by_tma(gemm, x.c, out),
    }


def _of_groups(product: Product) -> dict[str, Any]:
    """Returns the model's input for groups of equal size, like ``cuda/dispatch/ragged.cc``."""
    spec: GemmSpec = product.spec
    lhs, rhs, sizes, *_ = product.types
    algorithm = _algorithm(product, lhs, rhs)
    groups = sizes.shape[0]
    by_rows = spec.grouped == "m"
    multiple = COPY_BYTES // 2  # extents are padded to a multiple of it
    (rows, k), n = lhs.shape, rhs.shape[spec.axes.b[-1]]
    k, n = (-(-extent // multiple) * multiple for extent in (k, n))
    mean = -(-rows // groups)
    row_a, row_b = k, k if spec.transposes_b else n
    itemsize = lhs.dtype.itemsize
    return {
        "algorithm": algorithm,
        "m": mean if by_rows else k,
        "n": n,
        "k": k if by_rows else mean,
        "batch": groups,
        "aligned": True,
        "float32_result": written_dtype(algorithm, spec.out_dtype).itemsize > itemsize,
        "row_alignment_a": math.gcd(LINE_BYTES, row_a * itemsize),
        "row_alignment_b": math.gcd(LINE_BYTES, row_b * itemsize),
        "layout": "nt" if spec.transposes_b else "nn" if by_rows else "tn",
        "epilogue": spec.work,
        "grouped": spec.grouped,
    }


def _algorithm(product: Product, a: Any, b: Any) -> str:
    spec = product.spec
    algorithm = resolve_algorithm(a.dtype, b.dtype, spec.out_dtype, spec.precision)
    assert algorithm is not None, product  # lowering looks up only products with an algorithm
    return algorithm
