"""Converts a region to the function that ``gemm`` and ``gated_gemm`` take as their epilogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.epilogue import evaluation
from jax_tcgemm.transforms.fused import Fused
from jax_tcgemm.transforms.graph import Atom, Node, Value
from jax_tcgemm.transforms.products import COMPARISONS

# bfloat16 values are float32 within a region. float16 values are not: programs may depend on the
# largest float16 number.
_NARROW = jnp.dtype(jnp.bfloat16)
_WIDE = jnp.dtype(jnp.float32)

# The results of these operations reveal the type of their operands, or are discontinuous.
_DISCONTINUOUS = frozenset(
    {
        *("bitcast_convert_type", "nextafter", "reduce_precision", "is_finite"),
        *("floor", "ceil", "round", "rem"),
    }
)


def region_function(fused: Fused) -> Callable[..., list[Any]]:
    """Returns a function that computes the outputs from the float32 products and the leaves.

    Values that are bfloat16 in the user's program are float32 within the region and are rounded
    when they are written. An XLA fusion does the same, unless ``xla_allow_excess_precision`` is
    off. Exception: if an operation is discontinuous, all values are rounded as in the program. A
    comparison may guard an operation, such as ``jnp.where(y >= 1, jnp.sqrt(y - 1), 0)``, so that
    both must read the same number.
    """
    if any(map(_is_discontinuous, fused.nodes)):
        unfused = unfused_function(fused)

        def rounded(*values: Any) -> list[Any]:
            pairs = zip(fused.accumulators, values, strict=False)
            products = [x.astype(product.dtype) for product, x in pairs]
            return unfused(*products, *values[len(products) :])

        return rounded
    count = len(fused.products)

    def function(*values: Any) -> list[Any]:
        products = (
            _wide(x.astype(product.dtype)) if product.dtype == jnp.float16 else x
            for product, x in zip(fused.accumulators, values[:count], strict=True)
        )
        outputs = _computed(fused, [*products, *map(_wide, values[count:])], _applied, _wide)
        return [y.astype(x.dtype) for y, x in zip(outputs, fused.outputs, strict=True)]

    return function


def unfused_function(fused: Fused) -> Callable[..., list[Any]]:
    """Returns a function that computes the outputs as the user's program does.

    Its arguments are the products in their dtype in the program, then the leaves.
    """

    def applied(node: Node, inputs: Sequence[Any]) -> list[Any]:
        return evaluation.bind_again(node.eqn, inputs)

    return lambda *values: _computed(fused, values, applied, lambda number: number)


def _computed(
    fused: Fused,
    values: Sequence[Any],
    applied: Callable[[Node, Sequence[Any]], list[Any]],
    number: Callable[[Any], Any],
) -> list[Any]:
    """Computes the outputs from the products and the leaves.

    Args:
        fused: the region.
        values: the products, then the leaves.
        applied: computes a node.
        number: converts the number of a literal, which has its dtype of the program.
    """
    env: dict[Atom, Any] = dict(zip((*fused.accumulators, *fused.leaves), values, strict=True))
    for node in fused.nodes:
        inputs = [env[x] if isinstance(x, Value) else number(literal(x)) for x in node.inputs]
        (env[node.outputs[0]],) = applied(node, inputs)
    return [env[x] for x in fused.outputs]


def literal(atom: Any) -> np.ndarray:
    """Returns the number that a literal of a jaxpr stands for, in its dtype."""
    return np.asarray(atom.val).astype(atom.aval.dtype)


def _applied(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Computes a node on values; bfloat16 values are given and returned as float32."""
    if node.name == "convert_element_type":
        return [_converted(node, inputs[0])]
    made = [x for x in node.outputs if _is_narrow(x.dtype)]
    if not node.inputs and made:  # an iota, whose numbers are rounded
        return [_wide(x) for x in jaxprs.bind_again(node.eqn, [])]
    if node.name in jaxprs.CUSTOM_CALLS:  # they have their own rules for the type
        inputs = [_of(x, atom.aval) for x, atom in zip(inputs, node.inputs, strict=True)]
    return [_wide(x) for x in evaluation.bind_again(node.eqn, inputs)]


def _converted(node: Node, x: Any) -> Any:
    """Converts a value; a conversion of a floating-point value to bfloat16 does not round."""
    old, new = node.inputs[0].aval.dtype, jnp.dtype(node.params["new_dtype"])
    if _is_narrow(new):
        return x.astype(_WIDE) if jnp.issubdtype(old, jnp.floating) else _wide(x.astype(new))
    return x.astype(new)


def _is_discontinuous(node: Node) -> bool:
    """Returns true if an operation on bfloat16 values jumps where rounding may cross the jump.

    A comparison with zero does not, because rounding keeps the sign.
    """
    if not any(_is_narrow(x.aval.dtype) for x in node.inputs):
        return False
    if node.name == "convert_element_type":
        return not jnp.issubdtype(node.params["new_dtype"], jnp.inexact)
    if node.name in COMPARISONS:
        return not any(isinstance(x, core.Literal) and np.all(x.val == 0) for x in node.inputs)
    return node.name in _DISCONTINUOUS


def _of(x: Any, aval: Any) -> Any:
    return x.astype(aval.dtype) if x.dtype != aval.dtype else x


def _wide(x: Any) -> Any:
    return x.astype(_WIDE) if _is_narrow(x.dtype) else x


def _is_narrow(dtype: Any) -> bool:
    return dtype == _NARROW
