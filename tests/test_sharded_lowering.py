"""Lowering for CUDA, with or without a GPU: the calls of a partitioned program.

XLA would silently gather the operands of a kernel's own call on every device. So XLA partitions the
call that ``partitioning`` registers, and each device's program calls kernels.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import bf16
from fused_call import square_sum
from fusions import equations
from jax import lax
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tcgemm import Tunings, dot_general, fuse, gated_gemm, gated_mlp, gemm, mlp, ragged_dot
from jax_tcgemm.epilogue.part import Part
from jax_tcgemm.lowering import devices
from jax_tcgemm.partitioning import functions as division
from jax_tcgemm.partitioning import partitioner
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.entry import Entry

pytestmark = pytest.mark.usefixtures("all_kernels")

SIZES = jnp.array([100, 28])


def mesh_of(*shape: int) -> Mesh:
    devices = jax.devices("cpu")[: np.prod(shape, dtype=int)]
    axis_types = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types, devices=devices)


def calls(function, *args, divided: bool = False, **jit_options) -> int:
    """Counts calls of kernels or, with ``divided``, calls that XLA partitions."""
    traced = jax.jit(function, **jit_options).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    count = text.count(f"custom_call @{partitioner.TARGET}")
    return count if divided else text.count("custom_call @jax_tcgemm") - count


def activation_gradient(x, w):
    """Has a matrix large enough for the kernel of activation gradients."""
    wide = functools.partial(jnp.broadcast_to, shape=(2048, 2048))
    return jax.grad(
        square_sum(lambda x: gemm(wide(x[:1, :1]), wide(w[:1, :1]), activation="silu"))
    )(x)


def groups_of_8_bits(x, w, **options):
    x, w = (x.astype(jnp.float8_e4m3fn) for x in (x, jnp.stack([w.T, w.T])))
    return ragged_dot(
        x, w, SIZES, transpose_rhs=True, preferred_element_type=jnp.bfloat16, **options
    )


FUNCTIONS = {
    "gemm": (gemm, 1),
    "batch": (lambda x, w: jax.vmap(gemm, (None, 1), 1)(x, w.reshape(64, 2, 128)), 1),
    "column_sums": (lambda x, w: jax.grad(lambda b: gemm(x, w, bias=b).sum())(w[0]), 0),
    "gated_gemm": (lambda x, w: gated_gemm(x, w, w), 1),
    "function": (lambda x, w: gemm(x, w, epilogue=jax.nn.mish), 1),
    "ragged_dot": (lambda x, w: ragged_dot(x, jnp.stack([w, w]), SIZES), 1),
    "groups_of_8_bits": (lambda x, w: groups_of_8_bits(x, w), 1),
    "dot_general": (lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ()))), 1),
    "mlp": (lambda x, w: mlp(x, w, None, w.T), 2),
    "gradients": (jax.grad(square_sum(lambda x, w: gated_mlp(x, w, w, w.T)), (0, 1)), 8),
    "activation_gradient": (activation_gradient, 3),
    "ragged_gradients": (
        jax.grad(square_sum(lambda x, w: ragged_dot(x, jnp.stack([w, w]), SIZES)), (0, 1)),
        3,
    ),
}


@pytest.fixture
def args():
    return bf16(512, 64), bf16(64, 256)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sharded_operands_are_divided(name, args):
    function, count = FUNCTIONS[name]
    sharded = [jax.device_put(x, NamedSharding(mesh_of(4), P("x"))) for x in args]
    shardings = NamedSharding(mesh_of(4), P(None, "x")), NamedSharding(mesh_of(4), P())
    for options, operands in (({}, sharded), ({"in_shardings": shardings}, args)):
        assert calls(function, *operands, **options) == 0
        assert calls(function, *operands, divided=True, **options) >= count


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_device_has_kernels(name, args):
    function, count = FUNCTIONS[name]
    assert calls(function, *args) == count
    one = NamedSharding(mesh_of(1), P("x"))
    assert calls(function, *(jax.device_put(x, one) for x in args)) == count


def test_sharded_groups_with_a_dot_algorithm_fall_back(args):
    def function(x, w):
        algorithm = lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32)
        return ragged_dot(x, jnp.stack([w, w]), SIZES, precision=algorithm)

    sharded = [jax.device_put(x, NamedSharding(mesh_of(4), P("x"))) for x in args]
    assert calls(function, *sharded) == calls(function, *sharded, divided=True) == 0


def part(function, *operands, out=None, platform="cuda"):
    """Returns one device's program for a call with operands of these shapes and shardings."""
    args = [jax.device_put(x, NamedSharding(mesh_of(4), spec)) for x, spec in operands]
    traced = jax.jit(function).trace(*args)
    text = str(traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo"))
    (config,) = re.findall(r'backend_config = "((?:[^"\\]|\\.)*)"', text)
    result = jax.eval_shape(function, *args)
    shape, sharding = (
        lambda x: xla_client.Shape.array_shape(x.dtype, x.shape),
        lambda x: x.sharding._to_xla_hlo_sharding(x.ndim),
    )
    wanted = NamedSharding(mesh_of(4), out or P())._to_xla_hlo_sharding(result.ndim)
    (module, *_), *_ = partitioner.divide(
        [shape(x) for x in args],
        [sharding(x) for x in args],
        shape(result),
        wanted,
        config.replace("\\22", '"').encode(),
    )
    return deserialized(module)


def deserialized(module: bytes) -> str:
    with mlir.make_ir_context():
        return str(ir.Module.parse(module))


def test_each_device_calls_kernels_of_its_part(args):
    x, w = args
    text = part(lambda x, w: gemm(x, w), (x, P("x")), (w, P()), out=P("x"))
    assert text.count("custom_call @jax_tcgemm_gemm") == 1
    assert "tensor<128x64xbf16>, tensor<64x256xbf16>) -> tensor<128x256xbf16>" in text
    assert "all_reduce" not in text


def masked(x, w):
    rows, columns = (lax.broadcasted_iota(jnp.int32, (512, 256), axis) for axis in (0, 1))
    return jnp.tanh(x @ w) * (rows >= columns).astype(x.dtype)


@pytest.mark.parametrize(
    ("call", "product", "function"),
    [
        (fuse(lambda x, w: jnp.tanh(x @ w)), "bf16", "bf16"),
        (fuse(masked), "bf16", "bf16"),
        (FUNCTIONS["function"][0], "f32", "f32"),
    ],
)
def test_xla_computes_a_part_as_the_program_does(args, monkeypatch, call, product, function):
    found = Entry("xla", 1e-6, 2e-6, 1e-6), "the tunings"
    monkeypatch.setattr(devices, "find_choice", lambda product: found)
    x, w = args
    text = part(call, (x, P("x")), (w, P()), out=P("x"))
    assert re.findall(r"dot_general .* -> tensor<128x256x(\w+)>", text) == [product]
    assert set(re.findall(r"tanh .* : tensor<128x256x(\w+)>", text)) == {function}


def test_xla_rounds_the_product_of_a_part_with_joined_sums(args):
    def with_sums(x, w):
        z = jnp.tanh(x @ w)
        return z, jnp.sum(z.astype(jnp.float32), axis=0)

    x, w = args
    names = [eqn for eqn in equations(fuse(with_sums), x, w) if "compiled" in eqn.primitive.name]
    (spec,) = (eqn.params["spec"] for eqn in names)
    divided = division.rule(None, None).told(spec)
    assert divided.function.joined
    # Programs that 0.2.0 exported lack the field.
    assert division.DividedSpec(spec.product, divided.function).unfused is None
    given = Part(divided.function, {"m": 128, "n": 256}, {"m": 0, "n": 0})
    operands = spec.product.unflatten([x[:128], w])
    _, made = division._within_kernel(given, divided, operands, jnp.float32, [])
    assert [each.types[0].dtype for each in (made.function, made.unfused)] == ["f4", jnp.bfloat16]
    z = (x[:128] @ w).astype(jnp.bfloat16)
    for ours, wide in zip(made.unfused(z), made.function(z.astype(jnp.float32)), strict=True):
        np.testing.assert_array_equal(ours, wide)


def test_weight_gradients_are_told_of_collectives_beside_them(args):
    """This holds for several devices; other products keep their SMs from start to end."""
    x, w = args

    def weight_gradient(x, y):
        return dot_general(x, y, (((0,), (0,)), ((), ())))

    def told(text):
        return re.findall(r"beside_collectives = (\w+)", text)

    def lowered(function, *args):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    def on_each(function):
        specs = {"in_specs": P("x"), "out_specs": P("x")}
        return jax.shard_map(function, mesh=mesh_of(4), check_vma=False, **specs)

    y = bf16(512, 256)
    assert told(lowered(weight_gradient, x, y)) == ["false"]
    assert told(lowered(on_each(weight_gradient), x, y)) == ["true"]
    assert told(lowered(on_each(lambda x, y: gemm(x, y, transpose_b=True)), x, x)) == ["false"]
    assert told(part(weight_gradient, (x, P("x")), (y, P("x")))) == ["true"]
    assert told(part(lambda x, w: gemm(x, w), (x, P("x")), (w, P()), out=P("x"))) == ["false"]


def of_product(product, bias, rows):
    return (jnp.tanh(product * rows) + bias).astype(jnp.bfloat16)


def test_each_device_computes_a_function_within_its_kernel(args):
    x, w = args

    def program(x, w, *operands):
        return gemm(x, w, epilogue=of_product, epilogue_operands=operands)

    bias, rows = bf16(256), bf16(512, 1)
    operands = (x, P("x")), (w, P()), (bias, P()), (rows, P("x"))
    text = part(program, *operands, out=P("x"))
    assert text.count("custom_call @jax_tcgemm_compiled") == 1
    assert re.search(
        r"tensor<128x64xbf16>, tensor<64x256xbf16>, tensor<128x1xbf16>, tensor<256xbf16>\) ->"
        r" tensor<128x256xbf16>",
        text,
    )
    assert "all_reduce" not in text
    # If k is sharded, the function follows the sum.
    operands = (x, P(None, "x")), (w, P("x")), (bias, P()), (rows, P())
    text = part(program, *operands)
    assert "jax_tcgemm_compiled" not in text
    assert text.index("jax_tcgemm_gemm") < text.index("all_reduce") < text.index("tanh")


@pytest.mark.usefixtures("on_an_h200")
def test_each_device_takes_what_its_part_was_measured_to_want(args):
    x, w = args
    recorder = lookup.Recorder()
    with recorder:
        part(lambda x, w: gemm(x, w), (x, P("x")), (w, P()), out=P("x"))
    (product,) = recorder.products.values()
    assert [x.shape for x in product.types] == [(128, 64), (64, 256)]
    row = "sm90_bf16_64x64x64_s6_c1x1_cooperative"
    with Tunings({("NVIDIA H200", product.problem): Entry.measured(row, 1e-6, 2e-6, 3e-6)}):
        text = part(lambda x, w: gemm(x, w), (x, P("x")), (w, P()), out=P("x"))
    assert f'config = "{row}"' in text


def test_parts_of_k_are_added_up_in_the_type_of_the_result(args):
    """This is the sum across devices; float32 would double its bytes."""
    x, w = args

    def fused(x, w, bias):
        return gemm(x, w, bias=bias, activation="gelu")

    operands = (x, P(None, "x")), (w, P("x"))
    for function, others in (
        (lambda x, w: gemm(x, w), ()),
        (fused, [(bf16(256), P())]),
        (lambda x, w, up: gated_gemm(x, w, up), [(w, P("x"))]),
    ):
        text = part(function, *operands, *others)
        assert "custom_call @jax_tcgemm_gemm" in text
        sums = re.findall(r'"stablehlo.all_reduce".*?\}\) : \((tensor<[^>]*>)\)', text, re.DOTALL)
        assert sums
        assert set(sums) == {"tensor<512x256xbf16>"}


def test_float16_is_not_rounded_before_it_is_scaled(normal):
    """A product may exceed float16's range before its epilogue scales it down."""
    a, b = jnp.full((4, 4096), 8, jnp.float16), jnp.full((4096, 8), 8, jnp.float16)
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    scale = jnp.full(4, 1e-3)
    for options in ({"alpha": 1e-3}, {"row_scale": scale}, {"alpha": jnp.float32(1e-3)}):
        expected = gemm(a, b, **options)
        with jax.set_mesh(mesh):
            got = gemm(jax.device_put(a, NamedSharding(mesh, P("x"))), b, **options)
        assert np.isfinite(np.asarray(expected)).all()
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def shard_map(function, mesh, **options):
    options = {"mesh": mesh, "in_specs": (P("x"), P()), "out_specs": P("x")} | options
    return jax.shard_map(function, **options)


@pytest.mark.parametrize("name", ["gemm", "function", "gated_gemm", "ragged_dot", "mlp"])
def test_kernels_within_shard_map_over_all_axes(name, args):
    function, count = FUNCTIONS[name]
    assert calls(shard_map(function, mesh_of(4), check_vma=False), *args) == count
    specs = {"in_specs": (P(("x", "y")), P()), "out_specs": P(("x", "y"))}
    assert calls(shard_map(function, mesh_of(2, 2), check_vma=False, **specs), *args) == count
    # An axis of one device partitions nothing.
    partial = shard_map(function, mesh_of(4, 1), axis_names={"x"}, check_vma=False)
    assert calls(partial, *args) == count
    partial = shard_map(function, mesh_of(2, 2), axis_names={"x"}, check_vma=False)
    assert calls(partial, *args) == 0
    assert calls(partial, *args, divided=True) == count


def test_each_part_of_a_program_has_its_own(args):
    """The same product occurs outside and within ``shard_map``."""

    def both(x, w):
        return gemm(x, w), shard_map(gemm, mesh_of(4))(x, w), gemm(x, w)

    placed = [jax.device_put(x, NamedSharding(mesh_of(4), P())) for x in args]
    assert calls(both, *placed) == 1
    assert calls(both, *placed, divided=True) == 2


def test_pmap_has_kernels(args):
    x = jnp.stack([args[0]] * 4)
    mapped = jax.pmap(gemm, in_axes=(0, None), devices=jax.devices("cpu")[:4])
    assert calls(mapped, x, args[1]) == 1
