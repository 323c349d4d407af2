"""Lowering of a gemm: one custom call on CUDA, the reference if there is no kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_tcgemm import _extension
from jax_tcgemm.kernels.arithmetic import PlaneProduct
from jax_tcgemm.kernels.names import KERNEL, XLA, by_name, can_be, find, is_row, read_config
from jax_tcgemm.lowering import (
    complex_product,
    devices,
    fallback,
    named_function,
    quantized,
    reference,
)
from jax_tcgemm.lowering.custom_call import custom_call, shapes_of
from jax_tcgemm.lowering.row_epilogue import lacks_epilogue
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.alignment import layouts
from jax_tcgemm.problem.arithmetic import (
    is_quantized,
    resolve_algorithm,
    written_dtype,
)
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.problem.strides import Operands, fold
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.entry import problem_key

# Up to this many rows, reading the weights determines the time of a product.
_FEW_ROWS = 64


def cuda_gemm(*operands: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """Computes the primitive on CUDA devices; ``reference.reference_gemm`` defines it.

    Args:
        *operands: the primitive's operands.
        spec: the primitive's parameters; the results of a gated product include ``D``.

    Raises:
        ValueError: ``spec.config`` names a kernel that this build leaves out.
        FallbackError: no kernel can compute the gemm, and the call or the environment forbids a
            fallback.
    """
    strict = fallback.is_strict(spec.config)
    if spec.config == KERNEL and not is_quantized(operands[0].dtype, operands[1].dtype):
        spec = spec.replace(config=None)
    x = spec.unflatten(operands)
    types = (x.a.dtype, x.b.dtype, spec.out_dtype, spec.precision)
    if complex_product.is_complex(x, spec):
        results, how = complex_product.by_real_product(x, spec, strict=strict)
        if results is None:
            fallback.report(_describe(x, spec), how, strict=strict)
            return reference.reference_gemm(*operands, spec=spec)
        log(f"{_describe(x, spec)}: {how}")
        return results
    if is_quantized(x.a.dtype, x.b.dtype) and spec.config != XLA:
        described = _describe(x, spec)
        return quantized.cuda_product(operands, spec, described, reference.reference_gemm)
    planes = fallback.possible_planes(*types)
    if planes is not None:
        return _by_planes(operands, spec, planes, strict)
    algorithm = resolve_algorithm(*types)
    reason, source = fallback.no_kernel(algorithm, spec, x), ""
    if algorithm is not None and reason is None:
        spec, source = _tuned(operands, spec, algorithm, strict)
        if spec.config == XLA:
            reason = "it was measured to be faster"
        elif not strict:
            reason = fallback.slower_than_xla(algorithm, spec, x)
    if algorithm is None or reason is not None:
        fallback.report(_describe(x, spec), f"{reason}{source}", strict=strict)
        asked = spec.config == XLA
        return (reference.natural_gemm if asked else reference.reference_gemm)(*operands, spec=spec)
    results = _by_function(x, spec, algorithm, source)
    return _by_row(x, spec, algorithm, source) if results is None else results


def _by_function(
    x: Operands, spec: GemmSpec, algorithm: str, source: str = ""
) -> list[jax.Array] | None:
    """Computes a gemm whose epilogue is compiled as a function; ``None`` if it is a built one."""
    made = named_function.as_function(x, spec, algorithm)
    if made is None:
        return None
    log(f"{_describe(x, spec)}: {algorithm}, its epilogue compiled into the kernel{source}")
    return made.emit()


def _by_row(x: Operands, spec: GemmSpec, algorithm: str, source: str = "") -> list[jax.Array]:
    """Computes a gemm by a kernel with a built epilogue.

    Args:
        x: the operands.
        spec: the primitive's parameters.
        algorithm: name of the arithmetic.
        source: where the configuration was found.
    """
    apart = _is_finished_apart(x, spec, algorithm)
    how = f"{algorithm}, config {spec.config or 'by heuristic'}{source}"
    log(f"{_describe(x, spec)}: {how}" + ", epilogue in a pass after it" * apart)
    _check_built(spec)
    if apart:
        return _finished_apart(x, spec, algorithm)
    if _is_by_products(x, spec):
        return _gated_by_products(x, spec, algorithm)
    return custom_call(x, spec, algorithm)


def kernel_of(x: Operands, spec: GemmSpec) -> tuple[GemmSpec, str] | str:
    """Returns how ``cuda_gemm`` computes a gemm by one kernel, although XLA may be faster.

    Args:
        x: the types of the operands.
        spec: the primitive's parameters.

    Returns:
        ``spec`` with the fastest known configuration, and the algorithm. If ``cuda_gemm`` computes
        the gemm in another way, it is the reason.
    """
    types = (x.a.dtype, x.b.dtype, spec.out_dtype, spec.precision)
    if spec.config == KERNEL:
        spec = spec.replace(config=None)
    if complex_product.is_complex(x, spec) or fallback.possible_planes(*types) is not None:
        return f"{x.a.dtype} is multiplied by several products"
    algorithm = resolve_algorithm(*types)
    reason = fallback.no_kernel(algorithm, spec, x)
    if algorithm is None or reason is not None:
        return reason or "no kernel"
    spec, _ = _tuned(flatten(x), spec, algorithm, strict=True)
    _check_built(spec)
    if _is_finished_apart(x, spec, algorithm) or _is_by_products(x, spec):
        return "the kernel lacks the epilogue"
    return spec, algorithm


def _by_planes(
    operands: Sequence[jax.Array], spec: GemmSpec, planes: PlaneProduct, strict: bool
) -> list[jax.Array]:
    """Computes a gemm of float32 by products of planes, or falls back to XLA."""
    x = spec.unflatten(operands)
    reason = fallback.no_planes(planes, spec, x, strict=strict)
    if reason is not None:
        fallback.report(_describe(x, spec), reason, strict=strict)
        return reference.reference_gemm(*operands, spec=spec)
    pairs = f"{len(planes.pairs)} products of {planes.count} planes in {planes.factors}"
    log(f"{_describe(x, spec)}: {planes.name}, {pairs}")
    return custom_call(x, spec, planes.name)


def _tuned(
    operands: Sequence[jax.Array], spec: GemmSpec, algorithm: str, strict: bool
) -> tuple[GemmSpec, str]:
    """Returns ``spec`` with the fastest measured configuration, and where it was found."""
    if spec.config is not None:
        return spec, ""
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    if not all(math.prod(x.shape) for x in types):
        return spec, ""
    product = lookup.Product("gemm", spec, types, _problem(spec.unflatten(types), spec, algorithm))
    found = devices.find_choice(product)
    if found is None or not can_be(found[0].config, algorithm, gated=spec.is_gated):
        return spec, ""
    if strict and found[0].config == XLA:
        return spec, f", though not by {found[1]}"
    return spec.replace(config=found[0].config), f", by {found[1]}"


def _problem(x: Operands, spec: GemmSpec, algorithm: str) -> str:
    """Returns the tuning key of a gemm: all that its time depends on."""
    gemm = fold(spec.strided(shapes_of(x)))
    strides = gemm.strides._asdict()
    present = [name for name, operand in x._asdict().items() if operand is not None]
    activation = spec.activation and resolve(spec.activation).name
    has = [activation, *(name for name in present if name not in ("a", "b", "b2"))]
    has += [name for name in ("alpha", "beta") if getattr(spec, name) != 1 and name not in present]
    if spec.is_gated and spec.out_dtype == jnp.float32:  # earlier versions did not promote sums
        has += ["promoted"]
    return problem_key(
        op="gated" if spec.is_gated else "gemm",
        algorithm=algorithm,
        layout=layouts(gemm),
        m=gemm.m,
        n=gemm.n,
        k=gemm.k,
        batch=list(gemm.batch),
        dtypes=[getattr(x, name).dtype.name for name in present] + [spec.out_dtype.name],
        strides={name: list(strides[name]) for name in present if name not in ("alpha", "beta")},
        packed=spec.packed,
        epilogue={
            "form": spec.epilogue.form,
            "has": [part for part in has if part],
            "results": list(spec.epilogue.results),
        },
    )


def _is_by_products(x: Operands, spec: GemmSpec) -> bool:
    """Checks if ``_gated_by_products`` computes a gemm."""
    if not spec.is_gated or spec.config is not None:
        return False
    return fold(spec.strided(shapes_of(x))).m <= _FEW_ROWS


def _gated_by_products(x: Operands, spec: GemmSpec, algorithm: str) -> list[jax.Array]:
    """Computes a gated product of few rows, whose time is that of reading the weights.

    The built kernels for few rows have one weight. The first call computes ``U``, rounded, and the
    second product takes ``U`` as a factor. For a packed weight, one call computes both products,
    rounded.
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
    factored = Operands(x.a, x.b, c=u, bias=x.bias)
    found = _by_function(factored, gate, algorithm)
    d, *g = custom_call(factored, gate, algorithm) if found is None else found
    return spec.epilogue.picked((d, *(g or [None]), u))


def _is_finished_apart(x: Operands, spec: GemmSpec, algorithm: str) -> bool:
    """Checks if ``spec.config`` names a row that lacks the requested epilogue.

    If a row for two weights lacks it, another row computes the product.
    """
    if not is_row(spec.config) or spec.is_gated:
        return False
    written = spec.replace(out_dtype=written_dtype(algorithm, spec.out_dtype))
    name, splits = read_config(spec.config)
    if splits > 1:  # the step that adds up the parts has every epilogue
        return False
    return lacks_epilogue(by_name(name), fold(spec.strided(shapes_of(x))), x, written)


def shares_program(types: Sequence[jax.ShapeDtypeStruct], spec: GemmSpec, config: str) -> bool:
    """Checks if a row computes a product by the same call as ``config=MEASURED``.

    Args:
        types: types of the primitive's operands.
        spec: the primitive's parameters.
        config: the name of the row.
    """
    x = spec.unflatten(types)
    algorithm = resolve_algorithm(x.a.dtype, x.b.dtype, spec.out_dtype, spec.precision)
    row = find(read_config(config)[0])
    if algorithm is None or row is None or not row.copies_whole_chunks:
        return False
    return not _is_finished_apart(x, spec.replace(config=config), algorithm)


def _finished_apart(x: Operands, spec: GemmSpec, algorithm: str) -> list[jax.Array]:
    """Computes the product by the named row in float32, then the epilogue separately."""
    product = spec.product(out_dtype=jnp.dtype(jnp.float32), config=spec.config)
    return reference.epilogue(custom_call(Operands(x.a, x.b), product, algorithm), x, spec)


def _check_built(spec: GemmSpec) -> None:
    if is_row(spec.config) and not _extension.has_config(spec.config):
        raise ValueError(
            f"config={spec.config!r} is not in this build of jax_tcgemm; accepted: None or "
            f"{sorted(_extension.KERNEL_NAMES)}"
        )


def _describe(x: Operands, spec: GemmSpec) -> str:
    shapes = " x ".join(f"{operand.dtype}{list(operand.shape)}" for operand in (x.a, x.b))
    return f"{'gated ' * spec.is_gated}gemm {shapes} -> {spec.out_dtype}"
