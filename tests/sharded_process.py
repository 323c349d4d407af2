"""The subprocess of the tests of programs over several devices.

``export PATH`` writes programs and results; ``import PATH`` runs them. ``cache PATH`` compiles with
a persistent cache there. ``join ADDRESS RANK`` is one of two processes that run a program together.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Callable

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # from conftest.py
os.environ["JAX_TCGEMM_PARTITION"] = "everywhere"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_checks import placed
from sharded_program import TARGET, mesh_of
from sharded_programs import KINDS, PROGRAMS

import jax_tcgemm
from jax_tcgemm.tuning import agreement, lookup
from jax_tcgemm.tuning import cache as tuning_cache
from jax_tcgemm.tuning.entry import Entry, problem_key


def write(path: pathlib.Path) -> None:
    for name in KINDS:
        program, mesh = PROGRAMS[name], mesh_of()
        operands = placed(program, mesh, np.random.default_rng(0))
        function = jax.jit(lambda *args, own=program.ours: own(*args))
        checks = jax_tcgemm.export_disabled_checks()
        exported = jax.export.export(function, disabled_checks=checks)(*operands)
        assert TARGET in exported.mlir_module()
        (path / name).write_bytes(exported.serialize())
        np.save(path / f"{name}.npy", np.asarray(function(*operands), np.float32))


def read(path: pathlib.Path) -> None:
    for name in KINDS:
        program = PROGRAMS[name]
        exported = jax.export.deserialize(bytearray((path / name).read_bytes()))
        operands = placed(program, mesh_of(), np.random.default_rng(0))
        result = jax.jit(exported.call)(*operands)
        expected = np.load(path / f"{name}.npy")
        np.testing.assert_array_equal(np.asarray(result, np.float32), expected, err_msg=name)


def cache(path: pathlib.Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
    program = PROGRAMS["fused_k"]
    operands = placed(program, mesh_of(), np.random.default_rng(0))
    events.clear()
    jax.block_until_ready(jax.jit(lambda *args: program.ours(*args))(*operands))
    print("hits", events.count("/jax/compilation_cache/cache_hits"))
    print("misses", events.count("/jax/compilation_cache/cache_misses"))


def join(address: str, rank: int) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    mesh = jax.make_mesh((2, 2, 4), ("x", "y", "z"), (jax.sharding.AxisType.Auto,) * 3)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 32), (32, 48)))

    def put(value: np.ndarray, *spec: object) -> jax.Array:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_tcgemm.gemm(x, w, activation="relu")

    for specs in ((("z", "x"), ("x", "y")), (("x",), ("x",)), ((None, ("x", "z")), (("x", "z"),))):
        arrays = [put(value, *spec) for value, spec in zip((x, w), specs, strict=True)]
        jitted = jax.jit(program, out_shardings=NamedSharding(mesh, P()))
        assert TARGET in jitted.lower(*arrays).as_text()
        result = np.asarray(jitted(*arrays).addressable_data(0))
        np.testing.assert_allclose(result, np.maximum(x @ w, 0), rtol=1e-4, atol=1e-4)
    tunings_of_processes(rank, lambda: jitted(*arrays))
    measurements_of_processes(rank)
    print("joined", rank, jnp.shape(result))


def tunings_of_processes(rank: int, run: Callable[[], jax.Array]) -> None:
    """Checks that tunings must agree between processes, since their programs would differ."""

    def found(m: int) -> jax_tcgemm.Tunings:
        return jax_tcgemm.Tunings({("GPU", problem_key(m=m)): Entry(None, 1.0, 1.0, 1.0)})

    with found(3):
        jax.block_until_ready(run())
    with pytest.raises(AssertionError, match="differ between processes"), found(rank):
        pass


def measurements_of_processes(rank: int) -> None:
    """Checks that processes share one measurement, and take none if measuring takes too long."""
    os.environ.update({lookup.SETTING: "tune", tuning_cache.SETTING: ""})
    measured = []

    def measure(product: lookup.Product, patience: float) -> lookup.Measured:
        measured.append(product.problem)
        time.sleep(seconds)
        return lookup.Measured(Entry(None, 1.0 + rank, 1.0 + rank, None), is_certain=True)

    def found(m: int) -> object:
        product = lookup.Product("gemm", None, (), problem_key(m=m))
        return lookup.find("GPU", product)

    lookup.measure, seconds = measure, 0.2
    if rank == 1:
        assert found(1)[0].seconds == 2.0  # process 0 does not have this product
    order = (2, 3, 4, 5) if rank == 0 else (5, 4, 3, 2)
    times = {m: found(m)[0].seconds for m in order}
    print("taken", [times[m] for m in sorted(times)])
    print("measured", len(measured))
    agreement.PATIENCE, seconds = 0.5, 4.0
    multihost_utils.sync_global_devices("both ask")
    assert found(6) is None


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    if verb == "join":
        join(arguments[0], int(arguments[1]))
    else:
        {"export": write, "import": read, "cache": cache}[verb](pathlib.Path(arguments[0]))
