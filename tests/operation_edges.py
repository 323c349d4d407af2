"""Every operation of compiled epilogues, in every type, with values at its edges."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

M, N = 256, 256
FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
SIGNED = ("int32", "int16", "int8")
UNSIGNED = ("uint32", "uint16", "uint8")
TYPES = (*FLOATS, *SIGNED, *UNSIGNED, "bool")


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation on operands of some types.

    Attributes:
        name: the name for reports.
        call: the operation.
        types: the types of its operands.
        exact: whether the result must equal XLA's bit for bit.
    """

    name: str
    call: Callable[..., Any]
    types: tuple[str, ...]
    exact: bool

    @property
    def result(self) -> np.dtype:
        """Returns the type of the result."""
        operands = [jax.ShapeDtypeStruct((M, N), jnp.dtype(each)) for each in self.types]
        return np.dtype(jax.eval_shape(self.call, *operands).dtype)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.types)})"


_EXACT = ("neg", "abs", "sign", "floor", "ceil", "square", "is_finite")
_INEXACT = (
    *("sqrt", "rsqrt", "cbrt", "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin"),
    *("cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf"),
    *("erfc", "erf_inv"),
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_EXACT_OF_TWO = ("add", "sub", "mul", "rem", "max", "min", "nextafter", *_COMPARISONS)
_INEXACT_OF_TWO = ("div", "pow", "atan2")
_OF_INTEGERS = ("neg", "sign", "square", "population_count", "bitwise_not")
_OF_TWO_INTEGERS = (
    *("add", "sub", "mul", "div", "rem", "max", "min", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic", *_COMPARISONS),
)
_OF_TWO_TRUTHS = ("bitwise_and", "bitwise_or", "bitwise_xor", "max", "min", *_COMPARISONS)
_POWERS = (-20, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 20)
PRECISIONS = ((8, 23), (8, 7), (5, 10), (5, 2), (4, 3), (3, 1), (8, 0), (11, 52), (1, 1), (8, 10))
_DIVISORS = (3.0, 0.1, -7.0, 2.0**-6)

# XLA does not compile these operations.
_NOT_IN_XLA = ("erf", "erfc")


def _of_name(name: str) -> Callable[..., Any]:
    return getattr(lax, name)


def _rounded(method: lax.RoundingMethod, x: Any) -> Any:
    return lax.round(x, method)


def _power(power: int, x: Any) -> Any:
    return lax.integer_pow(x, power)


def _polynomial(x: Any) -> Any:
    return lax.polynomial(x, [lax.full_like(x, each, shape=()) for each in (1.5, -0.25, 0.125)])


def _reduced(precision: tuple[int, int], x: Any) -> Any:
    return lax.reduce_precision(x, *precision)


def _divided(divisor: float, x: Any) -> Any:
    return lax.div(x, lax.full_like(x, divisor))


def _converted(dtype: str, x: Any) -> Any:
    return lax.convert_element_type(x, jnp.dtype(dtype))


def _bits(dtype: str, x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.dtype(dtype))


@functools.cache
def _one_minus_square() -> Callable[..., Any] | None:
    """Returns JAX's operation ``1 - x**2``, from a derivative that uses it; older JAX has none."""
    jaxpr = jax.make_jaxpr(jax.grad(lax.tanh))(1.0).jaxpr
    made = (eqn.primitive for eqn in jaxpr.eqns if eqn.primitive.name == "one_minus_square")
    primitive = next(made, None)
    return primitive and primitive.bind


def _of_floats(dtype: str) -> Iterator[Case]:
    one = functools.partial(Case, types=(dtype,))
    for name in (*_EXACT, *_INEXACT):
        if dtype not in FLOATS[3:] or name not in _NOT_IN_XLA:
            yield one(name, _of_name(name), exact=name in _EXACT)
    for method in lax.RoundingMethod:
        yield one(f"round {method.name}", functools.partial(_rounded, method), exact=True)
    for power in _POWERS:
        yield one(f"integer_pow {power}", functools.partial(_power, power), exact=power >= 0)
    for kept in PRECISIONS:
        yield one(f"reduce_precision {kept}", functools.partial(_reduced, kept), exact=True)
    for divisor in _DIVISORS:
        yield one(f"div by {divisor}", functools.partial(_divided, divisor), exact=True)
    if (bind := _one_minus_square()) is not None:
        yield one("one_minus_square", bind, exact=True)
    if hasattr(lax, "polynomial"):  # since JAX 0.12
        yield one("polynomial", _polynomial, exact=False)
    for name in (*_EXACT_OF_TWO, *_INEXACT_OF_TWO):
        yield Case(name, _of_name(name), (dtype, dtype), name in _EXACT_OF_TWO)
    if dtype in FLOATS[:3]:
        yield Case("pow", lax.pow, (dtype, "int32"), False)
    yield Case("clamp", lax.clamp, (dtype,) * 3, True)


def _of_integers(dtype: str) -> Iterator[Case]:
    for name in (*_OF_INTEGERS, *(["abs"] if dtype in SIGNED else [])):
        yield Case(name, _of_name(name), (dtype,), True)
    if (bind := _one_minus_square()) is not None:
        yield Case("one_minus_square", bind, (dtype,), True)
    for name in _OF_TWO_INTEGERS:
        yield Case(name, _of_name(name), (dtype, dtype), True)
    yield Case("clamp", lax.clamp, (dtype,) * 3, True)


def _of_truths() -> Iterator[Case]:
    yield Case("bitwise_not", lax.bitwise_not, ("bool",), True)
    for name in _OF_TWO_TRUTHS:
        yield Case(name, _of_name(name), ("bool", "bool"), True)


def cases(dtype: str) -> list[Case]:
    """Returns all operations on this type: as first operand or, in ``select_n``, as choices."""
    found = list(
        _of_floats(dtype)
        if dtype in FLOATS
        else _of_truths()
        if dtype == "bool"
        else _of_integers(dtype)
    )
    size = jnp.dtype(dtype).itemsize
    for other in TYPES:
        if other == dtype:
            continue
        convert = functools.partial(_converted, other)
        found.append(Case(f"convert to {other}", convert, (dtype,), True))
        if "bool" not in (dtype, other) and jnp.dtype(other).itemsize == size:
            bits = functools.partial(_bits, other)
            found.append(Case(f"bitcast to {other}", bits, (dtype,), True))
    found.append(Case("select_n", lax.select_n, ("bool", dtype, dtype), True))
    return found


def in_kernel(call: Callable[..., Any], product: Any, operands: Sequence[Any]) -> Any:
    """Makes operands depend on a product that is 0, a value that only the kernel knows."""
    is_one = product == 1
    return call(*(lax.select(is_one, lax.full_like(x, 0), x) for x in operands))


# Values


def operands(types: Sequence[str]) -> list[np.ndarray]:
    """Returns matrices of edge values; for two operands, every pair of their edge values."""
    rng = np.random.default_rng(0)
    if len(types) == 1:
        return [_many(types[0], rng)]
    edges = [_edges(each, rng) for each in types]
    if len(types) == 2:
        first, second = np.meshgrid(*(np.arange(N) % len(x) for x in edges), indexing="ij")
        return [edges[0][first], edges[1][second]]
    return [x[rng.integers(len(x), size=(M, N))] for x in edges]


def _many(dtype: str, rng: np.random.Generator) -> np.ndarray:
    kind = jnp.dtype(dtype)
    if kind.itemsize < 4:
        values = _every(dtype)
    elif dtype == "float32":
        halves = [_between(each, rng) for each in ("bfloat16", "float16")]
        random = rng.integers(2**32, size=12000, dtype=np.uint32).view(np.float32)
        usual = rng.normal(size=8000).astype(np.float32) * 8
        values = np.concatenate([_edges(dtype, rng), *halves, random, usual])
        narrow = _every("float16").astype(np.float32)
        values = np.concatenate([values, rng.permutation(narrow)])
    else:
        values = np.concatenate([_edges(dtype, rng), _ties(dtype), _random(dtype, rng, M * N)])
    return np.resize(values, (M, N))


def _every(dtype: str) -> np.ndarray:
    kind = jnp.dtype(dtype)
    if dtype == "bool":
        return np.array([False, True])
    return np.arange(2 ** (8 * kind.itemsize), dtype=f"uint{8 * kind.itemsize}").view(kind)


def _random(dtype: str, rng: np.random.Generator, count: int) -> np.ndarray:
    kind = jnp.dtype(dtype)
    if dtype == "bool":
        return rng.integers(2, size=count).astype(bool)
    bits = rng.integers(2 ** (8 * kind.itemsize), size=count, dtype=np.uint64)
    return bits.astype(f"uint{8 * kind.itemsize}").view(kind)


def _between(dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Returns float32 midpoints between neighbours of a narrower type, and their neighbours."""
    kind = jnp.dtype(dtype)
    low = _random(dtype, rng, 3000)
    high = (low.view(np.uint16) + np.uint16(1)).view(kind)
    with np.errstate(all="ignore"):
        half = low.astype(np.float32) / 2 + high.astype(np.float32) / 2
    bits = half.view(np.uint32)
    return np.concatenate([bits, bits + np.uint32(1), bits - np.uint32(1)]).view(np.float32)


def _ties(dtype: str) -> np.ndarray:
    """Returns integer midpoints of two floating-point numbers, and the integers beside them."""
    info = np.iinfo(dtype)
    steps = itertools.product(range(9, 32), (3, 4, 8, 9, 11, 12, 24, 25), (-1, 0, 1), (1, -1))
    values = {s * (2**k + 2 ** (k - b) + d) for k, b, d, s in steps if k >= b}
    return np.array(sorted(x for x in values if info.min <= x <= info.max), dtype)


def _edges(dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Returns up to 256 values of a type: all values, or edge values and random ones."""
    kind = jnp.dtype(dtype)
    if kind.itemsize == 1:
        return _every(dtype)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        steps = [2**k + d for k in range(33) for d in (-1, 0, 1)]
        values = {s * x for x in (3, 5, 7, 31, 100, 1000, *steps, 0) for s in (1, -1)}
        edges = np.array(sorted(x for x in values if info.min <= x <= info.max), kind)[:216]
    else:
        edges = _edges_of_float(kind)
    return np.concatenate([edges, _random(dtype, rng, 256 - len(edges))])


def _edges_of_float(kind: np.dtype) -> np.ndarray:
    info = ml_dtypes.finfo(kind)
    largest, tiny, least = float(info.max), float(info.tiny), float(info.smallest_subnormal)
    eps = float(info.eps)
    own = [largest, largest / 2, tiny, 2 * tiny, tiny - least, tiny / 2, least, 3 * least]
    near_one = [1, 1 + eps, 1 - eps / 2, 0.5, 0.5 - eps / 4, 0.7071, 0.999, 1.1, 0.3]
    numbers = [0, 1.5, 2, 2.5, 3, 3.5, 4, 7, 8.5, 10, 20, 100, 1000, np.pi, np.pi / 2, np.e]
    exponentials = [88.7, 88.8, 89, 87.3, 103.9, 104, 127.5, 128, 126, 149, 150, 11.09, 9.7, 16.6]
    integers = [127.5, 128.5, 255.5, 256, 32767.5, 32768, 65535.5, 65536, 2.0**31, 2.0**32, 1e10]
    whole = [2.0**10 + 0.5, 2.0**22 + 0.5, 2.0**23, 2.0**24, 2.0**7 + 0.5]
    eight = [240, 248, 448, 464, 465, 480, 57344, 61439, 61440, 2.0**-9, 2.0**-10, 2.0**-16]
    halves = [65504, 65519.9, 65520, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 6e-5, 1e-7, 1e-20, 1e30]
    every = [*own, *near_one, *numbers, *exponentials, *integers, *whole, *eight, *halves]
    positive = np.array([*every, np.inf, np.nan], np.float64).astype(np.float32).astype(kind)
    return np.unique(np.concatenate([positive, -positive]).view(f"uint{8 * kind.itemsize}")).view(
        kind
    )
