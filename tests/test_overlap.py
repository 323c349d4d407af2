"""Transfers beside products: which plans have them, and what a device's program looks like.

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
from sharded_checks import compiled, compiled_gradients, placed
from sharded_program import Program, mesh_of

from jax_tcgemm import dot_general, export_disabled_checks, gated_gemm, gemm, mlp
from jax_tcgemm.lowering import overlapped, reference
from jax_tcgemm.partitioning import overlap, partitioner, products
from jax_tcgemm.partitioning.mesh import Devices
from jax_tcgemm.partitioning.plan import make_plan
from jax_tcgemm.partitioning.shard import AXIS
from jax_tcgemm.partitioning.work import GATHER, SCATTER, Array, Work
from jax_tcgemm.problem.log import print_once
from jax_tcgemm.problem.spec import flatten

pytestmark = pytest.mark.usefixtures("divided_everywhere")

BF16 = jnp.bfloat16
CALL = "jax_tcgemm_overlapped_v1"


# Plans

FOUR = Devices((2, 2))
ROWS, COLUMNS, WHOLE = ((0, 1), ()), ((), (0, 1)), ((), ())


def product(m, n, k):
    arrays = [Array(tuple(dims), 2, dims) for dims in ("mk", "kn", "mn")]
    return Work(
        {"m": m, "n": n, "k": k},
        tuple(arrays[:2]),
        arrays[2],
        (arrays[2],),
        frozenset((0, 1)),
        2.0 * m * n * k,
        rows=("m",),
        overlaps=frozenset((GATHER, SCATTER)),
    )


def test_rows_of_x_and_columns_of_w():
    plan = make_plan(product(8192, 14336, 4096), FOUR, [ROWS, COLUMNS], [COLUMNS])
    assert (plan.overlap, plan.rows, plan.peers) == (GATHER, "m", 4)
    assert plan.layout == {"m": (), "n": (0, 1), "k": ()}
    assert plan.operand_tilings == [ROWS, COLUMNS]
    assert plan.moved == (("all-gather of a beside the product in 4 parts", 0.75 * 2**26),)
    assert not plan.note


def test_k_of_both_and_rows_of_the_result():
    plan = make_plan(product(8192, 4096, 14336), FOUR, [COLUMNS, ROWS], [ROWS])
    assert (plan.overlap, plan.rows, plan.peers) == (SCATTER, "m", 4)
    assert plan.result_tilings == [ROWS]
    what = "reduce-scatter of the result beside the product in 4 parts"
    assert plan.moved == ((what, 0.75 * 2**26),)


def test_a_sum_for_all_devices_is_an_all_reduce():
    plan = make_plan(product(8192, 4096, 14336), FOUR, [COLUMNS, ROWS], [WHOLE])
    assert not plan.overlap
    assert not plan.note


@pytest.mark.parametrize(
    ("extents", "against", "reason"),
    [
        ((8192, 14336, 4096), "of a reason", "of a reason"),
        ((1024, 65536, 512), "", "only 1024 rows"),
        ((8194, 14336, 4096), "", "the parts have different sizes"),
        ((8256, 14336, 4096), "", "2064 rows of a part, which is no multiple of 128"),
        ((8192, 8256, 64), "", "it would take longer"),
    ],
)
def test_why_rows_are_gathered_before_the_product(extents, against, reason):
    plan = make_plan(product(*extents), FOUR, [ROWS, COLUMNS], [COLUMNS], against)
    assert not plan.overlap
    assert plan.note == f"{GATHER} not overlapped: {reason}"
    assert plan.operand_tilings == [WHOLE, COLUMNS]


def test_at_most_as_many_devices_as_the_call_takes():
    devices = Devices((2, 2, 2, 2))
    x, w = ((0, 1, 2, 3), ()), ((), (0, 1, 2, 3))
    plan = make_plan(product(2**15, 2**18, 4096), devices, [x, w], [w])
    assert plan.note.endswith("more than 8 devices")


def test_products_without_rows_have_no_note():
    work = dataclasses.replace(product(8192, 14336, 4096), overlaps=frozenset())
    plan = make_plan(work, FOUR, [ROWS, COLUMNS], [COLUMNS])
    assert not plan.overlap
    assert not plan.note


# Programs


@pytest.fixture
def small_products(monkeypatch):
    """Makes small products overlap, although that does not pay."""
    monkeypatch.setattr(overlap, "FEWEST_ROWS", 256)
    monkeypatch.setattr(overlap, "FEWEST_ROWS_OF_A_PART", 128)
    monkeypatch.setattr(overlap, "_LONGEST", float("inf"))


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


# The setting


def text_of(function, *operands):
    return jax.jit(lambda *args: function(*args)).lower(*operands).as_text()


def large(mesh):
    def operand(shape, *spec):
        return jax.ShapeDtypeStruct(shape, BF16, sharding=NamedSharding(mesh, P(*spec)))

    return operand((8192, 4096), "x"), operand((4096, 14336), None, "x")


def logged(capfd, operands):
    print_once.cache_clear()
    partitioner._DIVISIONS.clear()
    capfd.readouterr()
    jax.jit(lambda *args: gemm(*args)).lower(*operands).compile()
    return capfd.readouterr().err


def test_the_log_says_what_was_chosen_and_why(monkeypatch, capfd):
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    operands = large(mesh_of((4,)))
    assert "all-gather of a beside the product in 4 parts (48 MiB)" in logged(capfd, operands)
    monkeypatch.setenv(overlap.SETTING, "off")
    assert "not overlapped: JAX_TCGEMM_OVERLAP=off" in logged(capfd, operands)


def test_the_setting_is_part_of_the_program(monkeypatch):
    operands = large(mesh_of((4,)))
    by_default = text_of(gemm, *operands)
    monkeypatch.setenv(overlap.SETTING, "auto")
    assert text_of(gemm, *operands) == by_default
    monkeypatch.setenv(overlap.SETTING, "off")
    assert text_of(gemm, *operands) != by_default


def test_an_unknown_setting(monkeypatch):
    monkeypatch.setenv(overlap.SETTING, "on")
    with pytest.raises(ValueError, match=r"JAX_TCGEMM_OVERLAP='on'; accepted: auto, off"):
        text_of(gemm, *large(mesh_of((4,))))


def test_an_exported_program_leaves_transfers_to_xla():
    checks = export_disabled_checks()
    exported = jax.export.export(jax.jit(gemm), disabled_checks=checks)(*large(mesh_of((4,))))
    assert "the program is exported" in exported.mlir_module()


def test_several_processes_leave_transfers_to_xla(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "there are several processes" in text_of(gemm, *large(mesh_of((4,))))
