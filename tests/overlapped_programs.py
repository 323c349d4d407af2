"""Programs whose transfers can run beside their products."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from sharded_program import Program

from jax_tcgemm import dot_general, gated_gemm, gemm

BF16 = jnp.bfloat16


def _bias(x, w, b):
    return gemm(x, w, bias=b, activation="gelu")


def _bias_formula(x, w, b):
    return jax.nn.gelu(x @ w + b)


def swish(p, b):
    return (p * jax.nn.sigmoid(1.5 * p + b)).astype(BF16)


def _dot(x, w):
    return dot_general(x, w, (((1,), (0,)), ((), ())))


program_of = functools.partial(Program, dtype=BF16)
_GATHERED, _SCATTERED = (P("x"), P(None, "x")), (P(None, "x"), P("x"))
_W = ((1024, 64), (64, 2048))
GATHERED = {
    "gather": program_of(gemm, jnp.matmul, _W, _GATHERED, P(None, "x")),
    "gather_by_dot_general": program_of(_dot, jnp.matmul, _W, _GATHERED, P(None, "x")),
    "gather_and_bias": program_of(
        _bias, _bias_formula, (*_W, (2048,)), (*_GATHERED, P("x")), P(None, "x")
    ),
    "gather_gated": program_of(
        gated_gemm,
        lambda x, w, v: jax.nn.silu(x @ w) * (x @ v),
        (*_W, _W[1]),
        (*_GATHERED, P(None, "x")),
        P(None, "x"),
    ),
    "gather_of_a_batch": program_of(
        gemm, jnp.matmul, ((4, 256, 64), _W[1]), (P("x"), P(None, "x")), P(None, None, "x")
    ),
    "gather_transposed": program_of(
        lambda x, w: gemm(x, w, transpose_a=True),
        lambda x, w: x.T @ w,
        ((64, 1024), _W[1]),
        (P(None, "x"), P(None, "x")),
        P(None, "x"),
    ),
}
FUNCTIONS = {
    "gather_function": program_of(
        lambda x, w, b, **options: gemm(x, w, epilogue=swish, epilogue_operands=(b,), **options),
        lambda x, w, b: swish(jnp.matmul(x, w, preferred_element_type=jnp.float32), b),
        (*_W, (2048,)),
        (*_GATHERED, P("x")),
        P(None, "x"),
    ),
}
SCATTERED = {
    "scatter": program_of(gemm, jnp.matmul, _W, _SCATTERED, P("x")),
    "scatter_and_bias": program_of(
        _bias, _bias_formula, (*_W, (2048,)), (*_SCATTERED, P()), P("x")
    ),
    "scatter_float16": Program(gemm, jnp.matmul, _W, _SCATTERED, P("x"), dtype=jnp.float16),
}


REDUCED = {
    "reduce": program_of(gemm, jnp.matmul, _W, _SCATTERED, P()),
    "reduce_and_bias": program_of(_bias, _bias_formula, (*_W, (2048,)), (*_SCATTERED, P()), P()),
    "reduce_a_batch": program_of(
        gemm, jnp.matmul, ((4, 256, 64), _W[1]), (P(None, None, "x"), P("x")), P()
    ),
}
SUMMED = {
    "gather_a_along_k": program_of(
        lambda x, w: gemm(x, w, transpose_a=True),
        lambda x, w: x.T @ w,
        ((1024, 64), (1024, 2048)),
        (P("x"), P(None, "x")),
        P(None, "x"),
    ),
    "gather_b_along_k": program_of(
        lambda x, w: gemm(x, w, transpose_a=True),
        lambda x, w: x.T @ w,
        ((1024, 2048), (1024, 64)),
        (P(None, "x"), P("x")),
        P("x"),
    ),
}
PROGRAMS = {
    **{name: (program, "rows_of_a") for name, program in GATHERED.items()},
    **{name: (program, "rows_of_d") for name, program in SCATTERED.items()},
    **{name: (program, "sum_of_d") for name, program in REDUCED.items()},
    **{name: (program, f"k_of_{name[7]}") for name, program in SUMMED.items()},
}


def _scaled(x, w, c, s):
    return gemm(x, w, c, row_scale=s, activation="relu")


def _scaled_formula(x, w, c, s):
    return jax.nn.relu(s[..., None] * (x @ w) + c)


_BATCH = ((4, 1024, 64), (64, 2048))
BATCHES = {
    "gather_rows_of_a_batch": program_of(
        gemm, jnp.matmul, _BATCH, (P(None, "x"), P(None, "x")), P(None, None, "x")
    ),
    "gather_rows_of_a_fused_batch": program_of(
        _scaled,
        _scaled_formula,
        (*_BATCH, (4, 1024, 2048), (4, 1024)),
        (P(None, "x"), P(None, "x"), P(None, None, "x"), P()),
        P(None, None, "x"),
    ),
    "gather_and_a_broadcast_addend": program_of(
        _scaled,
        _scaled_formula,
        (*_BATCH, (1024, 2048), (4, 1024)),
        (P(None, "x"), P(None, "x"), P(None, "x"), P()),
        P(None, None, "x"),
    ),
    "scatter_rows_of_a_batch": program_of(
        gemm, jnp.matmul, _BATCH, (P(None, None, "x"), P("x")), P(None, "x")
    ),
    "scatter_rows_of_a_fused_batch": program_of(
        _scaled,
        _scaled_formula,
        (*_BATCH, (4, 1024, 2048), (4, 1024)),
        (P(None, None, "x"), P("x"), P(None, "x"), P(None, "x")),
        P(None, "x"),
    ),
}
