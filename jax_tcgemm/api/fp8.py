"""``fp8_dot``: a product that quantizes its operands and those of its gradients to 8 bits."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments, eager
from jax_tcgemm.api.delayed_scaling import Fp8State
from jax_tcgemm.api.gemm import gemm
from jax_tcgemm.api.quantization import quantize
from jax_tcgemm.quantized.arrays import Quantized

_DTYPES = ("bfloat16", "float16", "float32")
_RECIPES = ("current", "block", "delayed")
_FORWARD, _BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
_BLOCK = 128


@eager.one_program("recipe", "power_of_two", "preferred_element_type")
def fp8_dot(
    x: ArrayLike,
    w: ArrayLike,
    *,
    recipe: str = "current",
    state: Fp8State | None = None,
    power_of_two: bool = False,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Product ``x @ w`` in float8, in the forward pass and in its gradients.

    The function quantizes the operands to float8_e4m3fn and the result's cotangent to float8_e5m2.
    All three products (the result, ``dy @ w.T`` and ``x.T @ dy``) have promoted sums
    (``precision="highest"``). They are rounded once, to the dtypes of the result, ``x`` and ``w``.
    The gradients are those of the computed product, as if quantizing were the identity. The forward
    pass of a derivative keeps the operands in 8 bits.

    The recipe says where scales come from:

    - ``"current"``: one scale for each operand, from its largest magnitude.
    - ``"block"``: one scale for each 1 x 128 block of ``x`` and ``dy`` along the contracted
      dimension, and one for each 128 x 128 block of ``w``. ``k`` and ``n`` must be multiples of
      128. For ``x.T @ dy`` the original ``x`` and ``dy`` are quantized once more: ``x`` in blocks
      of 128 rows x 1, ``dy`` in 128 x 128 blocks, with zeros up to a multiple of 128 rows. (The
      kernel takes finer blocks of one operand only, and e5m2 spans 2^30.)
    - ``"delayed"``: one scale for each operand, from its largest magnitudes in earlier calls, as in
      ``flax.linen.fp8_ops``. ``state`` holds them, and the cotangent of ``state`` is the new state:
      ``dx, dw, state = jax.grad(loss, (0, 1, 2))(x, w, state)``. The new state replaces the old
      one; it is not for the optimizer. Each call needs a state of its own, and so does each device
      within ``shard_map``: JAX adds up the cotangents of a value that is used twice, and a sum is
      not a state. Calls of one ``vmap`` may share a state.

    Args:
        x: ``(..., k)``, bfloat16, float16 or float32.
        w: ``(k, n)``, bfloat16, float16 or float32. For stacks of weights use ``jax.vmap``.
        recipe: ``"current"``, ``"block"`` or ``"delayed"``.
        state: an ``Fp8State`` for ``"delayed"``, ``None`` for the other recipes.
        power_of_two: whether to round the scales of ``"current"`` and ``"block"`` up to powers of
            two.
        preferred_element_type: dtype of the result; ``None`` means that of ``x``.

    Returns:
        An array ``(..., n)``. It can be differentiated in reverse mode, once.

    Raises:
        TypeError: a type or dtype is not accepted.
        ValueError: a shape or value is not accepted.

    Example:
        >>> loss = lambda x, w: jnp.square(fp8_dot(x, w)).sum()
        >>> dx, dw = jax.grad(loss, (0, 1))(x, w)
        >>> dx.shape, dw.shape
        ((8, 128), (128, 256))
    """
    x, w = arguments.array("x", x), arguments.array("w", w)
    out = jnp.dtype(x.dtype if preferred_element_type is None else preferred_element_type)
    dtypes = {"x.dtype": x.dtype, "w.dtype": w.dtype, "preferred_element_type": out}
    for name, dtype in dtypes.items():
        if dtype.name not in _DTYPES:
            raise TypeError(f"{name}={dtype} is not accepted; accepted: {', '.join(_DTYPES)}")
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"x must be (..., k) and w (k, n), got x.shape={x.shape} and w.shape={w.shape}"
        )
    _check_recipe(recipe, state, w.shape)
    how = _How(recipe, bool(power_of_two), x.dtype, w.dtype, out)
    if _compat.is_sharded(x, w):
        dims = ((x.ndim - 1,), (0,)), ((), ())
        shardings = _compat.shardings_of(lambda x, w: lax.dot_general(x, w, dims), x, w)
        own = functools.partial(_dot, how=how)
        return _compat.with_automatic_axes(own, (x, w, state), shardings)
    return _dot(x, w, state, how)


def _dot(x: jax.Array, w: jax.Array, state: Fp8State | None, how: _How) -> jax.Array:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    # Under shard_map, the transpose of this call adds up their gradients.
    a, b = _compat.match_varying((rows, w))
    product: Any = _product(a, b, state, how)
    return product.reshape(*x.shape[:-1], w.shape[1])


def fp8_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: str = "current",
    state: Fp8State | None = None,
    power_of_two: bool = False,
    out_sharding: Any = None,
) -> jax.Array:
    """``fp8_dot`` with the arguments of ``lax.dot_general``, for Flax layers.

    ``nnx.Linear(..., dot_general=functools.partial(fp8_dot_general, recipe="block"))`` uses it.

    An operand is transposed first if its contracted dimensions are not its last ones (for ``rhs``:
    its first ones).

    Args:
        lhs: array of any rank, the ``x`` of ``fp8_dot``.
        rhs: array of any rank, the ``w`` of ``fp8_dot``.
        dimension_numbers: ``((lhs_contracting, rhs_contracting), ((), ()))``.
        precision: has no effect.
        preferred_element_type: dtype of the result; ``None`` means that of ``lhs``.
        recipe: as in ``fp8_dot``.
        state: as in ``fp8_dot``.
        power_of_two: as in ``fp8_dot``.
        out_sharding: must be ``None``.

    Returns:
        An array with the free dimensions of ``lhs``, then those of ``rhs``.

    Raises:
        NotImplementedError: there are batch dimensions, or an ``out_sharding``.
        TypeError: as ``fp8_dot`` does.
        ValueError: as ``fp8_dot`` does, for the operands as matrices.

    Example:
        >>> y = fp8_dot_general(x, w, (((1,), (0,)), ((), ())), recipe="block")
        >>> y.shape
        (8, 256)
    """
    del precision
    lhs, rhs = arguments.array("lhs", lhs), arguments.array("rhs", rhs)
    contracted, batch = (
        tuple(tuple(map(operator.index, np.ravel(side))) for side in pair)
        for pair in dimension_numbers
    )
    if any(batch) or out_sharding is not None:
        raise NotImplementedError(
            f"fp8_dot_general has neither batch dimensions nor out_sharding, got {batch=} and "
            f"{out_sharding=}"
        )
    rows, columns = (
        tuple(dim for dim in range(x.ndim) if dim not in dims)
        for x, dims in zip((lhs, rhs), contracted, strict=True)
    )
    k = math.prod(rhs.shape[dim] for dim in contracted[1])
    columns_shape = tuple(rhs.shape[dim] for dim in columns)
    x = lax.transpose(lhs, (*rows, *contracted[0]))
    w = lax.transpose(rhs, (*contracted[1], *columns))
    product = fp8_dot(
        x.reshape(*x.shape[: len(rows)], math.prod(x.shape[len(rows) :])),
        w.reshape(k, math.prod(columns_shape)),
        recipe=recipe,
        state=state,
        power_of_two=power_of_two,
        preferred_element_type=preferred_element_type,
    )
    return product.reshape(*product.shape[:-1], *columns_shape)


class _How(NamedTuple):
    """The static parameters of a product."""

    recipe: str
    power_of_two: bool
    x_dtype: np.dtype
    w_dtype: np.dtype
    out_dtype: np.dtype

    def quantize(self, x: jax.Array, dtype: DTypeLike, *tile: int) -> Quantized:
        return quantize(x, dtype, tile=tile or None, power_of_two=self.power_of_two)


class _Kept(NamedTuple):
    """The residuals of the reverse pass: quantized operands, and a new state."""

    x: Quantized
    w: Quantized
    state: Fp8State | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: jax.Array, w: jax.Array, state: Fp8State | None, how: _How) -> jax.Array:
    """Computes ``x @ w`` of two matrices."""
    return _forward(x, w, state, how)[0]


def _forward(
    x: jax.Array, w: jax.Array, state: Fp8State | None, how: _How
) -> tuple[jax.Array, _Kept]:
    if how.recipe == "block":
        qx = how.quantize(x, _FORWARD, 1, _BLOCK)
        qw = how.quantize(w, _FORWARD, _BLOCK, _BLOCK)
        kept = _Kept(how.quantize(_whole_blocks(x), _FORWARD, _BLOCK, 1), qw, None)
    elif state is not None:
        new_x, new_w = state.x.updated(x, _FORWARD), state.w.updated(w, _FORWARD)
        qx, qw = new_x.quantize(x, _FORWARD), new_w.quantize(w, _FORWARD)
        kept = _Kept(qx, qw, Fp8State(new_x, new_w, state.gradient))
    else:
        qx, qw = how.quantize(x, _FORWARD), how.quantize(w, _FORWARD)
        kept = _Kept(qx, qw, None)
    return _gemm(qx, qw, how.out_dtype), kept


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(how: _How, kept: _Kept, dy: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    state = kept.state
    if how.recipe == "block":
        rows = how.quantize(dy, _BACKWARD, 1, _BLOCK)
        columns = how.quantize(_whole_blocks(dy), _BACKWARD, _BLOCK, _BLOCK)
    elif state is not None:
        gradient = state.gradient.updated(dy, _BACKWARD)
        rows = columns = gradient.quantize(dy, _BACKWARD)
        state = dataclasses.replace(state, gradient=gradient)
    else:
        rows = columns = how.quantize(dy, _BACKWARD)
    dx = _gemm(rows, kept.w, how.x_dtype, transpose_b=True)
    dw = _gemm(kept.x, columns, how.w_dtype, transpose_a=True)
    return dx, dw, state


@_backward.defjvp
def _refuse(how: _How, primals: Any, tangents: Any) -> Any:
    """Raises, because the derivative of rounding to 8 bits would be arbitrary."""
    del how, primals, tangents
    raise TypeError("fp8_dot is differentiated once: its gradients have no derivative")


_product.defvjp(_forward, _backward)


def _gemm(
    a: Quantized,
    b: Quantized,
    dtype: np.dtype,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> jax.Array:
    return gemm(
        a.qvalue,
        b.qvalue,
        a_scale=a.scale if a.qvalue.size else None,  # no scale fits an empty operand
        b_scale=b.scale if b.qvalue.size else None,
        precision="highest",
        preferred_element_type=dtype,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
    )


def _whole_blocks(x: jax.Array) -> jax.Array:
    """Appends rows of zeros up to a multiple of the block; there may be a symbolic number."""
    rows = x.shape[0]
    missing = (rows + _BLOCK - 1) // _BLOCK * _BLOCK - rows
    is_whole = isinstance(missing, int) and missing == 0
    return x if is_whole else jnp.pad(x, ((0, missing), (0, 0)))


def _check_recipe(recipe: Any, state: Any, w_shape: tuple[int, ...]) -> None:
    if recipe not in _RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown; accepted: {', '.join(_RECIPES)}")
    if not (isinstance(state, Fp8State) if recipe == "delayed" else state is None):
        raise TypeError(
            "recipe='delayed' needs an Fp8State and other recipes have none, got "
            f"recipe={recipe!r} with a state of {type(state)}"
        )
    if recipe == "block" and any(extent % _BLOCK for extent in w_shape):
        raise ValueError(
            f"recipe='block' needs k and n to be multiples of {_BLOCK}, got w.shape={w_shape}; use "
            "recipe='current'"
        )
