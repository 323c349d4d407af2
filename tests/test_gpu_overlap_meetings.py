"""Meetings of the hosts of overlapped products: orders, delays, threads, failures."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
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
from sharded_checks import compiled, put

from jax_tcgemm import _core, gemm

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_products")]


@pytest.fixture(params=[2, 4])
def mesh(request):
    return mesh_of(request.param)


def test_hosts_wait_for_their_numbers_in_the_first_run(mesh, normal):
    x, w = (
        put(mesh, normal(512, 256, dtype=BF16), "x"),
        put(mesh, normal(256, 1024), None, "x").astype(BF16),
    )
    program = compiled(mesh, gemm, x, w, out=P(None, "x"))
    before = _core.overlapped_number_reads()
    for _ in range(3):
        jax.block_until_ready(program(x, w))
    assert _core.overlapped_number_reads() - before == mesh.size


_CACHED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_tcgemm import gemm
from jax_tcgemm.partitioning import overlap

overlap._LONGEST = float("inf")
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
rng = np.random.default_rng(0)
x, w = rng.standard_normal((2048, 256)), rng.standard_normal((256, 8192))
programs = []
for order in (1, -1):
    devices = jax.devices()[:2][::order]
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=devices)
    args = [
        jax.device_put(jnp.asarray(value, jnp.bfloat16), NamedSharding(mesh, P(*spec)))
        for value, spec in ((x, ("x",)), (w, (None, "x")))
    ]
    out = NamedSharding(mesh, P(None, "x"))
    programs.append((jax.jit(gemm, out_shardings=out).lower(*args).compile(), args))
for program, args in programs * 2:
    assert "jax_tcgemm_overlapped_v2" in program.as_text()
    got = np.asarray(program(*args), np.float32)
    np.testing.assert_allclose(got, x @ w, atol=0.05 * np.abs(x @ w).max())
print("right")
"""


def test_one_cached_program_for_two_orders_of_devices(tmp_path):
    """The key of JAX's persistent cache does not cover the order of devices."""
    mesh_of(2)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CACHED, str(tmp_path)],
        env=outer_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == ["right"], done.stderr[-2000:]


def test_the_order_of_devices_belongs_to_the_program(normal):
    values = normal(512, 256, dtype=BF16), normal(256, 1024, dtype=BF16) / 16
    expected = jnp.matmul(*wide(*values))
    for order in (1, -1, 1):
        mesh = mesh_of(2, order)
        x, w = put(mesh, values[0], "x"), put(mesh, values[1], None, "x")
        program = compiled(mesh, gemm, x, w, out=P(None, "x"))
        assert calls(program) == 1
        close(program(x, w), expected)


def test_groups_of_a_mesh_of_two_axes(normal):
    devices = [device for device in jax.devices() if device.platform == "gpu"]
    if len(devices) < 4:
        pytest.skip("needs 4 GPUs")
    mesh = jax.make_mesh((2, 2), ("data", "x"), (AxisType.Auto,) * 2, devices=devices[:4])
    x = put(mesh, normal(1024, 256, dtype=BF16), ("data", "x"))
    # Weights that are larger than x: otherwise the devices gather them.
    w, v = normal(256, 4096, dtype=BF16) / 16, normal(4096, 256, dtype=BF16) / 64
    operands = x, put(mesh, w, None, "x"), put(mesh, v, "x")
    program = compiled(mesh, two_layers, *operands, out=P(("data", "x")))
    assert calls(program) == 2
    for _ in range(3):
        close(program(*operands), formula(*wide(*operands)))


@pytest.mark.parametrize("steps", [60, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_devices_that_come_late(mesh, normal, rng, steps):
    """Work of single devices delays their hosts and their streams between the calls."""
    operands = layers(mesh, normal)
    program = compiled(mesh, two_layers, *operands, out=P("x"))
    expected = np.asarray(program(*operands))
    delays = [jax.device_put(jnp.ones((2048, 2048), BF16), device) for device in mesh.devices.flat]
    busy = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: (x @ x) / 2048, x))
    kept = []
    for step in range(steps):
        late = int(rng.integers(len(delays)))
        delays[late] = busy(delays[late], int(rng.integers(4)))
        if rng.integers(4) == 0:
            time.sleep(float(rng.random()) * 1e-3)
        kept.append(program(*operands))
        if step % 20 == 19:
            for result in kept:
                np.testing.assert_array_equal(np.asarray(result), expected)
            kept.clear()


def test_two_programs_of_two_threads(mesh, normal):
    first, second = layers(mesh, normal), layers(mesh, normal, 1024, 128, 512)
    errors = []

    def work(operands):
        try:
            program = compiled(mesh, two_layers, *operands, out=P("x"))
            expected = np.asarray(program(*operands))
            for _ in range(30):
                results = [program(*operands) for _ in range(3)]
                for result in results:
                    np.testing.assert_array_equal(np.asarray(result), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


_MISSING = """
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
import jax_tcgemm
from jax_tcgemm import gemm
from jax_tcgemm.lowering.overlapped import Exchange, gathered_product
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
spec = GemmSpec(Operands((0, 1), (0, 1)), jnp.dtype(jnp.bfloat16), lax.Precision.DEFAULT)
spec = spec.replace(precision=(lax.Precision.DEFAULT,) * 2)


def program(missing):
    def part(x, w):
        number = lax.axis_index("x")

        def called(x, w):
            exchange = Exchange((0, 1), 2, 0, number)
            (d,) = gathered_product(Operands(x, w), spec, exchange)
            return d

        def skipped(x, w):
            return jnp.zeros((2 * x.shape[0], w.shape[1]), x.dtype)

        return lax.cond(number == missing, skipped, called, x, w)

    specs = {"in_specs": (P("x"), P(None, "x")), "out_specs": P(None, "x"), "check_vma": False}
    return jax.jit(jax.shard_map(part, mesh=mesh, **specs))


x, w = jnp.ones((512, 256), jnp.bfloat16), jnp.ones((256, 512), jnp.bfloat16)
print(float(program(-1)(x, w).astype(jnp.float32).max()))
try:
    jax.block_until_ready(program(1)(x, w))
except Exception as error:
    print("refused" if "did not meet" in str(error) else str(error)[:500])
print(float(program(-1)(x, w).astype(jnp.float32).min()))
"""


def test_a_device_that_never_comes():
    """The call fails after the time limit; the next ones work."""
    mesh_of(2)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _MISSING],
        env=outer_environment() | {"JAX_TCGEMM_OVERLAP_SECONDS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == ["256.0", "refused", "256.0"], done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("connections", ["1", "32"])
def test_few_hardware_queues(connections):
    """Streams may share a queue, in which one's wait holds back the other's work."""
    mesh_of(2)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _MISSING.split("try:")[0]],
        env=outer_environment() | {"CUDA_DEVICE_MAX_CONNECTIONS": connections},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == ["256.0"], done.stderr[-2000:]
