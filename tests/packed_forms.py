"""Types of products with packed weights, in each form that has a kernel, for tests of tuning."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_tcgemm import _extension, gated_gemm, gemm, pack, quantize, ragged_dot

PACKED, FUNCTION = _extension.PACKED_TARGET, _extension.PACKED_FUNCTION_TARGET
RAGGED, UNPACK = _extension.PACKED_RAGGED_TARGET, _extension.UNPACK_TARGET
SIZES = jnp.asarray([3, 0, 0, 2], jnp.int32)


def weight(n=192, k=4096, dtype="int4", group=128, batch=(), scale_dtype="bfloat16"):
    """Returns the type of a packed weight."""
    tile = (*(1,) * len(batch), group, 1)
    made = functools.partial(quantize, dtype=dtype, tile=tile, scale_dtype=jnp.dtype(scale_dtype))
    return jax.eval_shape(lambda w: pack(made(w)), jax.ShapeDtypeStruct((*batch, k, n), "float32"))


def rows(*shape, k=4096, dtype="bfloat16"):
    return jax.ShapeDtypeStruct((*(shape or (16,)), k), dtype)


def plain(x, w):
    return gemm(x, w)


def with_function(x, w):
    return gemm(x, w, activation="silu")


def pair(x, w):
    return gated_gemm(x, w, w)


def experts(x, w):
    return ragged_dot(x, w, SIZES)


FORMS = {
    "plain": (plain, (rows(), weight()), PACKED),
    "int8": (plain, (rows(), weight(dtype="int8", group=-1)), PACKED),
    "function": (with_function, (rows(), weight()), FUNCTION),
    "pair": (pair, (rows(), weight()), FUNCTION),
    "experts": (experts, (rows(5), weight(batch=(4,))), RAGGED),
}
