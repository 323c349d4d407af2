"""The extension accepts the custom calls that the package makes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from native_calls import INVALID_ARGUMENT, Handler, calls_of
from tuned_calls import H200

import jax_tcgemm
from jax_tcgemm import _core, _extension
from jax_tcgemm.kernels.names import MEASURED
from jax_tcgemm.lowering import ragged
from jax_tcgemm.lowering.gemm import cuda_gemm
from jax_tcgemm.transforms import tune
from jax_tcgemm.transforms.numbers import Numbers
from jax_tcgemm.transforms.race import Race

BF16, F32 = jnp.bfloat16, jnp.float32
M, K, N = 512, 256, 384
GEMM, COMPILED = _extension.GEMM_TARGET, _extension.COMPILED_TARGET
PASS, RAGGED = _extension.COMPILED_PASS_TARGET, _extension.RAGGED_DOT_TARGET
TRANSPOSE, PACKED = _extension.TRANSPOSE_TARGET, _extension.PACKED_TARGET


def of(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def product(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a product whose epilogue is the function, with further operands."""
    return lambda x, w, *others: jax_tcgemm.gemm(
        x, w, epilogue=function, epilogue_operands=others, **options
    )


def mixed(z, matrix, bias, column, scalar):
    return (jnp.sin(z) * matrix + bias * column - scalar).astype(BF16)


def reduced(z, bias):
    y = jnp.sin(z + bias)
    return y.astype(BF16), jnp.abs(y).max(), y.sum(0), y.sum(1)


def dropped(z):
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, z.shape)
    return jnp.where(kept, z, 0).astype(BF16)


def masked(z, mask, key):
    kept = mask & jax.random.bernoulli(key, 0.9, z.shape)
    return jnp.where(kept, z, 0).astype(BF16)


def loss(x, w, bias):
    return product(lambda z, b: (jnp.sin(z) * jnp.exp(b)).astype(BF16))(x, w, bias).sum()


def gated(x, gate, up):
    return jax_tcgemm.gated_gemm(x, gate, up, epilogue=lambda g, u: (jnp.sin(g) * u).astype(BF16))


def grouped(x, w, sizes, bias):
    epilogue = lambda z, b: (jnp.tanh(z) * b).astype(BF16)  # noqa: E731
    return jax_tcgemm.ragged_dot(x, w, sizes, epilogue=epilogue, epilogue_operands=(bias,))


def packed(*shape: int, qtype: str = "int4", groups: int = 2) -> Any:
    """Returns the type of a packed weight ``(*batch, k, n)`` with this many groups along k."""
    *batch, _, n = shape
    q = jax_tcgemm.Quantized(of(*shape, dtype=qtype), of(*batch, groups, n))
    return jax.eval_shape(jax_tcgemm.pack, q)


SIZES = of(4, dtype=jnp.int32)
BESIDE = (of(M, N), of(N), of(M, 1, dtype=F32), of(dtype=F32))
PROGRAMS: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {
    "plain": (GEMM, jax_tcgemm.gemm, (of(M, K), of(K, N))),
    "odd": (GEMM, jax_tcgemm.gemm, (of(331, 77), of(77, 1031))),
    "float32": (GEMM, jax_tcgemm.gemm, (of(M, K, dtype=F32), of(K, N, dtype=F32))),
    "complex": (
        *(GEMM, jax_tcgemm.gemm),
        (of(1000, 520, dtype="complex64"), of(520, 1100, dtype="complex64")),
    ),
    "gated": (GEMM, jax_tcgemm.gated_gemm, (of(M, K), of(K, N), of(K, N))),
    "ragged": (RAGGED, jax_tcgemm.ragged_dot, (of(M, K), of(4, K, N), SIZES)),
    "operands": (COMPILED, product(mixed), (of(M, K), of(K, N), *BESIDE)),
    "odd operands": (
        *(COMPILED, product(mixed)),
        (of(333, K), of(K, 1032), of(333, 1032), of(1032), of(333, 1, dtype=F32), of(dtype=F32)),
    ),
    "batched": (
        COMPILED,
        jax.vmap(product(mixed)),
        tuple(of(3, *x.shape, dtype=x.dtype) for x in (of(M, K), of(K, N), *BESIDE)),
    ),
    "transposed": (
        *(COMPILED, product(mixed, transpose_a=True, transpose_b=True)),
        (of(K, M), of(N, K), *BESIDE),
    ),
    "reductions": (COMPILED, product(reduced), (of(M, K), of(K, N), of(N))),
    "random numbers": (COMPILED, product(dropped), (of(M, K), of(K, N))),
    "truths and a key": (
        *(COMPILED, lambda x, w, mask, seed: product(masked)(x, w, mask, jax.random.key(seed))),
        (of(M, K), of(K, N), of(M, N, dtype=jnp.bool_), of(dtype=jnp.uint32)),
    ),
    "two weights": (COMPILED, gated, (of(M, K), of(K, N), of(K, N))),
    "groups": (COMPILED, grouped, (of(M, K), of(4, K, N), SIZES, of(N))),
    "a gradient": (PASS, jax.grad(loss, argnums=(0, 1, 2)), (of(M, K), of(K, N), of(N))),
    "8 bits": (
        *(COMPILED, functools.partial(jax_tcgemm.gemm, preferred_element_type=F32)),
        (of(M, K, dtype=jnp.int8), of(K, N, dtype=jnp.int8)),
    ),
    "8 bits, transposed": (
        TRANSPOSE,
        jax_tcgemm.gemm,
        (of(M, K, dtype=jnp.float8_e4m3fn), of(K, N, dtype=jnp.float8_e4m3fn)),
    ),
    "packed": (PACKED, jax_tcgemm.gemm, (of(16, K), packed(K, N))),
    "packed, batched": (
        *(PACKED, jax.vmap(jax_tcgemm.gemm)),
        (of(3, 64, K), packed(3, K, 70, qtype="int8")),
    ),
    "packed, with a function": (
        *(_extension.PACKED_FUNCTION_TARGET, product(lambda z, bias: jnp.sin(z) + bias)),
        (of(33, K), packed(K, N, qtype="float8_e4m3fn"), of(N)),
    ),
    "packed, groups of rows": (
        *(_extension.PACKED_RAGGED_TARGET, jax_tcgemm.ragged_dot),
        (of(64, K), packed(4, K, N), SIZES),
    ),
    "two packed weights": (
        *(_extension.PACKED_FUNCTION_TARGET, jax_tcgemm.gated_gemm),
        (of(1, K), packed(K, N), packed(K, N)),
    ),
    "packed by the program": (
        *(_extension.PACK_TARGET, jax_tcgemm.gemm),
        (of(16, 4096), jax_tcgemm.Quantized(of(4096, 4096, dtype="int4"), of(32, 4096))),
    ),
    "scales by blocks": (
        COMPILED,
        lambda x, w, a, b: jax_tcgemm.gemm(x, w, a_scale=a, b_scale=b, preferred_element_type=BF16),
        (
            *(of(M, K, dtype=jnp.float8_e4m3fn), of(K, N, dtype=jnp.float8_e4m3fn)),
            *(of(M, K // 128, dtype=F32), of(K // 128, N // 128, dtype=F32)),
        ),
    ),
}


def lowered(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")


@pytest.mark.usefixtures("no_gpu", "never_apart")
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_of_the_package_are_accepted(name):
    target, function, arguments = PROGRAMS[name]
    calls = calls_of(lowered(function, arguments))
    assert target in [each[0] for each in calls]
    for called, attributes, operands, results in calls:
        code, message = Handler(called)(attributes, operands, results)
        assert code != INVALID_ARGUMENT, message


def skinny(x, w):
    return jax_tcgemm.gemm(x, w, bias=w[0], activation="gelu")


@pytest.mark.usefixtures("all_kernels", "on_an_h200", "never_apart")
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (jax_tcgemm.gemm, (of(M, K), of(K, N))),
        (jax_tcgemm.gemm, (of(16, 4096), of(4096, 1024))),
        (jax_tcgemm.gemm, (of(1031, 777), of(777, 1031))),
        (jax_tcgemm.gemm, (of(4, M, K, dtype=F32), of(4, K, N, dtype=F32))),
        (skinny, (of(8, 2048), of(2048, 1024))),
        (jax_tcgemm.gated_gemm, (of(M, K), of(K, N), of(K, N))),
        (jax_tcgemm.ragged_dot, (of(M, K), of(4, K, N), SIZES)),
    ],
)
def test_one_program_is_that_of_many_rows(monkeypatch, function, arguments):
    """Calls with a named row equal the shared call, except for the name and unused workspace."""
    monkeypatch.setattr(_core, "device_properties", lambda ordinal: H200)
    (product,) = tune.find_products(function, *arguments)
    race = Race(product, Numbers(), threading.Event())

    def call(config):
        spec = product.spec.with_config(config)
        compute = ragged.cuda_ragged if spec.is_grouped else cuda_gemm
        (made,) = calls_of(lowered(lambda *x: compute(*x, spec=spec), product.types))
        return made

    target, attributes, operands, results = call(MEASURED)
    assert attributes.pop("config") == MEASURED
    rows = [row for row in race.rows() if race._shares_program(row)]
    assert rows
    for row in rows:
        own_target, own, own_operands, own_results = call(row)
        assert own.pop("config") == row
        workspace = results[-1][1] if attributes.pop("has_workspace", False) else [0]
        own_workspace = own_results.pop()[1] if own.pop("has_workspace", False) else [0]
        assert own_workspace[0] <= workspace[0]
        attributes["has_workspace"] = workspace != [0]
        assert (own_target, own_operands) == (target, operands)
        assert own_results == results[: len(own_results)]
        assert own == {name: each for name, each in attributes.items() if name != "has_workspace"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_build_without_kernels_calls_none(name, monkeypatch):
    monkeypatch.setattr(_extension, "KERNEL_NAMES", frozenset())
    monkeypatch.setattr(_extension, "BUILT_TARGETS", frozenset())
    _, function, arguments = PROGRAMS[name]
    assert not calls_of(lowered(lambda *x: function(*x), arguments))
