"""Products of 8-bit operands: scales, a result that is quantised again, and its largest value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue.spec import SCALE_BLOCK, CompiledSpec
from jax_tcgemm.primitives import compiled
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.arithmetic import is_of_8_bits, resolve_run_time
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, Shape


@dataclasses.dataclass(frozen=True)
class Scale:
    """The scales of one operand.

    Attributes:
        value: float32; of the operand's rank, or of shape ``()``; ``None`` is 1.
        blocks: how many there are along ``(mn, k)``.
    """

    value: jax.Array | None = None
    blocks: tuple[int, int] = (1, 1)

    @property
    def is_along_k(self) -> bool:
        return self.blocks[1] > 1


def scale_of(name: str, value: Any, operand_name: str, operand: jax.Array, k_axis: int) -> Scale:
    """Returns an operand's scales, checked.

    Args:
        name: of the argument.
        value: the argument; ``None`` is a factor of 1.
        operand_name: of the operand.
        operand: what is scaled.
        k_axis: its contracted dimension, -1 or -2.

    Raises:
        TypeError: it is no floating-point number of up to 32 bits.
        ValueError: its shape does not fit.
    """
    if value is None:
        return Scale()
    x = arguments.array(name, value)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating-point numbers, got {name}.dtype={x.dtype}")
    x = lax.stop_gradient(x.astype(jnp.float32))
    if x.size == 1:
        return Scale(x.reshape(()))
    pairs = list(zip(x.shape, operand.shape, strict=False))
    fits = x.ndim == operand.ndim and all(
        own == extent or (own > 0 and extent % own == 0) for own, extent in pairs
    )
    if not fits or any(own not in (1, extent) for own, extent in pairs[:-2]):
        raise ValueError(
            f"{name}.shape={x.shape} does not fit {operand_name}.shape={operand.shape}; accepted: "
            "one number, or as many dimensions, the last two of extents that divide the operand's, "
            "the others of 1 or the operand's"
        )
    mn_axis = -3 - k_axis
    return Scale(x, (x.shape[mn_axis], x.shape[k_axis]))


def repeated(scale: jax.Array, shape: Shape) -> jax.Array:
    """Returns scales of blocks for each element of ``shape``."""
    for axis, (extent, blocks) in enumerate(zip(shape, scale.shape, strict=True)):
        if blocks not in (1, extent):
            scale = jnp.repeat(scale, extent // blocks, axis)
    return scale


def dequantized(x: jax.Array, scale: Scale, dtype: Any) -> jax.Array:
    """Returns an operand times its scales."""
    wide = x.astype(jnp.float32)
    if scale.value is not None:
        wide = wide * (repeated(scale.value, x.shape) if scale.value.ndim else scale.value)
    return wide.astype(dtype)


def are_kernel_blocks(a: Scale, b: Scale, m: int, n: int, k: int) -> bool:
    """Whether kernels multiply by these scales on the way: 1 x 128 of A, 128 x 128 of B."""
    k_blocks = k // SCALE_BLOCK
    return (
        k % SCALE_BLOCK == n % SCALE_BLOCK == 0
        and a.blocks == (m, k_blocks)
        and b.blocks == (n // SCALE_BLOCK, k_blocks)
    )


@dataclasses.dataclass(frozen=True)
class Formula:
    """What becomes of a scaled product: the epilogue of ``gemm``, then a result of 8 bits.

    Attributes:
        operands: arrays by name: ``c``, ``bias``, ``residual``, ``row_scale``, ``column_scale``,
            ``alpha``, ``beta``, ``out_scale``; those that there are.
        activation: as in ``gemm``.
        alpha: the factor of the product where that is no operand.
        beta: the factor of ``c`` where that is no operand.
        out_dtype: of the result.
        quantizes: whether the result is divided by ``out_scale`` and clipped.
        returns_amax: whether its largest absolute value is a second result.
    """

    operands: dict[str, jax.Array]
    activation: Any
    alpha: complex
    beta: complex
    out_dtype: np.dtype
    quantizes: bool
    returns_amax: bool

    @property
    def wide(self) -> np.dtype:
        """The type in which it is computed."""
        is_integer = jnp.issubdtype(self.out_dtype, jnp.integer) and not self.quantizes
        return jnp.dtype(self.out_dtype if is_integer else jnp.float32)

    def apply(self, product: jax.Array, *values: jax.Array) -> list[jax.Array]:
        """Computes it of the product and of the operands, and rounds once."""
        z = product.astype(self.wide)
        given = zip(self.operands, values, strict=True)
        x = {name: value.astype(self.wide) for name, value in given}
        alpha, beta = x.get("alpha", self.alpha), x.get("beta", self.beta)
        if "alpha" in x or alpha != 1:
            z = z * alpha
        for name, axis in (("row_scale", -1), ("column_scale", -2)):
            if name in x:
                z = z * jnp.expand_dims(x[name], axis)
        if "c" in x:
            is_sum = "beta" not in x and beta == 1
            z = z + (x["c"] if is_sum else x["c"] * beta)
        if "bias" in x:
            z = z + jnp.expand_dims(x["bias"], -2)
        if self.activation is not None:
            z = resolve(self.activation).reference(z).astype(self.wide)
        if "residual" in x:
            z = z + x["residual"]
        results = [self._rounded(z, x)]
        if self.returns_amax:
            results.append(jnp.max(jnp.abs(z), axis=(-2, -1)).astype(jnp.float32))
        return results

    def _rounded(self, z: jax.Array, x: dict[str, jax.Array]) -> jax.Array:
        if self.quantizes:
            z = z * (1 / x["out_scale"])
            is_integer = jnp.issubdtype(self.out_dtype, jnp.integer)
            limits = jnp.iinfo(self.out_dtype) if is_integer else jnp.finfo(self.out_dtype)
            z = jnp.clip(jnp.round(z) if is_integer else z, float(limits.min), float(limits.max))
        return z.astype(self.out_dtype)


class Asked(NamedTuple):
    """What is asked of a product of 8-bit operands alone."""

    a_scale: Any
    b_scale: Any
    out_scale: Any
    return_amax: bool

    @property
    def names(self) -> list[str]:
        """Those arguments that ask for something."""
        asks = [value is not None for value in self[:3]] + [bool(self.return_amax)]
        return [name for name, is_given in zip(self._fields, asks, strict=True) if is_given]


def are_taken(
    asked: Asked, a: jax.Array, b: jax.Array, preferred: DTypeLike | None, precision: Any
) -> bool:
    """Whether this is a product of 8-bit operands that kernels or this file's formula compute.

    Raises:
        TypeError: something is asked for that is not of other operands.
    """
    if not is_of_8_bits(a.dtype, b.dtype):
        if asked.names:
            raise TypeError(
                f"{', '.join(asked.names)} are for operands of 8 bits, got a.dtype={a.dtype}, "
                f"b.dtype={b.dtype}; accepted: two of float8_e4m3fn and float8_e5m2, or two of int8"
            )
        return False
    if asked.names:
        return True
    if a.dtype == jnp.int8:
        out = jnp.dtype(preferred or a.dtype)
        return out == jnp.int32 or (jnp.issubdtype(out, jnp.floating) and out.itemsize <= 4)
    out = jnp.dtype(jnp.bfloat16)
    is_ours = resolve_run_time(a.dtype, b.dtype, out, precision) is not None
    return is_ours and (preferred is not None or a.dtype == b.dtype)


def gemm_of_8_bits(
    a: jax.Array,
    b: jax.Array,
    shape: Shape,
    transposed: tuple[bool, bool],
    asked: Asked,
    *,
    given: dict[str, Any],
    activation: Any,
    precision: Any,
    preferred: DTypeLike | None,
    config: str | None,
    epilogue: Callable[..., Any] | None,
    epilogue_operands: Sequence[Any],
) -> Any:
    """Computes ``gemm`` of 8-bit operands; arguments as there, ``given`` what else goes in."""
    arguments.check_config(config)
    scales = tuple(
        scale_of(f"{name}_scale", value, name, x, -2 if is_transposed else -1)
        if name == "a"
        else scale_of(f"{name}_scale", value, name, x, -1 if is_transposed else -2)
        for name, value, x, is_transposed in zip("ab", asked[:2], (a, b), transposed, strict=True)
    )
    has_scales = asked.a_scale is not None or asked.b_scale is not None
    default = jnp.bfloat16 if has_scales else a.dtype
    out_dtype = jnp.dtype(jax.dtypes.canonicalize_dtype(default if preferred is None else preferred))
    kept = jnp.dtype(jnp.float32 if out_dtype.itemsize == 4 else jnp.bfloat16)
    common = (a, b, scales, shape, transposed, precision, config)
    if epilogue is not None:
        return _with_epilogue(common, asked, given, activation, epilogue, epilogue_operands, preferred, kept)
    formula = _formula(asked, given, activation, shape, out_dtype)
    results = scaled_gemm(*common, formula.apply, list(formula.operands.values()), kept)
    if not asked.return_amax:
        return results[0]
    return results[0], jnp.max(results[1])


def _with_epilogue(
    common: tuple[Any, ...],
    asked: Asked,
    given: dict[str, Any],
    activation: Any,
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    preferred: DTypeLike | None,
    kept: np.dtype,
) -> Any:
    others = {"out_scale": asked.out_scale, "return_amax": asked.return_amax or None}
    numbers = {name: given[name] for name in ("alpha", "beta")}
    arrays = {name: x for name, x in given.items() if name not in numbers}
    changed = {k: x for k, x in numbers.items() if not (arguments.is_number(x) and x == 1)}
    epilogues.check_alone("gemm", activation=activation, **arrays, **changed, **others)
    shape = tuple(common[3])
    listed, flat, out_trees = epilogues.as_listed(epilogue, operands, 1, shape, preferred)
    results = scaled_gemm(*common, listed, flat, kept)
    return jax.tree.unflatten(out_trees[0], results)


def _formula(
    asked: Asked, given: dict[str, Any], activation: Any, shape: Shape, out_dtype: np.dtype
) -> Formula:
    """Returns what becomes of the product, its operands checked."""
    *batch, m, n = shape
    quantizes = asked.out_scale is not None
    if quantizes and out_dtype.itemsize != 1:
        raise ValueError(
            f"out_scale is for results of 8 bits, got preferred_element_type={out_dtype}; accepted: "
            "float8_e4m3fn, float8_e5m2, int8"
        )
    wide = jnp.dtype(jnp.float32 if quantizes else out_dtype)
    arguments.check_activation(activation, wide)
    operands: dict[str, jax.Array] = {}
    for name in ("c", "residual"):
        if given[name] is not None:
            operands[name] = arguments.addend(name, given[name], tuple(shape), wide)
    extents = {"bias": n, "row_scale": m, "column_scale": n}
    for name, extent in extents.items():
        if given[name] is not None:
            operands[name] = arguments.vector(name, given[name], (*batch, extent), wide)
    numbers = {}
    for name in ("alpha", "beta"):
        if arguments.is_number(given[name]):
            numbers[name] = arguments.constant(name, given[name], wide)
        else:
            numbers[name] = 1
            operands[name] = arguments.scalar(name, given[name], wide)
    if quantizes:
        scale = arguments.array("out_scale", asked.out_scale)
        if scale.size != 1:
            raise ValueError(f"out_scale must be one number, got out_scale.shape={scale.shape}")
        operands["out_scale"] = scale.reshape(())
    return Formula(
        operands, activation, numbers["alpha"], numbers["beta"], out_dtype, quantizes, asked.return_amax
    )


def scaled_gemm(
    a: jax.Array,
    b: jax.Array,
    scales: tuple[Scale, Scale],
    shape: Shape,
    transposed: tuple[bool, bool],
    precision: Any,
    config: str | None,
    function: Any,
    operands: Sequence[jax.Array],
    kept: Any,
) -> list[jax.Array]:
    """Applies the primitive to 8-bit operands.

    Args:
        a: the first factor.
        b: the second, of the same kind.
        scales: of both.
        shape: ``(*batch, m, n)`` of the result.
        transposed: whether each is stored so.
        precision: canonical ``lax`` precision.
        config: name of a kernel configuration, or ``None``.
        function: of the scaled product and ``operands``; returns a list of results.
        operands: of the function.
        kept: type in which derivatives keep the product.
    """
    *batch, m, n = shape
    k = a.shape[-2 if transposed[0] else -1]
    is_integer = a.dtype == jnp.int8
    own_scales: list[jax.Array] = []
    factors: list[Any] = []
    if any(scale.is_along_k for scale in scales):
        if not is_integer and are_kernel_blocks(*scales, m, n, k):
            own_scales = [scale.value for scale in scales if scale.value is not None]
            precision = _compat.canonicalize_precision("highest")
        else:
            a, b = (dequantized(x, s, kept) for x, s in zip((a, b), scales, strict=True))
            is_integer = False
    else:
        factors = _factors(scales, (a, b), transposed)
    own_scales = [_alike(s, x, batch) for s, x in zip(own_scales, (a, b), strict=False)]
    (a, a_axes), (b, b_axes) = (
        arguments.placed(a, (*batch, m, k), transposed[0]),
        arguments.placed(b, (*batch, k, n), transposed[1]),
    )
    out = jnp.dtype(jnp.int32) if is_integer else jnp.dtype(kept)
    spec = GemmSpec(Operands(a_axes, b_axes), out, precision, config=config)
    sums = jnp.int32 if is_integer else jnp.float32
    product = jax.ShapeDtypeStruct(tuple(shape), sums)
    count = len(factors)

    def listed(sum_of_products: jax.Array, *values: jax.Array) -> list[jax.Array]:
        z = sum_of_products
        if count:
            z = z.astype(jnp.float32) * math.prod(values[1:count], start=values[0])
        return function(z, *values[count:])

    flat = [*factors, *operands]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat]
    traced, held = functions.trace(listed, [product, *types], 1)
    is_scaled = bool(own_scales)
    return compiled.bind([a, b, *own_scales, *flat, *held], CompiledSpec(spec, traced, is_scaled))


def product_of_8_bits(operands: Operands, spec: GemmSpec, out_dtype: np.dtype) -> jax.Array:
    """Applies the primitive to operands without scales, as a drop-in for ``lax.dot_general``.

    Args:
        operands: two factors of 8 bits.
        spec: the product.
        out_dtype: of the result.
    """
    shapes = Operands(operands.a.shape, operands.b.shape)
    is_integer = operands.a.dtype == jnp.int8
    kept = jnp.int32 if is_integer else jnp.float32 if out_dtype.itemsize == 4 else jnp.bfloat16
    sums = jax.ShapeDtypeStruct(
        spec.result_shape(shapes), jnp.int32 if is_integer else jnp.float32
    )
    traced, _ = functions.trace(lambda z: [z.astype(out_dtype)], [sums], 1)
    spec = spec.replace(out_dtype=jnp.dtype(kept))
    return compiled.bind([operands.a, operands.b], CompiledSpec(spec, traced))[0]


def _alike(scale: jax.Array, x: jax.Array, batch: Sequence[int]) -> jax.Array:
    """Returns scales by blocks with the batch dimensions that the operand will have."""
    scale = jnp.broadcast_to(scale, (*x.shape[:-2], *scale.shape[-2:]))
    own = batch[len(batch) - (x.ndim - 2) :]
    dropped = [i for i, extent in enumerate(own) if x.shape[i] == 1 and extent != 1]
    return lax.squeeze(scale, dropped) if dropped else scale


def _factors(
    scales: tuple[Scale, Scale], operands: tuple[jax.Array, jax.Array], transposed: tuple[bool, bool]
) -> list[jax.Array]:
    """Returns what rows and columns of the product are to be multiplied by, or all of it.

    Numbers come last.
    """
    along: list[jax.Array] = []
    numbers: list[jax.Array] = []
    for i, (scale, x, is_transposed) in enumerate(zip(scales, operands, transposed, strict=True)):
        value = scale.value
        if value is None or not value.ndim:
            numbers += [] if value is None else [value]
            continue
        # With k of extent 1: (..., m, 1) of A, (..., 1, n) of B.
        mn_axis = -1 if is_transposed == (i == 0) else -2
        shape = [*value.shape[:-2], 1, 1]
        shape[mn_axis] = x.shape[mn_axis]
        value = repeated(value, tuple(shape))
        along.append(jnp.swapaxes(value, -1, -2) if is_transposed else value)
    return [*along, *numbers]
