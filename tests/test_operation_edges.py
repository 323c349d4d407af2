"""Every operation in every type is translated or a known exception, and NVRTC compiles it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import operation_edges as edges
import pytest

from jax_tcgemm.epilogue import cubins, function, nvrtc, operations, translation


def _not_translated(dtype):
    """Returns 8-bit reductions to fewer bits than the type has: XLA makes large numbers NaN."""
    if dtype not in edges.FLOATS[3:]:
        return set()
    info = jnp.finfo(dtype)
    fewer = [kept for kept in edges.PRECISIONS if kept[0] < info.nexp or kept[1] < info.nmant]
    return {f"reduce_precision {kept}" for kept in fewer}


def _translated(case):
    types = [jax.ShapeDtypeStruct((edges.M, edges.N), jnp.dtype(each)) for each in case.types]
    product = jax.ShapeDtypeStruct((edges.M, edges.N), jnp.float32)
    made, _ = function.trace(
        lambda product, *x: [edges.in_kernel(case.call, product, x)], [product, *types], 1
    )
    return translation.translate(made)


def _function(number, program):
    """Returns C++ with the statements of a program."""
    kinds = [operations.element(leaf.dtype).value for leaf in program.leaves]
    operands = ", ".join(f"const {kind}* x{i}" for i, kind in enumerate(kinds))
    result = operations.element(program.matrices[0].dtype).value
    return (
        f"__global__ void f{number}(const Io io, {operands}, {result}* y, int i) {{\n"
        + "\n".join(program.lines)
        + f"\ny[i] = {program.written[0]};\n}}\n"
    )


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", edges.TYPES)
def test_every_operation_is_translated_and_compiles(dtype):
    found = nvrtc.find()
    assert not isinstance(found, str), found
    functions, refused = [], set()
    for case in edges.cases(dtype):
        program = _translated(case)
        if isinstance(program, str):
            refused.add(case.name)
        else:
            functions.append(_function(len(functions), program))
    assert refused == _not_translated(dtype)
    source = '#include "epilogue/compiled_rounding.cuh"\n'
    source += "namespace jax_tcgemm {\nstruct Io { float acc[1][1]; };\n" + "".join(functions)
    assert len(functions) > 10
    assert found.compile(source + "}\n", "sm_90a", cubins.include_folders())


@pytest.mark.any_jax
def test_all_names_are_tried():
    tried = set()
    for dtype in edges.TYPES:
        for case in edges.cases(dtype):
            operands = [jax.ShapeDtypeStruct((2,), jnp.dtype(each)) for each in case.types]
            jaxpr = jax.make_jaxpr(case.call)(*operands).jaxpr
            tried.update(eqn.primitive.name for eqn in jaxpr.eqns)
    missing = operations.ELEMENTWISE - tried
    known = {"add_any", "copy", "copy_p", "stop_gradient", "optimization_barrier", "name"}
    assert missing - {"one_minus_square"} == known
