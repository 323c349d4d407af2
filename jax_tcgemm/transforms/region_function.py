"""A region as the function that ``gemm`` and ``gated_gemm`` take as their epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.transforms.fused import Fused
from jax_tcgemm.transforms.graph import Atom, Value

# What shows the type that its operands have, or has rules of its own for it.
_EXACT = frozenset(
    {
        *("bitcast_convert_type", "nextafter", "reduce_precision", "is_finite"),
        *jaxprs.CUSTOM_CALLS,
    }
)
# What is float32 on the way. Not float16, whose largest number programs may be written around.
_NARROW = jnp.dtype(jnp.bfloat16)


def region_function(fused: Fused) -> Callable[..., list[Any]]:
    """Returns a function of the products, in float32, and of the leaves, a list of the outputs.

    What is bfloat16 in the user's program is float32 on the way, and is rounded where it is
    written: as XLA has it within a fusion, unless ``xla_allow_excess_precision`` is off.
    """
    count = len(fused.products)
    leaves = fused.leaves

    def function(*values: Any) -> list[Any]:
        env: dict[Value, Any] = {
            product: _wide(x.astype(product.dtype)) if product.dtype == jnp.float16 else x
            for product, x in zip(fused.accumulators, values[:count], strict=True)
        }
        env.update((leaf, _wide(x)) for leaf, x in zip(leaves, values[count:], strict=True))
        for node in fused.nodes:
            inputs = [_read(env, atom) for atom in node.inputs]
            (env[node.outputs[0]],) = _applied(node, inputs)
        return [env[x].astype(x.dtype) for x in fused.outputs]

    return function


def _read(env: dict[Value, Any], atom: Atom) -> Any:
    if isinstance(atom, Value):
        return env[atom]
    return np.float32(atom.val) if _is_narrow(atom.aval.dtype) else atom.val


def _applied(node: Any, inputs: list[Any]) -> list[Any]:
    """Computes a node of values of which those of bfloat16 are float32."""
    if node.name == "convert_element_type":
        new = node.params["new_dtype"]
        return [inputs[0].astype(jnp.float32 if _is_narrow(new) else new)]
    if node.name == "iota" and _is_narrow(node.params["dtype"]):
        iota = jaxprs.bind_again(_with(node.eqn, dtype=jnp.dtype(jnp.int32)), inputs)
        return [_wide(iota[0])]
    if node.name in _EXACT:
        inputs = [_of(x, atom.aval) for x, atom in zip(inputs, node.inputs, strict=True)]
    return [_wide(x) for x in jaxprs.bind_again(node.eqn, inputs)]


def _with(eqn: Any, **params: Any) -> Any:
    return eqn.replace(params={**eqn.params, **params})


def _of(x: Any, aval: Any) -> Any:
    return x.astype(aval.dtype) if hasattr(x, "astype") and x.dtype != aval.dtype else x


def _wide(x: Any) -> Any:
    dtype = getattr(x, "dtype", None)
    return x.astype(jnp.float32) if _is_narrow(dtype) else x


def _is_narrow(dtype: Any) -> bool:
    return dtype == _NARROW
