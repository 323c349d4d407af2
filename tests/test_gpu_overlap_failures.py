"""Overlapped products without memory, links or the usual allocator, and in CUDA graphs."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import jax
import jax.numpy as jnp
import native_calls
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from mps import outer_environment
from overlapped_products import (
    BF16,
    calls,
    close,
    formula,
    layers,
    mesh_of,
    two_layers,
    wide,
)
from sharded_checks import compiled

from jax_tcgemm import _extension
from jax_tcgemm.lowering.overlapped import Exchange, gathered_product
from jax_tcgemm.problem.log import print_once
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_products")]


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        (_extension.NO_LINK, "the devices cannot reach each other's memory"),
        (_extension.SLOW_LINK, "the devices are not linked by NVLink"),
    ],
)
def test_devices_without_a_fast_link_leave_transfers_to_xla(
    link, reason, normal, monkeypatch, capfd
):
    mesh = mesh_of(2)
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    monkeypatch.setattr(_extension, "link_of", lambda _: link)
    print_once.cache_clear()
    operands = layers(mesh, normal)
    program = compiled(mesh, two_layers, *operands, out=P("x"))
    assert calls(program) == 0
    assert f"all-gather of a not overlapped: {reason}" in capfd.readouterr().err
    close(program(*operands), formula(*wide(*operands)))


_LAYERS = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_tcgemm import gemm, mlp
from jax_tcgemm.partitioning import overlap

overlap.FEWEST_ROWS, overlap.FEWEST_ROWS_OF_A_PART, overlap._LONGEST = 256, 128, float("inf")
mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
rng = np.random.default_rng(0)


def put(rows, columns, *spec):
    value = rng.standard_normal((rows, columns)) * rows**-0.5
    return jax.device_put(jnp.asarray(value, jnp.bfloat16), NamedSharding(mesh, P(*spec)))


x, w, v = put(512, 256, "x"), put(256, 1024, None, "x"), put(1024, 256, "x")


def checked(out):
    place = NamedSharding(mesh, out)
    y = jax.jit(lambda x, w, v: mlp(x, w, None, v), out_shardings=place).lower(x, w, v).compile()
    assert y.as_text().count('custom_call_target="jax_tcgemm_overlapped_v2"') == 2
    a, b, c = (np.asarray(each, np.float32) for each in (x, w, v))
    expected = np.asarray(jax.nn.gelu(a @ b)) @ c
    for _ in range(5):
        got = np.asarray(y(x, w, v), np.float32)
        np.testing.assert_allclose(got, expected, atol=0.02 * np.abs(expected).max())
"""

_RIGHT = (
    _LAYERS
    + """
checked(P("x"))
checked(P())
print("right")
"""
)

_NO_MEMORY = (
    _LAYERS
    + """
from jax_tcgemm import _core
_core.limit_overlap_buffers(1 << 20)
try:
    checked(P("x"))
except Exception as error:
    text = str(error)
    known = "XLA_PYTHON_CLIENT_MEM_FRACTION" in text and "JAX_TCGEMM_OVERLAP=off" in text
    print("refused" if known else text[:1000])
_core.limit_overlap_buffers(1 << 40)
checked(P("x"))
print("right")
"""
)


def _said(program, **environment):
    mesh_of(2)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=outer_environment() | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout.strip() or done.stderr[-3000:]


def test_without_memory_for_the_buffers():
    """The call fails on all devices at once; the next ones work."""
    assert _said(_NO_MEMORY).split() == ["refused", "right"]


@pytest.mark.parametrize("allocator", ["platform", "cuda_async"])
def test_other_allocators(allocator):
    """Peers cannot write into memory of a pool, so they write into the call's own buffers."""
    assert _said(_RIGHT, XLA_PYTHON_CLIENT_ALLOCATOR=allocator) == "right"


def test_xla_keeps_the_calls_out_of_its_cuda_graphs():
    kinds = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,COLLECTIVES"
    flags = f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
    assert _said(_RIGHT, XLA_FLAGS=flags) == "right"


def test_a_captured_stream_is_refused():
    mesh = mesh_of(2)
    spec = GemmSpec(Operands((0, 1), (0, 1)), jnp.dtype(BF16), (lax.Precision.DEFAULT,) * 2)

    def part(x, w):
        exchange = Exchange((0, 1), 2, 0, lax.axis_index("x"))
        return gathered_product(Operands(x, w), spec, exchange)[0]

    specs = {"in_specs": (P("x"), P(None, "x")), "out_specs": P(None, "x"), "check_vma": False}
    operands = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((512, 256), (256, 512)))
    lowered = jax.jit(jax.shard_map(part, mesh=mesh, **specs)).lower(*operands)
    (call,) = [
        each
        for each in native_calls.calls_of(lowered.compiler_ir("stablehlo"))
        if each[0] == _extension.OVERLAPPED_TARGET
    ]
    cuda = ctypes.CDLL("libcuda.so.1")
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    try:
        assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
        assert cuda.cuStreamBeginCapture_v2(stream, 2) == 0
        _, message = native_calls.Handler(call[0], stream.value)(*call[1:])
    finally:
        graph = ctypes.c_void_p()
        cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    assert "cannot be captured into a CUDA graph; set JAX_TCGEMM_OVERLAP=off" in message


def test_results_are_the_same_in_each_run(normal):
    mesh = mesh_of(2)
    operands = layers(mesh, normal)
    program = compiled(mesh, two_layers, *operands, out=P())
    first = np.asarray(program(*operands))
    for _ in range(20):
        assert np.array_equal(np.asarray(program(*operands)), first)
