"""Times by CUDA events: how turns are queued, and how the marks are read."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from jax_tcgemm import _core
from jax_tcgemm.tools import stopwatch
from jax_tcgemm.tools.chain import Chain


class FakeStream:
    """A device's stream, on which each run of ``name`` takes the seconds in ``times``."""

    def __init__(self, monkeypatch, times):
        self.log = []
        self.times = times
        self.turns = []
        monkeypatch.setattr(stopwatch, "_marked", lambda device: self.device)
        monkeypatch.setattr(_core, "open_gates", lambda ordinal, count: self.log.append(count))
        named = lambda ordinal, gate, config: self.log.append((gate, config))  # noqa: E731
        monkeypatch.setattr(_core, "configure_gate", named)
        monkeypatch.setattr(_core, "stopwatch_seconds", self.seconds)
        self.device = stopwatch._Device(0, self.gate, self.mark)

    def gate(self):
        self.log.append("gate")
        self.turns.append([])

    def mark(self):
        self.log.append("mark")
        self.turns[-1].append(self.running)

    def chain(self, name, sets):
        def run(*_):
            self.log.append(name)
            self.running = self.times[name] * sets
            return jnp.zeros(())

        return Chain(run, [()] * sets, one_by_one=True)

    def seconds(self, ordinal):
        found, self.turns = self.turns, []
        return found


def test_turns_are_queued_behind_gates(monkeypatch):
    stream = FakeStream(monkeypatch, {"x": 1.0, "y": 2.0})
    chains = {name: stream.chain(name, 3) for name in "xy"}
    timings = stopwatch.time_chains(chains, None, reps=2, block=2)
    x, y = (["gate", *([name] * 3 + ["mark"]) * 2, i + 1] for i, name in enumerate("xy"))
    assert stream.log == [*x, *y]
    assert {name: timing.seconds for name, timing in timings.items()} == {
        "x": (1.0, 1.0),
        "y": (2.0, 2.0),
    }
    assert {timing.method for timing in timings.values()} == {"events"}
    again = stopwatch.time_chains(chains, None, reps=3, block=1)
    assert [count for count in stream.log if isinstance(count, int)] == list(range(1, 9))
    assert len(again["x"].seconds) == 3


def test_gates_name_what_calls_behind_them_take(monkeypatch):
    stream = FakeStream(monkeypatch, {"x": 1.0, "y": 2.0})
    x, y = stream.chain("x", 1), stream.chain("y", 1)
    chains = {"x": x, "row": dataclasses.replace(y, config="row")}
    stopwatch.time_chains(chains, None, reps=1, block=1)
    assert stream.log == ["gate", "x", "mark", 1, (2, "row"), "gate", "y", "mark", 2]
    stopwatch.run_once(chains["row"], None)
    assert stream.log[-4:] == [(3, "row"), "gate", 3, "y"]


def test_marks_of_an_interrupted_measurement_do_not_count(monkeypatch):
    stream = FakeStream(monkeypatch, {"x": 1.0})
    stream.turns = [[7.0]]
    timings = stopwatch.time_chains({"x": stream.chain("x", 1)}, None, reps=1, block=1)
    assert timings["x"].seconds == (1.0,)


def test_lost_marks_are_an_error(monkeypatch):
    stream = FakeStream(monkeypatch, {"x": 1.0})
    monkeypatch.setattr(stream, "mark", lambda: None)
    stream.device.mark = stream.mark
    with pytest.raises(RuntimeError, match="not all marks"):
        stopwatch.time_chains({"x": stream.chain("x", 1)}, None, reps=1, block=1)


def test_as_much_is_queued_as_jax_queues(monkeypatch):
    """Behind a closed gate no program ends, and JAX blocks at the 33rd."""
    stream = FakeStream(monkeypatch, {"x": 1.0})
    stopwatch.time_chains({"x": stream.chain("x", 10)}, None, reps=4, block=4)
    queued = [sum(x in ("x", "mark", "gate") for x in turn) for turn in _turns_of(stream.log)]
    assert queued == [1 + 2 * 11] * 2


def _turns_of(log):
    starts = [i for i, x in enumerate(log) if x == "gate"]
    return [log[i:j] for i, j in zip(starts, [*starts[1:], None], strict=True)]


def test_the_gap_between_programs_is_taken_off(monkeypatch):
    stream = FakeStream(monkeypatch, {"x": 1.0, "y": 0.25})
    stream.device.gap = 0.25
    chains = {name: stream.chain(name, 1) for name in "xy"}
    timings = stopwatch.time_chains(chains, None, reps=1, block=1)
    assert timings["x"].seconds == (0.75,)
    assert timings["y"].seconds == (stopwatch._SMALLEST_KERNEL,)


def test_nothing_was_marked_on_a_cpu():
    assert _core.stopwatch_seconds(0) == []
    _core.open_gates(0, 1)
