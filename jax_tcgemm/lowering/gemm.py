"""Lowering: on CUDA a gemm becomes one custom call, and the reference where there is no kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_tcgemm import _extension
from jax_tcgemm.kernels.table import by_name
from jax_tcgemm.lowering import reference
from jax_tcgemm.lowering.custom_call import custom_call, shapes_of
from jax_tcgemm.lowering.log import log
from jax_tcgemm.lowering.obstacles import obstacle
from jax_tcgemm.lowering.row_epilogue import lacks_epilogue
from jax_tcgemm.problem.arithmetic import resolve_algorithm, written_dtype
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, fold

# Rows up to which the time of a product is that of reading the weights.
_FEW_ROWS = 64


def cuda_gemm(*operands: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """Computes the primitive on CUDA devices; see ``reference.reference_gemm`` for what that is.

    Args:
        *operands: the primitive's operands.
        spec: the primitive's parameters; of a gated product ``D`` is among the results.

    Raises:
        ValueError: ``spec.config`` names a kernel that this build leaves out.
    """
    x = spec.unflatten(operands)
    algorithm = resolve_algorithm(x.a.dtype, x.b.dtype, spec.out_dtype, spec.precision)
    reason = obstacle(algorithm, spec, x)
    apart = algorithm is not None and reason is None and _is_finished_apart(x, spec, algorithm)
    how = f"{algorithm}, config {spec.config or 'by heuristic'}"
    log(_describe(x, spec, reason or how + ", epilogue in a pass after it" * apart))
    if algorithm is None or reason is not None:
        return reference.reference_gemm(*operands, spec=spec)
    _check_built(spec)
    if apart:
        return _finished_apart(x, spec, algorithm)
    is_short = spec.is_gated and fold(spec.strided(shapes_of(x))).m <= _FEW_ROWS
    if is_short and spec.config is None:
        return _gated_by_products(x, spec, algorithm)
    return custom_call(x, spec, algorithm)


def _gated_by_products(x: Operands, spec: GemmSpec, algorithm: str) -> list[jax.Array]:
    """Computes a gated product of few rows, whose time is that of reading the weights.

    The kernels made for few rows have one weight: ``U`` first, rounded, which the second product
    takes as a factor; or of a packed weight both at once, rounded.
    """
    axes = spec.axes
    if spec.packed:
        (both,) = custom_call(Operands(x.a, x.b), spec.product(), algorithm)
        return reference.epilogue(reference.halves(both), x, spec)
    up = spec.product(axes=Operands(axes.a, axes.b2, bias=axes.bias2))
    (u,) = custom_call(Operands(x.a, x.b2, bias=x.bias2), up, algorithm)
    _, saves_gate, _ = spec.epilogue.results
    whole = tuple(range(spec.batch_ndim + 2))
    gate = spec.product(
        axes=Operands(axes.a, axes.b, c=whole, bias=axes.bias),
        epilogue=Epilogue("factor", spec.activation, results=(True, saves_gate)),
    )
    d, *g = custom_call(Operands(x.a, x.b, c=u, bias=x.bias), gate, algorithm)
    return spec.epilogue.picked((d, *(g or [None]), u))


def _is_finished_apart(x: Operands, spec: GemmSpec, algorithm: str) -> bool:
    """Says whether ``spec.config`` names a row without the epilogue that is asked for."""
    if spec.config is None:
        return False
    written = spec.replace(out_dtype=written_dtype(algorithm, spec.out_dtype))
    return lacks_epilogue(by_name(spec.config), fold(spec.strided(shapes_of(x))), x, written)


def _finished_apart(x: Operands, spec: GemmSpec, algorithm: str) -> list[jax.Array]:
    """Computes the product by the row that is named, in float32, and the epilogue from that."""
    product = spec.product(out_dtype=jnp.dtype(jnp.float32), config=spec.config)
    return reference.epilogue(custom_call(Operands(x.a, x.b), product, algorithm), x, spec)


def _check_built(spec: GemmSpec) -> None:
    if spec.config is not None and spec.config not in _extension.KERNEL_NAMES:
        raise ValueError(
            f"config={spec.config!r} is not in this build of jax_tcgemm; accepted: None or "
            f"{sorted(_extension.KERNEL_NAMES)}"
        )


def _describe(x: Operands, spec: GemmSpec, decision: str) -> str:
    shapes = " x ".join(f"{operand.dtype}{list(operand.shape)}" for operand in (x.a, x.b))
    return f"{'gated ' * spec.is_gated}gemm {shapes} -> {spec.out_dtype}: {decision}"
