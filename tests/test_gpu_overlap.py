"""Products whose rows travel beside them, on two and four GPUs of one process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mps import outer_environment

from jax_tcgemm import _core, dot_general, gated_gemm, gemm, mlp
from jax_tcgemm._extension import OVERLAPPED_TARGET
from jax_tcgemm.partitioning import overlap
from jax_tcgemm.tools.collectives import collectives

pytestmark = pytest.mark.gpu

BF16 = jnp.bfloat16


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    """Small products do not pay, but show whether the results are right."""
    monkeypatch.setattr(overlap, "FEWEST_ROWS", 256)
    monkeypatch.setattr(overlap, "FEWEST_ROWS_OF_A_PART", 128)
    monkeypatch.setattr(overlap, "_LONGEST", float("inf"))


@pytest.fixture(params=[2, 4])
def mesh(request):
    return mesh_of(request.param)


def mesh_of(count, order=1):
    devices = [device for device in jax.devices() if device.platform == "gpu"]
    if len(devices) < count:
        pytest.skip(f"needs {count} GPUs")
    return jax.make_mesh((count,), ("x",), (AxisType.Auto,), devices=devices[:count][::order])


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def compiled(mesh, function, *operands, out=None):
    sharding = None if out is None else NamedSharding(mesh, out)
    return jax.jit(lambda *x: function(*x), out_shardings=sharding).lower(*operands).compile()


def calls(program):
    return program.as_text().count(f'custom_call_target="{OVERLAPPED_TARGET}"')


def close(actual, expected, tolerance=2e-2):
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max())


def wide(*operands):
    return [jnp.asarray(np.asarray(x, np.float32)) for x in operands]


GATHERED = {
    "plain": (gemm, jnp.matmul, ()),
    "dot_general": (
        lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ()))),
        jnp.matmul,
        (),
    ),
    "bias": (
        lambda x, w, b: gemm(x, w, bias=b, activation="gelu"),
        lambda x, w, b: jax.nn.gelu(x @ w + b),
        (((1024,), ("x",)),),
    ),
    "residual": (
        lambda x, w, c: gemm(x, w, c, alpha=0.5, activation="relu"),
        lambda x, w, c: jax.nn.relu(0.5 * (x @ w) + c),
        (((512, 1024), (None, "x")),),
    ),
    "row_scale": (
        lambda x, w, s: gemm(x, w, row_scale=s),
        lambda x, w, s: s[:, None] * (x @ w),
        (((512,), ()),),
    ),
    "gated": (
        gated_gemm,
        lambda x, w, v: jax.nn.silu(x @ w) * (x @ v),
        (((256, 1024), (None, "x")),),
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_rows_are_gathered_beside_the_product(mesh, normal, name):
    ours, theirs, others = GATHERED[name]
    x = put(mesh, normal(512, 256, dtype=BF16), "x")
    w = put(mesh, normal(256, 1024, dtype=BF16) / 16, None, "x")
    rest = [put(mesh, normal(*shape, dtype=BF16), *spec) for shape, spec in others]
    program = compiled(mesh, ours, x, w, *rest, out=P(None, "x"))
    assert calls(program) == 1
    kinds = [kind for kind, size in collectives(program.as_text(), mesh.size) if size > 64]
    assert "all-gather" not in kinds
    for _ in range(3):
        close(program(x, w, *rest), theirs(*wide(x, w, *rest)))


def test_rows_of_a_transposed_operand(mesh, normal):
    x = put(mesh, normal(256, 512, dtype=BF16), None, "x")
    w = put(mesh, normal(1024, 256, dtype=BF16) / 16, "x")
    program = compiled(
        mesh, lambda x, w: gemm(x, w, transpose_a=True, transpose_b=True), x, w, out=P(None, "x")
    )
    assert calls(program) == 1
    a, b = wide(x, w)
    close(program(x, w), a.T @ b.T)


def test_the_outermost_dimension_of_a_batch(mesh, normal):
    x = put(mesh, normal(4, 128, 256, dtype=BF16), "x")
    w = put(mesh, normal(256, 1024, dtype=BF16) / 16, None, "x")
    program = compiled(mesh, gemm, x, w, out=P(None, None, "x"))
    assert calls(program) == 1
    close(program(x, w), jnp.matmul(*wide(x, w)))


def test_a_sequence_behind_a_batch(mesh, normal):
    """The rows of a device do not follow each other in the result, nor in a sum's operand."""
    x = put(mesh, normal(4, 1024, 256, dtype=BF16), None, "x")
    w = put(mesh, normal(256, 2048, dtype=BF16) / 16, None, "x")
    v = put(mesh, normal(2048, 256, dtype=BF16) / 32, "x")
    c = put(mesh, normal(4, 1024, 2048, dtype=BF16), None, None, "x")

    def ours(x, w, c, v):
        return gemm(gemm(x, w, c, activation="relu"), v)

    program = compiled(mesh, ours, x, w, c, v, out=P(None, "x"))
    assert calls(program) == 2
    a, b, d, e = wide(x, w, c, v)
    close(program(x, w, c, v), jax.nn.relu(a @ b + d) @ e)


SCATTERED = {
    "plain": (gemm, jnp.matmul, ()),
    "bias": (
        lambda x, w, b: gemm(x, w, bias=b, activation="gelu"),
        lambda x, w, b: jax.nn.gelu(x @ w + b),
        (((384,), ()),),
    ),
    "residual": (
        lambda x, w, c: gemm(x, w, c, beta=2.0),
        lambda x, w, c: x @ w + 2 * c,
        (((512, 384), ("x",)),),
    ),
}


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
@pytest.mark.parametrize("name", SCATTERED)
def test_rows_are_scattered_beside_the_product(mesh, normal, name, dtype):
    ours, theirs, others = SCATTERED[name]
    x = put(mesh, normal(512, 256, dtype=dtype), None, "x")
    w = put(mesh, normal(256, 384, dtype=dtype) / 16, "x")
    rest = [put(mesh, normal(*shape, dtype=dtype), *spec) for shape, spec in others]
    program = compiled(mesh, ours, x, w, *rest, out=P("x"))
    assert calls(program) == 1
    results = [np.asarray(program(x, w, *rest), np.float32) for _ in range(3)]
    close(results[0], theirs(*wide(x, w, *rest)))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [BF16, jnp.float32])
@pytest.mark.parametrize("gathered", ["a", "b"])
def test_an_operand_is_gathered_along_k(mesh, normal, gathered, dtype):
    """The gradient of a weight, if the rows of the activations are divided."""
    own, other = (normal(512, 128, dtype=BF16), "x"), (normal(512, 2048, dtype=BF16), None, "x")
    x, w = (put(mesh, *each) for each in ((own, other) if gathered == "a" else (other, own)))

    def ours(x, w):
        return gemm(x, w, transpose_a=True, preferred_element_type=dtype)

    out = P(None, "x") if gathered == "a" else P("x")
    program = compiled(mesh, ours, x, w, out=out)
    assert calls(program) == 1
    for _ in range(3):
        a, b = wide(x, w)
        close(program(x, w), a.T @ b, 1e-2 if dtype == BF16 else 1e-4)


def layers(mesh, normal, m=512, k=256, n=1024):
    return (
        put(mesh, normal(m, k, dtype=BF16), "x"),
        put(mesh, normal(k, n, dtype=BF16) / 16, None, "x"),
        put(mesh, normal(n, k, dtype=BF16) / 32, "x"),
    )


def two_layers(x, w, v):
    return mlp(x, w, None, v)


def formula(x, w, v):
    return jax.nn.gelu(x @ w) @ v


def test_gradients(mesh, normal):
    operands = layers(mesh, normal)
    rows = NamedSharding(mesh, P("x"))

    def gradients(function, constrain):
        def loss(*args):
            y = function(*args)
            y = jax.lax.with_sharding_constraint(y, rows) if constrain else y
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.grad(loss, (0, 1, 2))

    ours = jax.jit(
        gradients(two_layers, True), out_shardings=tuple(x.sharding for x in operands)
    ).lower(*operands)
    program = ours.compile()
    assert calls(program) == 6
    results = gradients(formula, False)(*wide(*operands))
    for actual, expected in zip(program(*operands), results, strict=True):
        close(actual, expected, 3e-2)


def test_a_loop_meets_again_in_each_iteration(mesh, normal):
    operands = layers(mesh, normal)

    def ours(x, w, v):
        def step(x, _):
            y = jax.lax.with_sharding_constraint(two_layers(x, w, v), operands[0].sharding)
            return y / 2 + x, None

        return jax.lax.scan(step, x, None, length=5)[0]

    def theirs(x, w, v):
        return jax.lax.scan(lambda x, _: (formula(x, w, v) / 2 + x, None), x, None, length=5)[0]

    program = compiled(mesh, ours, *operands, out=P("x"))
    assert calls(program) == 2
    close(program(*operands), theirs(*wide(*operands)), 3e-2)


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
    assert "jax_tcgemm_overlapped_v1" in program.as_text()
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
    w, v = normal(256, 1024, dtype=BF16) / 16, normal(1024, 256, dtype=BF16) / 32
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
