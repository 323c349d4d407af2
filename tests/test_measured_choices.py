"""Products measured while a program is lowered: how often, how long, and what is kept."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import bf16
from tuned_calls import ARRAYS, H200, KIND, ROW, SQUARE, configs, entry, f, tuned

from jax_tcgemm import _core
from jax_tcgemm.transforms import measure as measure_module
from jax_tcgemm.transforms.numbers import Numbers
from jax_tcgemm.transforms.race import Race
from jax_tcgemm.transforms.tune import find_products
from jax_tcgemm.tuning import cache, lookup
from jax_tcgemm.tuning.lookup import Measured

pytestmark = pytest.mark.usefixtures("all_kernels", "on_an_h200")


def test_first_use_is_measured_once(monkeypatch):
    measured = []

    def measure(product, patience):
        # Measuring runs in a separate thread, since this thread is tracing and cannot run programs.
        measured.append(product)
        return Measured(entry(ROW), is_certain=True)

    monkeypatch.setattr(lookup, "measure", measure)
    assert configs(f, *ARRAYS) == [""]
    monkeypatch.setenv(lookup.SETTING, "tune")
    assert configs(f, *ARRAYS) == [ROW]
    assert configs(f, *ARRAYS) == [ROW]
    (product,) = measured
    assert cache.read(KIND, product.problem) == entry(ROW)
    assert cache.everything() == tuned(ROW)


@pytest.mark.parametrize("kept", [True, False])
def test_without_files_a_process_remembers(monkeypatch, capfd, kept):
    measured = []

    def measure(product, patience):
        measured.append(product)
        if not kept:
            raise MemoryError("RESOURCE_EXHAUSTED")
        return Measured(entry(ROW), is_certain=True)

    monkeypatch.setattr(lookup, "measure", measure)
    monkeypatch.setenv(lookup.SETTING, "tune")
    monkeypatch.setenv(cache.SETTING, "")
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    for _ in range(2):
        assert configs(f, *ARRAYS) == ([ROW] if kept else [""])
    assert len(measured) == 1
    said = "not kept in a file" if kept else "could not be measured: MemoryError"
    assert said in capfd.readouterr().err


def test_a_measurement_runs_programs_while_one_is_traced(monkeypatch):
    def measure(product, patience, stop):
        assert float(jax.jit(lambda x: x + 1)(jnp.float32(1))) == 2
        return Measured(entry(ROW), is_certain=True)

    monkeypatch.setattr(measure_module, "measure", measure)
    monkeypatch.setattr(lookup, "measure", measure_module.measure_while_lowering)
    monkeypatch.setenv(lookup.SETTING, "tune")
    assert configs(f, *ARRAYS) == [ROW]


def test_what_is_uncertain_is_not_kept_in_a_file(monkeypatch, capfd):
    monkeypatch.setattr(
        lookup, "measure", lambda product, patience: Measured(entry(ROW), is_certain=False)
    )
    monkeypatch.setenv(lookup.SETTING, "tune")
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    assert configs(f, *ARRAYS) == configs(f, *ARRAYS) == [ROW]
    assert len(cache.everything()) == 0
    assert "not kept in a file: its times scatter" in capfd.readouterr().err


def test_a_process_measures_within_its_budget(monkeypatch, capfd):
    def measure(product, patience):
        time.sleep(0.03)
        return Measured(entry(ROW), is_certain=True)

    monkeypatch.setattr(lookup, "measure", measure)
    monkeypatch.setenv(lookup.SETTING, "tune")
    monkeypatch.setenv(lookup.BUDGET_SETTING, "0.02")
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    assert configs(f, *ARRAYS) == [ROW]
    assert configs(f, *SQUARE) == [""]
    assert configs(f, *ARRAYS) == [ROW]
    assert capfd.readouterr().err.count("JAX_TCGEMM_TUNING_SECONDS=0.02 are spent") == 1
    monkeypatch.setenv(lookup.BUDGET_SETTING, "9")
    assert configs(f, *SQUARE) == [ROW]
    monkeypatch.setenv(lookup.BUDGET_SETTING, "long")
    with pytest.raises(ValueError, match="JAX_TCGEMM_TUNING_SECONDS='long' must be a number"):
        configs(f, bf16(8, 64), bf16(64, 8))


def test_a_thread_waits_for_another_measurement_and_goes_on(monkeypatch, capfd):
    begun, done = threading.Event(), threading.Event()

    def measure(product, patience):
        begun.set()
        assert done.wait(60)
        return Measured(entry(ROW), is_certain=True)

    monkeypatch.setattr(lookup, "measure", measure)
    monkeypatch.setattr(lookup, "_PATIENCE", 0.05)
    monkeypatch.setenv(lookup.SETTING, "tune")
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(configs, f, *ARRAYS)
        assert begun.wait(60)
        assert configs(f, *SQUARE) == [""]
        done.set()
        assert slow.result() == [ROW]
    assert "is not measured: another thread measures" in capfd.readouterr().err
    assert configs(f, *SQUARE) == [ROW]


def test_who_interrupts_a_measurement_ends_it(monkeypatch):
    ended = threading.Event()

    def measure(product, patience, stop):
        time.sleep(0.1)  # until the main thread waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if stop.wait(60):
            ended.set()
        raise MemoryError

    monkeypatch.setattr(measure_module, "measure", measure)
    monkeypatch.setattr(lookup, "measure", measure_module.measure_while_lowering)
    monkeypatch.setenv(lookup.SETTING, "tune")
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            configs(f, *ARRAYS)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert ended.wait(10)
    assert len(cache.everything()) == 0
    monkeypatch.setattr(
        lookup, "measure", lambda product, patience: Measured(entry(ROW), is_certain=True)
    )
    assert configs(f, *ARRAYS) == [ROW]


@pytest.mark.parametrize(
    ("peaks", "seconds", "expected"),
    [
        ({"clock_rate": 1.98e9, "memory_bandwidth": 4.9e12}, 1e-3, True),
        ({"clock_rate": 1.98e9, "memory_bandwidth": 4.9e12}, 1.9e-6, False),  # about a launch
        ({}, 1e-3, False),
    ],
)
def test_no_time_is_far_from_an_unknown_limit(monkeypatch, peaks, seconds, expected):
    """Otherwise XLA would autotune each medium product on GPUs that nobody measured."""
    monkeypatch.setattr(_core, "device_properties", lambda ordinal: H200 | peaks)
    (product,) = find_products(f, *SQUARE)
    race = Race(product, Numbers(), threading.Event())
    race._chains, race._least = {"untuned": None}, {"untuned": seconds}
    assert race.is_far(0.65) == expected
