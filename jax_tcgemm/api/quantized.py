"""Products of 8-bit operands: scales, requantized results and their largest magnitude."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.api.quantized_formula import Formula, of_rank
from jax_tcgemm.api.scales import alike, along_k, along_results, are_kernel_blocks, with_scale
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue import rng
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.primitives import jit_epilogue
from jax_tcgemm.problem.arithmetic import is_quantized, resolve_run_time
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, Shape
from jax_tcgemm.quantized.scaled_array import ScaledArray


class Asked(NamedTuple):
    """The arguments of ``gemm`` that only 8-bit operands have."""

    a_scale: Any
    b_scale: Any
    out_scale: Any
    return_amax: bool

    @property
    def names(self) -> list[str]:
        """The names of the arguments that are given."""
        asks = [value is not None for value in self[:3]] + [bool(self.return_amax)]
        return [name for name, is_given in zip(self._fields, asks, strict=True) if is_given]


def are_taken(
    asked: Asked,
    a: jax.Array,
    b: jax.Array,
    preferred: DTypeLike | None,
    precision: Any,
    out_sharding: Any,
) -> bool:
    """Checks if this is an 8-bit product that kernels or this file's formula compute.

    Raises:
        TypeError: an argument for 8-bit operands is given for other operands.
        ValueError: such an argument is given beside ``out_sharding`` or for explicitly sharded
            operands.
    """
    if asked.names and out_sharding is not None:
        raise ValueError(f"out_sharding is not taken beside {', '.join(asked.names)}")
    if not is_quantized(a.dtype, b.dtype):
        if asked.names:
            raise TypeError(
                f"8-bit operands alone take {', '.join(asked.names)}, got a.dtype={a.dtype}, "
                f"b.dtype={b.dtype}; accepted: two of float8_e4m3fn and float8_e5m2, or two of int8"
            )
        return False
    is_sharded = _compat.is_sharded(a, b)
    if asked.names:
        if is_sharded:
            raise ValueError(
                f"{', '.join(asked.names)} are not taken beside operands whose types say how they "
                "are sharded; accepted: scaled_dot, or automatic axes"
            )
        return True
    if out_sharding is not None or is_sharded:
        return False
    if preferred is None and (a.dtype == jnp.int8 or a.dtype != b.dtype):
        return False
    out = jnp.dtype(preferred or a.dtype)
    if a.dtype == jnp.int8 and out == jnp.int32:
        return True
    return _is_float(out) and resolve_run_time(a.dtype, b.dtype, _sums(a), precision) is not None


def _is_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4


def _sums(a: jax.Array) -> np.dtype:
    """Returns the dtype in which products with ``a`` are accumulated."""
    return jnp.dtype(jnp.int32 if a.dtype == jnp.int8 else jnp.float32)


# Types of results that ``out_scale`` quantizes.
_OUT_SCALED = ("float8_e4m3fn", "float8_e5m2", "int8")

# The largest k for which sums of int8 products stay within int32.
_MOST_INTEGER_K = (2**31 - 1) // 128**2


@dataclasses.dataclass(frozen=True)
class Factors:
    """Two 8-bit operands with their scales, and how they are multiplied.

    Attributes:
        a: the first operand.
        b: the second operand, of the same kind.
        shape: ``(*batch, m, n)``, the shape of the product.
        transposed: whether each operand is stored transposed.
        precision: canonical ``lax`` precision.
        config: name of a kernel configuration, or ``None``.
        wraps: whether integer sums are int32 however large they are.
    """

    a: ScaledArray
    b: ScaledArray
    shape: Shape
    transposed: tuple[bool, bool]
    precision: Any
    config: str | None
    wraps: bool

    @property
    def is_scaled_along_k(self) -> bool:
        return along_k((self.a, self.b), self.transposed)


def quantized_gemm(
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
    """Computes ``gemm`` of 8-bit operands.

    The arguments are those of ``gemm``; ``given`` holds the operands of its epilogue.
    """
    arguments.check_config(config)
    scaled_a = with_scale("a_scale", asked.a_scale, "a", a)
    scaled_b = with_scale("b_scale", asked.b_scale, "b", b)
    has_scales = asked.a_scale is not None or asked.b_scale is not None
    default = jnp.bfloat16 if has_scales else a.dtype
    asked_dtype = jax.dtypes.canonicalize_dtype(default if preferred is None else preferred)
    out_dtype = jnp.dtype(asked_dtype)
    kept = jnp.dtype(jnp.float32 if out_dtype.itemsize >= 4 else jnp.bfloat16)
    wraps = out_dtype == jnp.int32 and not asked.names
    factors = Factors(scaled_a, scaled_b, shape, transposed, precision, config, wraps)
    _check_row(factors)
    if asked.return_amax and 0 in shape:  # an empty result has no largest value
        asked = asked._replace(return_amax=False)
        rest = {"given": given, "activation": activation, "precision": precision}
        rest |= {"preferred": preferred, "config": config, "epilogue": epilogue}
        rest |= {"epilogue_operands": epilogue_operands}
        d = quantized_gemm(a, b, shape, transposed, asked, **rest)
        return d, jnp.zeros((), jnp.float32)
    if epilogue is not None:
        _check_alone(asked, given, activation)
        function, operands, out_trees = epilogues.as_listed(
            epilogue, epilogue_operands, 1, shape, preferred
        )
        results = _bind(factors, function, operands, kept)
        return jax.tree.unflatten(out_trees[0], results)
    formula = formula_of(asked, given, activation, shape, out_dtype)
    results = _bind(factors, formula.apply, list(formula.operands.values()), kept)
    return (results[0], jnp.max(results[1])) if asked.return_amax else results[0]


def _check_row(x: Factors) -> None:
    """Checks that precision and kernel configuration fit the arithmetic of 8-bit operands.

    Raises:
        TypeError: the precision does not fit.
        ValueError: the kernel configuration does not fit.
    """
    precision = x.precision
    if x.is_scaled_along_k:
        precision = _compat.canonicalize_precision("highest")
    algorithm = resolve_run_time(x.a.dtype, x.b.dtype, _sums(x.a.value), precision)
    if algorithm is None:
        raise TypeError(f"precision={x.precision} is not one of {x.a.dtype} times {x.b.dtype}")
    rows = [row.name for row in kernel_names.for_algorithm(algorithm) if not row.gated]
    if x.config not in (*kernel_names.NO_ROWS, *rows):
        raise ValueError(
            f"config={x.config!r} is no kernel configuration in {algorithm}; accepted: "
            f"{kernel_names.NO_ROWS} or {rows}"
        )


def _check_alone(asked: Asked, given: dict[str, Any], activation: Any) -> None:
    """Checks that only ``epilogue=`` modifies the product."""
    numbers = {name: given[name] for name in ("alpha", "beta")}
    changed = {k: x for k, x in numbers.items() if not (arguments.is_number(x) and x == 1)}
    arrays = {name: x for name, x in given.items() if name not in numbers}
    asked_too = {"out_scale": asked.out_scale, "return_amax": asked.return_amax or None}
    epilogues.check_alone("gemm", activation=activation, **arrays, **changed, **asked_too)


def formula_of(
    asked: Asked, given: dict[str, Any], activation: Any, shape: Shape, out_dtype: np.dtype
) -> Formula:
    """Checks the operands of the epilogue and returns its formula."""
    quantizes = asked.out_scale is not None
    if quantizes and out_dtype.name not in _OUT_SCALED:
        raise ValueError(
            "out_scale needs an 8-bit result (float8_e4m3fn, float8_e5m2, int8), got "
            f"preferred_element_type={out_dtype}"
        )
    is_integer = out_dtype == jnp.int32 and not asked.names
    if not (quantizes or is_integer or _is_float(out_dtype)):
        raise TypeError(
            f"preferred_element_type={out_dtype} is not the type of a product with scales; "
            "accepted: floating-point numbers of up to 32 bits, or int8 with out_scale"
        )
    wide = jnp.dtype(jnp.float32 if quantizes else out_dtype)
    arguments.check_activation(activation, wide)
    sums = jnp.dtype(out_dtype if is_integer else jnp.float32)
    placed, numbers = arguments.epilogue_operands(given, shape, wide, sums)
    operands = {name: x for name, (x, _) in placed.items()}
    axes = {name: axes for name, (_, axes) in placed.items()}
    if quantizes:
        scale = arguments.array("out_scale", asked.out_scale)
        if scale.size != 1:
            raise ValueError(f"out_scale must be one number, got out_scale.shape={scale.shape}")
        operands["out_scale"] = scale.reshape(())
    residual_axes = axes.pop("residual", ())
    whole = tuple(range(len(shape)))
    epilogue = Epilogue("add", activation, **numbers)
    spec = GemmSpec(Operands(whole, whole, **axes), sums, None, epilogue)
    return Formula(operands, spec, residual_axes, out_dtype, asked.return_amax)


def _bind(
    x: Factors, function: Callable[..., list[jax.Array]], operands: Sequence[jax.Array], kept: Any
) -> list[jax.Array]:
    """Applies the primitive.

    Args:
        x: the operands that are multiplied.
        function: function of the scaled product and ``operands``; returns a list of results.
        operands: operands of the function.
        kept: dtype in which derivatives keep the product.
    """
    *batch, m, n = x.shape
    k = x.a.shape[-2 if x.transposed[0] else -1]
    a, b, precision = x.a.value, x.b.value, x.precision
    by_blocks: list[jax.Array] = []
    along: list[jax.Array] = []
    if not x.is_scaled_along_k:
        along = along_results((x.a, x.b), x.transposed)
        is_long = isinstance(k, int) and k > _MOST_INTEGER_K
        if a.dtype == jnp.int8 and is_long and not x.wraps:
            a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)  # bfloat16 holds all int8 values
    elif a.dtype != jnp.int8 and are_kernel_blocks((x.a, x.b), x.transposed):
        by_blocks = [alike(y.scale, y.value, batch) for y in (x.a, x.b) if y.scale is not None]
        precision = _compat.canonicalize_precision("highest")
    else:
        a, b = x.a.dequantized(kept), x.b.dequantized(kept)
        # Operands dequantized to float32 must not be rounded to TF32.
        precision = _compat.canonicalize_precision("highest" if kept == jnp.float32 else None)
    (a, a_axes), (b, b_axes) = (
        arguments.placed(a, (*batch, m, k), x.transposed[0]),
        arguments.placed(b, (*batch, k, n), x.transposed[1]),
    )
    sums = jnp.dtype(jnp.int32 if a.dtype == jnp.int8 else jnp.float32)
    own_dtype = sums if sums == jnp.int32 else jnp.dtype(kept)
    spec = GemmSpec(Operands(a_axes, b_axes), own_dtype, precision, config=x.config)
    count = len(along)

    def listed(product: jax.Array, *values: jax.Array) -> list[jax.Array]:
        z = product
        if count:
            factor = math.prod(
                (of_rank(x, z) for x in values[1:count]), start=of_rank(values[0], z)
            )
            z = z.astype(jnp.float32) * factor
        return function(z, *values[count:])

    flat = [*along, *operands]
    types = [*map(epilogues.type_of, flat)]
    traced, held = functions.trace(listed, [jax.ShapeDtypeStruct(x.shape, sums), *types], 1)
    whole = CompiledSpec(spec, traced, scaled=bool(by_blocks))
    return jit_epilogue.bind([a, b, *by_blocks, *rng.words(flat), *held], whole)


def quantized_product(operands: Operands, spec: GemmSpec, out_dtype: np.dtype) -> jax.Array:
    """Applies the primitive to operands without scales, for ``dot_general``.

    Args:
        operands: two 8-bit operands.
        spec: parameters of the product.
        out_dtype: dtype of the result.
    """
    shapes = Operands(operands.a.shape, operands.b.shape)
    is_integer = operands.a.dtype == jnp.int8
    kept = jnp.int32 if is_integer else jnp.float32 if out_dtype.itemsize == 4 else jnp.bfloat16
    sums = jax.ShapeDtypeStruct(spec.result_shape(shapes), jnp.int32 if is_integer else jnp.float32)
    traced, _ = functions.trace(lambda z: [z.astype(out_dtype)], [sums], 1)
    spec = spec.replace(out_dtype=jnp.dtype(kept))
    return jit_epilogue.bind([operands.a, operands.b], CompiledSpec(spec, traced))[0]
