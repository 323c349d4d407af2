"""On the GPU: operands at addresses that XLA's allocator never returns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import poison
from shifted_call import shifted_call

from jax_tcgemm import _compat, _extension, gemm
from jax_tcgemm.lowering.custom_call import attributes
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, fold

pytestmark = pytest.mark.gpu

# Several kinds of tiling: one block, many blocks, few rows, split k, unaligned rows.
SHAPES = [(96, 136, 200), (520, 264, 320), (16, 512, 4096), (256, 1024, 4160), (65, 67, 131)]


@pytest.mark.parametrize("shift", [2, 4, 16, 64, 128])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", INPUT_DTYPES)
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_operands_that_begin_anywhere(
    normal, exact, assert_accurate, algorithm, shape, shift, layout
):
    """Only the handler sees the address; nothing before it does."""
    dtype = INPUT_DTYPES[algorithm]
    if shift % dtype.itemsize:
        pytest.skip("no address of such an element")
    m, n, k = shape
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
    bias = normal(n, dtype=dtype)
    operands, order = [a, b, bias], (1, 0) if layout == "tt" else (0, 1)
    stored = [a.T, b.T, bias] if layout == "tt" else operands
    axes = Operands(order, order, bias=(0,))
    spec = GemmSpec(axes, jnp.dtype(dtype), _compat.canonicalize_precision(None))
    shapes = Operands(stored[0].shape, stored[1].shape, bias=bias.shape)
    named = attributes(fold(spec.strided(shapes)), spec, algorithm, 0, has_workspace=False)
    poison((m, n), dtype)
    result = (jax.ShapeDtypeStruct((m, n), dtype),)
    (got,) = shifted_call(_extension.GEMM_TARGET, result, stored, shift, **named)
    wide = jnp.float16 if algorithm == "F16_F16_F16" else jnp.float32
    baseline = jnp.matmul(a, b, preferred_element_type=wide) + bias
    expected = exact(a) @ exact(b) + exact(bias)
    # Sums in float16 are rounded every 16 steps of k; jnp.matmul sums in float32.
    roundings = -(-k // 16) if algorithm == "F16_F16_F16" else 0
    slack = roundings * float(jnp.finfo(jnp.float16).eps) * np.abs(expected).max()
    assert_accurate(got, baseline.astype(dtype), expected, slack)


@pytest.mark.sm90
@pytest.mark.parametrize("shift", [2, 16, 64])
def test_weights_of_a_gated_product_that_begin_anywhere(normal, exact, assert_accurate, shift):
    x = normal(192, 320, dtype=jnp.bfloat16)
    w, u = normal(320, 256, dtype=jnp.bfloat16), normal(320, 256, dtype=jnp.bfloat16)
    axes = Operands((0, 1), (0, 1), b2=(0, 1))
    spec = GemmSpec(axes, x.dtype, _compat.canonicalize_precision(None), Epilogue("gated"))
    gemm_of = fold(spec.strided(Operands(x.shape, w.shape, b2=u.shape)))
    named = attributes(gemm_of, spec, "BF16_BF16_F32", 0, has_workspace=False)
    result = (jax.ShapeDtypeStruct((192, 256), x.dtype),)
    (got,) = shifted_call(_extension.GEMM_TARGET, result, [x, w, u], shift, **named)
    baseline = jnp.matmul(x, w) * jnp.matmul(x, u)
    assert_accurate(got, baseline, (exact(x) @ exact(w)) * (exact(x) @ exact(u)), 0.5)


@pytest.mark.parametrize("offset", [8, 32])  # in 16-bit elements: 16 and 64 bytes
def test_a_graph_whose_operand_moves_off_lines_of_l2(normal, offset):
    """JAX's array and a slice of another library's alternate; the graph keeps its kernels."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a PyTorch that sees the GPU")
    m, k = 128, 4096

    @jax.jit
    def chain(x, w):
        for _ in range(5):
            x = gemm(x, w, activation="tanh")
        return x

    w = normal(k, k, dtype=jnp.bfloat16) / 64
    for i in range(12):
        x = normal(m, k, dtype=jnp.bfloat16)
        expected = chain(x + 0, w)
        if i % 2:
            storage = torch.zeros(offset + m * k, dtype=torch.bfloat16, device="cuda")
            view = storage[offset:].view(m, k)
            view.copy_(torch.from_dlpack(x))
            torch.cuda.synchronize()
            x = jax.dlpack.from_dlpack(view)
            assert x.unsafe_buffer_pointer() % 128 == 2 * offset
        np.testing.assert_array_equal(
            np.asarray(chain(x, w)).view(np.uint16), np.asarray(expected).view(np.uint16)
        )
