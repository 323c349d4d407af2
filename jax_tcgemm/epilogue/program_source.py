"""C++ source of programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from jax_tcgemm.epilogue.operations import element
from jax_tcgemm.epilogue.program import Program


def of_program(
    program: Program,
    kinds: Sequence[tuple[str, bool]],
    by_vectors: Sequence[bool],
    *,
    batched: bool,
    scaled: bool = False,
) -> str:
    """Returns the C++ of a program; ``cuda/epilogue/compiled_output.cuh`` describes it.

    Args:
        program: the epilogue.
        kinds: for each leaf, the dimensions along which it varies, as ``Along`` names them, and
            whether it is read by vectors.
        by_vectors: for each result, whether it is written by vectors.
        batched: whether there is more than one matrix.
        scaled: whether the factors have block scales.
    """
    loads, types = [], []
    for number, (leaf, (along, is_vector)) in enumerate(zip(program.leaves, kinds, strict=True)):
        kind = element(leaf.dtype).cpp
        loads.append(f"    const auto x{number} = io.template {_LOADS[along]}<{kind}, {number}>();")
        size = jnp.dtype(leaf.dtype).itemsize
        types.append(f"{{Along::{along}, {size}, {str(is_vector).lower()}}}")
    results = [
        f"{{{jnp.dtype(result.dtype).itemsize}, {str(is_vector).lower()}}}"
        for result, is_vector in zip(program.matrices, by_vectors, strict=True)
    ]
    kinds_of = [element(each.dtype).cpp for each in program.outputs]
    declared = [f"    ValueOf<{kind}> r{i}[kValues];" for i, kind in enumerate(kinds_of)]
    values = (*program.written, *(each.value for each in program.reductions))
    stored = [f"      r{i}[i] = {value};" for i, value in enumerate(values)]
    count = len(results)
    writes = [f"    io.template write<{kinds_of[i]}, {i}>(r{i});" for i in range(count)]
    reductions = [
        (f"<{kinds_of[i]}, {i}, Along::{each.along}, {each.join}>", i, each.neutral)
        for i, each in enumerate(program.reductions, count)
    ]
    writes += [f"    io.template reduce{which}(r{i}, {zero});" for which, i, zero in reductions]
    visits = [f"    visitor.template reduction{which}({zero});" for which, _, zero in reductions]
    return _PROGRAM.format(
        batched=str(batched).lower(),
        scaled=str(scaled).lower(),
        operands=len(types),
        operand_kinds=", ".join(types) or "{Along::kNothing, 4, false}",
        results=len(results),
        result_kinds=", ".join(results) or "{4, false}",
        reductions=len(reductions),
        shows_sums=str(program.shows_sums).lower(),
        visits="\n".join(visits),
        loads="\n".join([*loads, *declared]),
        lines="\n".join([*(f"      {line}" for line in program.lines), *stored]),
        writes="\n".join(writes),
    )


_LOADS: Mapping[str, str] = {
    "kNothing": "scalar",
    "kRows": "rows",
    "kColumns": "columns",
    "kMatrix": "matrix",
}

_PROGRAM = """\
struct Program {{
  static constexpr bool kBatched = {batched};
  static constexpr bool kBlockScales = {scaled};
  static constexpr int kOperands = {operands};
  static constexpr CompiledOperandKind kOperand[] = {{{operand_kinds}}};
  static constexpr int kResults = {results};
  static constexpr CompiledResultKind kResult[] = {{{result_kinds}}};
  static constexpr int kReductions = {reductions};
  static constexpr bool kShowsSums = {shows_sums};

  template <typename Visitor>
  static __device__ __forceinline__ void each_reduction(const Visitor& visitor) {{
{visits}
  }}
  template <typename Io>
  static __device__ __forceinline__ void run(const Io& io) {{
    constexpr int kValues = Io::kValues;
{loads}
#pragma unroll
    for (int i = 0; i < kValues; ++i) {{
{lines}
    }}
{writes}
  }}
}};
"""
