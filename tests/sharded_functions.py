"""Sharded programs whose epilogues are user functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from sharded_program import F32, Program, uneven

import jax_tcgemm as tc


def _of_product(product, bias, rows, addend):
    counted = lax.broadcasted_iota(F32, product.shape, product.ndim - 2) / 64
    return jax.nn.silu(product * rows + bias) * counted + addend


def _function(x, w, *operands):
    return tc.gemm(x, w, epilogue=_of_product, epilogue_operands=operands)


def _function_formula(x, w, *operands):
    return _of_product(jnp.matmul(x, w), *operands)


def _of_both(gate, up, bias):
    return jax.nn.gelu(gate + bias) * jnp.clip(up, -1, 1)


def _gated_function(x, gate, up, bias):
    return tc.gated_gemm(x, gate, up, epilogue=_of_both, epilogue_operands=(bias,))


def _packed_function(x, w, bias):
    return tc.gated_gemm(x, w, epilogue=_of_both, epilogue_operands=(bias,))


def _packed_function_formula(x, w, bias):
    return _of_both(*jnp.split(x @ w, 2, axis=-1), bias)


def _dropout(product, bias, addend):
    kept = jax.random.bernoulli(jax.random.key(7), 0.75, product.shape)
    return jnp.where(kept, jax.nn.gelu(product + bias) / 0.75, 0) + addend


def _dropout_function(x, w, *operands):
    return tc.gemm(x, w, epilogue=_dropout, epilogue_operands=operands)


def _dropout_formula(x, w, *operands):
    return _dropout(jnp.matmul(x, w), *operands)


_DROPOUT = ((64, 32), (32, 48), (48,), (64, 48))
_FUNCTION = ((64, 32), (32, 48), (48,), (64, 1), (64, 48))
_GATED = ((64, 32), (32, 48), (32, 48))

FUNCTION_PROGRAMS = {
    "function_rows": Program(
        _function,
        _function_formula,
        _FUNCTION,
        (P("x"), P(), P(), P("x"), P("x")),
        gradients=(0, 1, 2, 3, 4),
    ),
    "function_columns": Program(
        _function, _function_formula, _FUNCTION, (P(), P(None, "x"), P("x"), P(), P(None, "x"))
    ),
    "function_rows_and_columns": Program(
        _function, _function_formula, _FUNCTION, (P("x"), P(None, "y"), P("y"), P("x"), P("x", "y"))
    ),
    "function_k": Program(
        _function, _function_formula, _FUNCTION, (P(None, "x"), P("x"), P(), P(), P())
    ),
    "function_sequence": Program(
        _function, _function_formula, _FUNCTION, (P(None, "x"), P("x"), P(), P("x"), P("x")), P("x")
    ),
    "function_fsdp": Program(
        _function,
        _function_formula,
        _FUNCTION,
        (P("x"), P("x"), P(), P("x"), P("x")),
        gradients=(0, 1, 2, 3, 4),
        grads_as_operands=True,
    ),
    "uneven_function": uneven(
        _function,
        _function_formula,
        ((61, 32), (32, 43), (43,), (61, 1), (61, 43)),
        (P("x"), P(None, "y"), P(), P(), P("x", "y")),
    ),
    "uneven_function_k": uneven(
        _function,
        _function_formula,
        ((61, 30), (30, 43), (43,), (61, 1), (61, 43)),
        (P(None, "x"), P("x"), P(), P(), P()),
    ),
    "dropout_rows_and_columns": Program(
        _dropout_function,
        _dropout_formula,
        _DROPOUT,
        (P("x"), P(None, "y"), P("y"), P("x", "y")),
        gradients=(0, 1, 2, 3),
    ),
    "dropout_k": Program(
        _dropout_function, _dropout_formula, _DROPOUT, (P(None, "x"), P("x"), P(), P())
    ),
    "uneven_dropout": uneven(
        _dropout_function,
        _dropout_formula,
        ((61, 32), (32, 43), (43,), (61, 43)),
        (P("x"), P(None, "y"), P(), P("x", "y")),
    ),
    "dropout_of_sequences": Program(
        _dropout_function,
        _dropout_formula,
        ((8, 16, 32), (32, 48), (48,), (8, 16, 48)),
        (P("x"), P(None, "y"), P("y"), P("x", None, "y")),
        gradients=(0, 1, 2, 3),
    ),
    "dropout_batch": Program(
        _dropout_function,
        _dropout_formula,
        ((8, 16, 32), (8, 32, 24), (24,), (16, 24)),
        (P("x"), P("x", None, "y"), P("y"), P(None, "y")),
    ),
    "function_batch": Program(
        _function,
        _function_formula,
        ((8, 16, 32), (8, 32, 24), (24,), (8, 1, 1), (16, 24)),
        (P("x"), P("x"), P(), P("x"), P()),
    ),
    "gated_function": Program(
        _gated_function,
        lambda x, gate, up, bias: _of_both(x @ gate, x @ up, bias),
        (*_GATED, (48,)),
        (P("x"), P(None, "y"), P(None, "y"), P("y")),
        gradients=(0, 1, 2, 3),
    ),
    "packed_function": Program(
        _packed_function,
        _packed_function_formula,
        ((64, 32), (32, 96), (48,)),
        (P("x"), P(None, "y"), P("y")),
        gradients=(),
    ),
}
