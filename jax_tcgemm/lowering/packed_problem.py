"""The measured choice for a product with packed weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_tcgemm.kernels import packed_configs
from jax_tcgemm.kernels.names import KERNEL, XLA
from jax_tcgemm.lowering import devices, fallback
from jax_tcgemm.problem.packed import BITS, PackedSpec
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.entry import problem_key

# Names of the primitives in ``lookup.Product``.
PLAIN, FUNCTION, RAGGED = "packed", "packed_function", "packed_ragged"
PRIMITIVES = (PLAIN, FUNCTION, RAGGED)


def measured_config(
    primitive: str,
    operands: Sequence[Any],
    spec: Any,
    m: int,
    *,
    count: int = 1,
    experts: int = 0,
    epilogue: Mapping[str, Any] | None = None,
) -> tuple[str | None, str]:
    """Returns the requested or measured configuration, and a text that says where it was found.

    The configuration is ``None`` if the table of rows decides.

    Args:
        primitive: one of ``PRIMITIVES``.
        operands: operands of the primitive.
        spec: the parameters of the primitive.
        m: number of rows, of all groups if there are experts.
        count: number of matrices that have a weight each.
        experts: number of groups of rows that have a weight each, 0 without such groups.
        epilogue: what identifies the function of the products.
    """
    product: PackedSpec = spec.product if primitive == FUNCTION else spec
    weights: int = spec.weights if primitive == FUNCTION else 1
    strict = fallback.is_strict(product.config)
    if product.config not in (None, KERNEL):
        return product.config, ", by config"
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    problem = problem_key(
        op=primitive,
        algorithm=product.qtype,
        m=m,
        n=product.n,
        k=product.k,
        batch=[count] if count > 1 else [],
        groups=experts,
        scale_group=product.group,
        has_zeros=product.has_zeros,
        weights=weights,
        dtypes=[types[0].dtype.name, types[2].dtype.name, product.out_dtype.name],
        epilogue=dict(epilogue or {}),
    )
    if len(candidates(problem)) < 2:  # nothing to compare
        return None, ""
    found = devices.find_choice(lookup.Product(primitive, spec.with_config(None), types, problem))
    if found is None or not packed_configs.can_be(found[0].config, product.bits, weights):
        return None, ""
    if strict and found[0].config == XLA:
        return None, f", though not by {found[1]}"
    return found[0].config, f", by {found[1]}"


def candidates(problem: str) -> list[str]:
    """Returns the configurations that are worth timing, the untuned one first.

    Args:
        problem: the tuning key of a product with packed weights.
    """
    fields = json.loads(problem)
    return packed_configs.candidates(
        BITS[fields["algorithm"]],
        (fields["m"], fields["n"], fields["k"]),
        fields["scale_group"],
        count=math.prod(fields["batch"]),
        weights=fields["weights"],
        experts=fields["groups"],
    )
