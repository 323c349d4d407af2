"""The output of a benchmark run: records, tables and the picture; and the programs."""

import dataclasses
import json
import os

import chains
import jax
import plot
import pytest
import report
import run
import sharded
import speed_page
import xla_rival
from benchmark_cases import CASES, UNSUPPORTED, tiny

from jax_tcgemm import Tunings
from jax_tcgemm.tuning import cache, lookup
from jax_tcgemm.tuning.entry import Entry

pytestmark = pytest.mark.any_jax

HEADER = {"device": "d", "gpu": None, "versions": {"jax": "1"}, "date": "2026-01-01", "commit": "c"}


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
    assert "2/2" in captured.err  # the other product and the unsupported case
    assert "geometric mean" in captured.out
    assert "chain of 100" in captured.out
    assert len(report.load(path)["rows"]) == 3
    assert run.main([*arguments, "--resume", "--commit", "other"]) == 2


def test_run_tunes_cases(small_suite, monkeypatch, tmp_path, capsys):
    tuned = []

    def tune(function, *types, progress):
        tuned.append(types)
        return Tunings({("cpu", json.dumps({"m": len(tuned)})): Entry(None, 1.0, 1.0, 1.0)})

    monkeypatch.setattr(run, "tune", tune)
    out, found = tmp_path / "out.json", tmp_path / "tunings.json"
    arguments = ["--tune", "--suite", "large", "--no-sustained", "--reps", "1", "--out", str(out)]
    assert run.main([*arguments, "--tunings", str(found)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [case.suite for case in small_suite] == ["large", "large", "none"]
    cases = small_suite[:2]
    assert [row["suite"] for row in rows] == ["large_untuned", "large_tuned"] * len(cases)
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
    monkeypatch.setattr(xla_rival, "xla", lambda case, arrays: -case.ours()(arrays))
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
    results.add({"suite": "models", "case": "a step", "jit_ms": 1.0, "fuse_ms": 1.0, "ratio": 1.0})
    assert plot.main([str(path), "--out", str(tmp_path / "new" / "speed")]) == 0
    written = sorted((tmp_path / "new").iterdir())
    assert [file.name for file in written] == ["speed-dark.svg", "speed-light.svg"]
    assert all(file.stat().st_size > 10_000 for file in written)
    assert plot.main([str(path), "--out", str(tmp_path / "speed"), "--suite", "ragged"]) == 1
    assert "no case with a time" in capsys.readouterr().err


# Programs over several devices


@pytest.mark.parametrize("setting", ["everywhere", "never"])
def test_sharded_programs_are_timed(setting, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_TCGEMM_PARTITION", setting)
    monkeypatch.setattr(sharded.jax, "devices", lambda: jax.local_devices(backend="cpu"))
    path = tmp_path / "results.json"
    arguments = ["--suite", "sharded", "--scale", "64", "--rounds", "1", "--calls", "1"]
    assert sharded.main([*arguments, "--out", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["header"]["devices"] == 2
    assert [row["case"] for row in content["rows"]] == list(sharded.SUITES["sharded"])
    by_name = {row["case"]: row for row in content["rows"]}
    assert by_name["k"]["collectives"] == by_name["k"]["xla_collectives"] == {"all-reduce": 1}
    assert all(row["ratio"] > 0 for row in content["rows"])


def test_overlapped_programs_are_timed_beside_those_of_xla(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_TCGEMM_PARTITION", "everywhere")
    monkeypatch.setattr(sharded.jax, "devices", lambda: jax.local_devices(backend="cpu"))
    path = tmp_path / "results.json"
    arguments = ["--suite", "overlap", "--case", "mlp 2048", "--scale", "64", "--rounds", "1"]
    assert sharded.main([*arguments, "--calls", "1", "--out", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    names = ["", " gradients", " all-reduce"]
    layers = ["mlp", "gated mlp"]
    assert [row["case"] for row in rows] == [
        f"{layer} 2048x8192x28672{name}" for layer in layers for name in names
    ]
    assert all(row["off_us"] > 0 and row["ratio"] > 0 for row in rows)


def test_a_sharded_program_that_is_wrong_is_not_timed(monkeypatch, tmp_path):
    program = sharded.SUITES["sharded"]["rows of x"]
    off = dataclasses.replace(program, ours=lambda x, w: 1.1 * program.ours(x, w))
    monkeypatch.setitem(sharded.SUITES["sharded"], "rows of x", off)
    monkeypatch.setattr(sharded.jax, "devices", lambda: jax.local_devices(backend="cpu"))
    path = tmp_path / "results.json"
    arguments = ["--case", "rows of x", "--scale", "64", "--rounds", "1", "--out", str(path)]
    assert sharded.main(arguments) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert "differs from XLA's result" in row["error"]


def test_the_page_of_speeds_is_up_to_date():
    assert speed_page.PAGE.read_text() == speed_page.page(), "python -P benchmarks/speed_page.py"
