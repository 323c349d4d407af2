"""The tuning key of a product with a user's epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_tcgemm import _core
from jax_tcgemm.epilogue import source, translation
from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.lowering import devices
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import StridedGemm
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.entry import problem_key


def measured_config(
    operands: Sequence[Any], spec: CompiledSpec, gemm: StridedGemm, algorithm: str, program: str
) -> tuple[str | None, str]:
    """Returns the fastest measured configuration, and a text that says where it was found.

    Args:
        operands: operands of the product, then those of the function.
        spec: the static parameters, without a configuration.
        gemm: the product as a kernel sees it.
        algorithm: a row of the arithmetic table.
        program: the function in C++.
    """
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    primitive = "compiled_ragged" if spec.is_grouped else "compiled"
    problem = _problem(types, spec, gemm, algorithm, program)
    found = devices.find_choice(lookup.Product(primitive, spec, types, problem))
    if found is None or not _can_be(found[0].config, spec, algorithm):
        return None, ""
    return found[0].config, f", config {found[0].config or 'by heuristic'}, by {found[1]}"


def _can_be(config: str | None, spec: CompiledSpec, algorithm: str) -> bool:
    """Checks if a configuration is for such products with a function as epilogue."""
    grouped = spec.product.grouped
    if not kernel_names.can_be(config, algorithm, gated=spec.is_gated, grouped=grouped):
        return False
    if config in (None, kernel_names.XLA):
        return True
    row, _ = kernel_names.read_config(config)
    facts = _core.row_facts(row)
    return facts.takes_reductions if spec.function.reduces else facts.takes_functions


def _problem(
    types: Sequence[Any], spec: CompiledSpec, gemm: StridedGemm, algorithm: str, program: str
) -> str:
    """Returns the tuning key of the product: all that its time depends on."""
    own, _ = spec.split(types)
    op = "gated" if spec.is_gated else "gemm"
    extents: dict[str, Any] = {"batch": list(gemm.batch)}
    if spec.is_grouped:
        op, extents = f"ragged_{spec.product.grouped}", {"groups": gemm.batch[0]}
    return problem_key(
        op=op,
        algorithm=algorithm,
        layout=_layout(own, spec.product),
        m=gemm.m,
        n=gemm.n,
        k=gemm.k,
        **extents,
        dtypes=[x.dtype.name for x in own] + [x.dtype.name for x in spec.function.results],
        strides={name: list(getattr(gemm.strides, name)) for name in ("a", "b")},
        epilogue={
            "has": ["function"],
            "program": source.digest(program)[:16],
            **({"unfused": _lines(spec.unfused)} if spec.unfused is not None else {}),
        },
    )


def _lines(function: EpilogueFunction) -> str:
    """Returns a digest of a function that XLA computes: of its operations in C++, if possible.

    The C++ depends less on the version of JAX than the jaxpr.
    """
    made = translation.translate(function)
    if isinstance(made, str):
        return function.key.digest.hex()[:16]
    return source.digest("\n".join((*made.lines, *made.written)))[:16]


def _layout(own: Sequence[Any], product: GemmSpec) -> str:
    """Returns the layouts of the factors before any is transposed."""
    x = product.unflatten(own[: len(product.operand_names)])
    k_of_a, n_of_b = product.axes.a[-1], product.axes.b[-1]
    return ("n" if k_of_a == x.a.ndim - 1 else "t") + ("n" if n_of_b == x.b.ndim - 1 else "t")
