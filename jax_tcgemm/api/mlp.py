"""``mlp`` and ``gated_mlp``: check the arguments and make two layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments, eager, two_layers
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.api.gated_gemm import gated_operands
from jax_tcgemm.api.weight_only_layers import two_products
from jax_tcgemm.problem.activations import Activation
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.quantized.packed import is_weight

_STATIC = (
    *("activation", "transpose_w", "precision", "preferred_element_type"),
    *("recompute_activation", "hidden_sharding", "out_sharding"),
)


@eager.one_program(*_STATIC, functions=("epilogue",))
def mlp(
    x: ArrayLike,
    w1: Any,
    b1: ArrayLike | None,
    w2: Any,
    b2: ArrayLike | None = None,
    *,
    activation: str | Activation | None = "gelu",
    residual: ArrayLike | None = None,
    transpose_w: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    recompute_activation: bool = False,
    hidden_sharding: Any = None,
    out_sharding: Any = None,
    epilogue: Callable[..., Any] | None = None,
    epilogue_operands: Sequence[Any] = (),
) -> jax.Array:
    """Two layers, computed as two gemms: ``activation(x @ w1 + b1) @ w2 + b2 + residual``.

    Each layer's bias, activation and residual are fused as in ``gemm``. In reverse mode, the gemm
    that takes the cotangent back through ``w2`` also multiplies by the derivative of the
    activation. So only the gradient of ``b1`` needs a separate pass over the hidden layer.

    A forward pass that is to be differentiated keeps the hidden layer before and after the
    activation. ``jax.checkpoint`` policies know these residuals by the names
    ``jax_tcgemm.PREACTIVATION`` and ``jax_tcgemm.ACTIVATION``.

    Args:
        x: ``(..., m, k)``.
        w1: ``(k, f)``. For stacks of weights use ``jax.vmap``. Weights may be quantized, as ``b``
            of ``gemm``: the layers are then two calls of ``gemm``.
        b1: ``(f,)``, or ``None``.
        w2: ``(f, n)``.
        b2: ``(n,)``, or ``None``.
        activation: as in ``gemm``.
        residual: broadcasts to ``(..., m, n)``.
        transpose_w: whether ``w1`` is ``(f, k)`` and ``w2`` is ``(n, f)``.
        precision: as in ``gemm``, for both layers. The hidden layer has the dtype in which the
            second product multiplies. For example, bfloat16 ``x`` and float32 master weights with
            ``precision="BF16_BF16_F32"`` and ``preferred_element_type=jnp.bfloat16`` compute
            throughout in bfloat16. The gradients of the weights are then float32 and are not
            rounded before.
        preferred_element_type: dtype of the result; ``None`` means that of ``jnp.matmul`` of the
            hidden layer and ``w2``.
        recompute_activation: whether to keep the hidden layer only before the activation. The
            reverse pass then computes the activation again for the gradient of ``w2``: one more
            pass over the hidden layer, and half of the memory.
        hidden_sharding: a ``PartitionSpec`` or ``NamedSharding`` of the hidden layer, as for
            ``jax.lax.with_sharding_constraint``; ``None`` leaves it to the partitioner.
        out_sharding: as in ``gemm``.
        epilogue: a function of ``x @ w1`` and ``epilogue_operands`` that replaces ``b1`` and the
            activation, as in ``gemm``. Its only result is the hidden layer, and ``activation`` has
            no effect. In reverse mode, its pullback is fused into the epilogue of a gemm as well.
        epilogue_operands: further arguments of ``epilogue``.

    Returns:
        An array ``(..., m, n)``.

    Raises:
        TypeError: an argument's type or dtype is not accepted.
        ValueError: an argument's shape or value is not accepted.

    Example:
        >>> y = mlp(x, w, b, w_down, residual=x)  # x + gelu(x @ w + b) @ w_down
        >>> y.shape
        (8, 128)
    """
    epilogues.check_operands(epilogue, epilogue_operands)
    x = arguments.matrix("x", x)
    if any(map(is_weight, (w1, w2))):
        return two_products(
            *("mlp", x, {"w1": w1}, {"b1": b1}, {"w2": w2}, b2),
            activation=activation,
            residual=residual,
            transpose_w=transpose_w,
            precision=precision,
            preferred_element_type=preferred_element_type,
            hidden_sharding=hidden_sharding,
            out_sharding=out_sharding,
            epilogue=epilogue,
            epilogue_operands=epilogue_operands,
        )
    w1, w2 = two_layers.weight("w1", w1), two_layers.weight("w2", w2)
    precision = _compat.canonicalize_precision(precision)
    names = arguments.Names("x", "w1", "", "transpose_w")
    batch, m, f, k = arguments.extents(x, w1, False, transpose_w, names)
    x, w1, dtype = arguments.promoted(
        x, w1, precision, two_layers.named_dtype(x, w1, precision), names
    )
    dtype = two_layers.hidden_dtype(x, w1, dtype, precision)
    placed = {
        "a": arguments.placed(x, (*batch, m, k)),
        "b": arguments.placed(w1, (*batch, k, f), transpose_w),
    }
    if b1 is not None:
        placed["bias"] = arguments.placed(arguments.vector("b1", b1, (f,), dtype), (*batch, f))
    first, axes = two_layers.unzipped(placed)
    if epilogue is not None:
        _check_alone("mlp", recompute_activation, b1=b1)
        activation = None
    arguments.check_activation(activation, dtype)
    spec = GemmSpec(axes, dtype, precision, Epilogue(activation=activation))
    return two_layers.apply(
        first,
        spec,
        {"w2": w2, "b2": b2, "residual": residual},
        transpose_w,
        preferred_element_type,
        recompute_activation,
        hidden_sharding,
        out_sharding,
        epilogue and (epilogue, epilogue_operands),
    )


@eager.one_program(*_STATIC, functions=("epilogue",))
def gated_mlp(
    x: ArrayLike,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    *,
    activation: str | Activation | None = "silu",
    bias_gate: ArrayLike | None = None,
    bias_up: ArrayLike | None = None,
    bias_down: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    transpose_w: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    recompute_activation: bool = False,
    hidden_sharding: Any = None,
    out_sharding: Any = None,
    epilogue: Callable[..., Any] | None = None,
    epilogue_operands: Sequence[Any] = (),
) -> jax.Array:
    """Gated layer and a second one: ``(activation(x @ w_gate) * (x @ w_up)) @ w_down``.

    This is computed as two gemms; the first is that of ``gated_gemm``. In reverse mode, the gemm
    that takes the cotangent back through ``w_down`` writes the cotangents of both halves of the
    gated layer.

    Args:
        x: ``(..., m, k)``.
        w_gate: ``(k, f)``, or both weights side by side, as in ``gated_gemm``. For stacks of
            weights use ``jax.vmap``. Weights may be quantized, as in ``mlp``.
        w_up: ``(k, f)``, or ``None`` if ``w_gate`` holds both weights.
        w_down: ``(f, n)``.
        activation: as in ``gemm``.
        bias_gate: ``(f,)``, added before the activation.
        bias_up: ``(f,)``.
        bias_down: ``(n,)``.
        residual: broadcasts to ``(..., m, n)``; added to the result.
        transpose_w: whether all weights are stored transposed.
        precision: as in ``mlp``.
        preferred_element_type: as in ``mlp``.
        recompute_activation: as in ``mlp``; ``x @ w_gate`` and ``x @ w_up`` are kept then.
        hidden_sharding: as in ``mlp``.
        out_sharding: as in ``gemm``.
        epilogue: as in ``mlp``, but a function of ``x @ w_gate``, ``x @ w_up`` and
            ``epilogue_operands`` that replaces both biases and the activation.
        epilogue_operands: further arguments of ``epilogue``.

    Returns:
        An array ``(..., m, n)``.

    Raises:
        TypeError: an argument's type or dtype is not accepted.
        ValueError: an argument's shape or value is not accepted.

    Example:
        >>> y = gated_mlp(x, w_gate, w_up, w_down, residual=x)
        >>> y.shape
        (8, 128)
    """
    epilogues.check_operands(epilogue, epilogue_operands)
    x = arguments.matrix("x", x)
    if any(map(is_weight, (w_gate, w_up, w_down))):
        return two_products(
            *("gated_mlp", x, {"w_gate": w_gate, "w_up": w_up}),
            *({"bias_gate": bias_gate, "bias_up": bias_up}, {"w_down": w_down}, bias_down),
            activation=activation,
            residual=residual,
            transpose_w=transpose_w,
            precision=precision,
            preferred_element_type=preferred_element_type,
            hidden_sharding=hidden_sharding,
            out_sharding=out_sharding,
            epilogue=epilogue,
            epilogue_operands=epilogue_operands,
        )
    w_gate, w_down = two_layers.weight("w_gate", w_gate), two_layers.weight("w_down", w_down)
    precision = _compat.canonicalize_precision(precision)
    first, spec = gated_operands(
        x,
        w_gate,
        w_up,
        bias_gate,
        bias_up,
        transpose_w=transpose_w,
        precision=precision,
        preferred_element_type=two_layers.named_dtype(x, w_gate, precision),
    )
    dtype = two_layers.hidden_dtype(first.a, first.b, spec.out_dtype, precision)
    if epilogue is not None:
        biases = {"bias_gate": bias_gate, "bias_up": bias_up}
        _check_alone("gated_mlp", recompute_activation, **biases)
        activation = None
    arguments.check_activation(activation, dtype)
    return two_layers.apply(
        first,
        spec.replace(out_dtype=dtype, activation=activation),
        {"w_down": w_down, "bias_down": bias_down, "residual": residual},
        transpose_w,
        preferred_element_type,
        recompute_activation,
        hidden_sharding,
        out_sharding,
        epilogue and (epilogue, epilogue_operands),
    )


def _check_alone(name: str, recompute_activation: bool, **biases: Any) -> None:
    """Checks that no argument conflicts with ``epilogue=``."""
    epilogues.check_alone(name, recompute_activation=recompute_activation or None, **biases)
