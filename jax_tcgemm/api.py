"""``gemm``: names, shapes and dtypes checked, and one ``GemmSpec`` made of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm import _compat, primitive
from jax_tcgemm.epilogues import ACTIVATIONS
from jax_tcgemm.spec import GemmSpec, accumulator_dtype, resolve_algorithm
from jax_tcgemm.strides import Axes, Operands, Shape


def gemm(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    alpha: ArrayLike = 1.0,
    beta: ArrayLike = 1.0,
    activation: str | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    config: str | None = None,
) -> jax.Array:
    """Matrix product with a fused epilogue.

    ``D = activation(alpha * op(A) @ op(B) + beta * C + bias)``. On NVIDIA GPUs of compute
    capability 8.0 and newer this is one hand-written tensor-core kernel for bfloat16, float16 and
    (in TF32 arithmetic) float32 operands. Elsewhere, and for what has no kernel but ``jnp.matmul``
    takes, it is the same formula in ``jax.numpy``. The product is accumulated in float32 for 16-bit
    operands unless ``precision`` says otherwise, the epilogue is computed in float32 (float64 for
    float64, in integers for integers), and the result is rounded once. It can be differentiated,
    forward and reverse and to any order, and batched.

    Args:
        a: ``(..., m, k)``, or ``(..., k, m)`` with ``transpose_a``.
        b: ``(..., k, n)``, or ``(..., n, k)`` with ``transpose_b``. Leading dimensions of ``a`` and
            ``b`` broadcast as in ``jnp.matmul``, and a broadcast operand is never copied.
        c: broadcasts to ``(..., m, n)``. Neither ``c`` nor ``bias``, ``alpha`` or ``beta`` widens
            the result's dtype.
        bias: ``(n,)`` or ``(..., n)``; its leading dimensions broadcast against those of the
            result, ``m`` excepted.
        alpha: factor of the product. A Python number is a constant of the compiled program, an
            array of shape ``()`` an operand, which may be traced and differentiated.
        beta: factor of ``c``, like ``alpha``; without ``c`` it has no effect.
        activation: ``None``, ``"relu"``, ``"gelu"`` (tanh form, as ``jax.nn.gelu``),
            ``"gelu_exact"``, ``"silu"``, ``"sigmoid"`` or ``"tanh"``.
        transpose_a: whether ``a`` holds the transpose of ``A``; nothing is moved in memory.
        transpose_b: whether ``b`` holds the transpose of ``B``.
        precision: as in ``jnp.matmul``; also the name of a ``jax.lax.DotAlgorithmPreset``.
            ``None`` is ``jax.default_matmul_precision``. float32 is computed in TF32 unless
            ``"highest"`` or a wider preset is asked for.
        preferred_element_type: dtype of the result; ``None`` is that of ``jnp.matmul(a, b)``.
        config: name of a kernel configuration (a row of ``jax_tcgemm.kernel_table``), or ``None``
            for the one that a heuristic chooses. Derivatives choose their own.

    Returns:
        ``(..., m, n)``, of the dtype of ``jnp.matmul(a, b, preferred_element_type=...)``.

    Raises:
        TypeError: an argument's type or dtype is not accepted.
        ValueError: an argument's shape or value is not accepted.
    """
    a, b = _matrix("a", a), _matrix("b", b)
    batch, m, n, k = _extents(a, b, transpose_a, transpose_b)
    precision = _compat.canonicalize_precision(precision)
    a, b, out_dtype = _promoted(a, b, precision, preferred_element_type)
    _check_activation(activation, out_dtype)
    if not (config is None or isinstance(config, str)):
        raise TypeError(f"config={config!r} must be None or the name of a kernel configuration")
    placed = {
        "a": _placed(a, (*batch, m, k), transpose_a),
        "b": _placed(b, (*batch, k, n), transpose_b),
    }
    if c is not None:
        placed["c"] = _placed(_addend("c", c, (*batch, m, n), out_dtype), (*batch, m, n))
    if bias is not None:
        placed["bias"] = _placed(_addend("bias", bias, (*batch, n), out_dtype), (*batch, n))
    constants = {}
    for name, value in (("alpha", alpha), ("beta", beta)):
        if isinstance(value, _NUMBERS) and not isinstance(value, np.generic):
            constants[name] = _constant(name, value, out_dtype)
            continue
        scalar = _scalar(name, value, out_dtype)
        if name == "alpha" or c is not None:
            scalar = scalar.astype(accumulator_dtype(a.dtype, b.dtype, out_dtype))
            placed[name] = scalar, (None,) * len(batch)
    operands = Operands(**{name: operand for name, (operand, _) in placed.items()})
    axes = Operands(**{name: axes for name, (_, axes) in placed.items()})
    spec = GemmSpec(axes, out_dtype, precision, **constants, activation=activation, config=config)
    return primitive.bind(operands, spec)[0]


_NUMBERS = (bool, int, float, complex)


def _array(name: str, value: Any) -> jax.Array:
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, *_NUMBERS)) and not hasattr(
        value, "__jax_array__"
    ):
        raise TypeError(f"{name} must be an array, got {name}={value!r} of {type(value)}")
    return jnp.asarray(value)


def _matrix(name: str, value: Any) -> jax.Array:
    x = _array(name, value)
    if x.ndim < 2:
        raise ValueError(f"{name} must have at least 2 dimensions, got {name}.shape={x.shape}")
    return x


def _extents(
    a: jax.Array, b: jax.Array, transpose_a: bool, transpose_b: bool
) -> tuple[Shape, int, int, int]:
    """Returns the result's batch, ``m``, ``n`` and ``k``."""
    for name, flag in (("transpose_a", transpose_a), ("transpose_b", transpose_b)):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name}={flag!r} must be True or False")
    m, k = a.shape[-2:][::-1] if transpose_a else a.shape[-2:]
    b_k, n = b.shape[-2:][::-1] if transpose_b else b.shape[-2:]
    shapes = f"a.shape={a.shape}, b.shape={b.shape}, {transpose_a=}, {transpose_b=}"
    if k != b_k:
        raise ValueError(f"a and b must agree in k, got {k} and {b_k} from {shapes}")
    try:
        batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(f"leading dimensions of a and b must broadcast, got {shapes}") from None
    return batch, m, n, k


def _promoted(
    a: jax.Array, b: jax.Array, precision: Any, preferred: DTypeLike | None
) -> tuple[jax.Array, jax.Array, np.dtype]:
    """Returns the operands and the dtype of the result, as ``jnp.matmul`` has them.

    Operands of two strong types stay as they are: the conversion is part of the product, so that
    each cotangent is rounded only once.
    """
    got = f"a.dtype={a.dtype}, b.dtype={b.dtype}"
    try:
        common = jnp.result_type(a, b)
    except (TypeError, ValueError) as error:
        raise TypeError(f"a and b must have dtypes that jnp.matmul takes, got {got}") from error
    a, b = (_strong(x, common) for x in (a, b))
    out_dtype = common if preferred is None else jax.dtypes.canonicalize_dtype(preferred)
    if resolve_algorithm(a.dtype, b.dtype, out_dtype, precision) is None:
        matmul = functools.partial(
            jnp.matmul, precision=precision, preferred_element_type=preferred
        )
        try:
            jax.eval_shape(matmul, *(jax.ShapeDtypeStruct((1, 1), x.dtype) for x in (a, b)))
        except (TypeError, ValueError) as error:
            raise TypeError(
                "a, b, precision and preferred_element_type must be what jnp.matmul takes, got "
                f"{got}, precision={precision}, preferred_element_type={preferred}: {error}"
            ) from error
    return a, b, jnp.dtype(out_dtype)


def _strong(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts an operand whose type is only a Python number's to the type that rules."""
    return x.astype(dtype) if jax.typeof(x).weak_type and x.dtype != dtype else x


def _check_activation(activation: str | None, out_dtype: np.dtype) -> None:
    if activation is None:
        return
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r} is unknown; accepted: None or {sorted(ACTIVATIONS)}"
        )
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise TypeError(
            f"activation={activation!r} needs a real floating-point result, got {out_dtype}"
        )


def _placed(x: jax.Array, extents: Shape, swap: bool = False) -> tuple[jax.Array, Axes]:
    """Returns an operand without the dimensions along which it is broadcast, and its axes.

    Args:
        x: the operand; its shape broadcasts to ``extents``, once its last two are swapped if asked.
        extents: the result's extents in the operand's roles.
        swap: whether the last two dimensions are in the other order than the roles.
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


def _addend(name: str, value: Any, shape: Shape, out_dtype: np.dtype) -> jax.Array:
    """Returns ``c`` or ``bias`` once it is known to fit."""
    x = _array(name, value)
    _check_kind(name, x.dtype, out_dtype)
    accepted = f"a shape that broadcasts to {shape}"
    if name == "bias":
        accepted = f"({shape[-1]},) or {accepted} and ends in {shape[-1]}"
        fits = x.ndim >= 1 and x.shape[-1] == shape[-1]
    else:
        fits = True
    if fits and x.ndim <= len(shape):
        own = zip(x.shape[::-1], shape[::-1], strict=False)
        if all(extent in (1, full) for extent, full in own):
            return x
    raise ValueError(f"{name}.shape={x.shape} does not fit; accepted: {accepted}")


def _constant(name: str, value: Any, out_dtype: np.dtype) -> Any:
    # The default is the float 1.0, also where the result is an integer.
    if value != 1:
        _check_kind(name, jnp.result_type(type(value)), out_dtype, value)
    return value


def _scalar(name: str, value: Any, out_dtype: np.dtype) -> jax.Array:
    x = _array(name, value)
    if x.ndim:
        raise ValueError(f"{name} must be a number or an array of shape (), got shape {x.shape}")
    _check_kind(name, x.dtype, out_dtype)
    return x


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
