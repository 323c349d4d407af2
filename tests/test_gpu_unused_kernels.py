"""Release of epilogue kernels that no program launches any more, on a Hopper GPU."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import _core, gemm
from jax_tcgemm.epilogue import unused

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("never_apart")]

BF16 = jnp.bfloat16


def _scaled(factor):
    @jax.jit
    def scaled(a, b):
        y = gemm(a, b, epilogue=lambda z: jnp.minimum(z * factor, 1e6).astype(BF16))
        return y, gemm(y, b, epilogue=lambda z: jax.nn.softmax(z * factor, axis=-1))

    return scaled


@pytest.fixture
def factors():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(256, 256)).astype(np.float32)) for _ in range(2))
    return a.astype(BF16), (b / 16).astype(BF16)


def _assert_right(result, a, b, factor):
    product = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(result[0].astype(jnp.float32), product * factor, 2**-6, 2**-6)


def test_kernels_of_dropped_programs_are_released(factors):
    for _ in range(2):  # those of other tests
        unused.release(0)
    kept, dropped = _scaled(0.25), _scaled(0.75)
    expected = kept(*factors)
    dropped(*factors)
    before = _core.loaded_program_count()
    unused.release(0)
    del dropped
    gc.collect()
    unused.release(0)
    assert _core.loaded_program_count() == before  # enqueued work may still run
    unused.release(3600)
    assert _core.loaded_program_count() == before
    unused.release(0)
    assert _core.loaded_program_count() < before
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, kept(*factors), expected)))
    _assert_right(_scaled(0.75)(*factors), *factors, 0.75)


def test_a_program_is_kept_until_it_has_run(factors):
    compiled = _scaled(0.375).lower(*factors).compile()
    for _ in range(2):
        unused.release(0)
    _assert_right(compiled(*factors), *factors, 0.375)
