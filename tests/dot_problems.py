"""Random problems for `dot_general`, their exact results and their tolerances."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_MOST_PRODUCTS, _MOST_ELEMENTS = 3e7, 1e6

# Operand dtypes, each with the allowed values of preferred_element_type and precision.
_DTYPES: list[tuple[Any, Any, list[Any], list[Any]]] = [
    (jnp.bfloat16, jnp.bfloat16, [None, jnp.float32, jnp.float16], [None, "BF16_BF16_F32"]),
    (jnp.float16, jnp.float16, [None, jnp.float32], [None, "highest", "F16_F16_F16"]),
    (jnp.float32, jnp.float32, [None, jnp.bfloat16], [None, "highest", "BF16_BF16_F32"]),
    (jnp.bfloat16, jnp.float32, [None], [None]),
    (jnp.float16, jnp.bfloat16, [None, jnp.float32], [None]),
    (jnp.int8, jnp.bfloat16, [None], [None]),
    (jnp.int8, jnp.int8, [jnp.int32], [None]),
    (jnp.complex64, jnp.complex64, [None], ["highest"]),
]
_WEIGHTS = [0.36, 0.16, 0.28, 0.04, 0.04, 0.04, 0.04, 0.04]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of `dot_general`, without its arrays."""

    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    dimension_numbers: Any
    lhs_dtype: Any
    rhs_dtype: Any
    preferred_element_type: Any
    precision: Any

    def arrays(self, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
        lhs = jnp.asarray(_values(rng, self.lhs_shape, self.lhs_dtype), self.lhs_dtype)
        return lhs, jnp.asarray(_values(rng, self.rhs_shape, self.rhs_dtype), self.rhs_dtype)

    def by(self, dot_general: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return dot_general(
            lhs,
            rhs,
            self.dimension_numbers,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )

    @property
    def names_algorithm(self) -> bool:
        return self.precision not in (None, "highest")

    def rounded(self, x: jax.Array, on_cpu: bool) -> jax.Array:
        """Returns an operand as the requested algorithm, if any, sees it.

        On a CPU, XLA (and so `lax.dot_general`) rounds a float16 factor to the other factor's type
        if the result has that type, too.
        """
        is_mixed = {self.lhs_dtype, self.rhs_dtype} == {jnp.float16, jnp.bfloat16}
        is_narrowed = is_mixed and self.preferred_element_type in (None, jnp.bfloat16)
        to_bfloat16 = self.precision == "BF16_BF16_F32" or (on_cpu and is_narrowed)
        return x.astype(jnp.bfloat16) if to_bfloat16 else x

    def baseline(self, lhs: jax.Array, rhs: jax.Array, on_cpu: bool) -> jax.Array:
        """Returns XLA's result. XLA lacks some algorithms on some platforms and for some shapes."""
        dtype = jax.eval_shape(lambda *x: self.by(lax.dot_general, *x), lhs, rhs).dtype
        precision = None if self.names_algorithm else self.precision
        lhs, rhs = self.rounded(lhs, on_cpu), self.rounded(rhs, on_cpu)
        if on_cpu and jnp.issubdtype(dtype, jnp.floating):
            # The CPU compiler of older XLA supports few 16-bit products with a float32 result.
            lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
        return lax.dot_general(lhs, rhs, self.dimension_numbers, precision, dtype)

    def slack(self, lhs: np.ndarray, rhs: np.ndarray, in_tf32: bool) -> float:
        """Returns the tolerance beyond the baseline's error.

        A small result has too few elements to measure an error by, and XLA has more accurate paths
        for some results. So the tolerance is one rounding at the scale of `|lhs| |rhs|`: a rounding
        of the operands or, if the operands are exact, of the sum. Sums in float16 add one rounding
        for every 16 products.
        """
        scale = exact_product(np.abs(lhs), np.abs(rhs), self.dimension_numbers).max(initial=0.0)
        if self.precision == "F16_F16_F16":
            k = math.prod(self.lhs_shape[dim] for dim in self.dimension_numbers[0][0])
            return math.ceil(k / 16) * float(jnp.finfo(jnp.float16).eps) * float(scale)
        return (2.0**-10 if in_tf32 else 2.0**-23) * float(scale)


def exact_product(lhs: np.ndarray, rhs: np.ndarray, dimension_numbers: Any) -> np.ndarray:
    """Returns `lax.dot_general` of NumPy arrays, by one batched `np.matmul`."""
    matrices, kept = [], []
    for x, contracted, batch in zip((lhs, rhs), *dimension_numbers, strict=True):
        free = [dim for dim in range(x.ndim) if dim not in (*contracted, *batch)]
        groups = [[x.shape[dim] for dim in dims] for dims in (batch, free, contracted)]
        x = x.transpose([*batch, *free, *contracted])
        matrices.append(np.ascontiguousarray(x).reshape([math.prod(group) for group in groups]))
        kept.append(groups[1])
    result = matrices[0] @ matrices[1].swapaxes(-1, -2)
    return result.reshape([*groups[0], *kept[0], *kept[1]])


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.integer):
        return rng.integers(-9, 10, shape)
    values = rng.standard_normal(shape)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return values + 1j * rng.standard_normal(shape) if is_complex else values


def _extent(rng: np.random.Generator, largest: int) -> int:
    kind = rng.choice(["none", "one", "few", "tile", "any"], p=[0.01, 0.14, 0.4, 0.2, 0.25])
    if kind == "few":
        return int(rng.integers(2, 10))
    if kind == "tile":
        return 8 * int(rng.integers(1, largest // 8)) + int(rng.integers(-1, 2))
    return {"none": 0, "one": 1}.get(kind, int(rng.integers(1, largest + 1)))


def _bounded(extents: dict[str, list[int]]) -> dict[str, list[int]]:
    """Halves the largest extents until the problem can be checked quickly."""

    def product(roles: list[str]) -> int:
        return math.prod(math.prod(extents[role]) for role in roles)

    while product([*extents]) > _MOST_PRODUCTS or any(
        product([role for role in extents if role != missing]) > _MOST_ELEMENTS for missing in "kmn"
    ):
        largest = max(max(values, default=0) for values in extents.values())
        extents = {
            role: [extent // 2 if extent == largest else extent for extent in values]
            for role, values in extents.items()
        }
    return extents


def draw(rng: np.random.Generator, largest: int) -> Problem:
    """Draws a problem with extents up to `largest`."""
    counts = {
        "b": rng.choice(4, p=[0.45, 0.3, 0.2, 0.05]),
        "k": rng.choice(4, p=[0.04, 0.6, 0.26, 0.1]),
        "m": rng.choice(4, p=[0.07, 0.43, 0.35, 0.15]),
        "n": rng.choice(4, p=[0.07, 0.48, 0.35, 0.1]),
    }
    drawn = {role: [_extent(rng, largest) for _ in range(n)] for role, n in counts.items()}
    extents = _bounded(drawn)
    names = {role: [f"{role}{i}" for i in range(n)] for role, n in counts.items()}
    extent_of = {
        name: extent
        for role in names
        for name, extent in zip(names[role], extents[role], strict=True)
    }

    def shuffled(values: list[str], share: float) -> list[str]:
        order = rng.permutation(len(values)) if rng.random() < share else range(len(values))
        return [values[i] for i in order]

    lhs = shuffled(names["b"] + names["m"] + names["k"], 0.6)
    rhs = shuffled(names["b"] + names["k"] + names["n"], 0.6)
    contracted, batch = shuffled(names["k"], 0.5), shuffled(names["b"], 0.5)
    dimension_numbers = tuple(
        tuple(tuple(order.index(name) for name in shared) for order in (lhs, rhs))
        for shared in (contracted, batch)
    )
    lhs_dtype, rhs_dtype, preferred, precisions = _DTYPES[rng.choice(len(_DTYPES), p=_WEIGHTS)]
    # XLA computes calls that are not matrix products; its compilers refuse some of these forms.
    are_matrices = all(math.prod(extents[role]) > 1 for role in "kmn") and 0 not in extents["b"]
    return Problem(
        tuple(extent_of[name] for name in lhs),
        tuple(extent_of[name] for name in rhs),
        dimension_numbers,
        lhs_dtype,
        rhs_dtype,
        preferred[rng.integers(len(preferred)) if are_matrices else 0],
        precisions[rng.integers(len(precisions)) if are_matrices else 0],
    )
