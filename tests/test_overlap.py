"""Transfers beside products: what a device's program looks like, and its results.

CPU devices run the same programs with XLA's collectives. GPUs: ``test_gpu_overlap.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from overlapped_programs import (
    BATCHES,
    BF16,
    FUNCTIONS,
    GATHERED,
    PROGRAMS,
    SCATTERED,
    SUMMED,
    program_of,
)
from sharded_checks import compiled_gradients, compiled_results, placed
from sharded_program import mesh_of

from jax_tcgemm import gemm, mlp
from jax_tcgemm.lowering import overlapped, reference
from jax_tcgemm.partitioning import overlap, partitioner, products
from jax_tcgemm.partitioning.shard import AXIS
from jax_tcgemm.problem.spec import flatten

pytestmark = pytest.mark.usefixtures("divided_everywhere", "overlapped")

CALL = "jax_tcgemm_overlapped_v2"
BUFFER = "jax_tcgemm_gathers_v1"


@pytest.fixture
def programs(monkeypatch):
    """Collects the programs that GPUs would run, beside those of CPU devices."""
    found = []
    divide = partitioner.divide

    def both(*arguments):
        *others, text = arguments
        text = text.decode() if isinstance(text, bytes) else text
        on_gpus = divide(*others, text.replace('"platform":"cpu"', '"platform":"cuda"'))
        with mlir.make_ir_context():
            found.append(str(ir.Module.parse(on_gpus[0][0])))
        return divide(*arguments)

    monkeypatch.setattr(partitioner, "divide", both)
    partitioner._DIVISIONS.clear()
    return found


def attribute(program, name, call=CALL):
    line = next(line for line in program.split("\n") if f"@{call}" in line)
    return re.search(rf"\b{name} = (dense<[^>]*>|\"?\w*)", line)[1].strip('"')


def run(program, mesh, rng, assert_accurate):
    operands = placed(program, mesh, rng)
    ours, theirs = (
        compiled_results(f, program, mesh, operands) for f in (program.ours, program.theirs)
    )
    results = ours(*operands), theirs(*operands)
    expected = program.theirs(*(np.asarray(x, np.float32) for x in operands))
    assert results[0].sharding.is_equivalent_to(results[1].sharding, results[0].ndim)
    assert_accurate(*results, expected, slack=1e-2 * float(np.abs(expected).max()))


@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("name", PROGRAMS)
def test_results(name, rng, programs, assert_accurate):
    program, kind = PROGRAMS[name]
    run(program, mesh_of((4, 2)), rng, assert_accurate)
    (on_gpus,) = programs
    assert on_gpus.count(f"@{CALL}") == 1
    assert on_gpus.count(f"@{BUFFER}") == (kind not in ("rows_of_d", "sum_of_d"))
    rows = "256" if kind.endswith("_of_d") else "1024"  # those of a part, or all
    assert attribute(on_gpus, "k" if kind.startswith("k") else "m") == rows
    assert attribute(on_gpus, "kind") == kind
    assert attribute(on_gpus, "group_size") == "4"
    # The mesh has a second axis, so there are two groups.
    assert attribute(on_gpus, "devices") == "dense<[0, 2, 4, 6, 1, 3, 5, 7]>"


@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, rng, programs, assert_accurate):
    run(FUNCTIONS[name], mesh_of((4, 2)), rng, assert_accurate)
    (on_gpus,) = programs
    assert on_gpus.count("@jax_tcgemm_overlapped_function_v1") == 1
    assert on_gpus.count(f"@{BUFFER}") == 1


@pytest.mark.usefixtures("small_products")
def test_the_request_for_any_kernel_names_no_row(rng, programs, assert_accurate):
    function = FUNCTIONS["gather_function"]
    ours = functools.partial(function.ours, config="kernel")
    run(dataclasses.replace(function, ours=ours), mesh_of((4, 2)), rng, assert_accurate)
    (on_gpus,) = programs
    assert attribute(on_gpus, "config", "jax_tcgemm_overlapped_function_v1") == ""


@pytest.mark.usefixtures("small_products")
def test_functions_that_depend_on_the_row(rng, programs, assert_accurate):
    """XLA gathers the rows: a part of them would count from its own first row."""

    def masked(p):
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, p.shape, 0) < 300, p, 0).astype(BF16)

    program = program_of(
        lambda x, w: gemm(x, w, epilogue=masked),
        lambda x, w: masked(jnp.matmul(x, w, preferred_element_type=jnp.float32)),
        ((1024, 64), (64, 2048)),
        (P("x"), P(None, "x")),
        P(None, "x"),
    )
    run(program, mesh_of((4, 2)), rng, assert_accurate)
    (on_gpus,) = programs
    assert "@jax_tcgemm_overlapped" not in on_gpus


@pytest.mark.usefixtures("small_products")
def test_sums_of_gradients_are_left_to_xla(rng, programs, assert_accurate):
    """XLA runs the reduce-scatter of a weight's gradient beside other products."""
    program = program_of(
        lambda x, w: gemm(x, w, transpose_a=True),
        lambda x, w: x.T @ w,
        ((2048, 1024), (2048, 64)),
        (P("x"), P("x")),
        P("x"),
    )
    run(program, mesh_of((4, 2)), rng, assert_accurate)
    (on_gpus,) = programs
    assert CALL not in on_gpus


@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("name", SUMMED)
def test_off_also_holds_for_gradients_of_narrow_weights(name, rng, programs, monkeypatch):
    monkeypatch.setenv(overlap.SETTING, "off")
    program, mesh = PROGRAMS[name][0], mesh_of((4, 2))
    compiled_results(program.ours, program, mesh, placed(program, mesh, rng))
    (on_gpus,) = programs
    assert CALL not in on_gpus


@pytest.fixture
def emulated(monkeypatch):
    """Makes CPU devices run the programs of GPUs, with calls that use XLA's collectives."""
    kinds = []

    def called(x, spec, exchange, kind, whole, part):
        del part
        kinds.append(kind)
        groups = np.reshape(exchange.devices, (-1, exchange.peers)).tolist()
        share = {"axis_index_groups": groups, "tiled": True}
        outer = [x.a.shape[axis] for axis in spec.axes.a[: exchange.role]]
        assert all(extent == 1 for extent in outer), "rows of a device that are not together"
        if kind == overlapped.SUM_OF_D:
            (d,) = reference.reference_gemm(*flatten(x), spec=spec)
            return [jax.lax.psum(d, AXIS, axis_index_groups=groups)]
        if kind == overlapped.ROWS_OF_D:
            (d,) = reference.reference_gemm(*flatten(x), spec=spec)
            return [jax.lax.psum_scatter(d, AXIS, scatter_dimension=exchange.role, **share)]
        name = "b" if kind == overlapped.K_OF_B else "a"
        along = {overlapped.ROWS_OF_A: exchange.role, overlapped.K_OF_A: -1}.get(kind, -2)
        axis = getattr(spec.axes, name)[along]
        gathered = jax.lax.all_gather(getattr(x, name), AXIS, axis=axis, **share)
        assert gathered.shape == getattr(whole, name)
        return reference.reference_gemm(*flatten(x._replace(**{name: gathered})), spec=spec)

    monkeypatch.setattr(overlapped, "_called", called)
    monkeypatch.setattr(products, "_PLATFORMS", ("cpu",))
    partitioner._DIVISIONS.clear()
    yield kinds
    partitioner._DIVISIONS.clear()


@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("name", [*PROGRAMS, *BATCHES])
def test_calls_get_the_rows_of_each_device_together(name, rng, emulated, assert_accurate):
    program = BATCHES[name] if name in BATCHES else PROGRAMS[name][0]
    run(program, mesh_of((4, 2)), rng, assert_accurate)
    assert len(emulated) == 1


@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("name", BATCHES)
def test_programs_of_batches(name, rng, programs, assert_accurate):
    run(BATCHES[name], mesh_of((4, 2)), rng, assert_accurate)
    (on_gpus,) = programs
    assert on_gpus.count(f"@{CALL}") == 1
    assert attribute(on_gpus, "m") == ("4096" if name.startswith("gather") else "1024")


@pytest.mark.usefixtures("small_products")
def test_gradients(rng, programs):
    mesh = mesh_of((8,))
    rows = NamedSharding(mesh, P("x"))

    def ours(x, w, v):
        return jax.lax.with_sharding_constraint(mlp(x, w, None, v), rows)

    def theirs(x, w, v):
        return jax.lax.with_sharding_constraint(jax.nn.gelu(x @ w) @ v, rows)

    program = program_of(
        ours,
        theirs,
        ((1024, 64), (64, 2048), (2048, 64)),
        (P("x"), P(None, "x"), P("x")),
        gradients=(0, 1, 2),
        grads_as_operands=True,
    )
    operands = placed(program, mesh, rng)
    results = [compiled_gradients(f, program, mesh, operands)(*operands) for f in (ours, theirs)]
    for actual, expected in zip(*results, strict=True):
        expected = np.asarray(expected, np.float32)
        atol = 5e-2 * float(np.abs(expected).max())
        np.testing.assert_allclose(np.asarray(actual, np.float32), expected, atol=atol)
    kinds = [attribute(each, "kind") for each in programs if CALL in each]
    assert sorted(kinds) == ["k_of_a", "k_of_b", *["rows_of_a"] * 2, *["rows_of_d"] * 2]


@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_explicit_axes(name, rng, programs):
    program = {**GATHERED, **SCATTERED}[name]
    mesh = mesh_of((4,), AxisType.Explicit)
    x, w = placed(program, mesh, rng)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x, w: gemm(x, w, out_sharding=program.out))(x, w)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, program.out), y.ndim)
    (on_gpus,) = programs
    assert attribute(on_gpus, "kind") == ("rows_of_a" if name == "gather" else "rows_of_d")


@pytest.mark.usefixtures("small_products")
def test_each_call_has_its_own_number(rng, programs):
    """A device's number is read once for each call, so calls of two programs may not share it."""
    program, mesh = GATHERED["gather"], mesh_of((4,))
    operands = placed(program, mesh, rng)
    for _ in range(2):
        compiled_results(program.ours, program, mesh, operands)
    first, second = (attribute(each, "call") for each in programs)
    assert first != second
