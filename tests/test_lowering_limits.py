"""The CUDA lowering of gemms whose rows, columns, k or batch exceed a kernel's limits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import picked

from jax_tcgemm import gated_gemm, gemm


@pytest.mark.parametrize("extents", [(2**30 + 1, 2, 2), (2, 2**30 + 1, 2), (2, 2, 2**30 + 1)])
def test_reference_beyond_what_kernels_count(cuda_module, extents):
    for m, n, k in (extents, [min(extent, 2**30) for extent in extents]):
        a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n)))
        _, calls = cuda_module(gemm, a, b)
        assert len(calls) == (max(m, n, k) <= 2**30)


@pytest.mark.parametrize("product", [gemm, functools.partial(gated_gemm, w_up=None)])
def test_reference_beyond_the_matrices_that_kernels_count(cuda_module, said, product):

    def calls(batch_a, batch_b):
        shapes = (*batch_a, 40, 8), (*batch_b, 8, 80)
        return cuda_module(product, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))[1]

    (call,) = calls((2**15, 2**15), (2**15, 2**15))
    assert call["batch_shape"] == [2**30]
    assert not calls((2**15, 2**15 + 1), (2**15, 2**15 + 1))
    assert said[-1].endswith("fallback to XLA: a batch beyond 2^30")
    # Dimensions that fold into rows are no batch.
    (call,) = calls((2**15, 2**16), ())
    assert picked(call, "m", "batch_shape") == (40 * 2**16, [2**15])
    # They do not fold once operands are broadcast over a batch that has too many dimensions.
    assert not calls((2**15, 1, 2, 1, 2, 1, 2**16), (1, 2, 1, 2, 1, 2, 1))
    assert said[-1].endswith("fallback to XLA: a batch beyond 2^30")
