"""Each operation of compiled epilogues at its edge values, compared with XLA on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import operation_edges as edges
import pytest
from gpu_accuracy import in_float64

from jax_tcgemm import gemm
from jax_tcgemm.epilogue import function, translation
from jax_tcgemm.lowering import jit_source

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("never_apart")]

K = 64
MOST_RESULTS = 6
PARTS = 3  # of the operations of a type, for several processes
SHOWN = 6  # differences that the table shows for an operation

# The allowed error in units in the last place, by bytes of the type; alternatively twice XLA's
# error.
_UNITS = {4: 8, 2: 1, 1: 1}


def _is_translated(case: edges.Case) -> bool:
    types = [jax.ShapeDtypeStruct((edges.M, edges.N), jnp.dtype(each)) for each in case.types]
    product = jax.ShapeDtypeStruct((edges.M, edges.N), jnp.float32)
    made, _ = function.trace(
        lambda product, *x: [edges.in_kernel(case.call, product, x)], [product, *types], 1
    )
    return not isinstance(translation.translate(made), str)


def _groups(dtype: str) -> Iterator[list[edges.Case]]:
    """Yields groups of operations on the same operands, as many as one kernel has room for."""
    by_types: dict[tuple[str, ...], list[edges.Case]] = {}
    for case in edges.cases(dtype):
        if _is_translated(case):
            by_types.setdefault(case.types, []).append(case)
    for types, found in by_types.items():
        sizes = [jit_source.matrix_bytes(jnp.dtype(each).itemsize) for each in types]
        group, left = [], jit_source.MOST_WARP_BYTES - sum(sizes)
        room = left
        for case in found:
            need = jit_source.matrix_bytes(case.result.itemsize)
            if len(group) == MOST_RESULTS or need > room:
                yield group
                group, room = [], left
            group.append(case)
            room -= need
        yield group


def _ours(group: Sequence[edges.Case], operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    def epilogue(product, *x):
        return [edges.in_kernel(case.call, product, x) for case in group]

    def of_zeros(a, b, *x):
        return gemm(a, b, epilogue=epilogue, epilogue_operands=x)

    a, b = np.zeros((edges.M, K), jnp.bfloat16), np.zeros((K, edges.N), jnp.bfloat16)
    return [np.asarray(x) for x in jax.jit(of_zeros)(a, b, *operands)]


def _theirs(group: Sequence[edges.Case], operands: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """Returns XLA's results, or ``None`` for operations that XLA does not compile."""

    def every(product, *x):
        return [edges.in_kernel(case.call, product, x) for case in group]

    zeros = np.zeros((edges.M, edges.N), np.float32)
    try:
        return [np.asarray(x) for x in jax.jit(every)(zeros, *operands)]
    except Exception:
        if len(group) == 1:
            return [None]
        return [result for case in group for result in _theirs([case], operands)]


def _place(x: np.ndarray) -> np.ndarray:
    """Returns the signed index of each floating-point number, counted from 0."""
    bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(np.int64)
    sign = 1 << (8 * x.dtype.itemsize - 1)
    return np.where(bits & sign, -(bits & (sign - 1)), bits)


def _is_nan(x: np.ndarray) -> np.ndarray:
    return np.isnan(x.astype(np.float32))


def _different(
    case: edges.Case, ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray | None
) -> np.ndarray:
    """Returns where results differ by more than the tolerance."""
    if not jnp.issubdtype(ours.dtype, jnp.floating):
        return ours != theirs
    bits = f"uint{8 * ours.dtype.itemsize}"
    both = _is_nan(ours) & _is_nan(theirs)
    different = (ours.view(bits) != theirs.view(bits)) & ~both
    if exact is None:
        return different
    with np.errstate(all="ignore"):
        best = exact.astype(np.float32).astype(ours.dtype)
        # Subnormal numbers with float32's exponent range may become 0.
        vanishes = np.abs(ours.astype(np.float64) - exact) <= 2.0**-126
    off, baseline = np.abs(_place(ours) - _place(best)), np.abs(_place(theirs) - _place(best))
    close = off <= np.maximum(_UNITS[ours.dtype.itemsize], 2 * baseline)
    return different & ~((close | vanishes) & (_is_nan(ours) == _is_nan(best)))


def _hexadecimal(x: Any) -> str:
    size = x.dtype.itemsize
    return f"{int(x.view(f'uint{8 * size}')) if x.dtype != bool else int(x):#0{2 * size + 2}x}"


def _table(
    case: edges.Case, operands: Sequence[np.ndarray], ours: np.ndarray, theirs: np.ndarray, wrong
) -> Iterator[str]:
    yield f"{case}: {int(wrong.sum())} of {wrong.size} differ"
    for at in map(tuple, np.argwhere(wrong)[:SHOWN]):
        values = [*(x[at] for x in operands), ours[at], theirs[at]]
        *taken, mine, other = (f"{x} ({_hexadecimal(np.asarray(x))})" for x in values)
        yield f"    at {', '.join(taken)}: {mine}, XLA {other}"


def _differences(group: Sequence[edges.Case]) -> tuple[int, list[str]]:
    """Returns how many operations were tried, and where they differ."""
    operands = edges.operands(group[0].types)
    floats = [x for x in operands if jnp.issubdtype(x.dtype, jnp.floating)]
    inexact = [case for case in group if not case.exact]
    wide = in_float64(lambda *x: [each.call(*x) for each in inexact], *operands)
    exact = dict(zip(map(str, inexact), wide, strict=True))
    tried, lines = 0, []
    both = zip(group, _ours(group, operands), _theirs(group, operands), strict=True)
    for case, ours, theirs in both:
        if theirs is None:
            lines.append(f"{case}: XLA does not compile it")
            continue
        tried += 1
        wrong = _different(case, ours, theirs, exact.get(str(case)))
        if case.name.startswith("bitcast") and case.types[0] != "float32":
            for x in floats:  # a NaN may have any bits
                wrong &= ~_is_nan(x)
        if wrong.any():
            lines += _table(case, operands, ours, theirs, wrong)
    return tried, lines


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", edges.TYPES)
def test_as_xla(dtype, part):
    with np.errstate(all="ignore"):
        found = [_differences(group) for group in list(_groups(dtype))[part::PARTS]]
    lines = [line for _, group in found for line in group]
    print(f"{sum(tried for tried, _ in found)} operations of {dtype}")
    assert not lines, "\n".join(["", *lines])
