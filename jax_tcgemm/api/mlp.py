"""``mlp`` and ``gated_mlp``: check the arguments and make two layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments, eager, weight_only
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.api.gated_gemm import gated_operands
from jax_tcgemm.api.weight_only_layers import two_products
from jax_tcgemm.primitives import layers
from jax_tcgemm.problem.activations import Activation
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, resolve_algorithm
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.problem.strides import Operands

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
    x = arguments.matrix("x", x)
    if any(map(weight_only.is_weight, (w1, w2))):
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
    w1, w2 = _weight("w1", w1), _weight("w2", w2)
    precision = _compat.canonicalize_precision(precision)
    names = arguments.Names("x", "w1", "", "transpose_w")
    batch, m, f, k = arguments.extents(x, w1, False, transpose_w, names)
    x, w1, dtype = arguments.promoted(x, w1, precision, _named_dtype(x, w1, precision), names)
    dtype = _hidden_dtype(x, w1, dtype, precision)
    arguments.check_activation(None if epilogue is not None else activation, dtype)
    placed = {
        "a": arguments.placed(x, (*batch, m, k)),
        "b": arguments.placed(w1, (*batch, k, f), transpose_w),
    }
    if b1 is not None:
        placed["bias"] = arguments.placed(arguments.vector("b1", b1, (f,), dtype), (*batch, f))
    first, axes = _unzipped(placed)
    if epilogue is not None:
        _check_alone("mlp", recompute_activation, b1=b1)
        activation = None
    spec = GemmSpec(axes, dtype, precision, Epilogue(activation=activation))
    return _two_layers(
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
    x = arguments.matrix("x", x)
    if any(map(weight_only.is_weight, (w_gate, w_up, w_down))):
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
    w_gate, w_down = _weight("w_gate", w_gate), _weight("w_down", w_down)
    precision = _compat.canonicalize_precision(precision)
    first, spec = gated_operands(
        x,
        w_gate,
        w_up,
        bias_gate,
        bias_up,
        transpose_w=transpose_w,
        precision=precision,
        preferred_element_type=_named_dtype(x, w_gate, precision),
    )
    dtype = _hidden_dtype(first.a, first.b, spec.out_dtype, precision)
    arguments.check_activation(None if epilogue is not None else activation, dtype)
    if epilogue is not None:
        biases = {"bias_gate": bias_gate, "bias_up": bias_up}
        _check_alone("gated_mlp", recompute_activation, **biases)
        activation = None
    return _two_layers(
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


def _weight(name: str, value: Any) -> jax.Array:
    w = arguments.array(name, value)
    if w.ndim != 2:
        raise ValueError(
            f"{name} must have 2 dimensions, got {name}.shape={w.shape}; for stacks of weights use "
            "jax.vmap"
        )
    return w


def _named_dtype(x: jax.Array, w: jax.Array, precision: Any) -> Any:
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


def _hidden_dtype(x: jax.Array, w: jax.Array, dtype: Any, precision: Any) -> Any:
    """Returns the dtype in which the second product multiplies, so that nothing is lost."""
    algorithm = resolve_algorithm(x.dtype, w.dtype, dtype, precision)
    return dtype if algorithm is None else INPUT_DTYPES[algorithm]


def _unzipped(placed: dict[str, Any]) -> tuple[Operands, Operands]:
    operands = Operands(None, None)._replace(**{name: x for name, (x, _) in placed.items()})
    return operands, Operands(None, None)._replace(**{name: x for name, (_, x) in placed.items()})


def _two_layers(
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
    second, axes = _unzipped(placed)
    axes = axes._replace(a=tuple(range(len(hidden.shape))))
    spec = GemmSpec(axes, out_dtype, first_spec.precision)
    both = layers.Layers(first_spec, spec, bool(recompute_activation), hidden_sharding)
    out_sharding = _compat.out_sharding_of(out_sharding, "mlp" if w_name == "w2" else "gated_mlp")
    if epilogue is not None:
        return _of_function(flatten(first), both, hidden, epilogue, second, out_sharding)
    return layers.apply(both, first, second, out_sharding)
