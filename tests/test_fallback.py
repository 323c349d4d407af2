"""When XLA computes a product instead of a kernel, and the modes that forbid it."""

import collections
import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest

from jax_tcgemm import FallbackError, dot_general, fuse, gated_gemm, gemm, ragged_dot
from jax_tcgemm.lowering import devices, fallback
from jax_tcgemm.partitioning import rules
from jax_tcgemm.tuning.entry import Entry

BF16 = jnp.bfloat16


def shape(*extents, dtype=BF16):
    return jax.ShapeDtypeStruct(extents, dtype)


def lower(function, *shapes):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture(autouse=True)
def _all_kernels(all_kernels):
    pass


def _of_integers(a, b, **options):
    return gemm(a.astype(jnp.int16), b.astype(jnp.int16), **options)


def _highest(a, b, **options):
    return gemm(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest", **options)


def _function_of_few_columns(a, b, **options):
    return gated_gemm(a, b[:, :8], b[:, 8:16], epilogue=lambda g, u: jnp.tanh(g) * u, **options)


def _gated(a, b, **options):
    return gated_gemm(a[:, :63], b[:63], b[:63], **options)


def _of_groups(a, b, **options):
    sizes = jnp.full((2,), 32, jnp.int32)
    return ragged_dot(a.astype(jnp.int16), jnp.stack([b, b]).astype(jnp.int16), sizes, **options)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (_of_integers, "no kernel algorithm for int16"),
        (_highest, "F32_F32_F32 without a GPU of compute capability 9.0"),
        (_function_of_few_columns, "the function: no kernel computes this: 64 x 8 results"),
        (_gated, "a has .* unaligned"),
        (_of_groups, "no ragged kernel for None"),
    ],
)
@pytest.mark.parametrize("by", ["config", "environment"])
def test_what_no_kernel_computes_is_an_error_where_asked(call, reason, by, monkeypatch):
    shapes = shape(64, 64), shape(64, 64)
    lower(call, *shapes)  # XLA computes it
    options = {"config": "kernel"} if by == "config" else {}
    if by == "environment":
        monkeypatch.setenv(fallback.SETTING, "1")
    with pytest.raises(FallbackError, match=reason):
        lower(lambda a, b: call(a, b, **options), *shapes)
    lower(lambda a, b: call(a, b, config="xla"), *shapes)  # the caller requests XLA


def test_a_kernel_takes_what_xla_computes_in_less_time(cuda_module, monkeypatch):
    a, b = shape(8, 4096), shape(4096, 4095)
    assert not cuda_module(gemm, a, b)[1]
    (call,) = cuda_module(lambda a, b: gemm(a, b, config="kernel"), a, b)[1]
    assert call["config"] == ""
    monkeypatch.setenv(fallback.SETTING, "1")
    assert len(cuda_module(lambda a, b: gemm(a, b), a, b)[1]) == 1


def test_a_measured_choice_of_xla_is_not_taken(cuda_module, monkeypatch):
    found = Entry("xla", 1e-6, 2e-6, 1e-6), "the tunings"
    monkeypatch.setattr(devices, "find_choice", lambda product: found)
    a = shape(512, 512)
    assert not cuda_module(gemm, a, a)[1]
    assert len(cuda_module(lambda a, b: gemm(a, b, config="kernel"), a, a)[1]) == 1
    function = functools.partial(gemm, epilogue=jnp.tanh)
    assert "compiled_gemm" not in lower(function, a, a)
    assert "compiled_gemm" in lower(functools.partial(function, config="kernel"), a, a)
    groups = shape(2, 512, 512), shape(2, dtype=jnp.int32)
    assert "ragged_dot_v1" not in lower(ragged_dot, a, *groups)
    assert "ragged_dot_v1" in lower(functools.partial(ragged_dot, config="kernel"), a, *groups)


@pytest.fixture
def asked(monkeypatch):
    """The tuning keys that are looked up; each has the measured choice of XLA."""
    keys = []

    def find_choice(product):
        keys.append(product.problem)
        return Entry("xla", 1e-6, 2e-6, 1e-6), "the tunings"

    monkeypatch.setattr(devices, "find_choice", find_choice)
    return keys


def operations(text):
    """Counts the operations of a module by name and result; those of control flow are left out."""
    found = re.findall(r"= stablehlo\.(\w+)\b.* (tensor<[\w-]+>)$", text, re.MULTILINE)
    return collections.Counter(x for x in found if x != ("constant", "tensor<i32>"))


def residual(a, b):
    return a @ b + b


def two_results(a, b):
    z = a @ b
    return z, jax.nn.gelu(z + b[0]), jnp.max(z.astype(jnp.float32), axis=1)


PROGRAMS = [
    residual,
    two_results,
    lambda a, b: jax.nn.silu(a @ b) * (a @ a),
    lambda a, b: jnp.exp((a @ b).astype(jnp.float16)) * jnp.float16(0.3),
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_xla_computes_a_region_as_the_program_does(asked, program, dtype):
    x = jax.ShapeDtypeStruct((512, 512), dtype)
    assert operations(lower(fuse(program), x, x)) == operations(lower(program, x, x))
    assert '"unfused"' in asked[0]


def test_xla_computes_a_mapped_region_as_the_program_does(asked):
    mapped, x = (lambda f: jax.vmap(f, (0, None))), (shape(4, 512, 512), shape(512, 512))
    fused, plain = (operations(lower(mapped(f), *x)) for f in (fuse(residual), residual))
    assert fused == plain
    assert '"unfused"' in asked[0]


def test_xla_computes_a_differentiated_region_as_the_program_does(asked):
    x = shape(512, 512)
    text = lower(lambda *x: jax.linearize(fuse(two_results), *x)[0], x, x)
    assert operations(text) == operations(lower(two_results, x, x))


def test_a_region_without_rounding_has_one_function(asked):
    def relu(a, b):
        return jax.nn.relu(jnp.matmul(a, b, preferred_element_type=jnp.float32))

    lower(fuse(relu), shape(512, 512), shape(512, 512))
    assert '"unfused"' not in asked[0]


def test_programs_that_xla_computes_differently_have_tunings_of_their_own(asked):
    def by_float32(a, b):
        return ((a @ b).astype(jnp.float32) + b).astype(jnp.bfloat16)

    for program in (residual, by_float32):
        lower(fuse(program), shape(512, 512), shape(512, 512))
    keys = [json.loads(key) for key in asked]
    assert keys[0]["epilogue"]["program"] == keys[1]["epilogue"]["program"]
    assert keys[0]["epilogue"]["unfused"] != keys[1]["epilogue"]["unfused"]


def test_xla_writes_the_accumulators_of_an_epilogue(asked):
    text = lower(functools.partial(gemm, epilogue=jnp.tanh), shape(512, 512), shape(512, 512))
    assert re.findall(r"dot_general .* -> tensor<512x512x(\w+)>", text) == ["f32"]


def test_other_platforms_have_no_kernels_to_ask_for(normal, monkeypatch):
    monkeypatch.setenv(fallback.SETTING, "1")
    a, b = normal(8, 16), normal(16, 8)
    assert jnp.allclose(gemm(a, b, config="kernel"), a @ b, atol=1e-5)
    assert jnp.allclose(dot_general(a, b, (((1,), (0,)), ((), ()))), a @ b, atol=1e-5)


def test_dot_general_gives_lax_what_has_no_kernel(monkeypatch):
    a = jnp.ones((8, 8), jnp.int32)
    monkeypatch.setenv(fallback.SETTING, "1")
    assert jnp.array_equal(dot_general(a, a, (((1,), (0,)), ((), ()))), a @ a)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.usefixtures("hopper")
def test_a_kernel_takes_small_products_of_planes(cuda_module, dtype):
    a = shape(64, 64, dtype=jnp.dtype(dtype))
    product = functools.partial(gemm, precision="highest")
    assert not cuda_module(product, a, a)[1]
    (call,) = cuda_module(functools.partial(product, config="kernel"), a, a)[1]
    assert call["algorithm"] == "F32_F32_F32"
    empty = shape(64, 0, dtype=jnp.dtype(dtype))
    with pytest.raises(FallbackError, match="nothing to multiply"):
        cuda_module(functools.partial(product, config="kernel"), empty, shape(0, 64, dtype=dtype))


def _loss(call):
    def loss(*operands):
        return jnp.sum(call(*operands).astype(jnp.float32) ** 2)

    return loss


def test_gradients_are_strict_where_they_are_products(monkeypatch):
    monkeypatch.setenv(fallback.SETTING, "1")
    a = shape(512, 512)
    lower(jax.grad(_loss(functools.partial(gemm, activation="gelu")), (0, 1)), a, a)
    lower(jax.grad(_loss(functools.partial(gemm, epilogue=jnp.tanh)), (0, 1)), a, a)
    bias, sizes = shape(2, 512, dtype=jnp.float32), shape(2, dtype=jnp.int32)

    def of_groups(x, w, b, sizes):
        return ragged_dot(x, w, sizes, bias=b)

    lower(jax.grad(_loss(of_groups), (0, 1, 2)), a, shape(2, 512, 512), bias, sizes)


def test_nothing_to_multiply_is_no_fallback(monkeypatch):
    monkeypatch.setenv(fallback.SETTING, "1")
    sizes = shape(2, dtype=jnp.int32)
    lower(ragged_dot, shape(0, 64), shape(2, 64, 64), sizes)
    lower(functools.partial(gemm, epilogue=jnp.tanh), shape(0, 64), shape(64, 64))


def test_programs_over_devices(monkeypatch):
    """The lowering of a call that XLA cannot divide is strict; divided parts are not."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
    rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    monkeypatch.setattr(rules, "divides", lambda platform: False)
    a = jax.ShapeDtypeStruct((512, 512), BF16, sharding=rows)
    lower(gemm, a, a)
    lower(functools.partial(gemm, config="xla"), a, a)
    with pytest.raises(FallbackError, match="to be divided among 2 devices"):
        lower(functools.partial(gemm, config="kernel"), a, a)
    monkeypatch.setenv(fallback.SETTING, "1")
    lower(functools.partial(gemm, config="xla"), a, a)
    with pytest.raises(FallbackError, match="to be divided among 2 devices"):
        lower(lambda a, b: gemm(a, b), a, a)


def test_measurements_are_not_strict(monkeypatch):
    monkeypatch.setenv(fallback.SETTING, "1")
    assert fallback.is_strict(None)
    with fallback.lenient():
        assert not fallback.is_strict(None)
        assert not fallback.is_strict("kernel")
    assert fallback.is_strict("kernel")
    assert not fallback.is_strict("xla")
