"""The timer's CUPTI session: how timers take turns, and how its record is divided."""

import jax.numpy as jnp
import pytest

from jax_tcgemm.tools import benchmarking
from jax_tcgemm.tools.chain import Chain, compile_chain


def kernels(*names):
    return [(name, float(index)) for index, name in enumerate(names)]


def test_a_session_is_divided_at_its_markers():
    record = kernels("mark", "a", "a", "mark", "b", "c", "b", "c", "mark", "a", "a")
    samples = benchmarking.divide_kernels(record, ["x", "y", "x"], block=2)
    assert samples == {"x": [[1], [2], [9], [10]], "y": [[4, 5], [6, 7]]}


@pytest.mark.parametrize(
    "record",
    [
        [],
        kernels("mark", "a", "a"),
        kernels("mark", "a", "a", "mark"),
        kernels("mark", "a", "a", "mark", "b"),
        kernels("mark", "a", "a", "mark", "a", "b"),
        kernels("mark", "a", "a", "mark", "a", "a", "a"),
    ],
)
def test_a_session_that_does_not_divide_is_refused(record):
    with pytest.raises(RuntimeError, match=r"turns|times the same"):
        benchmarking.divide_kernels(record, ["x", "y"], block=2)


class FakeCupti:
    """A fake of the extension of JAX's profiler; every run of a chain is one kernel."""

    def __init__(self, monkeypatch):
        self.record = []
        self.mosaic_gpu_lib = self
        self._mosaic_gpu_ext = self
        call = Chain.__call__
        monkeypatch.setattr(
            Chain,
            "__call__",
            lambda chain: (self.record.append((str(id(chain)), 3.0)), call(chain))[1],
        )
        turns = benchmarking.turns

        def marked_turns(*arguments):
            for name in turns(*arguments):
                self.record.append(("mark", 0.5))
                yield name

        monkeypatch.setattr(benchmarking, "turns", marked_turns)
        monkeypatch.setattr(benchmarking, "_profiler", lambda: self)

    def _cupti_init(self):
        self.record.clear()

    def _cupti_get_timings(self, finalize):
        return self.record


def chains_of(names):
    sets = [(jnp.ones(3),), (jnp.zeros(3),)]
    return {name: compile_chain(jnp.negative, sets) for name in names}


def test_one_session_times_all_chains(monkeypatch):
    FakeCupti(monkeypatch)
    timings = benchmarking.time_chains(chains_of("xy"), reps=5, block=2, method="cupti")
    assert set(timings) == {"x", "y"}
    assert all(timing.seconds == (1.5e-3,) * 6 for timing in timings.values())
    # The fake runs one kernel for a chain of two calls.
    assert all(timing.kernels == 0.5 for timing in timings.values())


def test_without_one_session_there_is_one_for_each_block(monkeypatch):
    cupti = FakeCupti(monkeypatch)
    monkeypatch.setattr(cupti, "_cupti_get_timings", lambda finalize: [])
    monkeypatch.setattr(benchmarking, "_cupti_samples", lambda chain, count: [2e-3] * count)
    with pytest.warns(UserWarning, match="one CUPTI session for each block"):
        timings = benchmarking.time_chains(chains_of("xy"), reps=4, method="cupti")
    assert timings["y"].seconds == (1e-3,) * 4


def test_time_chains_goes_on_for_as_long_as_it_is_told():
    short = benchmarking.time_chains(chains_of("x"), reps=1, block=1, method="wall")
    long = benchmarking.time_chains(chains_of("x"), reps=1, block=1, seconds=0.05, method="wall")
    assert len(short["x"].seconds) == 1
    assert len(long["x"].seconds) > 1
