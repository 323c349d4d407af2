"""``ragged_dot`` and ``gated_ragged_dot``: check the arguments and bind the primitive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments, eager, weight_only, weights
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.api.packed_ragged_dot import packed_ragged_dot
from jax_tcgemm.api.quantized_ragged_dot import quantized_ragged_dot
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem import ragged
from jax_tcgemm.problem.activations import Activation
from jax_tcgemm.problem.arithmetic import resolve_algorithm, resolve_run_time
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.strides import Operands
from jax_tcgemm.quantized import arrays
from jax_tcgemm.quantized.packed import PackedWeight, is_weight

_NAMES = arguments.Names("lhs", "rhs", "", "transpose_rhs")


_STATIC = "activation", "precision", "preferred_element_type", "transpose_rhs", "out_sharding"


@eager.one_program(*_STATIC, "config", functions=("epilogue",))
def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    activation: str | Activation | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    config: str | None = None,
    out_sharding: Any = None,
    epilogue: Callable[..., Any] | None = None,
    epilogue_operands: Sequence[Any] = (),
) -> Any:
    """Product of consecutive groups of rows with one matrix each, with a fused epilogue.

    The first ``group_sizes[0]`` rows are ``activation(lhs @ rhs[0] + bias[0])``, the next
    ``group_sizes[1]`` rows use ``rhs[1]`` and ``bias[1]``, and so on. Rows beyond the last group
    are zero; with ``epilogue``, the product is zero there. This is ``jax.lax.ragged_dot`` with an
    epilogue, as for the tokens of a mixture of experts, sorted by expert.

    On NVIDIA GPUs of compute capability 9.0 this is one tensor-core kernel for bfloat16, float16
    and 8-bit operands. Exception: for 8-bit operands without scales, the kernel takes neither
    ``bias`` nor ``activation``. The kernel serves any group sizes, and the host need not know them.
    Elsewhere, and for other dtypes, XLA computes group after group in ``jax.lax``.

    The product is accumulated and the epilogue computed in float32, and the result is rounded once.
    The function can be differentiated, forward and reverse and to any order. Under ``vmap`` the
    products are computed one after the other.

    Args:
        lhs: ``(m, k)``, an array, a ``Quantized`` or qwix's ``QArray``.
        rhs: ``(g, k, n)``, or ``(g, n, k)`` with ``transpose_rhs``; an array, a ``Quantized`` or
            qwix's ``QArray``, or a ``PackedWeight``. Beside bfloat16 or float16 ``lhs`` with few
            rows a group, only the packed weights of groups that have rows are read.
            Two float8 or two int8 operands are multiplied directly if their scales do not change
            along k and they have no zero points.
        group_sizes: ``(g,)``, integers. They may sum to less than ``m``. Negative sizes count as
            zero, and a group that would reach beyond row ``m`` ends there.
        bias: ``(g, n)``, added before the activation.
        activation: as in ``gemm``.
        precision: as in ``gemm``.
        preferred_element_type: dtype of the result. ``None`` means that of
            ``jnp.matmul(lhs, rhs)``. If JAX has no common type for the two (bfloat16 by int4), it
            means that of ``jax.lax.ragged_dot``.
        transpose_rhs: whether the matrices are stored transposed; this moves no data.
        config: name of a kernel configuration for groups of rows (a row of
            ``jax_tcgemm.kernels.table``), ``"xla"``, ``"kernel"`` or ``None``, as in ``gemm``.
        out_sharding: as in ``gemm``. By default rows are sharded like those of ``lhs``, and columns
            like those of ``rhs``.
        epilogue: as in ``gemm``. Values that differ between groups are operands of shape
            ``(m, 1)``, such as ``jnp.repeat(scales, group_sizes, total_repeat_length=m)[:, None]``.
        epilogue_operands: further arguments of ``epilogue``.

    Returns:
        An array ``(m, n)``, or the results of ``epilogue``.

    Raises:
        TypeError: an argument's type or dtype is not accepted.
        ValueError: an argument's shape or value is not accepted.

    Example:
        >>> group_sizes = jnp.array([5, 3])  # five rows for expert_w[0], three for expert_w[1]
        >>> y = ragged_dot(x, expert_w, group_sizes, activation="silu")
        >>> y.shape
        (8, 256)
    """
    epilogues.check_operands(epilogue, epilogue_operands)
    if isinstance(rhs, PackedWeight):
        lhs = arguments.matrix("lhs", lhs)
        if weights.multiplied(rhs, lhs, precision, transposed=transpose_rhs) is not None:
            _check_matrices(lhs, rhs)
            return packed_ragged_dot(
                lhs,
                rhs,
                _sizes(group_sizes, rhs.shape[0]),
                bias=bias,
                activation=activation,
                preferred=preferred_element_type,
                config=config,
                out_sharding=out_sharding,
                epilogue=epilogue,
                epilogue_operands=epilogue_operands,
            )
        rhs = weight_only.dequantized("rhs", rhs, "lhs", lhs)
    if arrays.is_quantized(lhs) or arrays.is_quantized(rhs):
        if out_sharding is not None:
            raise ValueError("ragged_dot: no out_sharding= of quantized operands; accepted: None")
        return quantized_ragged_dot(
            ragged_dot,
            lhs,
            rhs,
            group_sizes,
            bias=bias,
            activation=activation,
            precision=precision,
            preferred_element_type=preferred_element_type,
            transpose_rhs=bool(transpose_rhs),
            config=config,
            epilogue=epilogue,
            epilogue_operands=epilogue_operands,
        )
    lhs, rhs = arguments.matrix("lhs", lhs), arguments.matrix("rhs", rhs)
    n = _check_matrices(lhs, rhs, transpose_rhs)
    precision = _compat.canonicalize_precision(precision)
    own = preferred_element_type
    own = _without_promotion(lhs.dtype, rhs.dtype) if own is None else own
    lhs, rhs, out_dtype = arguments.promoted(lhs, rhs, precision, own, _NAMES)
    arguments.check_activation(activation, out_dtype)
    sums = jnp.dtype(jnp.int32) if lhs.dtype == rhs.dtype == jnp.int8 else out_dtype
    types = (lhs.dtype, rhs.dtype, sums, precision)
    # 8-bit kernels have a function as epilogue, or compute only the product.
    has_epilogue = bias is not None or activation is not None
    of_8_bits = None if has_epilogue else resolve_run_time(*types)
    _check_config(config, of_8_bits or resolve_algorithm(*types))
    groups = rhs.shape[0]
    operands = [lhs, rhs, _sizes(group_sizes, groups)]
    if epilogue is not None:
        epilogues.check_alone(
            "ragged_dot", bias=bias, activation=activation, out_sharding=out_sharding
        )
        spec = ragged.dot(out_dtype, precision, config, transpose_b=bool(transpose_rhs))
        shape = (lhs.shape[0], n)
        return epilogues.applied(
            operands, spec, shape, epilogue, epilogue_operands, preferred_element_type
        )
    if bias is not None:
        bias = arguments.vector("bias", bias, (groups, n), out_dtype)
        bias = jnp.broadcast_to(bias, (groups, n))
    spec = ragged.dot(
        *(out_dtype, precision, config),
        transpose_b=bool(transpose_rhs),
        has_bias=bias is not None,
        epilogue=Epilogue(activation=activation),
    )
    out_sharding = _compat.out_sharding_of(out_sharding, "ragged_dot")
    return gemm_primitive.bind(Operands(*operands, bias=bias), spec, out_sharding)[0]


@eager.one_program(*_STATIC)
def gated_ragged_dot(
    lhs: ArrayLike,
    rhs_gate: Any,
    rhs_up: Any,
    group_sizes: ArrayLike,
    *,
    activation: str | Activation | None = "silu",
    bias_gate: ArrayLike | None = None,
    bias_up: ArrayLike | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    out_sharding: Any = None,
) -> jax.Array:
    """Gated linear unit of each group of rows, for the experts of a mixture.

    The rows of group ``i`` are
    ``activation(lhs @ rhs_gate[i] + bias_gate[i]) * (lhs @ rhs_up[i] + bias_up[i])``. Rows beyond
    the last group are zero. The function calls ``ragged_dot`` twice, which rounds both factors to
    the result's dtype. A separate pass then multiplies them.

    Args:
        lhs: ``(m, k)``.
        rhs_gate: ``(g, k, n)``, or ``(g, n, k)`` with ``transpose_rhs``. Two ``PackedWeight``s are
            multiplied as in ``ragged_dot``. Otherwise a ``PackedWeight`` or a ``Quantized`` is
            dequantized to the dtype of ``lhs``.
        rhs_up: of the shape and dtype of ``rhs_gate``.
        group_sizes: ``(g,)``, as in ``ragged_dot``.
        activation: as in ``gemm``; ``None`` means the plain product of the two.
        bias_gate: ``(g, n)``, added before the activation.
        bias_up: ``(g, n)``.
        precision: as in ``gemm``.
        preferred_element_type: dtype of the result; ``None`` means that of
            ``jnp.matmul(lhs, rhs_gate)``.
        transpose_rhs: whether the matrices are stored transposed; this moves no data.
        out_sharding: as in ``ragged_dot``.

    Returns:
        An array ``(m, n)``.

    Raises:
        TypeError: an argument's type or dtype is not accepted.
        ValueError: an argument's shape or value is not accepted.

    Example:
        >>> group_sizes = jnp.array([5, 3])
        >>> y = gated_ragged_dot(x, expert_w_gate, expert_w_up, group_sizes)
        >>> y.shape
        (8, 256)
    """
    if isinstance(rhs_gate, PackedWeight) and isinstance(rhs_up, PackedWeight):
        if rhs_up.shape != rhs_gate.shape:
            raise ValueError(
                f"rhs_up must have the shape of rhs_gate, got rhs_up.shape={rhs_up.shape} and "
                f"rhs_gate.shape={rhs_gate.shape}"
            )
    else:
        if is_weight(rhs_gate) or is_weight(rhs_up):
            lhs = arguments.matrix("lhs", lhs)
            rhs_gate = weight_only.dequantized("rhs_gate", rhs_gate, "lhs", lhs)
            rhs_up = weight_only.dequantized("rhs_up", rhs_up, "lhs", lhs)
        rhs_gate = arguments.array("rhs_gate", rhs_gate)
        rhs_up = arguments.like("rhs_up", rhs_up, "rhs_gate", rhs_gate)
    options: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "transpose_rhs": transpose_rhs,
        "out_sharding": out_sharding,
    }
    gate = ragged_dot(lhs, rhs_gate, group_sizes, bias=bias_gate, activation=activation, **options)
    return gate * ragged_dot(lhs, rhs_up, group_sizes, bias=bias_up, **options)


def _check_matrices(lhs: Any, rhs: Any, transpose_rhs: bool = False) -> int:
    """Checks the shapes of the two operands and returns the number of columns."""
    if lhs.ndim != 2 or rhs.ndim != 3:
        raise ValueError(
            f"lhs must be (m, k) and rhs (g, k, n), got lhs.shape={lhs.shape} and "
            f"rhs.shape={rhs.shape}"
        )
    return arguments.extents(lhs, rhs, False, transpose_rhs, _NAMES)[2]


def _without_promotion(lhs: np.dtype, rhs: np.dtype) -> np.dtype | None:
    """Returns the dtype of ``lax.ragged_dot`` for operands that JAX does not promote."""
    try:
        with jax.numpy_dtype_promotion("standard"):
            jnp.promote_types(lhs, rhs)
    except (TypeError, ValueError):
        x, w = jax.ShapeDtypeStruct((1, 1), lhs), jax.ShapeDtypeStruct((1, 1, 1), rhs)
        with contextlib.suppress(TypeError, ValueError):
            return jax.eval_shape(lax.ragged_dot, x, w, jax.ShapeDtypeStruct((1,), "int32")).dtype
    return None


def _check_config(config: str | None, algorithm: str | None) -> None:
    arguments.check_config(config)
    rows = kernel_names.for_algorithm(algorithm, "m") if algorithm is not None else ()
    accepted = sorted(row.name for row in rows)
    if config not in (*kernel_names.NO_ROWS, *accepted):
        raise ValueError(
            f"config={config!r} is no kernel configuration for groups of rows in "
            f"{algorithm or 'these dtypes'}; "
            f"accepted: {kernel_names.NO_ROWS} or {accepted}"
        )


def _sizes(group_sizes: ArrayLike, groups: int) -> jax.Array:
    """Returns the sizes as int32; too large ones become its maximum, too small ones 0."""
    sizes = arguments.array("group_sizes", group_sizes)
    if not isinstance(groups, int):
        raise TypeError(f"the number of groups must be known, got rhs with {groups} matrices")
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes must be integers, got group_sizes.dtype={sizes.dtype}")
    if sizes.shape != (groups,):
        raise ValueError(
            f"group_sizes must have one size for each of the {groups} matrices of rhs, got "
            f"group_sizes.shape={sizes.shape}"
        )
    limits = jnp.iinfo(np.int32)
    if jnp.iinfo(sizes.dtype).max > limits.max:
        sizes = jnp.minimum(sizes, sizes.dtype.type(limits.max))
    if jnp.iinfo(sizes.dtype).min < limits.min:
        sizes = jnp.maximum(sizes, sizes.dtype.type(0))
    return sizes.astype(jnp.int32)
