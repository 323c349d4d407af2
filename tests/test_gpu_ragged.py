"""The kernels for products over groups on the GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_rows import by_config
from ragged_problems import (
    BF16,
    F16,
    F32,
    bounds,
    check_problem,
    contracted,
    drawn_sizes,
    looped,
    random_problem,
)

from jax_tcgemm import ragged_dot
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem import ragged
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES
from jax_tcgemm.problem.strides import Operands

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_equals_the_loop_and_lax_on_the_gpu(rng, normal, assert_accurate, dtype, part):
    for _ in range(6):
        check_problem(random_problem(rng, normal, dtype), assert_accurate)


@by_config(grouped="m")
def test_every_kernel_for_groups_of_rows(rng, normal, config):
    dtype = INPUT_DTYPES[config.algorithm]
    for transposed in (False, True):
        m, n, k = 1000, 8 * int(rng.integers(1, 90)), 8 * int(rng.integers(1, 50))
        groups = int(rng.integers(1, 40))
        sizes = drawn_sizes(rng, groups, m)
        lhs, rhs, bias = (normal(*s, dtype=dtype) for s in ((m, k), (groups, k, n), (groups, n)))
        stored = jnp.swapaxes(rhs, 1, 2) if transposed else rhs
        sizes = jnp.asarray(sizes, jnp.int32)
        options = {"bias": bias, "transpose_rhs": transposed, "config": config.name}
        d = ragged_dot(lhs, stored, sizes, activation="silu", **options)
        wanted = looped(lhs, rhs, sizes, bias, "silu")
        error = np.abs(np.asarray(d, np.float64) - wanted).max()
        assert error <= float(jnp.finfo(dtype).eps) * np.abs(wanted).max()


@by_config(grouped="k")
def test_every_kernel_for_groups_of_k(rng, normal, config):
    dtype = INPUT_DTYPES[config.algorithm]
    for out_dtype in (dtype, jnp.dtype(F32)):
        m, n, k = (8 * int(x) for x in rng.integers(1, (100, 90, 50)))
        groups = int(rng.integers(1, 40))
        sizes = drawn_sizes(rng, groups, m)
        used = int(bounds(sizes, m)[-1])
        lhs = normal(m, k, dtype=dtype).at[used:].set(jnp.nan)
        rhs = normal(m, n, dtype=dtype).at[used:].set(jnp.inf)
        spec = ragged.contraction(out_dtype, (jax.lax.Precision.DEFAULT,) * 2, config.name)
        (d,) = gemm_primitive.bind(Operands(lhs, rhs, jnp.asarray(sizes, jnp.int32)), spec)
        wanted = contracted(lhs, rhs, sizes)
        error = np.abs(np.asarray(d, np.float64) - wanted).max()
        assert error <= max(float(jnp.finfo(out_dtype).eps), 1e-5) * max(np.abs(wanted).max(), 1)


@pytest.mark.sm90
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gradients_on_the_gpu(rng, normal, assert_accurate, dtype):
    for _ in range(6):
        m, k, n = (int(x) for x in rng.integers(1, (700, 400, 400)))
        groups = int(rng.integers(1, 40))
        sizes = drawn_sizes(rng, groups, m)
        lhs, rhs, ct = (normal(*s, dtype=dtype) for s in ((m, k), (groups, k, n), (m, n)))
        used = int(bounds(sizes, m)[-1])
        lhs, ct = lhs.at[used:].set(jnp.nan), ct.at[used:].set(jnp.inf)
        product = functools.partial(ragged_dot, group_sizes=jnp.asarray(sizes, jnp.int32))
        dlhs, drhs = jax.jit(jax.vjp(product, lhs, rhs)[1])(ct)
        exact = looped(ct, jnp.swapaxes(rhs, 1, 2), sizes), contracted(lhs, ct, sizes)
        for actual, wanted in zip((dlhs, drhs), exact, strict=True):
            assert_accurate(actual, jnp.asarray(wanted, dtype), wanted, slack=1e-5 * (m * n) ** 0.5)


@pytest.mark.sm90
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_float32_results_are_as_accurate_as_those_of_lax(normal, dtype):
    """Tensor cores truncate sums; a 16-bit result would not show it."""
    sizes = jnp.asarray([1700, 0, 2000, 300], jnp.int32)
    lhs, rhs, ct = (normal(*s, dtype=dtype) for s in ((4096, 2048), (4, 2048, 256), (4096, 256)))

    def error(actual, wanted):
        return np.linalg.norm(np.asarray(actual, np.float64) - wanted) / np.linalg.norm(wanted)

    wanted = looped(lhs, rhs, sizes)
    ours, theirs = (
        jax.jit(functools.partial(f, preferred_element_type=F32))(lhs, rhs, sizes)
        for f in (ragged_dot, jax.lax.ragged_dot)
    )
    assert error(ours, wanted) <= 2 * error(theirs, wanted)

    spec = ragged.contraction(jnp.dtype(F32), (jax.lax.Precision.DEFAULT,) * 2)
    (ours,) = gemm_primitive.bind(Operands(lhs, ct, sizes), spec)
    theirs = jnp.matmul(lhs[:1700].T, ct[:1700], preferred_element_type=F32)
    wanted = contracted(lhs, ct, sizes)
    assert error(ours[0], wanted[0]) <= 2 * error(theirs, wanted[0])
    assert error(ours, wanted) <= 2 * error(theirs, wanted[0])
