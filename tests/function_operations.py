"""Further operations of `test_transformations.py`: functions as epilogues, weights in 4 bits."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from operations import (
    COLUMNS,
    F32,
    FEW,
    ROWS,
    Operation,
    array,
    product_of_groups,
    quantized,
    sizes,
    variant,
)

import jax_tcgemm as tc
from jax_tcgemm.api.fp8 import fp8_dot
from jax_tcgemm.api.quantization import quantize
from jax_tcgemm.api.scaled_dot import quantized_dot_general
from jax_tcgemm.lowering import unpacked

BF16 = jnp.bfloat16

# Functions as epilogues


def _of_one(z, gain, bias, residual):
    return jnp.tanh(z * gain + bias) + residual, 2 * z


def _of_two(gate, up, bias):
    return jax.nn.gelu(gate + bias) * jnp.sin(up)


def _sine(z, bias):
    return 2 * jnp.sin(z) + bias


def _dropout(z, bias):
    kept = jax.random.bits(jax.random.key(0), z.shape, "uint32") < np.uint32(2**31)
    return jnp.where(kept, jax.nn.silu(z + bias), 0)


def _gemm(function):
    return lambda a, b, *x: tc.gemm(a, b, epilogue=function, epilogue_operands=x)


def _gemm_formula(function):
    return lambda a, b, *x: function(a @ b, *x)


def _gated(x, gate, up, *operands):
    return tc.gated_gemm(x, gate, up, epilogue=_of_two, epilogue_operands=operands)


def _gated_in_one(x, gate, up, *operands):
    both = jnp.concatenate([gate, up], -1)
    return tc.gated_gemm(x, both, epilogue=_of_two, epilogue_operands=operands)


def _gated_formula(x, gate, up, bias):
    return _of_two(x @ gate, x @ up, bias)


def _mlp(function):
    def run(x, w1, bias, w2, b2, residual):
        options = {"epilogue": function, "epilogue_operands": (bias,)}
        return tc.mlp(x, w1, None, w2, b2, residual=residual, **options)

    return run


def _mlp_formula(function):
    return lambda x, w1, bias, w2, b2, residual: function(x @ w1, bias) @ w2 + b2 + residual


def _gated_mlp(x, gate, up, bias, down):
    return tc.gated_mlp(x, gate, up, down, epilogue=_of_two, epilogue_operands=(bias,))


def _gated_mlp_formula(x, gate, up, bias, down):
    return _of_two(x @ gate, x @ up, bias) @ down


def _grouped(x, w, rows, sizes):
    options = {"epilogue": lambda z, rows: jnp.tanh(z) * rows, "epilogue_operands": (rows,)}
    return tc.ragged_dot(x, w, sizes, **options)


def _grouped_formula(x, w, rows, sizes):
    return jnp.tanh(product_of_groups(x, w, sizes)) * rows


_X = array(4, 6, spec=ROWS)
_PAIR = (_X, array(6, 5), array(6, 5), array(5))
_LAYERS = (_X, array(6, 8), array(8), array(8, 3), array(3), array(4, 3, spec=ROWS))
_EXPERTS = array(3, 4, 8, spec=P(None, None, "x"))

FUNCTIONS = {
    "function": Operation(
        _gemm(_of_one),
        _gemm_formula(_of_one),
        (_X, array(6, 5), array(), array(5), array(4, 5, spec=ROWS)),
    ),
    "function, dropout": variant(
        _gemm(_dropout), _gemm_formula(_dropout), (_X, array(6, 5), array(5)), None
    ),
    "function, gated": Operation(_gated, _gated_formula, _PAIR),
    "function, one weight": variant(_gated_in_one, _gated_formula, _PAIR),
    "function, mlp": Operation(_mlp(_sine), _mlp_formula(_sine), _LAYERS),
    "function, mlp with dropout": variant(_mlp(_dropout), _mlp_formula(_dropout), _LAYERS, None),
    "function, gated mlp": variant(
        _gated_mlp,
        _gated_mlp_formula,
        (_X, array(6, 8), array(6, 8), array(8), array(8, 3)),
    ),
    "function, groups": variant(
        _grouped, _grouped_formula, (array(6, 4), _EXPERTS, array(6, 1), sizes(3, 6)), COLUMNS
    ),
}

# Weights in 4 and 8 bits


def _packed(x, w, bias):
    return tc.gemm(x, w, bias=bias, activation="tanh", preferred_element_type=F32)


def _packed_formula(x, w, bias):
    return jnp.tanh(x @ w + bias)


def _packed_by_the_program(x, w, bias):
    with mock.patch.object(unpacked, "LEAST_VALUES", 1):
        return _packed(x, w, bias)


def _packed_pair(x, gate, up, bias):
    options = {"epilogue": _of_two, "epilogue_operands": (bias,)}
    return tc.gated_gemm(x, gate, up, preferred_element_type=F32, **options)


def _packed_layers(x, up, b1, down):
    return tc.mlp(x, up, b1, down, None, preferred_element_type=F32)


def _packed_layers_formula(x, up, b1, down):
    return jax.nn.gelu(x @ up + b1) @ down


def _packed_groups(x, w, sizes):
    return tc.ragged_dot(x, w, sizes, preferred_element_type=F32)


def _beside(x, q):
    return quantized_dot_general(x, q, (((1,), (0,)), ((), ())))


def _fp8(x, w):
    return fp8_dot(x, w, power_of_two=True)


def _in_8_bits(x, dtype):
    wide = quantize(x.astype(F32), dtype, power_of_two=True).dequantize(F32)
    return wide.astype(x.dtype)


@jax.custom_vjp
def _fp8_formula(x, w):
    return _in_8_bits(x, jnp.float8_e4m3fn) @ _in_8_bits(w, jnp.float8_e4m3fn)


def _fp8_backward(kept, dy):
    x, w = (_in_8_bits(each, jnp.float8_e4m3fn) for each in kept)
    dy = _in_8_bits(dy, jnp.float8_e5m2)
    return dy @ w.T, x.T @ dy


_fp8_formula.defvjp(lambda x, w: (_fp8_formula(x, w), (x, w)), _fp8_backward)

_OWN_EXTENTS = {"export, symbolic": (ValueError, "must agree in k")}  # those of packed weights
_ROWS_OF_64 = array(4, 64, spec=ROWS, dtype=BF16)

FUNCTIONS |= {
    "packed": Operation(
        _packed,
        _packed_formula,
        (
            array(4, 64, dtype=BF16),
            quantized(64, 128, spec=ROWS),  # the columns of packed weights come first
            array(128, spec=ROWS),
        ),
        COLUMNS,
        dtype=BF16,
        errors=_OWN_EXTENTS,
    ),
    "packed, pair": Operation(
        _packed_pair,
        _gated_formula,
        (_ROWS_OF_64, quantized(64, 64), quantized(64, 64), array(64)),
        dtype=BF16,
    ),
    "packed, mlp": variant(
        _packed_layers,
        _packed_layers_formula,
        (
            array(4, 2, 64, spec=ROWS, dtype=BF16),
            *(quantized(64, 64), array(64), quantized(64, 64)),
        ),
        dtype=BF16,
    ),
    "packed, groups": Operation(
        _packed_groups,
        product_of_groups,
        (array(6, 64, dtype=BF16), quantized(3, 64, 128, spec=COLUMNS), sizes(3, 6)),
        COLUMNS,
        dtype=BF16,
        errors=_OWN_EXTENTS,
    ),
    "unpacked": variant(
        _packed,
        _packed_formula,
        (_ROWS_OF_64, quantized(64, 64, is_packed=False), array(64)),
        dtype=BF16,
    ),
    # Other extents than those of "unpacked", whose programs are traced without the change.
    "packed by the program": Operation(
        _packed_by_the_program,
        _packed_formula,
        (_ROWS_OF_64, quantized(64, 96, is_packed=False), array(96)),
        dtype=BF16,
    ),
    "quantized_dot_general": variant(
        _beside,
        jnp.matmul,
        (array(4, 64, spec=ROWS), quantized(64, 16, is_packed=False)),
    ),
    "fp8_dot": Operation(
        _fp8,
        _fp8_formula,
        (array(4, 8), array(8, 6)),
        None,  # each device scales its own rows
        errors={
            "forward": (TypeError, "forward-mode"),
            "second": (TypeError, "differentiated once|forward-mode"),
            "jacobians": (TypeError, "differentiated once|forward-mode"),
        },
        # No loop: a carry that is rounded otherwise may round to another number in 8 bits.
        only=(*FEW, "linearize", "vmap of gradient", "remat", "export"),
    ),
}
