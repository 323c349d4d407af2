"""The benchmark's own parts: cases, competitors, records, tables and picture."""

import dataclasses
import fnmatch
import itertools
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import Tunings, _extension
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.tools import benchmarking
from jax_tcgemm.tuning import cache, lookup
from jax_tcgemm.tuning.entry import Entry

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import cases  # noqa: E402
import chains  # noqa: E402
import measure  # noqa: E402
import pallas_rival  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
import sharded  # noqa: E402

pytestmark = pytest.mark.any_jax

CASES = cases.load_cases()
UNSUPPORTED = dataclasses.replace(
    next(case for case in CASES if case.group_sizes), suite="none", layout="tn"
)
HEADER = {"device": "d", "gpu": None, "versions": {"jax": "1"}, "date": "2026-01-01", "commit": "c"}


def tiny(case, **changes):
    small = {"m": 5, "n": 7, "k": 6, "batch": min(case.batch, 3)}
    if case.step:  # with few elements the rival's roundings may be most of what there is
        small |= {"m": 64, "n": 96, "k": 48}
    return dataclasses.replace(case, **{**small, **changes})


# One of each kind: what differs in extents alone runs the same code.
KINDS = list(dict.fromkeys(tiny(case, suite="tiny") for case in CASES))
STEP = next(case for case in KINDS if case.step)
MORE_KINDS = [
    tiny(CASES[0], layout=layout, batch=batch, broadcast=broadcast, epilogue=epilogue, out=out)
    for layout, (batch, broadcast), epilogue, out in itertools.product(
        ("nn", "tt"),
        ((1, ""), (3, ""), (3, "a"), (3, "b")),
        ("none", "alpha+beta_c+bias+silu+aux"),
        (None, "f32"),
    )
]


def test_labels_are_unique():
    labels = [case.label for case in CASES]
    assert len(set(labels)) == len(labels) > 90
    assert max(map(len, labels)) < 45


def test_every_suite_is_there_and_what_is_unsupported_says_so():
    assert list(dict.fromkeys(case.suite for case in CASES)) == [
        *("large", "medium", "decode", "unaligned", "batched"),
        *("epilogue", "gated", "backward", "tf32", "ragged", "f32_out", "random"),
    ]
    assert not any(case.unsupported for case in CASES)
    row = measure.measure_case(UNSUPPORTED, measure.Options())
    assert row["us"] is None
    assert row["note"].startswith("not supported yet")
    assert "error" not in row


@pytest.mark.parametrize(
    "changes",
    [
        *({"epilogue": "bias+glue"}, {"layout": "n"}, {"broadcast": "c"}, {"dtype": "f8"}),
        {"step": "layer"},
    ],
)
def test_a_case_with_a_typing_error_is_refused(changes):
    with pytest.raises((ValueError, KeyError)):
        _ = dataclasses.replace(CASES[0], **changes).out_dtype


def test_flops_and_bytes():
    case = dataclasses.replace(CASES[0], m=10, n=20, k=30, batch=2, broadcast="b", epilogue="c")
    assert case.flops == 2 * 10 * 20 * 30 * 2
    assert case.bytes == 2 * (2 * 10 * 30 + 30 * 20 + 2 * 2 * 10 * 20)
    to_f32 = dataclasses.replace(case, out="f32")
    assert to_f32.bytes == 2 * (2 * 10 * 30 + 30 * 20) + 4 * 2 * 2 * 10 * 20
    gated = dataclasses.replace(CASES[0], m=10, n=20, k=30, epilogue="silu_glu")
    assert gated.flops == 4 * 10 * 20 * 30
    assert gated.bytes == 2 * (10 * 30 + 2 * 30 * 20 + 10 * 20)
    step = dataclasses.replace(CASES[0], m=10, n=20, k=30, step="mlp")
    assert step.flops == 6 * 2 * 10 * 20 * 30
    assert step.bytes == 2 * 2 * (10 * 30 + 30 * 20 + 20 + 20 * 30 + 30 + 10 * 30)
    ragged = dataclasses.replace(CASES[0], m=10, n=20, k=30, group_sizes=(4, 6))
    assert ragged.bytes == 2 * (10 * 30 + 2 * 30 * 20 + 10 * 20)


def test_operands_are_fresh_and_of_unit_products():
    case = tiny(CASES[0], m=64, n=64, k=256, epilogue="bias+c")
    (first,), *others = case.argument_sets()
    assert len(others) == 15
    assert set(first) == {"a", "b", "bias", "c"}
    assert not np.array_equal(first["a"], others[0][0]["a"])
    product = np.asarray(first["a"] @ first["b"], np.float32)
    assert 0.8 < product.std() < 1.2
    assert 0.8 < np.asarray(first["c"], np.float32).std() < 1.2


@pytest.mark.parametrize("case", [*KINDS, *MORE_KINDS], ids=lambda case: case.label)
def test_ours_computes_what_the_rival_does(case):
    arrays = {
        name: jax.random.normal(jax.random.key(index), shape, cases.DTYPES[case.dtype])
        for index, (name, shape) in enumerate(case.shapes.items())
    }
    # XLA's CPU backend lacks some products of 16-bit operands to float32.
    wide = {name: x.astype(case.out_dtype) for name, x in arrays.items()} if case.out else arrays
    ours, xla = jax.jit(case.ours())(arrays), jax.jit(case.xla)(wide)
    assert measure.disagreement(case, ours, xla) is None
    results = len(arrays) if case.step else 1 + ("aux" in case.parts)
    assert len(jax.tree.leaves(ours)) == results
    # The check is of use: without the last operand the result is another.
    last = list(arrays)[-1]
    wrong = case.ours()({**arrays, last: jnp.zeros_like(arrays[last])})
    assert "of its norm" in measure.disagreement(case, wrong, xla)


def test_disagreement_of_shapes_dtypes_and_nan():
    case = tiny(CASES[0])
    x = jnp.ones((2, 2), jnp.bfloat16)
    assert measure.disagreement(case, x, x) is None
    assert "instead of" in measure.disagreement(case, x.astype(jnp.float32), x)
    assert "instead of" in measure.disagreement(case, x[0], x)
    assert "nan" in measure.disagreement(case, [x, x * jnp.nan], [x, x])


def options(**changes):
    fields = {"against": ("xla", "pallas"), "reps": 2, "seconds": 0.0}
    return measure.Options(**(fields | changes))


@pytest.mark.parametrize("case", [CASES[0], KINDS[-1], STEP], ids=lambda case: case.label)
def test_measures_a_case(case, monkeypatch):
    monkeypatch.setattr(measure, "_SUSTAINED_ABOVE_US", 0.0)
    monkeypatch.setattr(_extension, "KERNEL_NAMES", frozenset())
    row = measure.measure_case(tiny(case), options(seconds=1e-3, configs="*"))
    assert "error" not in row
    assert row["ratio"] == row["xla_us"] / row["us"]
    assert row["tflops"] == pytest.approx(tiny(case).flops / row["us"] * 1e-6)
    assert row["sustained_ratio"] == row["sustained_xla_us"] / row["sustained_us"]
    assert row["choice_loss"] == 1.0
    assert row["kernels"] >= 1
    assert row["xla_kernels"] >= 1
    assert row["pallas_us"] is None
    assert "Error: " in row["pallas_note"]
    json.dumps(row)


def test_times_the_configurations_that_can_compute_the_case(all_kernels):
    glob = "simt_*"
    names = [
        row.name
        for row in kernel_table.for_algorithm("BF16_BF16_F32")
        if fnmatch.fnmatch(row.name, glob) and not (row.copies_whole_chunks or row.gated)
    ]
    case = tiny(CASES[0])  # no extent allows copies of 16 bytes
    row = measure.measure_case(case, options(configs=glob))
    assert "error" not in row
    assert set(names) <= set(row["configs"]) <= set(measure.config_names(case, glob))
    assert row["choice_loss"] >= 1
    large = dataclasses.replace(case, m=4096, n=4096, k=4096)
    assert not any("simt" in name for name in measure.config_names(large, "*"))


def test_a_wrong_result_is_reported_and_not_timed(monkeypatch):
    monkeypatch.setattr(cases.Case, "xla", lambda self, arrays: 2 * self.ours()(arrays))
    row = measure.measure_case(tiny(CASES[0]), options())
    assert row["error"].startswith("differs from XLA's result: by 5.0e-01 of its norm")
    assert row["us"] is None


def test_an_exception_is_reported(monkeypatch):
    monkeypatch.setattr(cases.Case, "xla", lambda self, arrays: arrays["x"])
    assert measure.measure_case(tiny(CASES[0]), options())["error"] == "KeyError: 'x'"


def test_the_chosen_kernel_is_read_from_the_log(monkeypatch, capfd):
    line = "jax_tcgemm: m=5 n=7 k=6 batch=1 -> sm90_x"
    compiled = benchmarking.compile_chain

    def compile_chain(function, sets):
        chain = compiled(function, sets)
        print(f"a warning\n{line}", file=sys.__stderr__, flush=True)
        return chain

    monkeypatch.setattr(measure, "compile_chain", compile_chain)
    case = tiny(CASES[0])
    assert measure.compile_ours(case, case.argument_sets())[1] == "sm90_x"
    captured = capfd.readouterr().err
    assert "a warning" in captured
    assert line not in captured


def test_pallas_takes_plain_products_whose_extents_it_divides():
    labels = [case.label for case in CASES if pallas_rival.obstacle(case) is None]
    assert "bf16 nn 4096x4096x4096" in labels
    assert not any("bias" in label or "nt" in label or "f32" in label for label in labels)


def test_pallas_configurations_divide_the_case():
    pytest.importorskip("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu")
    assert len(pallas_rival.candidates(tiny(CASES[0], m=512, n=512, k=512))) == 7
    with pytest.raises(ValueError, match="no tile"):
        pallas_rival.candidates(tiny(CASES[0]))


def test_pallas_has_a_kernel_for_groups_of_rows():
    pytest.importorskip("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu")
    case = next(case for case in CASES if case.suite == "ragged")
    assert pallas_rival.obstacle(case) is None
    names = pallas_rival.candidates(dataclasses.replace(case, n=384))
    assert list(names) == [
        "128x128 width 1 stages 6",
        "128x192 width 1 stages 4",
        "64x128 width 1 stages 6",
    ]


def test_chains_are_measured():
    row = chains.measure_chain(8, rounds=1, samples_per_round=2)
    assert 0 < row["best_us"] <= row["us"]
    assert chains.table([row]).splitlines()[-1].startswith("| bf16 8x8x8 | ")


# What comes of a run


def row(suite="large", case="x", **fields):
    fields = {"config": None, "us": 2.0, "xla_us": 3.0, "pallas_us": None, "tflops": 4.0} | fields
    return {"suite": suite, "case": case, "ratio": 1.5, **fields}


def test_results_are_written_after_each_row_and_resumed(tmp_path):
    path = tmp_path / "new" / "results.json"
    results = report.Results(path, HEADER)
    results.add(row(us=1 / 3))
    results.add(row(case="bad", us=None, error="oh"))
    assert json.loads(path.read_text()) == {
        "header": HEADER,
        "rows": [row(us=0.3333), row(case="bad", us=None, error="oh")],
        "chains": [],
    }
    assert list(path.parent.iterdir()) == [path]
    resumed = report.Results.resume(path, HEADER | {"date": "2026-01-02"})
    assert resumed.done == {("large", "x")}
    assert resumed.header == HEADER
    with pytest.raises(ValueError, match="commit c, this run has d"):
        report.Results.resume(path, HEADER | {"commit": "d"})
    assert report.Results.resume(tmp_path / "none.json", HEADER).done == set()


def test_header_describes_this_machine():
    header = report.header("abc")
    assert header["commit"] == "abc"
    assert header["versions"]["jax"] == jax.__version__
    assert header["date"].endswith("+00:00")
    json.dumps(header)


def test_tables_have_means_and_worst_cases():
    assert report.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    rows = [
        row(case="fast", ratio=2.0),
        row(case="slow", ratio=0.5),
        row(suite="gated", case="none", us=None, ratio=None, note="not supported yet"),
    ]
    text = report.tables(rows)
    assert "ratio: geometric mean 1.000 of 2, worst 0.500 (slow)" in text
    assert "| none | not supported yet |" in text
    assert "Pallas" not in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_choices_lists_those_that_lose():
    good = row(choice_loss=1.02, best_config="b", best_us=1.9)
    bad = row(case="lost", config="a", choice_loss=1.25, best_config="b", best_us=1.6)
    text = report.choices([good, bad, row(choice_loss=None)])
    assert "within 3% of the best kernel in 1 of 2 cases" in text
    assert "lost: a takes 1.250 times as long as b (1.6 us)" in text
    assert len(text.splitlines()) == 2


@pytest.fixture
def small_suite(monkeypatch):
    for name in ("JAX_TCGEMM_LOG", cache.SETTING, lookup.SETTING):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # main sets them
    small = [tiny(CASES[0]), tiny(CASES[0], m=9), UNSUPPORTED]
    monkeypatch.setattr(run, "load_cases", lambda: small)
    monkeypatch.setattr(chains, "SIZES", (8,))
    monkeypatch.setattr(chains, "_ROUNDS", 1)
    return small


def test_run_writes_resumes_and_reports(small_suite, tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = ["--out", str(path), "--reps", "2", "--no-sustained", "--commit", "abc"]
    assert run.main([*arguments, "--suite", "large", "--case", "5x7x6", "--chain"]) == 0
    assert len(report.load(path)["rows"]) == len(report.load(path)["chains"]) == 1
    assert "1/1" in capsys.readouterr().err
    assert run.main([*arguments, "--resume"]) == 0
    captured = capsys.readouterr()
    assert "2/2" in captured.err  # the other product and what is not supported
    assert "geometric mean" in captured.out
    assert "chain of 100" in captured.out
    assert len(report.load(path)["rows"]) == 3
    assert run.main([*arguments, "--resume", "--commit", "other"]) == 2


def test_run_tunes_cases(small_suite, monkeypatch, tmp_path, capsys):
    tuned = []

    def tune(function, *types, progress):
        tuned.append(types)
        return Tunings({("cpu", str(len(tuned))): Entry(None, 1.0, 1.0, 1.0)})

    monkeypatch.setattr(run, "tune", tune)
    out, found = tmp_path / "out.json", tmp_path / "tunings.json"
    arguments = ["--tune", "--suite", "large", "--no-sustained", "--reps", "1", "--out", str(out)]
    assert run.main([*arguments, "--tunings", str(found)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [case.suite for case in small_suite] == ["large", "large", "none"]
    cases = small_suite[:2]
    assert [row["suite"] for row in rows] == ["large", "large_tuned"] * len(cases)
    assert all(row["us"] > 0 and row["ratio"] > 0 for row in rows)
    assert rows[0]["us"] == rows[1]["untuned_us"]
    assert rows[0]["xla_us"] == rows[1]["xla_us"]
    assert len(Tunings.load(found)) == len(tuned) == len(cases)
    capsys.readouterr()
    assert run.main([*arguments, "--resume"]) == 0
    assert len(tuned) == len(cases)
    with pytest.raises(SystemExit):
        run.main(["--tunings", str(found)])


def test_run_fails_when_a_result_is_wrong(small_suite, monkeypatch, capsys):
    monkeypatch.setattr(cases.Case, "xla", lambda self, arrays: -self.ours()(arrays))
    assert run.main(["--suite", "large", "--configs"]) == 1
    assert "FAILED: large: bf16 nn 5x7x6: differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--suite", "no"], ["--against", "me"], ["--resume"], ["--reps", "0"]]
)
def test_run_refuses_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        run.parse_arguments(arguments)
    assert "error: " in capsys.readouterr().err


# The picture


def test_speeds_of_competitors():
    timed = row(pallas_us=4.0, sustained_us=4.0, sustained_xla_us=8.0)
    assert plot.speeds(timed) == {"jax_tcgemm": 4.0, "XLA": 8 / 3, "Pallas": 2.0}
    assert plot.speeds(timed, sustained=True) == {"jax_tcgemm": 2.0, "XLA": 1.0}
    assert plot.speeds(row(), sustained=True) == {"jax_tcgemm": 4.0, "XLA": 8 / 3}


def test_suites_are_spread_over_two_columns():
    suites = {"a": [{}] * 3, "b": [{}] * 20, "c": [{}] * 15}
    assert plot.columns(suites) == [["b"], ["c", "a"]]
    assert plot.columns({"a": [{}]}) == [["a"]]


def test_plot_writes_both_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.json"
    results = report.Results(path, HEADER)
    for case in CASES:
        times = {"us": None, "xla_us": None} if case.suite == "ragged" else {}
        results.add(row(case.suite, case.label, **times))
    assert plot.main([str(path), "--out", str(tmp_path / "new" / "speed")]) == 0
    written = sorted((tmp_path / "new").iterdir())
    assert [file.name for file in written] == ["speed.png", "speed.svg"]
    assert all(file.stat().st_size > 10_000 for file in written)
    assert plot.main([str(path), "--out", str(tmp_path / "speed"), "--suite", "ragged"]) == 1
    assert "no case with a time" in capsys.readouterr().err


# Programs over several devices


@pytest.mark.parametrize("setting", ["everywhere", "never"])
def test_sharded_programs_are_timed(setting, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_TCGEMM_PARTITION", setting)
    monkeypatch.setattr(sharded.jax, "devices", lambda: jax.local_devices(backend="cpu"))
    path = tmp_path / "results.json"
    arguments = ["--scale", "64", "--rounds", "1", "--calls", "1", "--out", str(path)]
    assert sharded.main(arguments) == 0
    content = json.loads(path.read_text())
    assert content["header"]["devices"] == 2
    assert [row["case"] for row in content["rows"]] == list(sharded.PROGRAMS)
    by_name = {row["case"]: row for row in content["rows"]}
    assert by_name["k"]["collectives"] == by_name["k"]["xla_collectives"] == {"all-reduce": 1}
    assert all(row["ratio"] > 0 for row in content["rows"])


def test_a_sharded_program_that_is_wrong_is_not_timed(monkeypatch, tmp_path):
    program = sharded.PROGRAMS["rows of x"]
    off = dataclasses.replace(program, ours=lambda x, w: 1.1 * program.ours(x, w))
    monkeypatch.setitem(sharded.PROGRAMS, "rows of x", off)
    monkeypatch.setattr(sharded.jax, "devices", lambda: jax.local_devices(backend="cpu"))
    path = tmp_path / "results.json"
    arguments = ["--case", "rows of x", "--scale", "64", "--rounds", "1", "--out", str(path)]
    assert sharded.main(arguments) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert "differs from XLA's result" in row["error"]
