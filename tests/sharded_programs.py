"""Programs with sharded operands: ours and the same in jax.numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_functions import FUNCTION_PROGRAMS
from sharded_program import BF16, F32, Program, mesh_of, uneven

import jax_tcgemm as tc


def _fused(x, w, bias, c):
    return tc.gemm(x, w, c, bias=bias, alpha=0.5, beta=2.0, activation="gelu")


def _fused_formula(x, w, bias, c):
    return jax.nn.gelu(0.5 * jnp.matmul(x, w) + 2.0 * c + bias)


def _mlp(x, w1, b1, w2, b2):
    return tc.mlp(x, w1, b1, w2, b2, activation="silu", residual=x)


def _mlp_formula(x, w1, b1, w2, b2):
    return jax.nn.silu(x @ w1 + b1) @ w2 + b2 + x


def _gated(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


def _packed_like(x, w):
    gate, up = jnp.split(x @ w, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _attention(dot_general):
    def scores(q, k, v):
        dims = (((3,), (3,)), ((0, 2), (0, 2)))  # bthd, bshd -> bhts
        p = jax.nn.softmax(dot_general(q, k, dims).astype(F32)).astype(q.dtype)
        return dot_general(p, v, (((3,), (1,)), ((0, 1), (0, 2))))

    return scores


def _ragged_formula(activation, x, w, sizes, bias=None):
    """Multiplies each row by its group's matrix: all groups masked, partitionable by XLA."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(x.shape[0])[None, :]
    inside = ((ends - sizes)[:, None] <= rows) & (rows < ends[:, None])  # (g, m)
    mask = inside.astype(x.dtype)
    z = jnp.einsum("gmk,gkn->mn", mask[:, :, None] * x[None], w)
    if bias is not None:
        z = z + mask.T @ bias
    return z if activation is None else jnp.where(inside.any(0)[:, None], activation(z), 0)


def _ragged(x, w, sizes, bias):
    return tc.ragged_dot(x, w, sizes, bias=bias, activation="relu")


def _layers(layer):
    def stack(x, weights):
        @jax.checkpoint
        def step(x, w):
            return layer(x, w), None

        return lax.scan(step, x, weights)[0]

    return stack


_gemm, _matmul = tc.gemm, jnp.matmul
_W = ((64, 32), (32, 48))
_FUSED = ((64, 32), (32, 48), (48,), (64, 48))
_MLP = ((64, 32), (32, 96), (96,), (96, 32), (32,))
_GATED = ((64, 32), (32, 48), (32, 48))
_GATED_MLP = ((64, 32), (32, 48), (32, 48), (48, 32))
_QKV = ((4, 16, 8, 32), (4, 24, 8, 32), (4, 24, 8, 32))
_RAGGED = ((64, 32), (8, 32, 48), (8,), (8, 48))
_SIZES = {2: (5, 0, 11, 9, 20, 1, 2, 10)}


def _to_rows(function):
    """Pads the result to a divisible number of rows, and shards the rows."""

    def padded(x, w):
        d = function(x, w)
        d = jnp.pad(d, ((0, -len(d) % 4), (0, 0)))
        return lax.with_sharding_constraint(d, NamedSharding(mesh_of(), P("x")))

    return padded


def _transposed(function):
    return lambda x, w: function(x.T, w.T)


_OF_GROUPS = {"gradients": (0, 1, 3), "sizes": _SIZES}
_BOTH = (_ragged, functools.partial(_ragged_formula, jax.nn.relu))
_groups = functools.partial(Program, *_BOTH, **_OF_GROUPS)
_uneven_groups = functools.partial(uneven, *_BOTH, **_OF_GROUPS)


PROGRAMS = {
    "rows": Program(_gemm, _matmul, _W, (P("x"), P())),
    "rows_of_both_axes": Program(_gemm, _matmul, _W, (P(("x", "y")), P())),
    "columns": Program(_gemm, _matmul, _W, (P(), P(None, "x"))),
    "k": Program(_gemm, _matmul, _W, (P(None, "x"), P("x"))),
    "k_of_both_axes": Program(_gemm, _matmul, _W, (P(None, ("y", "x")), P(("y", "x")))),
    "k_bfloat16": Program(_gemm, _matmul, _W, (P(None, "x"), P("x")), dtype=BF16),
    "k_float16": Program(_gemm, _matmul, _W, (P(None, "x"), P("x")), dtype=jnp.float16),
    "k_of_one_operand": Program(_gemm, _matmul, _W, (P(None, "x"), P())),
    "rows_and_columns": Program(_gemm, _matmul, _W, (P("x"), P(None, "y"))),
    "rows_and_k": Program(_gemm, _matmul, _W, (P("x", "y"), P("y"))),
    "sequence": Program(_gemm, _matmul, _W, (P(None, "x"), P("x")), P("x")),
    "sequence_by_columns": Program(_gemm, _matmul, _W, (P(None, "x"), P("x")), P(None, "x")),
    "fsdp": Program(_gemm, _matmul, _W, (P("x"), P("x")), grads_as_operands=True),
    "fsdp_and_columns": Program(_gemm, _matmul, _W, (P("x"), P("x", "y")), grads_as_operands=True),
    "rows_and_columns_alike": Program(_gemm, _matmul, _W, (P("x"), P(None, "x"))),
    "replicated_result": Program(_gemm, _matmul, _W, (P("x"), P()), P()),
    "uneven_rows_and_columns": uneven(_gemm, _matmul, ((61, 32), (32, 43)), (P("x"), P(None, "y"))),
    "uneven_k": uneven(_gemm, _matmul, ((64, 30), (30, 48)), (P(None, "x"), P("x"))),
    "uneven_k_to_uneven_rows": uneven(
        _to_rows(tc.gemm),
        _to_rows(jnp.matmul),
        ((61, 30), (30, 48)),
        (P(None, "x"), P("x")),
    ),
    "uneven_fused_k": uneven(
        _fused,
        _fused_formula,
        ((61, 30), (30, 43), (43,), (61, 43)),
        (P(None, "x"), P("x"), P(), P()),
        gradients=(0, 1, 2, 3),
    ),
    "uneven_gated_k": uneven(
        tc.gated_gemm,
        _gated,
        ((61, 30), (30, 43), (30, 43)),
        (P(None, "x"), P("x"), P("x")),
        gradients=(0, 1, 2),
    ),
    "transposed": Program(
        functools.partial(tc.gemm, transpose_a=True, transpose_b=True),
        _transposed(jnp.matmul),
        ((32, 64), (48, 32)),
        (P("y", "x"), P(None, "y")),
    ),
    "fused_rows": Program(
        _fused, _fused_formula, _FUSED, (P("x"), P(), P(), P("x")), gradients=(0, 1, 2, 3)
    ),
    "fused_columns": Program(
        _fused, _fused_formula, _FUSED, (P(), P(None, "x"), P("x"), P(None, "x"))
    ),
    "fused_k": Program(
        _fused, _fused_formula, _FUSED, (P(None, "x"), P("x"), P(), P()), gradients=(0, 1, 2, 3)
    ),
    "fused_sequence": Program(
        _fused, _fused_formula, _FUSED, (P(None, "x"), P("x"), P(), P("x")), P("x")
    ),
    "activations_of_three_dimensions": Program(
        _gemm, _matmul, ((4, 16, 32), (32, 48)), (P("x", "y"), P())
    ),
    "three_dimensions_columns": Program(
        _gemm, _matmul, ((4, 16, 32), (32, 48)), (P("x"), P(None, "y"))
    ),
    "batch": Program(_gemm, _matmul, ((8, 16, 32), (8, 32, 24)), (P("x"), P("x"))),
    "batch_and_k": Program(
        _gemm, _matmul, ((8, 16, 32), (8, 32, 24)), (P("x", None, "y"), P("x", "y"))
    ),
    "vmap": Program(
        jax.vmap(tc.gemm, (0, None), spmd_axis_name="x"),
        jax.vmap(jnp.matmul, (0, None), spmd_axis_name="x"),
        ((8, 16, 32), (32, 24)),
        (P("x"), P(None, "y")),
    ),
    "megatron_mlp": Program(
        _mlp,
        _mlp_formula,
        _MLP,
        (P("x"), P(None, "y"), P("y"), P("y"), P()),
        gradients=(0, 1, 2, 3, 4),
        grads_as_operands=True,
    ),
    "megatron_mlp_of_one_axis": Program(
        _mlp, _mlp_formula, _MLP, (P(), P(None, "x"), P("x"), P("x"), P())
    ),
    "fsdp_mlp": Program(
        _mlp,
        _mlp_formula,
        _MLP,
        (P("x"), P("x"), P(), P("x"), P()),
        gradients=(0, 1, 2, 3, 4),
        grads_as_operands=True,
    ),
    "gated_rows": Program(tc.gated_gemm, _gated, _GATED, (P("x"), P(), P())),
    "gated_columns": Program(tc.gated_gemm, _gated, _GATED, (P("x"), P(None, "y"), P(None, "y"))),
    "gated_k": Program(tc.gated_gemm, _gated, _GATED, (P(None, "x"), P("x"), P("x"))),
    "packed_rows": Program(tc.gated_gemm, _packed_like, ((64, 32), (32, 96)), (P("x"), P())),
    "packed_fsdp": Program(
        tc.gated_gemm, _packed_like, ((64, 32), (32, 96)), (P("x"), P("x")), grads_as_operands=True
    ),
    "packed_columns": Program(
        tc.gated_gemm,
        _packed_like,
        ((64, 32), (32, 96)),
        (P("x"), P(None, "y")),
        gradients=(),
    ),
    "packed_columns_of_many_rows": Program(
        tc.gated_gemm,
        _packed_like,
        ((512, 32), (32, 96)),
        (P(), P(None, "x")),
        gradients=(),
    ),
    "megatron_gated_mlp": Program(
        tc.gated_mlp,
        lambda x, g, u, d: _gated(x, g, u) @ d,
        _GATED_MLP,
        (P("x"), P(None, "y"), P(None, "y"), P("y")),
        gradients=(0, 1, 2, 3),
        grads_as_operands=True,
    ),
    "data_parallel_gated_mlp": Program(
        tc.gated_mlp,
        lambda x, g, u, d: _gated(x, g, u) @ d,
        _GATED_MLP,
        (P("x"), P(), P(), P()),
        gradients=(1, 2, 3),
        grads_as_operands=True,
    ),
    "fsdp_gated_mlp": Program(
        tc.gated_mlp,
        lambda x, g, u, d: _gated(x, g, u) @ d,
        _GATED_MLP,
        (P("x"), P("x"), P("x"), P("x")),
        gradients=(1, 2, 3),
        grads_as_operands=True,
    ),
    "attention_heads": Program(
        _attention(tc.dot_general),
        _attention(lax.dot_general),
        _QKV,
        (P("x", None, "y"),) * 3,
        gradients=(0, 1, 2),
    ),
    "accumulated_gradient": Program(
        lambda x, g, c: tc.gemm(x, g, c, transpose_a=True, preferred_element_type=F32),
        lambda x, g, c: c + jnp.matmul(x.T, g, preferred_element_type=F32),
        ((64, 32), (64, 48), (32, 48)),
        (P("x"), P("x"), P()),
    ),
    "scan_of_layers": Program(
        _layers(lambda x, w: tc.gemm(x, w, x, activation="tanh")),
        _layers(lambda x, w: jnp.tanh(x @ w + x)),
        ((64, 32), (3, 32, 32)),
        (P("x"), P(None, "x")),
        grads_as_operands=True,
    ),
    "ragged_rows": _groups(
        _RAGGED,
        (P("x"), P(), P(), P()),
    ),
    "ragged_experts": _groups(
        _RAGGED,
        (P(), P("x"), P(), P("x")),
        grads_as_operands=True,
    ),
    "ragged_rows_and_experts": _groups(
        _RAGGED,
        (P("x"), P("y"), P(), P("y")),
        grads_as_operands=True,
    ),
    "uneven_ragged_rows": _uneven_groups(
        ((61, 32), (8, 32, 48), (8,), (8, 48)),
        (P("x"), P(), P(), P()),
    ),
    "uneven_ragged_experts": _uneven_groups(
        ((64, 32), (6, 32, 48), (6,), (6, 48)),
        (P(), P("x"), P(), P("x")),
        sizes={2: (5, 0, 11, 30, 1, 10)},
        grads_as_operands=True,
    ),
    "uneven_ragged_k": _uneven_groups(
        ((64, 30), (8, 30, 48), (8,), (8, 48)),
        (P(None, "x"), P(None, "x"), P(), P()),
    ),
    "gated_ragged_rows": Program(
        tc.gated_ragged_dot,
        lambda x, g, u, sizes: (
            _ragged_formula(jax.nn.silu, x, g, sizes) * _ragged_formula(None, x, u, sizes)
        ),
        ((64, 32), (8, 32, 48), (8, 32, 48), (8,)),
        (P("x"), P(), P(), P()),
        gradients=(0, 1, 2),
        sizes={3: _SIZES[2]},
    ),
    "ragged_columns": _groups(
        _RAGGED,
        (P("x"), P(None, None, "y"), P(), P(None, "y")),
    ),
    "ragged_k": _groups(
        _RAGGED,
        (P(None, "x"), P(None, "x"), P(), P()),
    ),
    **FUNCTION_PROGRAMS,
}

# Some programs of each primitive and each operand sharding. Use these for tests of the JAX version
# or of the process, not for tests of how the rules partition a program.
KINDS = (
    *("rows", "k", "k_bfloat16", "fsdp", "uneven_k", "fused_k", "fused_sequence"),
    *("uneven_fused_k", "batch_and_k", "vmap", "attention_heads", "accumulated_gradient"),
    *("megatron_mlp", "fsdp_mlp", "scan_of_layers", "gated_k", "packed_fsdp"),
    *("megatron_gated_mlp", "ragged_rows", "ragged_experts", "uneven_ragged_k"),
    *("gated_ragged_rows", "function_rows_and_columns", "function_k", "uneven_function_k"),
    *("dropout_k", "dropout_batch", "gated_function", "packed_function"),
)
