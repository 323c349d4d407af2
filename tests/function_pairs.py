"""Pairs of functions that differ in one thing only, for tests of cache keys.

Each function takes a float32 matrix of `SHAPE`. Each value of `PAIRS` creates its pair anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata

# The shape of a product for which the package compiles kernels with epilogues.
SHAPE = (72, 72)

Function = Callable[[Any], Any]
Pair = tuple[Function, Function]

_FAR = np.arange(72.0 * 72, dtype=np.float32).reshape(SHAPE)
_OTHER = _FAR + (_FAR == 2600)  # changes one element, where a printed array has dots
_LARGE, _OTHER_LARGE = (np.tile(x, (4, 1)) for x in (_FAR, _OTHER))
_KEY = np.array([0, 7], np.uint32)


@contextlib.contextmanager
def simplified_constants() -> Iterator[None]:
    """Makes JAX keep arrays as literals of the operations that read them."""
    name = "jax_use_simplified_jaxpr_constants"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def times(x: Any, y: Any) -> Pair:
    """Returns two functions that multiply by different values."""
    return (lambda z: z * x), (lambda z: z * y)


def summed(x: Any, y: Any) -> Pair:
    """Returns two functions that add the sum of different arrays."""
    return (lambda z: z + x.sum(0)), (lambda z: z + y.sum(0))


def in_calls(x: Any, y: Any) -> Pair:
    """Returns two functions with calls that close over different arrays."""

    def closing(t: Any) -> Function:
        return jax.jit(lambda z: z * t)

    return closing(x), closing(y)


def in_calls_in_calls(x: Any, y: Any) -> Pair:
    """Returns two functions with nested calls that close over different arrays."""

    def closing(t: Any) -> Function:
        return jax.jit(lambda z: jax.jit(lambda a: a * t)(z + 1))

    return closing(x), closing(y)


def in_loops(x: Any, y: Any) -> Pair:
    """Returns two functions with loops whose bodies call closures over different arrays."""

    def looping(t: Any) -> Function:
        return lambda z: lax.fori_loop(0, 2, lambda i, a: jax.jit(lambda b: b + t)(a), z)

    return looping(x), looping(y)


def in_branches(x: Any, y: Any) -> Pair:
    """Returns two functions with branches that call closures over different arrays."""

    def branching(t: Any) -> Function:
        return lambda z: lax.cond(z[0, 0] > -1e9, jax.jit(lambda a: a + t), jnp.sin, z)

    return branching(x), branching(y)


def with_rules(x: Any, y: Any) -> Pair:
    """Returns two custom-derivative functions that close over different arrays."""

    def ruled(t: Any) -> Function:
        function = jax.custom_jvp(lambda z: jax.jit(lambda a: a * t)(z))
        function.defjvp(lambda p, u: (function(*p), u[0] * t))
        return function

    return ruled(x), ruled(y)


def with_forward_rules(x: Any, y: Any) -> Pair:
    """Returns one function with two different JVP rules."""

    def ruled(t: Any) -> Function:
        function = jax.custom_jvp(lambda z: z * 2)
        function.defjvp(lambda p, u: (function(*p), u[0] * t))
        return function

    return ruled(x), ruled(y)


def with_backward_rules(x: Any, y: Any) -> Pair:
    """Returns one function with two different VJP rules."""

    def ruled(t: Any) -> Function:
        function = jax.custom_vjp(lambda z: z * 2)
        function.defvjp(lambda z: (z * 2, None), lambda _, g: (g * t,))
        return function

    return ruled(x), ruled(y)


def drawn(one: bool, other: bool) -> Pair:
    """Returns two functions that draw random numbers with different counter layouts."""

    def drawing(partitionable: bool) -> Function:
        def draw(z: Any) -> Any:
            with jax.threefry_partitionable(partitionable):
                return jnp.where(
                    jax.random.bernoulli(jax.random.wrap_key_data(_KEY), 0.5, SHAPE), z, 0
                )

        return draw

    return drawing(one), drawing(other)


def told(one: Any, other: Any) -> Pair:
    """Returns one function with two different values of XLA metadata."""

    def telling(value: Any) -> Function:
        def tell(z: Any) -> Any:
            with set_xla_metadata(told=value):
                return z * 2

        return tell

    return telling(one), telling(other)


def rounded(one: tuple[int, int], other: tuple[int, int]) -> Pair:
    """Returns two functions that round to different numbers of bits."""
    return (lambda z: lax.reduce_precision(z, *one)), (lambda z: lax.reduce_precision(z, *other))


def _nan(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def _bits(x: np.float32) -> Function:
    return lambda z: lax.bitcast_convert_type(jnp.full_like(z, x), jnp.int32) + 0 * z.astype(int)


def _device(x: Any) -> Any:
    return jnp.asarray(x)


# Pairs whose values differ.
VALUES: dict[str, Callable[[], Pair]] = {
    "the last digits of a number": lambda: times(0.001, 0.001000004),
    "the last digits of another": lambda: times(0.0001234, 0.000123404),
    "small numbers": lambda: times(1e-5, 2e-5),
    "the last bit": lambda: times(0.1, float(np.nextafter(np.float32(0.1), np.float32(1)))),
    "the sign of zero": lambda: times(0.0, -0.0),
    "the bits of NaN": lambda: (_bits(_nan(0x7FC00000)), _bits(_nan(0x7FC00001))),
    "an array": lambda: times(_device(_FAR), _device(_OTHER)),
    "a large array": lambda: summed(_device(_LARGE), _device(_OTHER_LARGE)),
    "an array of NumPy": lambda: times(_FAR, _OTHER),
    "an array in a call": lambda: in_calls(_device(_FAR), _device(_OTHER)),
    "an array of NumPy in a call": lambda: in_calls(_FAR, _OTHER),
    "a number on the device in a call": lambda: in_calls(jnp.float32(0.1), jnp.float32(0.10000002)),
    "an array in a call in a call": lambda: in_calls_in_calls(_device(_FAR), _device(_OTHER)),
    "an array in a call in a loop": lambda: in_loops(_device(_FAR), _device(_OTHER)),
    "an array in a call in a branch": lambda: in_branches(_device(_FAR), _device(_OTHER)),
    "an array in a function with a rule": lambda: with_rules(_device(_FAR), _device(_OTHER)),
    "a parameter": lambda: rounded((8, 10), (8, 11)),
    "an axis": lambda: ((lambda z: lax.cumsum(z, 0)), (lambda z: lax.cumsum(z, 1))),
    "an operation": lambda: (jnp.sin, jnp.cos),
    "which operand is first": lambda: ((lambda z: z - z.T), (lambda z: z.T - z)),
    "how random numbers are counted": lambda: drawn(True, False),
}

# Pairs whose derivatives differ, and nothing else.
SLOPES: dict[str, Callable[[], Pair]] = {
    "a forward rule": lambda: with_forward_rules(2.0, 3.0),
    "a forward rule that closes over an array": lambda: with_forward_rules(
        _device(_FAR), _device(_OTHER)
    ),
    "a backward rule": lambda: with_backward_rules(2.0, 3.0),
    "a backward rule that closes over an array": lambda: with_backward_rules(
        _device(_FAR), _device(_OTHER)
    ),
}

# Pairs that differ only for other readers of the program.
NAMES: dict[str, Callable[[], Pair]] = {
    "a name": lambda: (
        (lambda z: checkpoint_name(z, "one") * 2),
        (lambda z: checkpoint_name(z, "other") * 2),
    ),
    "what XLA is told": lambda: told("1", "2"),
}

PAIRS = {**VALUES, **SLOPES, **NAMES}
