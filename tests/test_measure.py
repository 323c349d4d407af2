"""How a product is measured: the competitors, when XLA takes part, and who wins."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import bf16
from tuned_calls import (
    E4M3,
    FEW_ROWS,
    H200,
    KIND,
    OTHER,
    ROW,
    SIZES,
    SQUARE,
    configs,
    entry,
    f,
)

from jax_tcgemm import Tunings, _core, gated_gemm, gemm, ragged_dot
from jax_tcgemm.tools.benchmarking import Timing
from jax_tcgemm.transforms import decision
from jax_tcgemm.transforms import measure as measure_module
from jax_tcgemm.transforms import race as race_module
from jax_tcgemm.transforms import tune as tune_module
from jax_tcgemm.transforms.candidates import (
    built_candidates,
    candidates,
    relative,
    rows_of_relative,
)
from jax_tcgemm.transforms.numbers import Numbers
from jax_tcgemm.transforms.roofline import least_seconds

pytestmark = [pytest.mark.any_jax, pytest.mark.usefixtures("all_kernels", "on_an_h200")]

SMALL = bf16(128, 128), bf16(128, 128)


@pytest.mark.parametrize(
    ("f", "arrays"),
    [
        (lambda a, b: gemm(a, b, bias=b[0], activation="relu"), SMALL),
        (lambda a, b: gemm(a, b, b, preferred_element_type="float32"), SMALL),
        (lambda a, b: gated_gemm(a, b, b), SMALL),
        (lambda a, b: ragged_dot(a, b[None], SIZES[:1]), SMALL),
        (lambda a, b: gemm(a, b), (jnp.zeros((3, 5, 7)), jnp.zeros((7, 9)))),
        (lambda a, b: gemm(a, b, epilogue=jnp.sin), SMALL),
        (lambda a, b: gemm(a, b, a_scale=2.0), FEW_ROWS),
        (
            lambda a, b: ragged_dot(a, b[None], SIZES[:1], epilogue=jnp.sin),
            (jnp.zeros((64, 32), E4M3), jnp.zeros((32, 64), E4M3)),
        ),
    ],
)
def test_competitors_are_compiled_and_timed(monkeypatch, f, arrays):
    # All of them run on XLA here, timed by wall time.
    monkeypatch.setattr(_core, "device_properties", lambda ordinal: H200)
    (product,) = tune_module.find_products(f, *arrays)
    found = measure_module.measure(product).entry
    assert 0 < min(found.seconds, found.untuned_seconds, found.xla_seconds) < 1
    assert found.seconds <= found.untuned_seconds or found.config == "xla"
    named = {None, "xla", *candidates(product, H200), *built_candidates(product, H200)}
    assert found.config in named
    assert len(named) >= 3 or not _core.kernel_names()


STEADY = [1.0] * 4


def timing(seconds):
    return Timing(tuple(seconds), "cupti")


def decided(first, second=None, **lead):
    timings = [{x: timing(y) for x, y in block.items()} for block in (first, second or first)]
    return decision.decided(timings, decision.Lead(**lead))


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([0.97] * 4, True),
        ([0.99] * 4, False),
        ([0.4, 0.5, 0.5, 0.6], True),
        ([0.8, 0.97, 0.97, 1.2], False),
    ],
)
@pytest.mark.parametrize("name", ["xla", ROW])
def test_what_is_taken_untuned_stays_unless_another_is_faster_by_more_than_noise(
    times, expected, name
):
    assert decided({"untuned": STEADY, name: times}) == (name if expected else "untuned", True)


def test_a_row_stays_unless_xla_is_faster_by_more_than_noise():
    times = {"untuned": STEADY, ROW: [0.9] * 4, OTHER: [0.91] * 4}
    leads = {"share": 0.02}, {"share": 0.05}, {"seconds": 0.02}, {"seconds": 0.04}
    cases = (0.895, {}), (0.8, {}), *((0.92, lead) for lead in leads)  # XLA's time, and its lead
    found = [decided(times | {"xla": [time] * 4}, **lead)[0] for time, lead in cases]
    assert found == [ROW, "xla", ROW, "xla", ROW, "xla"]


def test_two_blocks_agree_or_nothing_changes():
    fast, slow = {"untuned": STEADY, ROW: [0.9] * 4}, {"untuned": STEADY, ROW: [1.0] * 4}
    assert decided(fast, slow) == ("untuned", False)
    assert decided(slow, fast) == ("untuned", False)
    spoilt = {"untuned": STEADY, "xla": [1.5] * 4}
    assert decided({"untuned": STEADY, "xla": [0.6] * 4}, spoilt) == ("untuned", False)
    # All of them are slower in one block, at the power limit.
    assert decided(fast, {name: [2 * x for x in y] for name, y in fast.items()}) == (ROW, True)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (STEADY, True),
        ([0.98] * 4, True),
        ([0.92, 0.97, 0.99, 1.04], False),
        ([0.6, 0.7, 0.7, 0.8], True),
        ([1.3, 1.4, 1.4, 1.5], True),
    ],
)
@pytest.mark.parametrize("name", ["xla", ROW])
def test_more_samples_are_taken_where_they_may_change_the_choice(times, expected, name):
    block = {"untuned": timing(STEADY), name: timing(times)}
    assert decision.is_clear([block, block]) == expected
    # This many equal samples are enough.
    assert decision.is_clear([block] * 256)


F16 = jax.ShapeDtypeStruct((512, 768), jnp.float16), jax.ShapeDtypeStruct((768, 1024), jnp.float16)
BF16 = tuple(jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in F16)


@pytest.mark.parametrize(
    ("f", "arrays", "op"),
    [
        (lambda a, b: gemm(a, b), F16, "gemm"),
        (lambda a, b: gemm(a, b, bias=b[0], activation="gelu"), F16, "gemm"),
        (lambda a, b: gemm(a, b, bias=b[0], activation="gelu"), BF16, "gemm"),
        (lambda a, b: gemm(a, b, epilogue=jnp.sin), BF16, "gemm"),
        (lambda a, b: gated_gemm(a, b, b), F16, "gemm"),
        (lambda a, b: gated_gemm(a, b, b, epilogue=jnp.less), BF16, "gemm"),
        (lambda a, b: ragged_dot(a, b[None], SIZES[:1]), F16, "ragged_dot"),
        (lambda a, b: ragged_dot(a, b[None], SIZES[:1], epilogue=jnp.sin), BF16, "ragged_dot"),
    ],
)
def test_rows_that_are_to_be_compiled_have_relatives_in_the_build(f, arrays, op):
    (product,) = tune_module.find_products(f, *arrays)
    plain = relative(product)
    assert plain.primitive == op
    assert [x.dtype for x in plain.types[:2]] == [jnp.bfloat16] * 2
    assert [x.shape for x in plain.types[:2]] == [x.shape for x in product.types[:2]]
    names = built_candidates(plain, H200)
    assert names
    possible = rows_of_relative(product, names, H200)
    assert possible
    for name in possible:
        with Tunings({(KIND, product.problem): entry(name)}):
            assert configs(f, *arrays) == [name]


LONG = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 8192), (8192, 1024)))


@pytest.mark.parametrize(
    ("f", "arrays"),
    [
        (lambda a, b: gemm(a, b, epilogue=jnp.sin), LONG),  # related rows split k
        (lambda a, b: gemm(a, b, epilogue=jnp.sin, preferred_element_type="float32"), BF16),
        (lambda a, b: gated_gemm(a, b, b), F16),
        (lambda a, b: ragged_dot(a, b[None], SIZES[:1], epilogue=jnp.sin), LONG),
        (lambda a, b: gemm(a, b, precision="BF16_BF16_F32"), F16),
        (lambda a, b: gemm(a, b, precision="F16_F16_F32"), F16),
        (lambda a, b: gemm(a, b, a_scale=2.0), FEW_ROWS),
    ],
)
def test_what_is_timed_can_compute_the_product(monkeypatch, f, arrays):
    monkeypatch.setattr(_core, "device_properties", lambda ordinal: H200)
    (product,) = tune_module.find_products(f, *arrays)

    def fastest(race, plain):
        return built_candidates(plain, H200)

    monkeypatch.setattr(race_module.Race, "_fastest_relatives", fastest)
    monkeypatch.setattr(race_module, "operand_sets", lambda *_: [])
    names = race_module.Race(product, Numbers(), threading.Event()).rows()
    assert names
    for name in names:
        assert "simt" not in name
        with Tunings({(KIND, product.problem): entry(name)}):
            assert configs(f, *arrays) == [name]


def test_products_of_the_build_and_of_8_bits_have_none():
    for g, arrays in ((f, BF16), (lambda a, b: gemm(a, b, a_scale=2.0), FEW_ROWS)):
        (product,) = tune_module.find_products(g, *arrays)
        assert relative(product) is None


PEAKS = {**H200, "clock_rate": 1.98e9, "memory_bandwidth": 4.9e12}


@pytest.mark.parametrize(
    ("m", "n", "k", "us"),
    # Products near a limit of an H200, with the time it took.
    [(4096, 4096, 4096, 173.4), (64, 28672, 4096, 56.9), (1, 28672, 4096, 55.3)],
)
def test_no_kernel_is_faster_than_the_gpu(m, n, k, us):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n))]
    (product,) = tune_module.find_products(f, *arrays)
    size = 2 * (m * k + k * n + m * n)
    assert race_module._bytes(product) == size
    assert 0.85 * us < 1e6 * least_seconds(product, size, PEAKS) < us
    assert least_seconds(product, size, H200) == 0


def race_of(monkeypatch, m=8):
    monkeypatch.setattr(_core, "device_properties", lambda ordinal: PEAKS)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, 1024), (1024, 6144))]
    (product,) = tune_module.find_products(f, *arrays)
    return race_module.Race(product, Numbers(), threading.Event())


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        (20e-6, True),
        (1.9e-6, False),
        (4.0e-6, False),  # about a launch plus reading the operands
    ],
)
def test_when_xla_is_asked(monkeypatch, best, expected):
    race = race_of(monkeypatch)
    race._chains = dict.fromkeys(["untuned", ROW])
    race._least = {"untuned": 1.2 * best, ROW: best, "gone": 1e-6}
    assert race.asks_xla() == expected


@pytest.mark.parametrize(
    ("m", "untuned", "cublas", "xla", "entered", "best"),
    [
        (8, 4.0, 4.1, None, ["untuned"], None),  # about a launch plus reading the operands
        (8, 5.0, 6.0, None, ["untuned", "cublas"], None),
        (8, 5.2, 5.05, None, ["untuned", "cublas", ROW], ROW),
        (8, 8.0, 10.0, None, ["untuned", "cublas", ROW], ROW),  # the GPU could do better
        (8, 4.94, None, None, ["untuned", ROW], None),  # XLA could not compile it
        (8, 8.0, 4.5, 4.5, ["untuned", "xla", ROW], "xla"),
        (8, 8.0, 4.5, 7.0, ["untuned", "xla", ROW], ROW),  # XLA would take another kernel
        (65, 8.0, 4.5, None, ["untuned", "cublas", ROW], "xla"),  # XLA's is no slower
        (569, 16.0, 18.0, 7.0, ["untuned", "xla", ROW], "xla"),  # so it would here
        (569, 13.0, 18.0, 4.5, ["untuned", "cublas", ROW], ROW),  # not far from the GPU's limit
        (570, 16.0, 18.0, 7.3, ["untuned", "xla", ROW], ROW),  # not 5 % and 2 us
    ],
)
def test_who_is_asked_with_little_time(monkeypatch, m, untuned, cublas, xla, entered, best):
    """With few seconds left, nothing is compiled that hardly matters."""
    times = {"untuned": untuned, "cublas": cublas, "xla": xla, ROW: 4.9}

    def enter(race, configs):
        race._chains |= {name: None for name in configs if times[name] is not None}

    def timed(race, reps, block):
        timed_at.append([*race._chains])
        return {x: Timing((1e-6 * (times[x] or 0.0),) * 4, "events") for x in race._chains}

    timed_at: list[list[str]] = []
    monkeypatch.setattr(race_module.Race, "enter", enter)
    monkeypatch.setattr(race_module.Race, "timed", timed)
    monkeypatch.setattr(race_module.Race, "rows", lambda race: [ROW])
    product = race_of(monkeypatch, m)._product
    entry = measure_module.measure(product, patience=5.0).entry
    assert set(timed_at[-1]) == set(entered)
    assert entry.config == best
    of_xla = cublas if "cublas" in entered else xla if "xla" in entered else None
    assert entry.xla_seconds == (of_xla and pytest.approx(1e-6 * of_xla))


@pytest.mark.parametrize(
    ("rows", "columns", "batch", "seconds", "is_measured"),
    [
        (8, 96, 3, 5.0, False),
        (8, 96, 3, 90.0, True),
        (65, 96, 3, 5.0, True),
        (96, 8, 3, 5.0, True),
        (1, 96, 3, 5.0, True),
        (8, 96, 1, 5.0, True),
    ],
)
def test_batches_of_few_rows_take_the_models_choice(
    monkeypatch, rows, columns, batch, seconds, is_measured
):
    """The model's choice is nearly as fast as the fastest row; time is left for other products."""
    monkeypatch.setattr(measure_module, "measure", lambda *_, **__: "measured")
    a, b = jnp.zeros((batch, rows, 64), jnp.bfloat16), jnp.zeros((batch, 64, columns), jnp.bfloat16)
    (product,) = tune_module.find_products(gemm, a, b)
    found = measure_module.measure_while_lowering(product, seconds)
    assert found == ("measured" if is_measured else None)


@pytest.mark.parametrize(
    ("rows", "k", "expected"),
    [(65, 4096, True), (64, 512, False), (16384, 2048, True), (16384, 4096, False)],
)
def test_functions_that_products_do_not_hide_are_measured(monkeypatch, rows, k, expected):
    def both(a, b):
        return gemm(a, b, epilogue=jnp.tanh), gated_gemm(a, b, b, epilogue=jnp.multiply)

    monkeypatch.setattr(measure_module, "measure", lambda *_, **__: "measured")
    products = tune_module.find_products(both, bf16(rows, k), bf16(k, 2048))
    found = [measure_module.measure_while_lowering(x, 5.0) for x in products if x.spec.function]
    assert found == ["measured" if expected else None] * 2


def test_a_candidate_that_fails_is_left_out(monkeypatch):
    monkeypatch.setattr(_core, "device_properties", lambda ordinal: H200)
    for name in ("candidates", "built_candidates"):
        monkeypatch.setattr(race_module, name, lambda *_: ["no row", ROW])
    (product,) = tune_module.find_products(f, *SQUARE)
    assert measure_module.measure(product).entry.config in (None, "xla", ROW)


def test_products_are_measured_without_a_mesh_or_options(monkeypatch):
    seen = []

    def look(stop) -> None:
        seen.append((jax.sharding.get_abstract_mesh().empty, jax.config.jax_debug_nans))

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), auto, devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh), jax.debug_nans(True):
        measure_module.in_a_thread(look)
    assert seen == [(True, False)]


def test_numbers_are_normal_and_others_each_time():
    numbers = Numbers()
    kinds = [jax.ShapeDtypeStruct(s, d) for s in ((64, 128), (300, 7)) for d in ("float32", "f2")]
    drawn = [np.asarray(numbers.take(x), np.float32) for x in kinds * 3]
    for values, x in zip(drawn, kinds * 3, strict=True):
        assert values.shape == x.shape
        assert abs(values.std() - 1) < 0.1
    assert len({values.tobytes() for values in drawn}) == len(drawn)
