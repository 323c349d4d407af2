"""On the GPU: custom calls made by hand, which no lowering makes, are refused or right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import _compat, _extension, lowering
from jax_tcgemm.spec import GemmSpec, flatten
from jax_tcgemm.strides import Operands, fold

pytestmark = pytest.mark.gpu


def custom_call(x: Operands, **changes) -> jax.Array:
    """Multiplies by a custom call, some of whose attributes are changed."""
    axes = Operands(*(None if o is None else tuple(range(o.ndim)) for o in x))
    shapes = Operands(*(None if o is None else o.shape for o in x))
    spec = GemmSpec(axes, jnp.dtype(x.a.dtype), _compat.canonicalize_precision(None))
    gemm = fold(spec.strided(shapes))
    attributes = lowering._attributes(gemm, spec, "BF16_BF16_F32", 0, has_workspace=False)
    result = jax.ShapeDtypeStruct(spec.result_shape(shapes), x.a.dtype)
    call = jax.ffi.ffi_call(_extension.GEMM_TARGET, (result,))
    (d,) = jax.jit(lambda *o: call(*o, **attributes | changes))(*flatten(x))
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
