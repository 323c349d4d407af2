"""Products of arrays and quantized weights, which are multiplied as they are or dequantized."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.api.quantized import Asked, formula_of
from jax_tcgemm.api.weights import UnpackedWeight, Weight
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue import rng
from jax_tcgemm.epilogue.spec import PackedFunctionSpec
from jax_tcgemm.kernels import packed as kernels
from jax_tcgemm.kernels import packed_configs
from jax_tcgemm.kernels.names import NO_ROWS
from jax_tcgemm.lowering import reference
from jax_tcgemm.primitives import packed as packed_primitive
from jax_tcgemm.primitives import packed_function
from jax_tcgemm.problem.arithmetic import at_least_float32
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.packed import PackedSpec
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands
from jax_tcgemm.quantized.arrays import dequantize
from jax_tcgemm.quantized.packed import PackedWeight, is_weight


def check_scales(asked: Asked) -> None:
    """Checks that no argument for 8-bit operands is given beside a quantized weight.

    Raises:
        TypeError: one is given.
    """
    if asked.names:
        raise TypeError(
            f"8-bit arrays alone take {', '.join(asked.names)}, and b has its own scales; "
            "accepted beside a PackedWeight or a Quantized: None"
        )


def dequantized(name: str, w: Any, x_name: str, x: jax.Array) -> jax.Array:
    """Returns a weight in the dtype of the left operand, rounded once; an array as it is.

    Args:
        name: argument name of the weight.
        w: the weight.
        x_name: argument name of the left operand.
        x: the left operand.

    Raises:
        TypeError: the left operand does not hold floating-point numbers of 16 bits or more.
    """
    if not is_weight(w):
        return w
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise TypeError(
            f"{x_name}.dtype={x.dtype} is not multiplied by a quantized {name}; accepted: "
            "floating-point numbers of 16 bits or more. Two quantized operands: dot_general"
        )
    if isinstance(w, PackedWeight):
        return lax.stop_gradient(w.dequantize(x.dtype))
    return dequantize(w, x.dtype)


def product(
    x: jax.Array,
    w: Weight,
    out_dtype: DTypeLike,
    config: str | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Returns ``x @ w``, whose leading dimensions broadcast; the weight is not copied.

    Args:
        x: ``(..., m, k)``, bfloat16 or float16.
        w: ``(..., k, n)``.
        out_dtype: dtype of the result.
        config: as in ``gemm``.
        out_sharding: as in ``gemm``, for a weight without leading dimensions.
    """
    if isinstance(w, UnpackedWeight):
        return w.product(x, out_dtype, out_sharding)
    spec = w.spec(out_dtype, config)
    check_config(spec)
    values, scales = map(lax.stop_gradient, (w.values, w.scales))
    *x_batch, m, k = x.shape
    if not w.batch or tuple(x_batch) == w.batch:
        return packed_primitive.bind(x, values, scales, spec, out_sharding)
    # Dimensions along which only the weights differ come first; all others join the rows.
    batch = jnp.broadcast_shapes(tuple(x_batch), w.batch)
    own = (1,) * (len(batch) - len(w.batch)) + w.batch
    shared = [i for i, extent in enumerate(own) if extent == batch[i] and extent != 1]
    rows = [i for i in range(len(batch)) if i not in shared]
    order = [*shared, *rows]
    outer, inner = [batch[i] for i in shared], [batch[i] for i in rows]
    x = jnp.broadcast_to(x, (*batch, m, k))
    x = lax.transpose(x, (*order, len(batch), len(batch) + 1))
    x = x.reshape(*outer, math.prod(inner) * m, k)
    values, scales = (y.reshape(*outer, *y.shape[-4:]) for y in (values, scales))
    z = packed_primitive.bind(x, values, scales, spec)
    z = z.reshape(*outer, *inner, m, spec.n)
    inverse = [order.index(i) for i in range(len(batch))]
    return lax.transpose(z, (*inverse, len(batch), len(batch) + 1))


def check_config(spec: PackedSpec, weights: int = 1) -> None:
    """Checks that ``config`` is one that such products with packed weights accept.

    Args:
        spec: the static parameters of the product.
        weights: number of weights whose products a function gets.

    Raises:
        TypeError: ``config`` is not a string.
        ValueError: ``config`` is not accepted.
    """
    config = spec.config
    arguments.check_config(config)
    if config in (*NO_ROWS, packed_configs.DEQUANTIZED):
        return
    row = packed_configs.find(config, spec.bits, weights)
    if row is None:
        raise ValueError(
            f"config={config!r} is no kernel configuration for packed weights of {spec.bits} bits"
            f"{', two in a kernel' * (weights > 1)}; accepted: "
            f"{packed_configs.accepted(spec.bits, weights)}"
        )
    if not row.takes(spec.group, spec.k):
        raise ValueError(
            f"config={config!r} takes no packed weight with k={spec.k} in groups of {spec.group}; "
            f"accepted: groups of {kernels.GROUPS}, of all k or of multiples of {row.stage_k}, and "
            f"at most one part for each {row.stage_k} of k"
        )


def packed_gemm(
    x: jax.Array,
    w: Weight,
    *,
    given: dict[str, Any],
    activation: Any,
    preferred: DTypeLike | None,
    config: str | None,
    out_sharding: Any,
    epilogue: Callable[..., Any] | None,
    epilogue_operands: Sequence[Any],
) -> Any:
    """Computes ``gemm`` of an array and a weight that is not dequantized.

    The arguments are those of ``gemm``; ``given`` holds the operands of its epilogue. The epilogue
    is computed in float32 from float32 sums.
    """
    batch, m, n, _ = arguments.extents(x, w, False, False)
    out_dtype = out_dtype_of(x, preferred)
    wide = at_least_float32(out_dtype)
    if epilogue is not None:
        numbers = {name: given[name] for name in ("alpha", "beta")}
        changed = {k: y for k, y in numbers.items() if not (arguments.is_number(y) and y == 1)}
        others = {name: y for name, y in given.items() if name not in numbers} | changed
        epilogues.check_alone("gemm", activation=activation, out_sharding=out_sharding, **others)
        return function_of_products(x, [w], wide, config, epilogue, epilogue_operands, preferred)
    asked = Asked(None, None, None, False)
    formula = formula_of(asked, given, activation, (*batch, m, n), out_dtype)
    if formula.is_plain:
        return product(x, w, out_dtype, config, out_sharding)
    values = tuple(formula.operands.values())
    if out_sharding is None:
        applied_formula = lambda z, *values: formula.apply(z, *values)[0]  # noqa: E731
        return function_of_products(x, [w], wide, config, applied_formula, values)
    return formula.apply(product(x, w, wide, config, out_sharding), *values)[0]


def packed_gated_gemm(
    x: jax.Array,
    w_gate: Weight,
    w_up: Weight | None,
    *,
    activation: Any,
    biases: dict[str, Any],
    preferred: DTypeLike | None,
    config: str | None,
    out_sharding: Any,
    epilogue: Callable[..., Any] | None,
    epilogue_operands: Sequence[Any],
) -> Any:
    """Computes ``gated_gemm`` of an array and such weights; the arguments are those of it."""
    out_dtype = out_dtype_of(x, preferred)
    wide = at_least_float32(out_dtype)
    names = arguments.Names("x", "w_gate", "", "")
    batch, _, n, _ = arguments.extents(x, w_gate, False, False, names)
    if w_up is None:
        if n % 2:
            raise ValueError(
                f"w_gate.shape={w_gate.shape} holds both weights where w_up is None, so that the "
                f"extent {n} must be even"
            )
        n //= 2
    elif w_up.shape != w_gate.shape:
        raise ValueError(
            f"w_up must have the shape of w_gate, got w_up.shape={w_up.shape} and "
            f"w_gate.shape={w_gate.shape}"
        )
    if epilogue is not None:
        epilogues.check_alone("gated_gemm", out_sharding=out_sharding, **biases)
        of_products, operands = epilogue, tuple(epilogue_operands)
    else:
        arguments.check_activation(activation, out_dtype)
        placed = arguments.gate_biases(biases, (*batch, n), out_dtype)
        vectors = Operands(None, None, **{name: x for name, (x, _) in placed.items()})
        whole = tuple(range(len(batch) + 2))
        axes = Operands(whole, whole, **{name: own for name, (_, own) in placed.items()}, b2=whole)
        of_products, operands = _gate(activation, out_dtype, axes), (vectors,)
    if w_up is not None and out_sharding is None:
        weights = [w_gate, w_up]
        return function_of_products(x, weights, wide, config, of_products, operands, preferred)
    if w_up is None:
        products = jnp.split(product(x, w_gate, wide, config, out_sharding), 2, axis=-1)
    else:
        products = [product(x, w, wide, config, out_sharding) for w in (w_gate, w_up)]
    return applied(products, of_products, operands, preferred)


def _gate(activation: Any, out_dtype: np.dtype, axes: Operands) -> Callable[..., jax.Array]:
    """Returns the function of the two products and their biases that a gated layer computes."""
    spec = GemmSpec(axes, out_dtype, None, Epilogue("gated", activation))
    return lambda gate, up, vectors: reference.epilogue([gate, up], vectors, spec)[0]


def applied(
    products: list[jax.Array],
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    preferred: DTypeLike | None,
) -> Any:
    """Returns the results of ``epilogue=`` for given products."""
    listed, flat, out_trees = epilogues.as_listed(
        epilogue, operands, len(products), products[0].shape, preferred
    )
    results = listed(*products, *flat)
    return jax.tree.unflatten(out_trees[0], results)


def function_of_products(
    x: jax.Array,
    weights: Sequence[Weight],
    wide: DTypeLike,
    config: str | None,
    epilogue: Callable[..., Any],
    operands: Sequence[Any] = (),
    preferred: DTypeLike | None = None,
) -> Any:
    """Returns the results of a function of the products of ``x`` and each weight.

    One kernel computes all of it if the products have float32 sums, and the weights are packed and
    have no leading dimensions.

    Args:
        x: ``(..., m, k)``, bfloat16 or float16.
        weights: one or two, each ``(..., k, n)``, of one format.
        wide: dtype of the products.
        config: as in ``gemm``.
        epilogue: function of the products and ``operands``; returns a pytree of arrays.
        operands: pytrees of arrays.
        preferred: dtype of the floating-point results.
    """
    packed = [w for w in weights if isinstance(w, PackedWeight)]
    specs = {w.spec(wide, config) for w in packed}
    for each in specs:
        check_config(each, len(weights))
    arrays = [y for w in packed for y in (w.values, w.scales)]
    scales = {w.scales.dtype for w in packed}
    typed = [x, *arrays, *(y for y in jax.tree.leaves(tuple(operands)) if hasattr(y, "dtype"))]
    is_special = _compat.has_explicit_axes() or _compat.is_unreduced(*typed)
    is_one = len(specs) == len(scales) == 1 and not any(w.batch for w in weights)
    is_one &= len(packed) == len(weights)
    if is_special or not is_one or jnp.dtype(wide) != jnp.float32 or x.ndim < 2:
        products = [product(x, w, wide, config) for w in weights]
        return applied(products, epilogue, operands, preferred)
    (spec,) = specs
    shape = (*x.shape[:-1], spec.n)
    listed, flat, out_trees = epilogues.as_listed(
        epilogue, operands, len(weights), shape, preferred
    )
    types = [jax.ShapeDtypeStruct(shape, wide)] * len(weights)
    types += map(epilogues.type_of, flat)
    function, held = functions.trace(listed, types, len(weights))
    every = [x, *map(lax.stop_gradient, arrays), *rng.words(flat), *held]
    described = PackedFunctionSpec(spec, len(weights), function)
    return jax.tree.unflatten(out_trees[0], packed_function.bind(every, described))


def out_dtype_of(x: jax.Array, preferred: DTypeLike | None) -> np.dtype:
    """Returns the dtype of a product with a packed weight.

    Raises:
        TypeError: ``preferred`` is not a floating-point type of 16 bits or more.
    """
    dtype = jnp.dtype(jax.dtypes.canonicalize_dtype(x.dtype if preferred is None else preferred))
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise TypeError(
            f"preferred_element_type={dtype} is not the type of a product with a packed weight; "
            "accepted: floating-point numbers of 16 bits or more"
        )
    return dtype
