"""Transfers beside products: what a device's program looks like, and its results.

CPU devices run the same programs with XLA's collectives. GPUs: ``test_gpu_overlap.py``.
"""

from __future__ import annotations

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
from sharded_checks import compiled, compiled_gradients, placed
from sharded_program import Program, mesh_of

from jax_tcgemm import dot_general, gated_gemm, gemm, mlp
from jax_tcgemm.lowering import overlapped, reference
from jax_tcgemm.partitioning import partitioner, products
from jax_tcgemm.partitioning.shard import AXIS
from jax_tcgemm.problem.spec import flatten

pytestmark = pytest.mark.usefixtures("divided_everywhere", "overlapped")

BF16 = jnp.bfloat16
CALL = "jax_tcgemm_overlapped_v1"


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


def attribute(program, name):
    line = next(line for line in program.split("\n") if f"@{CALL}" in line)
    return re.search(rf"\b{name} = (dense<[^>]*>|\"?\w+)", line)[1].strip('"')


def _bias(x, w, b):
    return gemm(x, w, bias=b, activation="gelu")


def _bias_formula(x, w, b):
    return jax.nn.gelu(x @ w + b)


def _dot(x, w):
    return dot_general(x, w, (((1,), (0,)), ((), ())))


_program = functools.partial(Program, dtype=BF16)
_GATHERED, _SCATTERED = (P("x"), P(None, "x")), (P(None, "x"), P("x"))
_W = ((1024, 64), (64, 2048))
GATHERED = {
    "gather": _program(gemm, jnp.matmul, _W, _GATHERED, P(None, "x")),
    "gather_by_dot_general": _program(_dot, jnp.matmul, _W, _GATHERED, P(None, "x")),
    "gather_and_bias": _program(
        _bias, _bias_formula, (*_W, (2048,)), (*_GATHERED, P("x")), P(None, "x")
    ),
    "gather_gated": _program(
        gated_gemm,
        lambda x, w, v: jax.nn.silu(x @ w) * (x @ v),
        (*_W, _W[1]),
        (*_GATHERED, P(None, "x")),
        P(None, "x"),
    ),
    "gather_of_a_batch": _program(
        gemm, jnp.matmul, ((4, 256, 64), _W[1]), (P("x"), P(None, "x")), P(None, None, "x")
    ),
    "gather_transposed": _program(
        lambda x, w: gemm(x, w, transpose_a=True),
        lambda x, w: x.T @ w,
        ((64, 1024), _W[1]),
        (P(None, "x"), P(None, "x")),
        P(None, "x"),
    ),
}
SCATTERED = {
    "scatter": _program(gemm, jnp.matmul, _W, _SCATTERED, P("x")),
    "scatter_and_bias": _program(_bias, _bias_formula, (*_W, (2048,)), (*_SCATTERED, P()), P("x")),
    "scatter_float16": Program(gemm, jnp.matmul, _W, _SCATTERED, P("x"), dtype=jnp.float16),
}


SUMMED = {
    "gather_a_along_k": _program(
        lambda x, w: gemm(x, w, transpose_a=True),
        lambda x, w: x.T @ w,
        ((1024, 64), (1024, 2048)),
        (P("x"), P(None, "x")),
        P(None, "x"),
    ),
    "gather_b_along_k": _program(
        lambda x, w: gemm(x, w, transpose_a=True),
        lambda x, w: x.T @ w,
        ((1024, 2048), (1024, 64)),
        (P(None, "x"), P("x")),
        P("x"),
    ),
}
PROGRAMS = {
    **{name: (program, "rows_of_a") for name, program in GATHERED.items()},
    **{name: (program, "rows_of_d") for name, program in SCATTERED.items()},
    **{name: (program, f"k_of_{name[7]}") for name, program in SUMMED.items()},
}


def _scaled(x, w, c, s):
    return gemm(x, w, c, row_scale=s, activation="relu")


def _scaled_formula(x, w, c, s):
    return jax.nn.relu(s[..., None] * (x @ w) + c)


_BATCH = ((4, 1024, 64), (64, 2048))
BATCHES = {
    "gather_rows_of_a_batch": _program(
        gemm, jnp.matmul, _BATCH, (P(None, "x"), P(None, "x")), P(None, None, "x")
    ),
    "gather_rows_of_a_fused_batch": _program(
        _scaled,
        _scaled_formula,
        (*_BATCH, (4, 1024, 2048), (4, 1024)),
        (P(None, "x"), P(None, "x"), P(None, None, "x"), P()),
        P(None, None, "x"),
    ),
    "gather_and_a_broadcast_addend": _program(
        _scaled,
        _scaled_formula,
        (*_BATCH, (1024, 2048), (4, 1024)),
        (P(None, "x"), P(None, "x"), P(None, "x"), P()),
        P(None, None, "x"),
    ),
    "scatter_rows_of_a_batch": _program(
        gemm, jnp.matmul, _BATCH, (P(None, None, "x"), P("x")), P(None, "x")
    ),
    "scatter_rows_of_a_fused_batch": _program(
        _scaled,
        _scaled_formula,
        (*_BATCH, (4, 1024, 2048), (4, 1024)),
        (P(None, None, "x"), P("x"), P(None, "x"), P(None, "x")),
        P(None, "x"),
    ),
}


def run(program, mesh, rng, assert_accurate):
    operands = placed(program, mesh, rng)
    ours, theirs = (compiled(f, program, mesh, operands) for f in (program.ours, program.theirs))
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
    assert attribute(on_gpus, "k" if kind.startswith("k") else "m") == "256"
    assert attribute(on_gpus, "kind") == kind
    assert attribute(on_gpus, "group_size") == "4"
    # The mesh has a second axis, so there are two groups.
    assert attribute(on_gpus, "devices") == "dense<[0, 2, 4, 6, 1, 3, 5, 7]>"


@pytest.fixture
def emulated(monkeypatch):
    """Makes CPU devices run the programs of GPUs, with calls that use XLA's collectives."""
    kinds = []

    def called(x, spec, exchange, kind, whole, part):
        del whole
        kinds.append(kind)
        groups = np.reshape(exchange.devices, (-1, exchange.peers)).tolist()
        share = {"axis_index_groups": groups, "tiled": True}
        outer = [x.a.shape[axis] for axis in spec.axes.a[: exchange.role]]
        assert all(extent == 1 for extent in outer), "rows of a device that are not together"
        if kind == overlapped.ROWS_OF_D:
            (d,) = reference.reference_gemm(*flatten(x), spec=spec)
            return [jax.lax.psum_scatter(d, AXIS, scatter_dimension=exchange.role, **share)]
        name = "b" if kind == overlapped.K_OF_B else "a"
        along = {overlapped.ROWS_OF_A: exchange.role, overlapped.K_OF_A: -1}.get(kind, -2)
        axis = getattr(spec.axes, name)[along]
        assert getattr(x, name).shape == getattr(part, name)
        whole = jax.lax.all_gather(getattr(x, name), AXIS, axis=axis, **share)
        return reference.reference_gemm(*flatten(x._replace(**{name: whole})), spec=spec)

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
    assert attribute(on_gpus, "m") == "1024"


@pytest.mark.usefixtures("small_products")
def test_gradients(rng, programs):
    mesh = mesh_of((8,))
    rows = NamedSharding(mesh, P("x"))

    def ours(x, w, v):
        return jax.lax.with_sharding_constraint(mlp(x, w, None, v), rows)

    def theirs(x, w, v):
        return jax.lax.with_sharding_constraint(jax.nn.gelu(x @ w) @ v, rows)

    program = _program(
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
        compiled(program.ours, program, mesh, operands)
    first, second = (attribute(each, "call") for each in programs)
    assert first != second
