"""Measured choices: their effect, how they are kept, and where they are looked up."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import types

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import bf16
from tuned_calls import (
    ARRAYS,
    KIND,
    OTHER,
    ROW,
    SIZES,
    SQUARE,
    configs,
    entry,
    f,
    lowered,
    problems,
    tuned,
)

from jax_tcgemm import Tunings, _extension, gated_gemm, gemm, ragged_dot
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.lowering import devices
from jax_tcgemm.tuning import cache, lookup, tunings
from jax_tcgemm.tuning.entry import Entry, row_digest

pytestmark = [pytest.mark.any_jax, pytest.mark.usefixtures("all_kernels", "on_an_h200")]


def test_what_is_active_names_the_row():
    assert configs(f, *ARRAYS) == [""]
    with tuned(ROW):
        assert configs(f, *ARRAYS) == [ROW]
        assert configs(f, bf16(128, 512), ARRAYS[1]) == [""]  # no tuning exists for this problem
        assert configs(lambda a, b: gemm(a, b, config=OTHER), *ARRAYS) == [OTHER]
    with tuned(f"{OTHER}/splits=2"):
        assert configs(f, *ARRAYS) == [f"{OTHER}/splits=2"]
    with tuned("xla"):
        assert configs(f, *ARRAYS) == []
    with tuned(None):
        assert configs(f, *ARRAYS) == [""]
    with tuned(ROW, kind="NVIDIA L4"):
        assert configs(f, *ARRAYS) == [""]
    assert configs(f, *ARRAYS) == [""]


def test_unaligned_operands_of_a_tuned_row_are_padded():
    arrays = bf16(515, 777), bf16(777, 1030)
    with tuned(ROW, arrays=arrays):
        (before, after) = [lowered(g, *arrays) for g in (lambda a, b: gemm(a, b) * 1, f)]
    for text in (before, after):
        assert f'config = "{ROW}"' in text
        assert re.search(r"padding_bytes = [1-9]", text)


@pytest.mark.parametrize("grad", [False, True])
def test_gated_and_ragged_products_are_tuned(grad):
    rows = {
        "gated": next(row.name for row in kernel_table.CONFIGS if row.gated and row.arch == "sm90"),
        "m": next(row.name for row in kernel_table.CONFIGS if row.grouped == "m"),
    }
    for function, arrays, row in (
        (lambda a, b: gated_gemm(a, b, b), SQUARE, rows["gated"]),
        (lambda a, b: ragged_dot(a, b, SIZES), (bf16(64, 32), bf16(2, 32, 48)), rows["m"]),
    ):
        g = jax.grad(lambda *x, f=function: f(*x).astype("float32").sum()) if grad else function
        entries = {
            (KIND, problem): entry("xla" if grad else row) for problem in problems(g, *arrays)
        }
        with Tunings(entries):
            assert configs(g, *arrays) == ([] if grad else [row])


def test_programs_of_jit_are_those_of_their_tunings():
    traces = []

    @jax.jit
    def g(a, b):
        traces.append(None)
        return gemm(a, b)

    first, same, other = tuned(ROW), tuned(ROW), tuned("xla")
    assert first == same != other
    for active, count in ((None, 1), (first, 2), (same, 2), (other, 3), (first, 3), (None, 3)):
        if active is None:
            g(*ARRAYS)
        else:
            with active:
                g(*ARRAYS)
        assert len(traces) == count


def test_equal_choices_are_equal_tunings():
    (problem,) = problems(f, *ARRAYS)
    first, second = (
        Tunings({(KIND, problem): Entry.measured(ROW, us, 2e-6, 3e-6)}) for us in (1e-6, 1.1e-6)
    )
    assert first == second
    assert hash(first) == hash(second)
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert other == first
        with first, other:
            assert configs(f, *ARRAYS) == [ROW]


def test_nothing_within_ends_what_is_final():
    recorder = lookup.Recorder()
    with recorder, tuned(ROW):
        assert configs(f, *ARRAYS) == [""]
    assert len(recorder.products) == 1
    with tunings.untuned(), tuned(ROW):
        assert configs(f, *ARRAYS) == [""]
    with tuned(ROW), tunings.untuned():
        assert configs(f, *ARRAYS) == [""]


def test_an_entry_that_is_for_other_products_is_none():
    ragged = lambda a, b: ragged_dot(a, b, SIZES)  # noqa: E731
    arrays = bf16(64, 32), bf16(2, 32, 48)
    for function, operands, config in (
        (ragged, arrays, f"{ROW}/splits=2"),
        (ragged, arrays, ROW),
        (lambda a, b: gated_gemm(a, b, b), SQUARE, ROW),
        (f, tuple(x.astype(jnp.float16) for x in SQUARE), ROW),
    ):
        with tuned(config, function, operands):
            assert configs(function, *operands) == [""]


def test_nothing_is_looked_for_where_nothing_is_multiplied():
    for shapes in (((0, 8), (8, 8)), ((8, 0), (0, 8)), ((8, 8), (8, 0))):
        assert problems(f, *(bf16(*shape) for shape in shapes)) == []


def test_joined_and_nested():
    arrays = bf16(128, 512), ARRAYS[1]
    one, two = tuned(ROW), tuned(OTHER, arrays=arrays)
    both = one | two
    assert len(both) == 2
    assert len(both | tuned("xla")) == 2
    with both | tuned("xla"):
        assert configs(f, *ARRAYS) == []
        assert configs(f, *arrays) == [OTHER]
    with one, two:
        assert configs(f, *ARRAYS) == [ROW]
        with tuned("xla"):
            assert configs(f, *ARRAYS) == []
            assert configs(f, *arrays) == [OTHER]
        assert configs(f, *arrays) == [OTHER]
    with one, one:
        pass
    assert tunings.active() is None


def test_saved_and_loaded(tmp_path):
    both = tuned(ROW) | tuned("xla", arrays=(bf16(8, 512), ARRAYS[1])) | tuned(None, kind="L4")
    path = tmp_path / "tunings.json"
    both.save(path)
    assert Tunings.load(path) == both
    assert [name for name in os.listdir(tmp_path) if name != "cache"] == ["tunings.json"]
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    text = str(both)
    assert ROW in text
    assert "as untuned" in text
    assert "gemm bf16 nn 8x384x512" in text
    assert "0.750 untuned, 1.500 tuned" in text
    assert repr(both) == "<Tunings of 3 products, for L4, NVIDIA H200>"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "devices": {}}',
        '{"format": 1, "devices": {"x": [{"problem": {}, "entry": {}}]}}',
        '{"format": 1, "devices": {"x": [{"problem": {}}]}}',
    ],
)
def test_what_is_no_file_of_tunings(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"file\.json holds no tunings"):
        Tunings.load(path)


@pytest.mark.parametrize("problem", ["x", 1, None, [], [{"m": 1}]])
def test_a_problem_is_an_object(tmp_path, problem):
    each = {"problem": problem, "entry": entry(ROW).to_json()}
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"format": 1, "devices": {KIND: [each]}}))
    with pytest.raises(ValueError, match=r"file\.json holds no tunings"):
        Tunings.load(path)


@pytest.mark.parametrize(
    "changes", [{"algorithm": 1}, {"batch": 2}, {"epilogue": []}, {"op": None}]
)
def test_any_object_is_printed(tmp_path, changes):
    fields = {"op": "gemm", "algorithm": "BF16_BF16_F32", "m": 1, "n": 1, "k": 1} | changes
    each = {"problem": fields, "entry": entry(ROW).to_json()}
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"format": 1, "devices": {KIND: [each]}}))
    assert len(str(Tunings.load(path)).splitlines()) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"config": OTHER},  # OTHER has no digest
        {"config": 1},
        {"seconds": 0.0},
        {"seconds": "1"},
        {"seconds": float("nan")},
        {"rows": [ROW]},
        {"rows": {ROW: 1}},
    ],
)
def test_what_is_no_entry(change):
    good = entry(ROW).to_json()
    assert Entry.from_json(json.loads(json.dumps(good))) == entry(ROW)
    with pytest.raises(ValueError, match="not an entry"):
        Entry.from_json(good | change)


def test_an_entry_ends_with_its_row():
    changed = Entry(ROW, 1e-6, 2e-6, 3e-6, ((ROW, "another"),))
    gone = Entry("gone", 1e-6, 2e-6, 3e-6, (("gone", row_digest("gone")),))
    for old in (changed, gone):
        assert not old.is_current
        with Tunings({(KIND, problem): old for problem in problems(f, *ARRAYS)}):
            assert configs(f, *ARRAYS) == [""]


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    axes = (tuned(ROW) | tuned("xla", arrays=(bf16(8, 512), ARRAYS[1]))).plot()
    assert len(axes.get_yticks()) == 2


def test_what_comes_with_the_package_names_rows_as_they_are(monkeypatch):
    monkeypatch.undo()  # removes the other lookup paths
    names = frozenset(config.name for config in kernel_table.CONFIGS)
    monkeypatch.setattr(_extension, "KERNEL_NAMES", names)
    for kind in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        entries = lookup.packaged(kind).entries
        assert len(entries) > 80
        assert {name for name, _ in entries} == {kind}
        assert all(entry.is_current for entry in entries.values())
        assert {entry.config for entry in entries.values()} > {None, kernel_names.XLA}


def test_order_of_places(monkeypatch):
    (problem,) = problems(f, *ARRAYS)
    monkeypatch.setattr(lookup, "packaged", lambda kind: tuned("xla"))
    assert configs(f, *ARRAYS) == []
    assert cache.write(KIND, problem, entry(ROW)) is None
    assert configs(f, *ARRAYS) == [ROW]
    with tuned(OTHER):
        assert configs(f, *ARRAYS) == [OTHER]
    with tunings.untuned():
        assert configs(f, *ARRAYS) == [""]
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)  # several processes
    assert configs(f, *ARRAYS) == []
    monkeypatch.undo()


def test_the_package_is_not_asked_where_processes_have_several_kinds(monkeypatch):
    monkeypatch.setattr(lookup, "packaged", lambda kind: tuned("xla"))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    kinds = [types.SimpleNamespace(device_kind=kind) for kind in (KIND, "NVIDIA H100 80GB HBM3")]
    monkeypatch.setattr(lookup.jax, "devices", lambda: kinds[:1])
    assert configs(f, *ARRAYS) == []
    monkeypatch.setattr(lookup.jax, "devices", lambda: kinds)
    assert configs(f, *ARRAYS) == [""]


def test_settings(monkeypatch):
    (problem,) = problems(f, *ARRAYS)
    cache.write(KIND, problem, entry(ROW))
    monkeypatch.setenv(lookup.SETTING, "off")
    assert configs(f, *ARRAYS) == [""]
    with tuned(OTHER):
        assert configs(f, *ARRAYS) == [OTHER]
    monkeypatch.setenv(lookup.SETTING, "sometimes")
    with pytest.raises(ValueError, match="JAX_TCGEMM_TUNING='sometimes' must be one of"):
        configs(f, *ARRAYS)
    monkeypatch.setenv(lookup.SETTING, "read")
    monkeypatch.setenv(cache.SETTING, "")
    assert configs(f, *ARRAYS) == [""]
    monkeypatch.undo()


def test_a_gpu_that_nothing_was_fitted_to(monkeypatch):
    monkeypatch.setattr(
        devices, "local_device", lambda matches: "NVIDIA L4" if matches((8, 9)) else None
    )
    monkeypatch.setattr(devices, "local_kind", lambda: "NVIDIA L4")
    assert configs(f, *ARRAYS) == []
    assert configs(lambda a, b: gemm(a, b, config=OTHER), *ARRAYS) == [OTHER]
    assert configs(lambda a, b: gemm(a, b, bias=b[0]), *ARRAYS) == [""]
    with tuned(OTHER, kind="NVIDIA L4"):
        assert configs(f, *ARRAYS) == [OTHER]
