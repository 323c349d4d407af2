"""``gated_gemm``: checks the arguments and makes one ``GemmSpec`` with two weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments, eager, weight_only, weights
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem.activations import Activation
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.problem.strides import Operands
from jax_tcgemm.quantized.packed import is_weight


@eager.one_program(
    *("activation", "transpose_w", "precision", "preferred_element_type", "config"),
    "out_sharding",
    functions=("epilogue",),
)
def gated_gemm(
    x: ArrayLike,
    w_gate: Any,
    w_up: Any = None,
    *,
    activation: str | Activation | None = "silu",
    bias_gate: ArrayLike | None = None,
    bias_up: ArrayLike | None = None,
    transpose_w: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    config: str | None = None,
    out_sharding: Any = None,
    epilogue: Callable[..., Any] | None = None,
    epilogue_operands: Sequence[Any] = (),
) -> Any:
    """Gated linear unit: two products of one left operand, joined in a fused epilogue.

    ``D = activation(x @ w_gate + bias_gate) * (x @ w_up + bias_up)`` (Shazeer, 2020, "GLU variants
    improve transformer").

    On GPUs of compute capability 9.0, for bfloat16 and float16, this is one kernel that reads ``x``
    once. It accumulates and joins both products in float32 and rounds the result once. Exceptions
    with up to 64 rows are exported programs and less than 2^24 multiplications: they take two
    kernels, which round ``x @ w_up`` in between (for packed weights, both products). Elsewhere, and
    for float32, XLA computes the same formula in ``jax.numpy``.

    The function can be differentiated and batched like ``gemm``. The forward pass of a derivative
    also writes the two pre-activations.

    Args:
        x: ``(..., m, k)``.
        w_gate: ``(..., k, n)``, or ``(..., n, k)`` with ``transpose_w``. Leading dimensions of
            ``x`` and the weights broadcast as in ``jnp.matmul``. Weights may be quantized, as ``b``
            of ``gemm``.
        w_up: of the shape and dtype of ``w_gate``. ``None`` means that ``w_gate`` holds both
            weights side by side, the activated columns first: ``(..., k, 2 * n)``, or
            ``(..., 2 * n, k)`` with ``transpose_w``.
        activation: as in ``gemm``; ``None`` means the plain product of the two.
        bias_gate: ``(n,)`` or ``(..., n)``, added before the activation.
        bias_up: ``(n,)`` or ``(..., n)``.
        transpose_w: whether the weights are stored transposed; this moves no data.
        precision: as in ``gemm``.
        preferred_element_type: dtype of the result; ``None`` means that of
            ``jnp.matmul(x, w_gate)``.
        config: name of a kernel configuration, ``"kernel"``, ``"xla"`` or ``None``, as in ``gemm``.
        out_sharding: as in ``gemm``.
        epilogue: as in ``gemm``, but a function of ``x @ w_gate``, ``x @ w_up`` and
            ``epilogue_operands``; ``activation`` then has no effect.
        epilogue_operands: further arguments of ``epilogue``.

    Returns:
        An array ``(..., m, n)``, or the results of ``epilogue``.

    Raises:
        TypeError: an argument's type or dtype is not accepted.
        ValueError: an argument's shape or value is not accepted.

    Example:
        >>> h = gated_gemm(x, w_gate, w_up)  # silu(x @ w_gate) * (x @ w_up)
        >>> h.shape
        (8, 256)
    """
    epilogues.check_operands(epilogue, epilogue_operands)
    x = arguments.matrix("x", x)
    if is_weight(w_gate) or is_weight(w_up):
        gate, up = (
            weights.multiplied(
                w, x, precision, preferred_element_type, config, transposed=transpose_w
            )
            for w in (w_gate, w_up)
        )
        if gate is not None and (up is None) == (w_up is None):
            return weight_only.packed_gated_gemm(
                *(x, gate, up),
                activation=activation,
                biases={"bias_gate": bias_gate, "bias_up": bias_up},
                preferred=preferred_element_type,
                config=config,
                out_sharding=_compat.out_sharding_of(out_sharding, "gated_gemm"),
                epilogue=epilogue,
                epilogue_operands=epilogue_operands,
            )
        w_gate = weight_only.dequantized("w_gate", w_gate, "x", x)
        w_up = weight_only.dequantized("w_up", w_up, "x", x)
    operands, spec = gated_operands(
        x,
        w_gate,
        w_up,
        bias_gate,
        bias_up,
        transpose_w=transpose_w,
        precision=_compat.canonicalize_precision(precision),
        preferred_element_type=preferred_element_type,
    )
    if epilogue is None:
        arguments.check_activation(activation, spec.out_dtype)
        arguments.check_real("the product of both gates", spec.out_dtype, operands.a, operands.b)
    arguments.check_config(config)
    if epilogue is not None:
        epilogues.check_alone(
            "gated_gemm", bias_gate=bias_gate, bias_up=bias_up, out_sharding=out_sharding
        )
        spec = spec.accumulators(config=config)
        operands = spec.select(operands)
        shape = spec.result_shape(Operands(*(None if x is None else x.shape for x in operands)))
        return epilogues.applied(
            flatten(operands), spec, shape, epilogue, epilogue_operands, preferred_element_type
        )
    spec = spec.replace(activation=activation, config=config)
    out_sharding = _compat.out_sharding_of(out_sharding, "gated_gemm")
    return gemm_primitive.bind(operands, spec, out_sharding)[0]


_GATED_NAMES = arguments.Names("x", "w_gate", "", "transpose_w")


def gated_operands(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike | None,
    bias_gate: ArrayLike | None,
    bias_up: ArrayLike | None,
    *,
    transpose_w: bool,
    precision: Any,
    preferred_element_type: DTypeLike | None,
) -> tuple[Operands, GemmSpec]:
    """Checks and places the operands of ``gated_gemm``; ``precision`` is canonical."""
    x, w_gate = arguments.matrix("x", x), arguments.matrix("w_gate", w_gate)
    batch, m, n, k = arguments.extents(x, w_gate, False, transpose_w, _GATED_NAMES)
    x, w_gate, out_dtype = arguments.promoted(
        x, w_gate, precision, preferred_element_type, _GATED_NAMES
    )
    placed = {
        "a": arguments.placed(x, (*batch, m, k)),
        "b": arguments.placed(w_gate, (*batch, k, n), transpose_w),
    }
    if w_up is None:
        if n % 2:
            raise ValueError(
                f"w_gate.shape={w_gate.shape} holds both weights where w_up is None, so that the "
                f"extent {n} must be even"
            )
        n //= 2
    else:
        w_up = arguments.like("w_up", w_up, "w_gate", w_gate)
        placed["b2"] = arguments.placed(w_up, (*batch, k, n), transpose_w)
    biases = {"bias_gate": bias_gate, "bias_up": bias_up}
    placed |= arguments.gate_biases(biases, (*batch, n), out_dtype)
    operands = Operands(**{name: operand for name, (operand, _) in placed.items()})
    axes = Operands(**{name: axes for name, (_, axes) in placed.items()})
    return operands, GemmSpec(axes, out_dtype, precision, Epilogue("gated"), packed=w_up is None)
