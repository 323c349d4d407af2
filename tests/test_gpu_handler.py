"""On the GPU: custom calls that no lowering makes are refused or right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import _compat, _extension
from jax_tcgemm.lowering.custom_call import attributes
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.problem.strides import Operands, fold

pytestmark = pytest.mark.gpu


def custom_call(x: Operands, **changes) -> jax.Array:
    """Multiplies by a custom call, some of whose attributes are changed."""
    axes = Operands(*(None if o is None else tuple(range(o.ndim)) for o in x))
    shapes = Operands(*(None if o is None else o.shape for o in x))
    spec = GemmSpec(axes, jnp.dtype(x.a.dtype), _compat.canonicalize_precision(None))
    gemm = fold(spec.strided(shapes))
    named = attributes(gemm, spec, "BF16_BF16_F32", 0, has_workspace=False)
    result = jax.ShapeDtypeStruct(spec.result_shape(shapes), x.a.dtype)
    call = jax.ffi.ffi_call(_extension.GEMM_TARGET, (result,))
    (d,) = jax.jit(lambda *o: call(*o, **named | changes))(*flatten(x))
    return jax.block_until_ready(d)


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape, jnp.bfloat16)


@pytest.mark.parametrize("extents", [(2**30 + 1,), (2**15, 2**15 + 1), (2**31, 0)])
def test_a_batch_beyond_what_kernels_count_is_refused(extents):
    operands = Operands(ones(3, 32, 64), ones(3, 64, 48))
    np.testing.assert_array_equal(custom_call(operands).astype(jnp.float32), 64)
    strides = np.zeros(len(extents) + 2, np.int64)
    changes = {"batch_shape": np.asarray(extents, np.int64), "a_strides": strides}
    with pytest.raises(jax.errors.JaxRuntimeError, match="batch"):
        custom_call(operands, **changes)


# Operands with rows that TMA can address, and others.
@pytest.mark.parametrize(
    ("name", "strides"), [("a", [0, 1]), ("b", [0, 1]), ("b", [1, 0]), ("a", [1, 0])]
)
@pytest.mark.parametrize("k", [64, 65])
def test_rows_without_a_stride_are_refused(name, strides, k):
    operands = Operands(ones(32, k), ones(k, 48))
    np.testing.assert_array_equal(custom_call(operands).astype(jnp.float32), k)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{name} has strides .*may be 0"):
        custom_call(operands, **{f"{name}_strides": np.asarray(strides, np.int64)})
    # A single row, or an empty operand, needs no stride.
    single = Operands(ones(1, k), ones(k, 48))
    got = custom_call(single, a_strides=np.asarray([0, 1], np.int64))
    np.testing.assert_array_equal(got.astype(jnp.float32), k)
    empty = Operands(ones(32, 0), ones(0, 48))
    np.testing.assert_array_equal(custom_call(empty).astype(jnp.float32), 0)


@pytest.mark.parametrize("name", ["row_scale", "column_scale"])
def test_scales_of_16_bits_are_refused(name):
    scale = 2 * jnp.ones(32)
    operands = Operands(ones(32, 64), ones(64, 32))
    got = custom_call(operands._replace(**{name: scale}))
    np.testing.assert_array_equal(got.astype(jnp.float32), 128)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{name} has element type .*float32"):
        custom_call(operands._replace(**{name: scale.astype(jnp.bfloat16)}))
