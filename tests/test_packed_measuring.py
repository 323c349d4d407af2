"""How products with packed weights are measured: competitors and operands. Without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from packed_forms import FORMS, SIZES, experts, plain, rows, weight, with_function
from tuned_calls import H200, only

from jax_tcgemm import _core, ragged_dot
from jax_tcgemm.lowering import packed_problem
from jax_tcgemm.tools.benchmarking import Timing
from jax_tcgemm.transforms import measure as measure_module
from jax_tcgemm.transforms import race as race_module
from jax_tcgemm.transforms.numbers import Numbers, operand_sets, unread_size

pytestmark = [pytest.mark.any_jax, pytest.mark.usefixtures("all_kernels", "on_an_h200")]


@pytest.mark.parametrize("form", FORMS)
def test_competitors_are_compiled_and_timed(monkeypatch, form):
    """All of them run on XLA here, timed by wall time."""
    monkeypatch.setattr(_core, "device_properties", lambda ordinal: H200)
    monkeypatch.setattr(race_module, "argument_set_count", lambda size: 1)
    k, n = 512, 64
    f, (x, w), _ = FORMS[form]
    small = weight(n, k, w.qtype, 128, w.values.shape[:-4])
    product = only(f, rows(*x.shape[:-1], k=k), small)
    seen = set()
    enter = race_module.Race.enter

    def look(race, configs):
        enter(race, configs)
        seen.update(race._chains)

    monkeypatch.setattr(race_module.Race, "enter", look)
    found = measure_module.measure(product).entry
    names = packed_problem.candidates(product.problem)
    assert seen == {"untuned", "xla", *names[1:]}
    assert 0 < found.seconds <= found.untuned_seconds < 1
    assert found.config in (None, "xla", *names[1:])


def test_with_little_time_xla_is_not_asked(monkeypatch):
    product = only(plain, rows(), weight())
    names = packed_problem.candidates(product.problem)
    times = dict.fromkeys(names, 9.0) | {"untuned": 8.0, names[2]: 7.0}

    def timed(race, reps, block):
        return {x: Timing((1e-6 * times[x],) * 4, "events") for x in race._chains}

    entered = []

    def enter(race, configs):
        entered.extend(configs)
        race._chains |= dict.fromkeys(configs)

    monkeypatch.setattr(_core, "device_properties", lambda ordinal: H200)
    monkeypatch.setattr(race_module.Race, "enter", enter)
    monkeypatch.setattr(race_module.Race, "timed", timed)
    monkeypatch.setattr(race_module, "operand_sets", lambda *_: [])
    found = measure_module.measure(product, patience=5.0).entry
    assert found.config == names[2]
    assert found.xla_seconds is None
    assert entered == ["untuned", *names[1:6]]
    assert measure_module.measure_while_lowering(only(with_function, rows(), weight()), 5.0) is None


def test_operands_of_experts():
    product = only(experts, rows(5, k=512), weight(64, 512, batch=(4,)))
    ((x, values, scales, sizes),) = operand_sets(product, Numbers(), 1)
    assert [y.shape for y in (x, values, scales, sizes)] == [y.shape for y in product.types]
    np.testing.assert_array_equal(np.sort(sizes), [1, 1, 1, 2])
    counts = np.bincount(np.asarray(values).ravel(), minlength=256)
    assert counts[[127, 255]].tolist() == [0, 0]
    assert np.delete(counts, [127, 255]).min() > 0.5 * counts.mean()
    assert unread_size(product) == 0
    few = only(lambda x, w: ragged_dot(x, w, SIZES), rows(1, k=512), weight(64, 512, batch=(4,)))
    assert unread_size(few) == 3 * (values.nbytes + scales.nbytes) // 4
