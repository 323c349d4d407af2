"""Transfers beside products: which plans have them, the setting, and what the log says."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_program import mesh_of

from jax_tcgemm import export_disabled_checks, gemm
from jax_tcgemm.partitioning import overlap, partitioner
from jax_tcgemm.partitioning.mesh import Devices
from jax_tcgemm.partitioning.plan import make_plan
from jax_tcgemm.partitioning.work import GATHER, SCATTER, SUM, Array, Work
from jax_tcgemm.problem.log import print_once

pytestmark = pytest.mark.usefixtures("divided_everywhere", "overlapped")

BF16 = jnp.bfloat16


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
        overlaps=frozenset((GATHER, SCATTER, SUM)),
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


def test_a_sum_for_all_devices():
    work = product(8192, 4096, 14336)
    plan = make_plan(work, FOUR, [COLUMNS, ROWS], [WHOLE])
    assert (plan.overlap, plan.rows, plan.peers) == (SUM, "m", 4)
    assert plan.result_tilings == [WHOLE]
    assert plan.moved == (("all-reduce of the result beside the product in 4 parts", 1.5 * 2**26),)
    work = dataclasses.replace(work, overlaps=frozenset((SCATTER,)))
    plan = make_plan(work, FOUR, [COLUMNS, ROWS], [WHOLE])
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
    overlapped = text_of(gemm, *operands)
    monkeypatch.setenv(overlap.SETTING, "off")
    by_xla = text_of(gemm, *operands)
    assert by_xla != overlapped
    monkeypatch.delenv(overlap.SETTING)
    assert text_of(gemm, *operands) == overlapped


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
