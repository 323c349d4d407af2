"""Lowering of products over groups of rows to one custom call on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _extension
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.lowering import devices, fallback, quantized
from jax_tcgemm.lowering.custom_call import shapes_of
from jax_tcgemm.lowering.ragged_reference import reference_product
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.alignment import COPY_BYTES
from jax_tcgemm.problem.arithmetic import (
    INPUT_DTYPES,
    is_quantized,
    resolve_algorithm,
    written_dtype,
)
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.entry import problem_key

_FLOAT32 = jnp.dtype(jnp.float32)


def cuda_ragged(*operands: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """Computes a product over groups on CUDA devices; ``ragged_reference`` defines it."""
    x = spec.unflatten(operands)
    by_rows = spec.grouped == "m"
    if by_rows and is_quantized(x.a.dtype, x.b.dtype) and spec.config != kernel_names.XLA:
        described = _describe(operands, spec)
        return quantized.cuda_product(operands, spec, described, reference_product)
    algorithm, spec = _kernel_algorithm(operands, spec)
    if algorithm is None:
        return reference_product(*operands, spec=spec)
    shape = spec.result_shape(shapes_of(x))
    out_dtype = written_dtype(algorithm, spec.out_dtype)
    x = x._replace(**{name: _padded(getattr(x, name), INPUT_DTYPES[algorithm]) for name in "ab"})
    if x.bias is not None:
        x = x._replace(bias=_padded(x.bias, out_dtype if x.bias.dtype == out_dtype else _FLOAT32))
    padded = spec.strided(shapes_of(x))
    result = jax.ShapeDtypeStruct(spec.result_shape(shapes_of(x)), out_dtype)
    call = jax.ffi.ffi_call(_extension.RAGGED_DOT_TARGET, (result,) * spec.result_count)
    results = call(
        *flatten(x),
        groups=np.int64(padded.batch[0]),
        m=np.int64(padded.m),
        n=np.int64(padded.n),
        k=np.int64(padded.k),
        depth=not by_rows,
        transpose_rhs=spec.transposes_b,
        has_bias=x.bias is not None,
        has_aux=spec.result_count > 1,
        **resolve(spec.activation).attributes,
        algorithm=algorithm,
        config=spec.config or "",
    )
    inside = tuple(slice(extent) for extent in shape)
    return [result[inside].astype(spec.out_dtype) for result in results]


def _padded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts ``x`` and pads its last dimensions with zeros, so that TMA can step over them.

    ``k`` and ``n`` become multiples of 16 bytes of 16-bit elements. The number of rows is
    arbitrary.
    """
    multiple = COPY_BYTES // 2
    kept = 2 if x.ndim == 3 else 1
    widths = [(0, 0)] * (x.ndim - kept) + [(0, -extent % multiple) for extent in x.shape[-kept:]]
    x = x.astype(dtype)
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def _kernel_algorithm(operands: Sequence[jax.Array], spec: GemmSpec) -> tuple[str | None, GemmSpec]:
    """Returns the algorithm of the kernels for a product, or None if there are none.

    The second value is ``spec`` with the fastest measured configuration.
    """
    lhs, rhs, group_sizes = operands[:3]
    extents = (*lhs.shape, *rhs.shape, *group_sizes.shape)
    strict = fallback.is_strict(spec.config) and 0 not in extents
    if spec.config == kernel_names.KERNEL:
        spec = spec.with_config(None)
    algorithm = resolve_algorithm(lhs.dtype, rhs.dtype, spec.out_dtype, spec.precision)
    reason, source = fallback.no_ragged_kernel(algorithm, spec, extents), ""
    if algorithm is not None and reason is None and spec.config is None:
        found = devices.find_choice(_product(operands, spec, algorithm))
        config = found and found[0].config
        is_refused = strict and config == kernel_names.XLA
        can_be = kernel_names.can_be(config, algorithm, grouped=spec.grouped)
        if found and can_be and not is_refused:
            spec = spec.with_config(config)
            source = f", config {config or 'by heuristic'}, by {found[1]}"
            reason = fallback.no_ragged_kernel(algorithm, spec, extents)
    call = _describe(operands, spec)
    if reason is not None:
        fallback.report(call, reason + source, strict=strict)
        return None, spec
    log(f"{call}: {algorithm}{source}")
    if kernel_names.is_row(spec.config) and spec.config not in _extension.KERNEL_NAMES:
        raise ValueError(f"config={spec.config!r} is not in this build of jax_tcgemm")
    return algorithm, spec


def _describe(operands: Sequence[Any], spec: GemmSpec) -> str:
    shapes = " x ".join(f"{x.dtype}{list(x.shape)}" for x in operands[:2])
    return f"ragged product, groups of {spec.grouped}, {shapes} -> {spec.out_dtype}"


def _product(operands: Sequence[jax.Array], spec: GemmSpec, algorithm: str) -> lookup.Product:
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    gemm = spec.strided(shapes_of(spec.unflatten(types)))
    lhs, rhs, _, *bias = types
    by_rows = spec.grouped == "m"
    activation = spec.activation and resolve(spec.activation).name
    problem = problem_key(
        op=f"ragged_{spec.grouped}",
        algorithm=algorithm,
        layout="nt" if spec.transposes_b else "nn" if by_rows else "tn",
        m=gemm.m,
        n=gemm.n,
        k=gemm.k,
        groups=gemm.batch[0],
        dtypes=[x.dtype.name for x in (lhs, rhs, *bias)] + [spec.out_dtype.name],
        epilogue={
            "has": [part for part in (activation, "bias" * len(bias)) if part],
            "results": list(spec.epilogue.results),
        },
    )
    primitive = "ragged_dot" if by_rows else "ragged_contraction"
    return lookup.Product(primitive, spec, types, problem)
