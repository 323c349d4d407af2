"""Calls with one or the other function of a pair, and checks that each gives its own results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from function_pairs import SHAPE, Function, Pair

import jax_tcgemm
from jax_tcgemm import fuse, gated_gemm, gemm, mlp, ragged_dot

# Products of these arrays are exact: small integers, times the identity.
PRODUCT = np.random.default_rng(5).integers(-8, 9, SHAPE).astype(np.float32)
_X = PRODUCT.astype(jnp.bfloat16)
_EYE = np.eye(SHAPE[1], dtype=jnp.bfloat16)
_SIZES = np.array([SHAPE[0] // 2, SHAPE[0] - SHAPE[0] // 2], np.int32)


def _of_8_bits(function: Function, x: Any) -> Any:
    a, b = x.astype(jnp.float8_e4m3fn), _EYE.astype(jnp.float8_e4m3fn)
    return gemm(a, b, a_scale=1.0, epilogue=function)


def _of_mlp(function: Function, x: Any) -> Any:
    wide = _EYE.astype(np.float32)
    options = {"precision": "highest", "preferred_element_type": jnp.float32}
    epilogue = lambda z: function(z).astype(jnp.float32)  # noqa: E731
    return mlp(x.astype(np.float32), wide, None, wide, epilogue=epilogue, **options)


# Each computes `function` of `x` times the identity.
WRAPPERS: Mapping[str, Callable[[Function, Any], Any]] = {
    "gemm": lambda function, x: gemm(x, _EYE, epilogue=function),
    "gated_gemm": lambda function, x: gated_gemm(
        x, _EYE, 0 * _EYE, epilogue=lambda g, u: (function(g), u)
    )[0],
    "ragged_dot": lambda function, x: ragged_dot(
        x, jnp.stack([_EYE, _EYE]), _SIZES, epilogue=function
    ),
    "gemm of 8 bits": _of_8_bits,
    "mlp": _of_mlp,
    "fuse": lambda function, x: fuse(lambda x: function((x @ _EYE).astype(jnp.float32)))(x),
}


def _each(wrapper: Callable[..., Any], functions: list[Function], x: Any) -> list[Any]:
    return [wrapper(function, x) for function in functions]


def _in_one_program(wrapper: Callable[..., Any], functions: list[Function], x: Any) -> list[Any]:
    return jax.jit(lambda x: _each(wrapper, functions, x))(x)


def _in_programs(wrapper: Callable[..., Any], functions: list[Function], x: Any) -> list[Any]:
    return [jax.jit(functools.partial(wrapper, function))(x) for function in functions]


def _batched(wrapper: Callable[..., Any], functions: list[Function], x: Any) -> list[Any]:
    stacked = jnp.stack([x, 2 * x])
    results = jax.jit(jax.vmap(lambda x: _each(wrapper, functions, x)))(stacked)
    return [result[0] for result in results]


def export_options() -> dict[str, Any]:
    """Returns options of ``jax.export.export`` for programs that run on the default platform."""
    platform = next(iter(jnp.zeros(()).devices())).platform
    return {
        "platforms": ["cuda" if platform == "gpu" else platform],
        "disabled_checks": jax_tcgemm.export_disabled_checks(),
    }


def _exported(wrapper: Callable[..., Any], functions: list[Function], x: Any) -> list[Any]:
    options = export_options()
    programs = [
        jax.export.export(jax.jit(functools.partial(wrapper, function)), **options)(x)
        for function in functions
    ]
    return [program.call(x) for program in programs]


WAYS: Mapping[str, Callable[..., list[Any]]] = {
    "eagerly": _each,
    "in one program": _in_one_program,
    "in a program each": _in_programs,
    "batched": _batched,
    "exported": _exported,
}


def computed(wrapper: str, way: str, functions: list[Function]) -> list[Any]:
    """Returns the results of functions of `PRODUCT`.

    Args:
        wrapper: a key of `WRAPPERS`.
        way: a key of `WAYS`.
        functions: the functions.
    """
    return WAYS[way](WRAPPERS[wrapper], functions, _X)


def wrong_values(wrapper: str, way: str, pairs: Mapping[str, Callable[[], Pair]]) -> list[str]:
    """Describes wrong results of pairs of functions.

    Args:
        wrapper: a key of `WRAPPERS`.
        way: a key of `WAYS`.
        pairs: some of `function_pairs.VALUES`.
    """
    lost = (
        ("the sign of zero", "the bits of NaN") if wrapper == "mlp" else ()
    )  # the second layer loses these
    named = {name: make for name, make in pairs.items() if name not in lost}
    made = [(name, function) for name, make in named.items() for function in make()]
    functions = [function for _, function in made]
    found = computed(wrapper, way, functions)
    wanted = [np.asarray(function(jnp.asarray(PRODUCT))) for function in functions]
    return _compared(f"{wrapper} {way}", [name for name, _ in made], found, wanted)


def wrong_slopes(is_jitted: bool, pairs: Mapping[str, Callable[[], Pair]]) -> list[str]:
    """Describes wrong derivatives of pairs of functions.

    The derivatives are with respect to a float32 operand of the function, so nothing is rounded.

    Args:
        is_jitted: whether one program computes all derivatives.
        pairs: some of `function_pairs.PAIRS`.
    """
    made = [(name, function) for name, make in pairs.items() for function in make()]

    def ours(function: Function, c: Any) -> Any:
        return gemm(_X, _EYE, epilogue=lambda z, c: function(z + c), epilogue_operands=(c,))

    def plain(function: Function, c: Any) -> Any:
        return function(PRODUCT + c)

    def gradients(of: Callable[..., Any], c: Any) -> list[Any]:
        return [jax.grad(lambda c, f=f: of(f, c).sum())(c) for _, f in made]

    c = jnp.asarray(np.random.default_rng(6).integers(-3, 4, SHAPE).astype(np.float32))
    of_ours = functools.partial(gradients, ours)
    found = (jax.jit(of_ours) if is_jitted else of_ours)(c)
    wanted = list(map(np.asarray, jax.jit(functools.partial(gradients, plain))(c)))
    return _compared("gradient", [name for name, _ in made], found, wanted)


def _compared(what: str, names: list[str], found: list[Any], wanted: list[Any]) -> list[str]:
    wrong = []
    for i, (name, mine, own) in enumerate(zip(names, found, wanted, strict=True)):
        other, mine = wanted[i ^ 1], np.asarray(mine).astype(own.dtype)
        which = ("first", "second")[i % 2]
        if not np.allclose(mine, own, rtol=1e-5, atol=1e-5):
            wrong.append(f"{what}, {name}: the {which} is wrong")
        elif _distance(own, other) and _distance(mine, own) >= _distance(mine, other):
            wrong.append(f"{what}, {name}: the {which} is as near to the other's")
    return wrong


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    signs = 0 if x.dtype.kind in "iub" else (np.signbit(x) != np.signbit(y)).sum()
    return float(np.abs(x.astype(np.float64) - y.astype(np.float64)).sum() + signs)
