"""The operations that `test_transformations.py` transforms, their formulas and arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fused_call import formula, fused
from jax import lax
from jax.sharding import PartitionSpec as P
from mlp_forms import FORMS as MLPS
from packed_values import weight

import jax_tcgemm as tc
from jax_tcgemm.primitives.epilogue_derivative import activation_tangent
from jax_tcgemm.problem.activations import ACTIVATIONS, resolve

C64, F32 = jnp.complex64, jnp.float32
ROWS, COLUMNS, WHOLE = P("x"), P(None, "x"), P()
Draw = Callable[[np.random.Generator], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of an operation.

    Attributes:
        draw: takes a generator; returns a value for the operation and an equal one for its formula.
        spec: its sharding over the mesh axis ``x``.
        moves: whether it has a derivative.
    """

    draw: Draw
    spec: P = WHOLE
    moves: bool = True


def array(*shape: int, spec: P = WHOLE, dtype: Any = F32) -> Argument:
    """Returns normally distributed numbers; products of matrices of them are about 1."""

    def draw(rng):
        x = rng.standard_normal(shape)
        x = x + 1j * rng.standard_normal(shape) if dtype == C64 else x
        x = jnp.asarray(x / max(shape[-2] if len(shape) > 1 else 1, 4) ** 0.5, dtype)
        return x, x

    return Argument(draw, spec)


def sizes(groups: int, rows: int) -> Argument:
    """Returns sizes of groups: some have rows beyond the last group, an empty or too long group."""

    def draw(rng):
        x = rng.multinomial(rows - 1, np.ones(groups) / groups)
        x[rng.integers(groups)] = rng.choice([0, 1, rows, 2**31 - 1, -5])
        x = jnp.asarray(x, jnp.int32)
        return x, x

    return Argument(draw, WHOLE, False)


def quantized(*shape: int, spec: P = WHOLE, is_packed: bool = True) -> Argument:
    """Returns a weight in 4 bits; the formula takes the dequantized weight."""

    def draw(rng):
        q = weight(rng, "int4", shape, 32, has_zeros=True, narrow_zeros=True)
        q = dataclasses.replace(q, scale=q.scale / 8)
        return (tc.pack(q) if is_packed else q), q.dequantize(F32)

    return Argument(draw, spec, False)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One row of the matrix.

    Attributes:
        ours: the operation.
        formula: the same in ``jax.numpy``.
        arguments: the arguments.
        out: the sharding of the result; ``None`` if the arguments' parts do not give its parts.
        linear: sets of arguments in which the operation is linear, up to a constant.
        dtype: the type to which intermediate results are rounded.
        errors: by transformation that is refused, the type and text of the error.
        only: the transformations that are tried; ``None`` means all.
    """

    ours: Callable[..., Any]
    formula: Callable[..., Any]
    arguments: tuple[Argument, ...]
    out: P | None = ROWS
    linear: tuple[tuple[int, ...], ...] = ()
    dtype: Any = F32
    errors: dict[str, tuple[type[Exception], str]] = dataclasses.field(default_factory=dict)
    only: tuple[str, ...] | None = None

    @property
    def moving(self) -> list[int]:
        return [i for i, argument in enumerate(self.arguments) if argument.moves]

    @property
    def specs(self) -> tuple[P, ...]:
        return tuple(argument.spec for argument in self.arguments)


# For another form of an operation that goes through all.
FEW = ("forward", "second", "vmap", "gradient of vmap", "jit", "shard_map", "remat, names")
variant = functools.partial(Operation, only=FEW)


def _transposed(a, b, c, bias):
    return tc.gemm(a, b, c, bias=bias, alpha=-1.5, beta=0.5, transpose_a=True, transpose_b=True)


def _transposed_formula(a, b, c, bias):
    return -1.5 * (a.T @ b.T) + 0.5 * c + bias


def _scaled(a, b, bias, residual, row_scale, column_scale, alpha):
    scales = {"row_scale": row_scale, "column_scale": column_scale, "alpha": alpha}
    return tc.gemm(a, b, bias=bias, residual=residual, activation="silu", **scales)


def _scaled_formula(a, b, bias, residual, row_scale, column_scale, alpha):
    z = alpha * row_scale[..., :, None] * column_scale * (a @ b)
    return jax.nn.silu(z + bias) + residual


_ACTIVATIONS = (*ACTIVATIONS, tc.softcap(1.5), tc.clip(-0.7, 0.6))


def _activated(a, b, bias):
    return [tc.gemm(a, b, bias=bias, activation=activation) for activation in _ACTIVATIONS]


def _activated_formula(a, b, bias):
    return [resolve(activation).reference(a @ b + bias) for activation in _ACTIVATIONS]


def _conjugated(a, b, bias):
    return tc.gemm(a, b, bias=bias, conjugate_a=True, alpha=0.5 - 1j)


def _conjugated_formula(a, b, bias):
    return (0.5 - 1j) * (jnp.conj(a) @ b) + bias


def _gated(x, w_gate, w_up, bias_gate, bias_up, form="two weights", activation="silu"):
    options = {"bias_gate": bias_gate, "bias_up": bias_up, "activation": activation}
    if form == "two weights":
        return tc.gated_gemm(x, w_gate, w_up, **options)
    if form == "one weight":
        return tc.gated_gemm(x, jnp.concatenate([w_gate, w_up], -1), **options)
    both = jnp.concatenate([w_gate.mT, w_up.mT], -2)
    return tc.gated_gemm(x, both, transpose_w=True, **options)


def _gated_formula(x, w_gate, w_up, bias_gate, bias_up, activation="silu"):
    return resolve(activation).reference(x @ w_gate + bias_gate) * (x @ w_up + bias_up)


def _dot_general(dimension_numbers, *arguments, **options):
    ours, theirs = (
        functools.partial(f, dimension_numbers=dimension_numbers)
        for f in (tc.dot_general, lax.dot_general)
    )
    return Operation(ours, theirs, arguments, linear=((0,), (1,)), **options)


def _layers(x, w1, b1, w2, b2, residual):
    return tc.mlp(x, w1, b1, w2, b2, residual=residual)


def _layers_formula(x, w1, b1, w2, b2, residual):
    return jax.nn.gelu(x @ w1 + b1) @ w2 + b2 + residual


def product_of_groups(x, w, sizes, bias=None):
    """Returns each row's product with the matrix of its group, and zero outside of groups."""
    rows, ends = jnp.arange(x.shape[0]), jnp.cumsum(jnp.clip(sizes, 0, x.shape[0]))
    inside = (rows >= jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])[:, None]) & (
        rows < ends[:, None]
    )  # (g, m)
    inside = inside.astype(x.dtype)
    z = jnp.einsum("gm,mk,gkn->mn", inside, x, w)
    return z if bias is None else z + inside.T @ bias


def _ragged(x, w, bias, sizes, transposed=False, activation="tanh"):
    options = {"bias": bias, "activation": activation, "transpose_rhs": transposed}
    return tc.ragged_dot(x, w.mT if transposed else w, sizes, **options)


def _ragged_formula(x, w, bias, sizes):
    return jnp.tanh(product_of_groups(x, w, sizes, bias))


def _gated_ragged(x, gate, up, bias, sizes):
    return tc.gated_ragged_dot(x, gate, up, sizes, bias_gate=bias)


def _gated_ragged_formula(x, gate, up, bias, sizes):
    gate = product_of_groups(x, gate, sizes, bias)
    return jax.nn.silu(gate) * product_of_groups(x, up, sizes)


def _slope(activation, z, t, bias=0):
    return jax.jvp(resolve(activation).reference, (z,), (t + bias,))[1]


_OF_SLOPES = (*FEW, "reverse of each", "vmap of gradient", "nested vmap")
_X = array(4, 6, spec=ROWS)
_GATED = (_X, array(6, 5), array(6, 5), array(5), array(5))
_LAYERS = (_X, array(6, 8), array(8), array(8, 3), array(3))
_EXPERTS = array(3, 4, 8, spec=P(None, None, "x"))
_GROUPS = (array(6, 4), _EXPERTS, array(3, 8, spec=COLUMNS), sizes(3, 6))

PRODUCTS = {
    "gemm": Operation(
        fused,
        formula,
        (array(2, 3, 6, spec=ROWS), array(6, 5), array(3, 1), array(5), array(), array()),
    ),
    "gemm, transposed": Operation(
        _transposed,
        _transposed_formula,
        (array(6, 4, spec=COLUMNS), array(5, 6), array(4, 5, spec=ROWS), array(5)),
        linear=((0, 2, 3), (1,), (3,)),
    ),
    "gemm, scales": Operation(
        _scaled,
        _scaled_formula,
        (
            *(_X, array(6, 5), array(5), array(4, 5, spec=ROWS)),
            *(array(4, spec=ROWS), array(5), array()),
        ),
        linear=((3,),),
    ),
    "gemm, activations": Operation(
        _activated,
        _activated_formula,
        (_X, array(6, 5), array(5)),
        only=("forward", "second", "jit"),
    ),
    "gemm, complex": Operation(
        _conjugated,
        _conjugated_formula,
        (array(4, 6, spec=ROWS, dtype=C64), array(6, 5, dtype=C64), array(5, dtype=C64)),
        errors={"remat, everything": (TypeError, "reduce_precision")},  # jnp.matmul, too
    ),
    "gated_gemm": Operation(_gated, _gated_formula, _GATED, linear=((2, 4), (2,), (4,))),
    "gated_gemm, one weight": variant(
        functools.partial(_gated, form="one weight", activation="gelu"),
        functools.partial(_gated_formula, activation="gelu"),
        _GATED,
    ),
    "gated_gemm, transposed": variant(
        functools.partial(_gated, form="transposed", activation=None),
        functools.partial(_gated_formula, activation=None),
        _GATED,
    ),
    "dot_general": _dot_general(  # bqhd,bkhd->bhqk
        (((3,), (3,)), ((0, 2), (0, 2))),
        array(2, 6, 3, 4, spec=ROWS),
        array(2, 5, 3, 4, spec=ROWS),
    ),
    "dot_general, complex": _dot_general(
        (((3, 2), (0, 1)), ((), ())),
        array(2, 5, 3, 4, spec=ROWS, dtype=C64),
        array(4, 3, 6, dtype=C64),
        only=FEW,
    ),
    "mlp": Operation(
        _layers,
        _layers_formula,
        (*_LAYERS, array(4, 1, spec=ROWS)),
        linear=((3, 4, 5), (4,), (5,)),
    ),
    **{
        f"mlp, {form}": Operation(*functions, _LAYERS, only=None if form == "gated" else FEW)
        for form, functions in MLPS.items()
        if form != "plain"
    },
    "ragged_dot": Operation(_ragged, _ragged_formula, _GROUPS, COLUMNS),
    "ragged_dot, transposed": variant(
        functools.partial(_ragged, transposed=True, activation=None),
        lambda x, w, bias, sizes: product_of_groups(x, w, sizes, bias),
        _GROUPS,
        COLUMNS,
        linear=((0,), (1,), (2,)),
    ),
    "gated_ragged_dot": Operation(
        _gated_ragged,
        _gated_ragged_formula,
        (*_GROUPS[:2], *_GROUPS[1:]),
        COLUMNS,
        only=("forward", "vmap", "jit", "shard_map"),
    ),
    "slope": Operation(
        functools.partial(activation_tangent, "gelu"),
        functools.partial(_slope, "gelu"),
        (_X, _X, array(6)),
        linear=((1, 2), (1,), (2,)),
        only=_OF_SLOPES,
    ),
    "slope, without bias": Operation(
        functools.partial(activation_tangent, tc.softcap(1.5)),
        functools.partial(_slope, tc.softcap(1.5)),
        (_X, _X),
        linear=((1,),),
        only=_OF_SLOPES,
    ),
}
