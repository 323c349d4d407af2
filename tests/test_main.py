"""The command ``jax-tcgemm``, the self-test behind it, and the timer."""

import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tcgemm
from jax_tcgemm import _core, cli
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.tools import benchmarking, selftest
from jax_tcgemm.tools.chain import argument_set_count

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.any_jax
@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_whole_report(platform, capsys):
    status = cli.main(["--seed", "3", "--no-speed"])
    captured = capsys.readouterr()
    assert status == 0, captured.out
    lines = captured.out.splitlines()
    assert lines[0].split() == ["jax_tcgemm:", jax_tcgemm.__version__]
    assert lines[-1] == "OK"
    for words in ("jax, jaxlib:", "NVIDIA driver:", "device:", "kernels built:", "custom calls:"):
        assert any(line.startswith(words) for line in lines), words
    assert all(target in captured.out for target in _core.registrations())
    assert f"({platform})" in captured.out
    named = {row.name for row in kernel_table.CONFIGS if row.goes_by_name}
    count = selftest.PROBLEMS_PER_CONFIG * len(named & set(_core.kernel_names()))
    if platform == "cpu":  # a dozen for each algorithm
        count = 12 * len(selftest.INPUT_DTYPES)
    assert f"{count} of {count} problems right" in lines
    # Without a terminal it prints some plain lines and no control characters.
    assert captured.err.splitlines()
    assert "\r" not in captured.err


def one_row(monkeypatch):
    monkeypatch.setattr(kernel_table, "CONFIGS", kernel_table.CONFIGS[:1])


def test_a_wrong_result_is_reported_and_fails(monkeypatch, capsys):
    one_row(monkeypatch)
    right = selftest.gemm
    monkeypatch.setattr(
        selftest, "gemm", lambda *args, **kw: right(*args, **kw).at[..., 0, 0].add(1)
    )
    assert cli.main(["--no-speed", "--seed", "0"]) == 1
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == "FAILED"
    assert f"WRONG: config={kernel_table.CONFIGS[0].name}, batch=" in output


def test_an_exception_is_reported_and_fails(monkeypatch, capsys):
    one_row(monkeypatch)

    def broken(*args, **kwargs):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(selftest, "gemm", broken)
    assert cli.main(["--no-speed"]) == 1
    assert "RuntimeError: launch failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "config", [row for row in kernel_table.CONFIGS if row.goes_by_name], ids=lambda row: row.name
)
def test_problems_fit_their_row_and_can_be_drawn_again(config):
    problems = [
        selftest.draw_problem(config, np.random.default_rng(seed), plain=False)
        for seed in (1, 1, 2)
    ]
    assert problems[0] == problems[1] != problems[2]
    for problem in problems:
        assert min(problem.m, problem.n, problem.k) >= 1
        if config.copies_whole_chunks:
            leading = (problem.m, problem.n, problem.k)
            assert not any(extent * config.element_bytes % 16 for extent in leading)


@pytest.mark.parametrize("algorithm", selftest.INPUT_DTYPES)
def test_the_criterion_refuses_an_error_of_a_few_roundings(algorithm, monkeypatch):
    config = kernel_names.for_algorithm(algorithm)[0]
    problem = selftest.draw_problem(config, np.random.default_rng(0), plain=True)
    assert selftest.check(problem, use_config=False) is None
    right = selftest.gemm
    # Roundings of the accumulator weigh more if it is no wider than the result.
    roundings = 6 if algorithm in ("BF16_BF16_F32", "F16_F16_F32") else 100
    factor = 1 + roundings * float(jnp.finfo(selftest.INPUT_DTYPES[algorithm]).eps)
    monkeypatch.setattr(
        selftest,
        "gemm",
        lambda *args, **kw: (right(*args, **kw) * factor).astype(kw["preferred_element_type"]),
    )
    assert "is above" in (selftest.check(problem, use_config=False) or "")
    monkeypatch.setattr(selftest, "gemm", lambda *args, **kw: right(*args, **kw) * jnp.nan)
    assert "nan" in (selftest.check(problem, use_config=False) or "")


def test_gated_rows_are_held_against_both_products(monkeypatch):
    config = next(row for row in kernel_table.CONFIGS if row.gated)
    problem = selftest.draw_problem(config, np.random.default_rng(0), plain=False)
    assert selftest.check(problem, use_config=False) is None
    right = selftest.gated_gemm
    monkeypatch.setattr(
        selftest, "gated_gemm", lambda x, w, v, **options: right(x, w, w, **options)
    )
    assert "is above" in (selftest.check(problem, use_config=False) or "")


@pytest.mark.parametrize("arguments", [["-m", "jax_tcgemm", "--help"]])
def test_runs_in_the_clone(arguments):
    # -P keeps the clone's folder, which has only the Python sources, off the path.
    result = subprocess.run(
        [sys.executable, "-P", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: jax-tcgemm")


def test_timer_orders_and_interleaves():
    calls = []

    def slow(x):
        jax.debug.callback(lambda: (calls.append("slow"), time.sleep(0.02)))
        return x + 1

    def fast(x):
        jax.debug.callback(lambda: calls.append("fast"))
        return x + 1

    sets = [(jnp.full((4,), i),) for i in range(2)]
    timings = benchmarking.time_interleaved(
        {"slow": slow, "fast": fast}, sets, reps=4, block=2, method="wall"
    )
    jax.effects_barrier()
    assert set(timings) == {"slow", "fast"}
    assert all(len(t.seconds) == 4 and t.method == "wall" for t in timings.values())
    # The competitors take turns: neither runs all its samples before the other starts.
    assert calls.index("fast") < len(calls) - calls[::-1].index("slow")
    assert timings["fast"].median > 0


def test_timing_statistics():
    timing = benchmarking.Timing((1.0, 2.0, 3.0, 4.0, 100.0), "wall")
    assert timing.median == 3.0
    assert timing.spread == pytest.approx(2 / 3)
    assert benchmarking.Timing((1.0,), "wall").spread == 0.0


@pytest.mark.parametrize(
    ("functions", "sets", "keywords"),
    [({}, [()], {}), ({"f": abs}, [], {}), ({"f": abs}, [(1.0,)], {"reps": 0})],
)
def test_timer_refuses_what_it_cannot_time(functions, sets, keywords):
    with pytest.raises(ValueError, match="at least"):
        benchmarking.time_interleaved(functions, sets, **keywords)


def test_argument_sets_outgrow_the_cache_within_the_limit():
    assert argument_set_count(1) == 16
    assert argument_set_count(2**40) == 1
    size = 40 * 2**20
    assert argument_set_count(size) * size >= 128 * 2**20


@pytest.mark.gpu
def test_timer_reads_kernel_times():
    x = jax.random.normal(jax.random.key(0), (2048, 2048), jnp.bfloat16)
    timings = benchmarking.time_interleaved({"jnp": jnp.matmul}, [(x, x), (x, x.T)], reps=4)
    assert timings["jnp"].method == "cupti"
    # 17 GFLOP: every GPU needs less than a second and more than a microsecond.
    assert 1e-6 < timings["jnp"].median < 1
