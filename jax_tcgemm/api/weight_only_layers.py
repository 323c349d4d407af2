"""``mlp`` and ``gated_mlp`` of quantized weights: one product after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.api.gated_gemm import gated_gemm
from jax_tcgemm.api.gemm import gemm
from jax_tcgemm.quantized.packed import is_weight


def two_products(
    name: str,
    x: jax.Array,
    first: dict[str, Any],
    first_biases: dict[str, Any],
    second: dict[str, Any],
    second_bias: Any,
    *,
    activation: Any,
    residual: Any,
    transpose_w: bool,
    precision: Any,
    preferred_element_type: DTypeLike | None,
    hidden_sharding: Any,
    out_sharding: Any,
    epilogue: Callable[..., Any] | None,
    epilogue_operands: Sequence[Any],
) -> Any:
    """Computes two layers of which at least one weight is quantized.

    The hidden layer has the dtype of ``x`` (with arrays of other dtypes, the promoted one).

    Args:
        name: name of the public function.
        x: ``(..., m, k)``.
        first: the weight of the first layer, or both of a gated one, by argument name.
        first_biases: its biases, by their argument names.
        second: the weight of the second layer, by its argument name.
        second_bias: its bias.
        activation: as in ``mlp``.
        residual: as in ``mlp``.
        transpose_w: as in ``mlp``.
        precision: as in ``mlp``.
        preferred_element_type: as in ``mlp``.
        hidden_sharding: as in ``mlp``.
        out_sharding: as in ``mlp``.
        epilogue: as in ``mlp``.
        epilogue_operands: as in ``mlp``.

    Raises:
        ValueError: a weight has more than 2 dimensions, or something is given beside ``epilogue``.
    """
    for key, w in (first | second).items():
        if w is not None and len(w.shape) != 2:
            raise ValueError(
                f"{key} must have 2 dimensions, got {key}.shape={w.shape}; for stacks of weights "
                "use jax.vmap"
            )
    options: dict[str, Any] = {"activation": activation, "precision": precision}
    if epilogue is not None:
        epilogues.check_alone(name, **first_biases)
        options |= {"epilogue": epilogue, "epilogue_operands": epilogue_operands}
        arrays = [w for w in first.values() if w is not None and not is_weight(w)]
        dtypes = [x.dtype, *(w.dtype for w in arrays)]
        if all(jnp.issubdtype(t, jnp.floating) and jnp.dtype(t).itemsize > 1 for t in dtypes):
            dtype = functools.reduce(jnp.promote_types, dtypes)
            options |= {"preferred_element_type": dtype}
    if name == "mlp":
        (w1,), (b1,) = first.values(), first_biases.values()
        options["activation"] = None if epilogue is not None else activation
        hidden = gemm(x, w1, bias=b1, transpose_b=transpose_w, **options)
    else:
        hidden = gated_gemm(x, *first.values(), **first_biases, transpose_w=transpose_w, **options)
    shape = (*x.shape[:-1], next(iter(second.values())).shape[-1 if transpose_w else -2])
    if getattr(hidden, "shape", None) != shape:
        raise ValueError(
            f"epilogue and {', '.join(first)} give a hidden layer of "
            f"{jax.tree.map(lambda y: y.shape, hidden)}; accepted: one array of {shape}"
        )
    if hidden_sharding is not None:
        hidden = _compat.constrained(hidden, hidden_sharding)
    (w2,) = second.values()
    return gemm(
        hidden,
        w2,
        bias=second_bias,
        residual=residual,
        transpose_b=transpose_w,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
