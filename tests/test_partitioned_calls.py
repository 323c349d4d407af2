"""The custom call of a partitioned product: transformations, meshes, compilers, processes."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, square_sum
from jax.experimental import serialize_executable
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_checks import (
    compiled_gradients,
    compiled_results,
    kinds,
    placed,
    put,
)
from sharded_program import TARGET, mesh_of
from sharded_programs import PROGRAMS

from jax_tcgemm import (
    export_disabled_checks,
    gemm,
)
from jax_tcgemm.problem.log import print_once
from jax_tcgemm.tools.collectives import collectives

pytestmark = pytest.mark.usefixtures("divided_everywhere")

PROCESS = pathlib.Path(__file__).with_name("sharded_process.py")


@pytest.fixture
def mesh():
    return mesh_of()


# Meshes


@pytest.mark.parametrize("by_hand", [{"x"}, {"y"}])
def test_axes_divided_by_hand(mesh, normal, by_hand):
    """The call is partitioned again in each part of a partially manual region."""
    specs = (P("x"), P()) if by_hand == {"x"} else (P(None, None, "y"), P("y"))
    x, w = put(mesh, normal(8, 16, 32), "x", None, "y"), put(mesh, normal(32, 24), "y")

    def program(function):
        def part(x, w):
            d = function(x, w)
            return d if by_hand == {"x"} else jax.lax.psum(d, "y")

        mapped = jax.shard_map(
            part, mesh=mesh, in_specs=specs, out_specs=P(*specs[0][:1]), axis_names=by_hand
        )
        return mapped, jax.grad(square_sum(mapped), (0, 1))

    for ours, theirs in zip(program(gemm), program(jnp.matmul), strict=True):
        assert TARGET in jax.jit(ours).lower(x, w).as_text()
        assert kinds(ours, x, w) == kinds(theirs, x, w)
        assert_trees_close(jax.jit(ours)(x, w), jax.jit(theirs)(x, w), 1e-3)


def test_two_meshes_in_one_program(mesh, normal):
    other = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])
    x, w = put(mesh, normal(16, 32), "x"), put(mesh, normal(32, 24), None, "y")

    def program(function, x, w):
        y = jax.lax.with_sharding_constraint(function(x, w), NamedSharding(other, P("a", "b")))
        return function(y, y.T)

    ours, theirs = (functools.partial(program, f) for f in (gemm, jnp.matmul))
    assert kinds(ours, x, w).count("all-gather") <= kinds(theirs, x, w).count("all-gather")
    assert_trees_close(jax.jit(ours)(x, w), jax.jit(theirs)(x, w), 1e-3)


def test_a_mesh_of_no_power_of_two(normal):
    mesh = jax.make_mesh((3, 2), ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices("cpu")[:6])
    x, w = put(mesh, normal(12, 36), "y", "x"), put(mesh, normal(36, 10), "x")
    assert kinds(gemm, x, w) == kinds(jnp.matmul, x, w) == ["all-reduce"]
    assert_trees_close(jax.jit(gemm)(x, w), x @ w, 1e-3)


def test_lowered_for_a_mesh_without_devices():
    mesh = AbstractMesh((4, 2), ("x", "y"), (AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((512, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    w = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", "y")))
    for platform in ("cpu", "cuda"):
        traced = jax.jit(lambda x, w: gemm(x, w)).trace(x, w)
        assert traced.lower(lowering_platforms=(platform,)).as_text().count(f"@{TARGET}") == 1


# Compilers and processes


@pytest.mark.parametrize(
    "name", ["fsdp", "fused_k", "function_fsdp", "megatron_mlp", "ragged_experts"]
)
def test_without_shardy(name, rng):
    """GSPMD has no propagation rules, and asks for the results' shardings."""
    program, mesh = PROGRAMS[name], mesh_of()
    before = jax.config.jax_use_shardy_partitioner
    operands = placed(program, mesh, rng)
    try:
        jax.config.update("jax_use_shardy_partitioner", False)
        for compile_ in (compiled_results, compiled_gradients):
            ours, theirs = (
                compile_(f, program, mesh, operands) for f in (program.ours, program.theirs)
            )
            mine, other = (collectives(each.as_text(), 8) for each in (ours, theirs))
            assert sum(size for _, size in mine) <= sum(size for _, size in other)
            assert_trees_close(ours(*operands), theirs(*operands), 1e-3)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def test_an_executable_is_serialized(rng):
    program, mesh = PROGRAMS["fused_sequence"], mesh_of()
    operands = placed(program, mesh, rng)
    first = compiled_results(program.ours, program, mesh, operands)
    serialized = serialize_executable.serialize(first)
    second = serialize_executable.deserialize_and_load(*serialized, backend="cpu")
    np.testing.assert_array_equal(np.asarray(first(*operands)), np.asarray(second(*operands)))


def run_process(*arguments):
    command = [sys.executable, "-P", str(PROCESS), *map(str, arguments)]
    return subprocess.run(
        command, env=process_environment(), capture_output=True, text=True, timeout=300, check=False
    )


def process_environment():
    paths = [str(PROCESS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.any_jax
def test_exported_to_another_process(tmp_path):
    for verb in ("export", "import"):
        done = run_process(verb, tmp_path)
        assert done.returncode == 0, done.stderr


def test_exported_for_several_platforms(mesh, rng):
    """Each platform has a branch; our rules partition one of them."""
    program = PROGRAMS["fused_k"]
    operands = placed(program, mesh, rng)
    exported = jax.export.export(
        jax.jit(lambda *args: program.ours(*args)),
        platforms=("cpu", "cuda"),
        disabled_checks=export_disabled_checks(),
    )(*operands)
    assert exported.mlir_module().count(f"@{TARGET}") == 2
    result = jax.jit(exported.call)(*operands)
    assert_trees_close(result, program.theirs(*operands), 1e-3)


def test_another_process_finds_it_in_the_persistent_cache(tmp_path):
    first, second = (run_process("cache", tmp_path).stdout.split() for _ in range(2))
    assert first[1] == "0"
    assert first[3] != "0"
    assert second == ["hits", first[3], "misses", "0"]


def test_two_processes():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", str(PROCESS), "join", address, str(rank)],
            env=process_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    for rank, (out, err) in enumerate(outputs):
        assert f"joined {rank}" in out, err
    taken, counts = zip(
        *(re.findall("(?:taken|measured) (.*)", out) for out, _ in outputs), strict=True
    )
    assert taken[0] == taken[1]  # for products that both processes have
    assert sum(map(int, counts)) == 5  # one process has one more product


# Types


def test_sums_of_rows_in_float64(mesh):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w, b = (jnp.asarray(rng.standard_normal(s)) for s in ((64, 32), (32, 48), (48,)))
        loss = square_sum64(lambda x, w, b: gemm(x, w, bias=b, activation="gelu"))
        placed_x = put(mesh, x, "x")
        actual = jax.jit(jax.grad(loss, 2))(placed_x, w, b)
        np.testing.assert_allclose(actual, jax.grad(loss, 2)(x, w, b), rtol=1e-12)


def square_sum64(function):
    return lambda *args: jnp.sum(jnp.square(function(*args)))


# Memory


def test_an_accumulated_gradient_takes_the_memory_of_its_operand(mesh, normal):
    x, g = put(mesh, normal(64, 32, dtype=jnp.bfloat16), "x"), None
    g = put(mesh, normal(64, 48, dtype=jnp.bfloat16), "x")
    c = put(mesh, normal(32, 48))

    def step(c, x, g):
        return gemm(x, g, c, transpose_a=True, preferred_element_type=jnp.float32)

    executable = jax.jit(step, donate_argnums=0).lower(c, x, g).compile()
    assert executable.memory_analysis().alias_size_in_bytes == c.size * 4


@pytest.mark.parametrize(
    "name", ["fsdp_mlp", "megatron_gated_mlp", "fsdp_gated_mlp", "scan_of_layers"]
)
def test_gradients_need_no_more_memory(name, rng):
    program, mesh = PROGRAMS[name], mesh_of()
    operands = placed(program, mesh, rng)
    ours, theirs = (
        compiled_gradients(f, program, mesh, operands).memory_analysis().temp_size_in_bytes
        for f in (program.ours, program.theirs)
    )
    assert ours <= 1.05 * theirs + 2**12, (ours, theirs)


# Log lines


def test_log_names_every_collective(mesh, normal, monkeypatch, capfd):
    print_once.cache_clear()
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    x, w = put(mesh, normal(64, 32), "x"), put(mesh, normal(32, 48), "x", "y")
    jax.jit(lambda x, w: gemm(x, w)).lower(x, w).compile()
    x, w = put(mesh, normal(64, 32), None, "x"), put(mesh, normal(32, 48), "x")
    jax.jit(lambda x, w: gemm(x, w)).lower(x, w).compile()
    lines = [line for line in capfd.readouterr().err.splitlines() if "on 8 devices" in line]
    assert len(lines) == 2
    assert "dividing m by 4, n by 2; all-gather of b (0.0022 MiB)" in lines[0]
    assert "dividing k by 4; all-reduce of the result" in lines[1]


def test_log_says_what_xla_divides(mesh, normal, monkeypatch, capfd):
    print_once.cache_clear()
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    x, w = put(mesh, normal(64, 32), "x"), normal(32, 48)
    traced = jax.jit(lambda x, w: gemm(x, w, precision="highest")).trace(x, w)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert TARGET not in text
    assert "XLA divides its own products" in capfd.readouterr().err
