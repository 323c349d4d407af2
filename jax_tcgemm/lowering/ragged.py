"""Lowering of products over groups of rows to one custom call on CUDA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _extension
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.lowering import devices, fallback, quantized, ragged_reference
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.alignment import COPY_BYTES
from jax_tcgemm.problem.arithmetic import (
    INPUT_DTYPES,
    is_quantized,
    resolve_algorithm,
    written_dtype,
)
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.ragged import RaggedSpec
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.entry import problem_key

_FLOAT32 = jnp.dtype(jnp.float32)


def cuda_dot(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *bias: jax.Array, spec: RaggedSpec
) -> list[jax.Array]:
    """Computes the ragged product on CUDA devices; see ``ragged_reference``."""
    operands = (lhs, rhs, group_sizes, *bias)
    if is_quantized(lhs.dtype, rhs.dtype) and spec.config != kernel_names.XLA:
        return _quantized(operands, spec)
    algorithm, spec = _kernel_algorithm("m", operands, spec)
    if algorithm is None:
        return ragged_reference.reference_dot(lhs, rhs, group_sizes, *bias, spec=spec)
    n = rhs.shape[1 if spec.transpose_rhs else 2]
    out_dtype = written_dtype(algorithm, spec.out_dtype)
    padded = [_padded(x, INPUT_DTYPES[algorithm]) for x in (lhs, rhs)]
    padded += [group_sizes]
    padded += [_padded(x, x.dtype if x.dtype == out_dtype else _FLOAT32) for x in bias]
    activation = resolve(spec.activation)
    p0, p1 = (*activation.parameters, 0.0, 0.0)[:2]
    padded_n = padded[1].shape[1 if spec.transpose_rhs else 2]
    results = _custom_call(
        padded,
        jax.ShapeDtypeStruct((lhs.shape[0], padded_n), out_dtype),
        spec.result_count,
        m=np.int64(lhs.shape[0]),
        n=np.int64(padded_n),
        k=np.int64(padded[0].shape[1]),
        depth=False,
        transpose_rhs=spec.transpose_rhs,
        has_bias=len(bias) > 0,
        has_aux=spec.result_count > 1,
        activation=activation.cpp_name,
        activation_p0=np.float32(p0),
        activation_p1=np.float32(p1),
        algorithm=algorithm,
        config=spec.config or "",
    )
    return [result[:, :n].astype(spec.out_dtype) for result in results]


def _quantized(operands: Sequence[jax.Array], spec: RaggedSpec) -> list[jax.Array]:
    """Computes an 8-bit product by a kernel compiled for it, or in ``jax.lax``."""
    lhs, rhs, _, *bias = operands
    if bias or spec.activation is not None or spec.result_count > 1:
        call = _describe("m", operands, spec)
        strict = fallback.is_strict(spec.config)
        fallback.report(call, "more than a product of 8-bit operands", strict=strict)
        return ragged_reference.reference_dot(*operands, spec=spec)
    n = rhs.shape[1 if spec.transpose_rhs else 2]
    shape = (lhs.shape[0], n)
    return quantized.cuda_product(
        *operands, spec=spec, shape=shape, reference=ragged_reference.reference_dot
    )


def cuda_contraction(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, spec: RaggedSpec
) -> list[jax.Array]:
    """Computes the contraction on CUDA devices; see ``ragged_reference.reference_contraction``."""
    algorithm, spec = _kernel_algorithm("k", (lhs, rhs, group_sizes), spec)
    if algorithm is None:
        return ragged_reference.reference_contraction(lhs, rhs, group_sizes, spec=spec)
    padded = [_padded(x, INPUT_DTYPES[algorithm]) for x in (lhs, rhs)]
    (rows, m), (_, n) = (x.shape for x in padded)
    shape = (group_sizes.shape[0], m, n)
    (result,) = _custom_call(
        [*padded, group_sizes],
        jax.ShapeDtypeStruct(shape, written_dtype(algorithm, spec.out_dtype)),
        1,
        m=np.int64(m),
        n=np.int64(n),
        k=np.int64(rows),
        depth=True,
        transpose_rhs=False,
        has_bias=False,
        has_aux=False,
        activation="",
        activation_p0=np.float32(0),
        activation_p1=np.float32(0),
        algorithm=algorithm,
        config=spec.config or "",
    )
    return [result[:, : lhs.shape[1], : rhs.shape[1]].astype(spec.out_dtype)]


def _custom_call(
    operands: list[jax.Array], result: jax.ShapeDtypeStruct, count: int, **attributes: Any
) -> list[jax.Array]:
    """Emits the custom call; ``cuda/ffi/ragged.cc`` reads the same attributes."""
    call = jax.ffi.ffi_call(_extension.RAGGED_DOT_TARGET, (result,) * count)
    return list(call(*operands, groups=np.int64(operands[2].shape[0]), **attributes))


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


def _kernel_algorithm(
    grouped: str, operands: Sequence[jax.Array], spec: RaggedSpec
) -> tuple[str | None, RaggedSpec]:
    """Returns the algorithm of the kernels for a product, or None if there are none.

    The second value is ``spec`` with the fastest measured configuration.
    """
    lhs, rhs, group_sizes, *bias = operands
    is_empty = 0 in (*lhs.shape, *rhs.shape, *group_sizes.shape)
    strict = fallback.is_strict(spec.config) and not is_empty
    if spec.config == kernel_names.KERNEL:
        spec = dataclasses.replace(spec, config=None)
    is_plain = not bias and spec.activation is None and spec.result_count == 1
    work = "none" if is_plain else "any"
    algorithm = resolve_algorithm(lhs.dtype, rhs.dtype, spec.out_dtype, spec.precision)
    extents = (*lhs.shape, *rhs.shape, *group_sizes.shape)
    reason = fallback.no_ragged_kernel(algorithm, grouped, work, extents, spec.config)
    source = ""
    if algorithm is not None and reason is None and spec.config is None:
        found = devices.find_choice(_product(grouped, operands, spec, algorithm))
        config = found and found[0].config
        is_refused = strict and config == kernel_names.XLA
        if found and not is_refused and kernel_names.can_be(config, algorithm, grouped=grouped):
            spec = dataclasses.replace(spec, config=config)
            source = f", config {config or 'by heuristic'}, by {found[1]}"
            reason = fallback.no_ragged_kernel(algorithm, grouped, work, extents, spec.config)
    call = _describe(grouped, operands, spec)
    if reason is not None:
        fallback.report(call, reason + source, strict=strict)
        return None, spec
    log(f"{call}: {algorithm}{source}")
    if kernel_names.is_row(spec.config) and spec.config not in _extension.KERNEL_NAMES:
        raise ValueError(f"config={spec.config!r} is not in this build of jax_tcgemm")
    return algorithm, spec


def _describe(grouped: str, operands: Sequence[Any], spec: RaggedSpec) -> str:
    shapes = " x ".join(f"{x.dtype}{list(x.shape)}" for x in operands[:2])
    return f"ragged product, groups of {grouped}, {shapes} -> {spec.out_dtype}"


def _product(
    grouped: str, operands: Sequence[jax.Array], spec: RaggedSpec, algorithm: str
) -> lookup.Product:
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    lhs, rhs, sizes, *bias = types
    (m, k), n = lhs.shape, rhs.shape[1 if spec.transpose_rhs or grouped == "k" else 2]
    if grouped == "k":
        m, k = k, m
    activation = spec.activation and resolve(spec.activation).name
    problem = problem_key(
        op=f"ragged_{grouped}",
        algorithm=algorithm,
        layout={"m": "nt" if spec.transpose_rhs else "nn", "k": "tn"}[grouped],
        m=m,
        n=n,
        k=k,
        groups=sizes.shape[0],
        dtypes=[x.dtype.name for x in (lhs, rhs, *bias)] + [spec.out_dtype.name],
        epilogue={
            "has": [part for part in (activation, "bias" * len(bias)) if part],
            "results": list(spec.epilogue.results),
        },
    )
    primitive = "ragged_dot" if grouped == "m" else "ragged_contraction"
    return lookup.Product(primitive, spec, types, problem)
