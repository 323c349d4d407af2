"""Checks the arguments of the public functions and places the operands."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.kernels.names import MEASURED
from jax_tcgemm.problem.activations import Activation, resolve
from jax_tcgemm.problem.arithmetic import resolve_algorithm
from jax_tcgemm.problem.strides import Axes, Shape


class Names(NamedTuple):
    """Argument names of operands and flags, used in error messages."""

    a: str
    b: str
    transpose_a: str
    transpose_b: str


NAMES = Names("a", "b", "transpose_a", "transpose_b")
_NUMBERS = (bool, int, float, complex)


def is_number(value: Any) -> bool:
    """Checks if a scalar is a Python number, which is a constant of the compiled program."""
    return isinstance(value, _NUMBERS) and not isinstance(value, np.generic)


def array(name: str, value: Any) -> jax.Array:
    """Returns an argument as an array and rejects objects that only look like one."""
    if not isinstance(
        value, (jax.Array, *_compat.HOST_ARRAYS, np.generic, *_NUMBERS)
    ) and not hasattr(value, "__jax_array__"):
        raise TypeError(f"{name} must be an array, got {name}={value!r} of {type(value)}")
    return jnp.asarray(value)


def matrix(name: str, value: Any) -> jax.Array:
    """Returns an operand of a product, which must have at least 2 dimensions."""
    x = array(name, value)
    if x.ndim < 2:
        raise ValueError(f"{name} must have at least 2 dimensions, got {name}.shape={x.shape}")
    return x


def check_flags(**flags: Any) -> None:
    """Checks that arguments are True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name}={flag!r} must be True or False")


def extents(
    a: Any, b: Any, transpose_a: bool, transpose_b: bool, names: Names = NAMES
) -> tuple[Shape, int, int, int]:
    """Returns the batch shape, ``m``, ``n`` and ``k`` of a product of objects with shapes."""
    check_flags(**{names.transpose_a: transpose_a, names.transpose_b: transpose_b})
    m, k = a.shape[-2:][::-1] if transpose_a else a.shape[-2:]
    b_k, n = b.shape[-2:][::-1] if transpose_b else b.shape[-2:]
    flags = ((names.transpose_a, transpose_a), (names.transpose_b, transpose_b))
    shapes = f"{names.a}.shape={a.shape}, {names.b}.shape={b.shape}"
    shapes += "".join(f", {name}={flag}" for name, flag in flags if name)
    both = f"{names.a} and {names.b}"
    if k != b_k:
        raise ValueError(f"{both} must agree in k, got {k} and {b_k} from {shapes}")
    try:
        batch: Any = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(f"leading dimensions of {both} must broadcast, got {shapes}") from None
    return batch, m, n, k


def promoted(
    a: jax.Array,
    b: jax.Array,
    precision: Any,
    preferred: DTypeLike | None,
    names: Names = NAMES,
) -> tuple[jax.Array, jax.Array, np.dtype]:
    """Returns the operands and the dtype of the result, promoted as by ``jnp.matmul``.

    Operands of two strong types keep them: the conversion is part of the product, so that each
    cotangent is rounded only once.
    """
    got = f"{names.a}.dtype={a.dtype}, {names.b}.dtype={b.dtype}"
    both = f"{names.a} and {names.b}"
    try:
        common = jnp.result_type(a, b)
    except (TypeError, ValueError) as error:
        if preferred is None:
            raise TypeError(f"{both} must have dtypes that jnp.matmul takes, got {got}") from error
    else:
        a, b = (_strong(x, common) for x in (a, b))
    out_dtype = common if preferred is None else jax.dtypes.canonicalize_dtype(preferred)
    if preferred is not None:  # the result's type is then a strong one
        a, b = (x.astype(x.dtype) if jax.typeof(x).weak_type else x for x in (a, b))
    if resolve_algorithm(a.dtype, b.dtype, out_dtype, precision) is None:
        matmul = functools.partial(
            jnp.matmul, precision=precision, preferred_element_type=preferred
        )
        try:
            jax.eval_shape(matmul, *(jax.ShapeDtypeStruct((1, 1), x.dtype) for x in (a, b)))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{both}, precision and preferred_element_type must be what jnp.matmul takes, got "
                f"{got}, precision={precision}, preferred_element_type={preferred}: {error}"
            ) from error
    return a, b, jnp.dtype(out_dtype)


def _strong(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts a weakly typed operand to ``dtype``."""
    return x.astype(dtype) if jax.typeof(x).weak_type and x.dtype != dtype else x


def check_activation(
    activation: str | Activation | None, out_dtype: np.dtype, *factors: jax.Array
) -> None:
    """Checks that the activation exists and that the product of the factors can have one."""
    if activation is None:
        return
    resolve(activation)
    check_real(f"activation={activation!r}", out_dtype, *factors)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise TypeError(
            f"activation={activation!r} needs a real floating-point result, got {out_dtype}"
        )


def check_real(what: str, out_dtype: np.dtype, *factors: jax.Array) -> None:
    """Checks that a nonlinear epilogue with a real result has no complex product."""
    types = [x.dtype for x in factors if jnp.issubdtype(x.dtype, jnp.complexfloating)]
    if types and not jnp.issubdtype(out_dtype, jnp.complexfloating):
        raise TypeError(
            f"{what} with a result in {out_dtype} needs real operands, got {types[0]}; accepted: "
            "the operation on the real part of gemm"
        )


def check_scaled(out_dtype: np.dtype) -> None:
    """Checks that a product with scales has a result of floating-point numbers."""
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise TypeError(
            f"preferred_element_type={out_dtype} is not the type of a product with scales; "
            "accepted: floating-point numbers"
        )


def check_config(config: str | None) -> None:
    """Checks the type of ``config``; which configurations exist depends on the operands.

    Raises:
        TypeError: ``config`` is not a string.
        ValueError: ``config`` is reserved for measurements.
    """
    if not (config is None or isinstance(config, str)):
        raise TypeError(f"config={config!r} must be None or the name of a kernel configuration")
    if config == MEASURED:
        raise ValueError(f"config={config!r} is not a kernel configuration")


def placed(x: jax.Array, extents: Shape, swap: bool = False) -> tuple[jax.Array, Axes]:
    """Returns an operand without the dimensions along which it is broadcast, and its axes.

    Args:
        x: the operand. Its shape, after the swap, broadcasts to ``extents``.
        extents: the result's extents in the operand's roles.
        swap: whether the last two dimensions are in the opposite order of the roles.
    """
    missing = len(extents) - x.ndim
    axes: list[int | None] = [None] * missing + list(range(x.ndim))
    if swap:
        axes[-2:] = axes[:-3:-1]
    dropped = [
        axis
        for axis, extent in zip(axes, extents, strict=True)
        if axis is not None and x.shape[axis] == 1 and extent != 1
    ]
    kept = [axis for axis in range(x.ndim) if axis not in dropped]
    x = lax.squeeze(x, dropped) if dropped else x
    return x, tuple(kept.index(axis) if axis in kept else None for axis in axes)


def like(name: str, value: Any, model_name: str, model: jax.Array) -> jax.Array:
    """Returns an operand that must have the shape and dtype of another."""
    x = array(name, value)
    if x.shape != model.shape:
        raise ValueError(
            f"{name} must have the shape of {model_name}, got {name}.shape={x.shape} and "
            f"{model_name}.shape={model.shape}"
        )
    x = _strong(x, model.dtype)
    if x.dtype != model.dtype:
        raise TypeError(
            f"{name} must have the dtype of {model_name}, got {name}.dtype={x.dtype} and "
            f"{model_name}.dtype={model.dtype}"
        )
    return x


def addend(name: str, value: Any, shape: Shape, out_dtype: np.dtype) -> jax.Array:
    """Returns ``c`` or ``residual``, which must broadcast to ``shape``."""
    x = array(name, value)
    _check_kind(name, x.dtype, out_dtype)
    if not _broadcasts(x.shape, shape):
        raise ValueError(
            f"{name}.shape={x.shape} does not fit; accepted: a shape that broadcasts to {shape}"
        )
    return x


def vector(name: str, value: Any, shape: Shape, out_dtype: np.dtype) -> jax.Array:
    """Returns a bias or scale, which must broadcast to ``shape``.

    Its last extent must be the last of ``shape``.
    """
    x = array(name, value)
    _check_kind(name, x.dtype, out_dtype)
    if x.ndim == 0 or x.shape[-1] != shape[-1] or not _broadcasts(x.shape, shape):
        raise ValueError(
            f"{name}.shape={x.shape} does not fit; accepted: ({shape[-1]},) or a shape that "
            f"broadcasts to {shape} and ends in {shape[-1]}"
        )
    return x


def _broadcasts(own: Shape, full: Shape) -> bool:
    pairs = zip(own[::-1], full[::-1], strict=False)
    return len(own) <= len(full) and all(x in (1, extent) for x, extent in pairs)


def constant(name: str, value: Any, out_dtype: np.dtype) -> Any:
    """Returns ``alpha`` or ``beta`` that is a Python number."""
    # The default is the float 1.0, even for integer results.
    if value != 1:
        _check_kind(name, jnp.result_type(type(value)), out_dtype, value)
    return value


def scalar(name: str, value: Any, out_dtype: np.dtype) -> jax.Array:
    """Returns ``alpha`` or ``beta`` that is an array."""
    x = array(name, value)
    if x.ndim:
        raise ValueError(f"{name} must be a number or an array of shape (), got shape {x.shape}")
    _check_kind(name, x.dtype, out_dtype)
    return x


def epilogue_operands(
    given: dict[str, Any], shape: Shape, out_dtype: np.dtype, wide: np.dtype
) -> tuple[dict[str, tuple[jax.Array, Axes]], dict[str, Any]]:
    """Checks and places the operands of the epilogue of ``gemm``.

    Args:
        given: the arguments ``c``, ``residual``, ``bias``, ``row_scale``, ``column_scale``,
            ``alpha`` and ``beta``, by name.
        shape: ``(*batch, m, n)``.
        out_dtype: dtype of the result.
        wide: dtype of ``alpha`` and ``beta`` if they are arrays.

    Returns:
        The arrays and their axes, by name. The residual's axes are those of an operand ``c``. The
        second value holds ``alpha`` and ``beta`` if they are numbers.
    """
    *batch, m, n = shape
    operands, numbers = {}, {}
    for name in ("c", "residual"):
        if given[name] is not None:
            operands[name] = placed(addend(name, given[name], shape, out_dtype), shape)
    for name, extent in {"bias": n, "row_scale": m, "column_scale": n}.items():
        if given[name] is not None:
            full = (*batch, extent)
            operands[name] = placed(vector(name, given[name], full, out_dtype), full)
    for name in ("alpha", "beta"):
        if is_number(given[name]):
            numbers[name] = constant(name, given[name], out_dtype)
            continue
        x = scalar(name, given[name], out_dtype)
        if name == "alpha" or "c" in operands:
            operands[name] = x if x.dtype == wide else x.astype(wide), (None,) * len(batch)
    return operands, numbers


def gate_biases(
    given: dict[str, Any], shape: Shape, out_dtype: np.dtype
) -> dict[str, tuple[jax.Array, Axes]]:
    """Checks and places the biases of ``gated_gemm``, which become ``bias`` and ``bias2``.

    Args:
        given: the bias of the gate and that of the other product, by argument name.
        shape: ``(*batch, n)``.
        out_dtype: dtype of the result.
    """
    return {
        own: placed(vector(name, given[name], shape, out_dtype), shape)
        for own, name in zip(("bias", "bias2"), given, strict=True)
        if given[name] is not None
    }


def _check_kind(name: str, dtype: Any, out_dtype: np.dtype, value: Any = None) -> None:
    """Checks that values of ``dtype`` can be added to the result without losing their kind."""
    kinds = (jnp.complexfloating, jnp.floating, jnp.integer, jnp.bool_)
    out_kind = next((i for i, kind in enumerate(kinds) if jnp.issubdtype(out_dtype, kind)), 0)
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds[out_kind:]):
        got = f"{name}={value!r}" if value is not None else f"{name}.dtype={dtype}"
        raise TypeError(
            f"{got} does not fit a result of {out_dtype}; accepted: "
            f"{', '.join(kind.__name__ for kind in kinds[out_kind:])} values"
        )
