"""Steps that ``mlp`` and ``gated_mlp`` share: checks, dtypes and the second layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.primitives import layers
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, resolve_algorithm
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.problem.strides import Operands


def apply(
    first: Operands,
    first_spec: GemmSpec,
    others: dict[str, Any],
    transpose_w: bool,
    preferred_element_type: DTypeLike | None,
    recompute_activation: bool,
    hidden_sharding: Any,
    out_sharding: Any,
    epilogue: tuple[Callable[..., Any], Sequence[Any]] | None,
) -> jax.Array:
    """Checks the second layer's operands, by the names that its caller gives; runs both layers."""
    (w_name, w), (bias_name, bias), (_, residual) = others.items()
    shapes = Operands(*(None if x is None else x.shape for x in first))
    *batch, m, f = first_spec.result_shape(shapes)
    hidden: Any = jax.ShapeDtypeStruct((*batch, m, f), first_spec.out_dtype)
    names = arguments.Names("the hidden layer", w_name, "", "transpose_w")
    _, _, n, _ = arguments.extents(hidden, w, False, transpose_w, names)
    _, w, out_dtype = arguments.promoted(
        hidden, w, first_spec.precision, preferred_element_type, names
    )
    placed = {"b": arguments.placed(w, (*batch, f, n), transpose_w)}
    if bias is not None:
        vector = arguments.vector(bias_name, bias, (n,), out_dtype)
        placed["bias"] = arguments.placed(vector, (*batch, n))
    if residual is not None:
        addend = arguments.addend("residual", residual, (*batch, m, n), out_dtype)
        placed["c"] = arguments.placed(addend, (*batch, m, n))
    second, axes = unzipped(placed)
    axes = axes._replace(a=tuple(range(len(hidden.shape))))
    spec = GemmSpec(axes, out_dtype, first_spec.precision)
    both = layers.Layers(first_spec, spec, bool(recompute_activation), hidden_sharding)
    out_sharding = _compat.out_sharding_of(out_sharding, "mlp" if w_name == "w2" else "gated_mlp")
    if epilogue is not None:
        return _of_function(flatten(first), both, hidden, epilogue, second, out_sharding)
    return layers.apply(both, first, second, out_sharding)


def _of_function(
    first: Sequence[jax.Array],
    both: layers.Layers,
    hidden: Any,
    epilogue: tuple[Callable[..., Any], Sequence[Any]],
    second: Operands,
    out_sharding: Any,
) -> jax.Array:
    """Runs both layers; the first has a function as its epilogue."""
    if not jnp.issubdtype(hidden.dtype, jnp.inexact):
        raise TypeError(
            f"epilogue= makes a hidden layer of {hidden.dtype} here; accepted: operands with a "
            "floating-point product"
        )
    products = both.first.accumulators(out_dtype=both.first.out_dtype)
    given, compiled_spec, _ = epilogues.traced(
        first, products, hidden.shape, *epilogue, preferred_element_type=hidden.dtype
    )
    results = [(x.shape, x.dtype) for x in compiled_spec.function.results]
    if results != [(hidden.shape, hidden.dtype)]:
        raise ValueError(
            f"epilogue returned arrays of {results}; accepted: one of {hidden.shape} and a "
            "floating-point type, the hidden layer"
        )
    both = dataclasses.replace(both, first=compiled_spec)
    return layers.apply(both, given, second, out_sharding)


def weight(name: str, value: Any) -> jax.Array:
    """Returns a weight of two dimensions."""
    w = arguments.array(name, value)
    if w.ndim != 2:
        raise ValueError(
            f"{name} must have 2 dimensions, got {name}.shape={w.shape}; for stacks of weights use "
            "jax.vmap"
        )
    return w


def named_dtype(x: jax.Array, w: jax.Array, precision: Any) -> Any:
    """Returns the dtype in which ``precision`` says that two types are multiplied.

    The operands then need no common dtype, which ``jax_numpy_dtype_promotion="strict"`` would
    refuse.
    """
    named = INPUT_DTYPES.get(getattr(precision, "name", ""))
    are_floats = all(
        jnp.issubdtype(operand.dtype, jnp.floating) and operand.dtype.itemsize <= 4
        for operand in (x, w)
    )
    return named if x.dtype != w.dtype and are_floats else None


def hidden_dtype(x: jax.Array, w: jax.Array, dtype: Any, precision: Any) -> Any:
    """Returns the dtype in which the second product multiplies, so that nothing is lost."""
    algorithm = resolve_algorithm(x.dtype, w.dtype, dtype, precision)
    return dtype if algorithm is None else INPUT_DTYPES[algorithm]


def unzipped(placed: dict[str, Any]) -> tuple[Operands, Operands]:
    """Returns operands and their axes, given both by name."""
    operands = Operands(None, None)._replace(**{name: x for name, (x, _) in placed.items()})
    return operands, Operands(None, None)._replace(**{name: x for name, (_, x) in placed.items()})
