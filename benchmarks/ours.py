"""``jax_tcgemm`` for each kind of case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import quantized
import weight_only
from functions import FUNCTIONS
from steps import STEPS, Arrays, own_value_and_gradients

from jax_tcgemm import _compat, gated_gemm, gemm, ragged_dot
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

ALPHA = 0.5
BETA = 2.0

# Names of the operands that are multiplied; others are bias and c, or operands of a step.
FACTORS = ("a", "b", "b2")

_TRANSPOSED = ("transpose_a", "transpose_b")


def ours(case: Any, config: str | None) -> Callable[[Arrays], Any]:
    """Returns a case computed by this package.

    Args:
        case: the case.
        config: name of the kernel configuration; None lets the heuristic choose.
    """
    if case.is_packed:
        return weight_only.ours(case, config)
    if case.scale:
        return quantized.ours(case, config)
    if case.step:
        return lambda arrays: own_value_and_gradients(STEPS[case.step], arrays)
    if case.function:
        return lambda arrays: _with_function(case, arrays, config)
    if case.is_gated:
        return lambda arrays: gated_gemm(
            jnp.swapaxes(arrays["a"], -1, -2) if case.layout[0] == "t" else arrays["a"],
            arrays["b"],
            arrays["b2"],
            transpose_w=case.layout[1] == "t",
            preferred_element_type=case.out_dtype if case.out else None,
            config=config,
        )
    if case.group_sizes:
        return lambda arrays: ragged_dot(
            arrays["a"],
            arrays["b"],
            jnp.asarray(case.group_sizes, jnp.int32),
            bias=arrays.get("bias"),
            activation=case.activation,
            transpose_rhs=case.layout[1] == "t",
            preferred_element_type=case.out_dtype if case.out else None,
            config=config,
        )
    if "aux" in case.parts:
        return lambda arrays: _with_preactivation(case, arrays, config)
    return lambda arrays: gemm(
        arrays["a"],
        arrays["b"],
        arrays.get("c"),
        bias=arrays.get("bias"),
        alpha=ALPHA if "alpha" in case.parts else 1.0,
        beta=BETA if "beta_c" in case.parts else 1.0,
        activation=case.activation,
        transpose_a=case.layout[0] == "t",
        transpose_b=case.layout[1] == "t",
        conjugate_a=case.conjugate == "a",
        conjugate_b=case.conjugate == "b",
        precision=case.precision,
        preferred_element_type=case.out_dtype if case.out else None,
        config=config,
    )


def _with_function(case: Any, arrays: Arrays, config: str | None) -> Any:
    a, *weights = (arrays[name] for name in FACTORS if name in arrays)
    options = {
        "config": config,
        "epilogue": FUNCTIONS[case.function].apply,
        "epilogue_operands": case.function_operands(arrays),
    }
    if case.group_sizes:
        sizes = jnp.asarray(case.group_sizes, jnp.int32)
        is_transposed = case.layout[1] == "t"
        return ragged_dot(a, weights[0], sizes, transpose_rhs=is_transposed, **options)
    if case.is_gated:
        return gated_gemm(a, *weights, transpose_w=case.layout[1] == "t", **options)
    transposed = (letter == "t" for letter in case.layout)
    return gemm(a, *weights, **dict(zip(_TRANSPOSED, transposed, strict=True)), **options)


def _with_preactivation(case: Any, arrays: Arrays, config: str | None) -> Any:
    """Binds the primitive like the derivative of ``gemm``: no public function returns z."""

    def axes(name: str, letter: str = "n") -> tuple[int | None, ...] | None:
        if name not in arrays:
            return None
        roles = 1 if name == "bias" else 2
        leading = arrays[name].ndim - roles
        matrix = [leading + role for role in range(roles)]
        missing = (None,) * ((case.batch > 1) - leading)
        return (*missing, *range(leading), *(matrix[::-1] if letter == "t" else matrix))

    a, b = axes("a", case.layout[0]), axes("b", case.layout[1])
    spec = GemmSpec(
        Operands(a, b, c=axes("c"), bias=axes("bias")),
        case.out_dtype,
        _compat.canonicalize_precision(None),
        Epilogue(
            activation=case.activation,
            alpha=ALPHA if "alpha" in case.parts else 1.0,
            beta=BETA if "beta_c" in case.parts else 1.0,
            results=(True, True),
        ),
        config,
    )
    names = ("a", "b", "c", "bias")
    return gemm_primitive.bind(Operands(*(arrays.get(name) for name in names)), spec)
