"""Which products ``tune`` finds in a program, and how it measures them."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
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

from jax_tcgemm import Tunings, _core, gated_gemm, gemm, mlp, ragged_dot, tune
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.tools.benchmarking import Timing
from jax_tcgemm.transforms import measure as measure_module
from jax_tcgemm.transforms import tune as tune_module
from jax_tcgemm.transforms.candidates import built_candidates, candidates, relative, row_of
from jax_tcgemm.transforms.numbers import Numbers, operand_sets
from jax_tcgemm.transforms.roofline import least_seconds
from jax_tcgemm.tuning import tunings
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.lookup import Measured

pytestmark = pytest.mark.usefixtures("all_kernels", "on_an_h200")


def scanned(a, b):
    return jax.lax.scan(lambda x, _: (gemm(x, b), None), a, length=3)[0]


def branching(a, b):
    return jax.lax.cond(a.sum() > 0, lambda: gemm(a, b), lambda: gemm(a, b, activation="relu"))


def sharded(a, b):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), auto, devices=jax.devices("cpu")[:2])
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(
        lambda a, b: gemm(a, b), mesh=mesh, in_specs=(spec, None), out_specs=spec
    )
    return mapped(a, b)


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (f, ["gemm nn 256x256x256"]),
        (lambda a, b: f(a, b) + f(b, a), ["gemm nn 256x256x256"]),
        (scanned, ["gemm nn 256x256x256"]),
        (branching, ["gemm nn 256x256x256", "gemm nn 256x256x256 relu"]),
        (sharded, ["gemm nn 128x256x256"]),
        (
            jax.grad(lambda a, b: gemm(a, b, activation="silu").astype("float32").sum(), (0, 1)),
            ["gemm nn 256x256x256", "gemm nt 256x256x256", "gemm tn 256x256x256"],
        ),
        (
            jax.grad(jax.checkpoint(lambda a, b: mlp(a, b, None, b).astype("float32").sum())),
            [
                "gemm nn 256x256x256",
                "gemm nt 256x256x256",
                "gemm nt 256x256x256 gelu c",
            ],
        ),
        (lambda a, b: gated_gemm(a, b, b), ["gated nn 256x256x256 silu"]),
        (lambda a, b: ragged_dot(a, b[None], SIZES[:1]), ["ragged_m nn 256x256x256 1 groups"]),
        (lambda a, b: gemm(a, b, epilogue=jnp.sin), ["gemm nn 256x256x256 function"]),
        (
            lambda a, b: gated_gemm(a, b, b, epilogue=jnp.multiply),
            ["gated nn 256x256x256 function"],
        ),
        (lambda a, b: gemm(a, b, epilogue=jnp.sin, config=ROW), []),
        (lambda a, b: a + b, []),
        (lambda a, b: gemm(a, b, config=ROW), []),
    ],
)
def test_products_of_a_program(f, expected):
    found = {tunings.described(problem).replace(" bf16", "") for problem in problems(f, *SQUARE)}
    assert found == set(expected)


def test_products_of_a_jitted_function_and_of_types():
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARRAYS]
    jitted = jax.jit(lambda a, b, activation: gemm(a, b, activation=activation), static_argnums=2)
    (product,) = tune_module.find_products(jitted, *types, "relu")
    assert product.types == tuple(types)
    assert product.spec.activation == "relu"
    (again,) = tune_module.find_products(jitted, *types, "relu")  # nothing is kept that hides it
    assert again == product


def test_a_problem_is_known_by_what_its_time_depends_on():
    def only(f, *arrays):
        (problem,) = problems(f, *arrays)
        return problem

    base = only(f, *ARRAYS)
    # The same to a kernel.
    assert only(f, bf16(4, 64, 512), ARRAYS[1]) == base
    assert only(lambda a, b: gemm(a, b, alpha=1.0), *ARRAYS) == base
    scaled = [only(lambda a, b, x=x: gemm(a, b, alpha=x), *ARRAYS) for x in (0.5, 3.0)]
    assert scaled[0] == scaled[1]
    # Others.
    others = [
        only(f, bf16(257, 512), ARRAYS[1]),
        only(f, bf16(1, 256, 512), bf16(2, 512, 384)),
        only(lambda a, b: gemm(a, b, transpose_b=True), ARRAYS[0], bf16(384, 512)),
        only(lambda a, b: gemm(a, b, preferred_element_type="float32"), *ARRAYS),
        only(lambda a, b: gemm(a, b, bias=b[0]), *ARRAYS),
        only(lambda a, b: gemm(a, b, activation="gelu"), *ARRAYS),
        only(lambda a, b: gemm(a, b, activation="silu"), *ARRAYS),
        only(lambda a, b: gated_gemm(a, b, b), *ARRAYS),
        only(f, *(x.astype(jnp.float16) for x in ARRAYS)),
        only(f, *(x.astype(jnp.float32) for x in ARRAYS)),
        scaled[0],
    ]
    assert len({base, *others}) == 1 + len(others)


E4M3 = jnp.float8_e4m3fn
FEW_ROWS = jnp.zeros((16, 256), E4M3), jnp.zeros((256, 384), E4M3)
H200 = {"sm_count": 132, "shared_memory_per_block": 227 * 1024, "compute_capability": 90}


def test_functions_are_problems_of_their_own():
    found = [
        problems(lambda a, b, f=f: gemm(a, b, epilogue=f), *ARRAYS)[0]
        for f in (jnp.sin, jnp.cos, lambda z: (z, jnp.abs(z)))
    ]
    found += problems(lambda a, b: gemm(a, b, a_scale=2.0), *FEW_ROWS)
    found += problems(lambda a, b: gemm(a, b), *FEW_ROWS)
    assert len(set(found)) == 5


def test_a_measured_row_of_a_function_is_taken():
    g = lambda a, b: gemm(a, b, epilogue=jnp.sin)  # noqa: E731
    assert configs(g, *ARRAYS) == [""]
    with tuned(ROW, g):
        assert configs(g, *ARRAYS) == [ROW]
    with tuned("xla", g):
        assert configs(g, *ARRAYS) == []
    with tuned("sm90_f16_128x128x64_s6_c2x1_pingpong", g):  # of another type
        assert configs(g, *ARRAYS) == [""]


def test_few_rows_of_8_bits_may_be_measured_with_weights_either_way():
    g = lambda a, b: gemm(a, b, a_scale=2.0)  # noqa: E731
    (product,) = tune_module.find_products(g, *FEW_ROWS)
    names = candidates(product, H200)
    streamed = [name for name in names if kernel_names.by_name(name).streams_b]
    assert 1 <= len(streamed) < len(names) <= 12
    for name in (streamed[0], next(name for name in names if name not in streamed)):
        with tuned(name, g, FEW_ROWS):
            text = lowered(g, *FEW_ROWS)
            assert configs(g, *FEW_ROWS) == [name]
        assert ("jax_tcgemm_transpose" in text) == (name not in streamed)


def test_candidates_of_many_rows_are_of_one_way():
    arrays = [jax.ShapeDtypeStruct(shape, E4M3) for shape in ((8192, 4096), (4096, 4096))]
    (product,) = tune_module.find_products(lambda a, b: gemm(a, b, a_scale=2.0), *arrays)
    names = candidates(product, H200)
    assert not any(kernel_names.by_name(name).streams_b for name in names)


def test_operands_of_functions_are_drawn():
    key = jax.random.key(3)

    def dropped(z, mask, key):
        kept = jax.random.bernoulli(key, 0.5, z.shape)
        return jnp.where(mask & kept, z, 0)

    arrays = (*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 512), (512, 8192))), key)
    mask = jax.ShapeDtypeStruct((4096, 8192), jnp.bool_)

    def g(a, b, key, mask):
        return gemm(a, b, epilogue=dropped, epilogue_operands=(mask, key))

    (product,) = tune_module.find_products(g, *arrays, mask)
    (drawn,) = operand_sets(product, Numbers(), 1)
    assert [x.dtype for x in drawn] == [x.dtype for x in product.types]
    assert [x.shape for x in drawn] == [x.shape for x in product.types]


def test_rows_that_take_no_functions_are_not_taken_from_tunings():
    g = lambda a, b: gemm(a, b, epilogue=jnp.sin)  # noqa: E731
    for row in ("sm80_bf16_64x64x64_w2x2_s3", "sm90_bf16_64x64x64_s8_c1x1_skinny"):
        with tuned(row, g):
            assert configs(g, *ARRAYS) == [""]


def test_tune_needs_a_gpu():
    with pytest.raises(RuntimeError, match=r"tune measures kernels on a GPU; .* is cpu"):
        tune(f, *ARRAYS)


class _Gpu:
    platform, device_kind = "gpu", KIND


def test_tune_measures_each_product_within_its_budget(monkeypatch, capfd):
    measured = []

    def measure(product, stop):
        measured.append(product)
        return Measured(entry(ROW), is_certain=True)

    monkeypatch.setattr(tune_module, "default_device", lambda: _Gpu)
    monkeypatch.setattr(tune_module._core, "kernel_names", lambda: [ROW])
    monkeypatch.setattr(tune_module, "measure", measure)
    g = lambda a, b: gemm(gemm(a, b[:, :32]), b[:32])  # noqa: E731
    found = tune(g, *ARRAYS)
    assert len(found) == len(measured) == 2
    assert [product.types[1].shape for product in measured] == [(512, 32), (32, 384)]
    with found:
        assert configs(g, *ARRAYS) == [ROW, ROW]
    assert "tune: 1/2" in capfd.readouterr().err
    assert len(tune(g, *ARRAYS, budget=-1.0, progress=False)) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("f", "arrays"),
    [
        (lambda a, b: gemm(a, b, bias=b[0], activation="relu"), SQUARE),
        (lambda a, b: gemm(a, b, b, preferred_element_type="float32"), SQUARE),
        (lambda a, b: gated_gemm(a, b, b), SQUARE),
        (lambda a, b: ragged_dot(a, b[None], SIZES[:1]), SQUARE),
        (lambda a, b: gemm(a, b), (jnp.zeros((3, 5, 7)), jnp.zeros((7, 9)))),
        (lambda a, b: gemm(a, b, epilogue=jnp.sin), SQUARE),
        (lambda a, b: gemm(a, b, a_scale=2.0), FEW_ROWS),
        (
            lambda a, b: ragged_dot(a, b[None], SIZES[:1], epilogue=jnp.sin),
            (jnp.zeros((64, 32), E4M3), jnp.zeros((32, 64), E4M3)),
        ),
    ],
)
def test_competitors_are_compiled_and_timed(monkeypatch, f, arrays):
    # Here all of them are XLA's, by wall time.
    monkeypatch.setattr(_core, "device_properties", lambda ordinal: H200)
    (product,) = tune_module.find_products(f, *arrays)
    found = measure_module.measure(product).entry
    assert 0 < found.seconds <= found.untuned_seconds < 1
    assert 0 < found.xla_seconds < 1
    named = {None, "xla", *candidates(product, H200), *built_candidates(product, H200)}
    assert found.config in named
    assert len(named) >= 3 or not _core.kernel_names()


def timing(seconds):
    return Timing(tuple(seconds), "cupti")


STEADY = [1.0] * 4


def decided(first, second=None):
    """Of times of each competitor, in one block or in two."""
    blocks = [first, second or first]
    return measure_module.decided(
        [{name: timing(seconds) for name, seconds in block.items()} for block in blocks]
    )


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
    assert decided(times | {"xla": [0.89] * 4})[0] == ROW
    assert decided(times | {"xla": [0.8] * 4})[0] == "xla"


def test_two_blocks_agree_or_nothing_changes():
    fast, slow = {"untuned": STEADY, ROW: [0.9] * 4}, {"untuned": STEADY, ROW: [1.0] * 4}
    assert decided(fast, slow) == ("untuned", False)
    assert decided(slow, fast) == ("untuned", False)
    spoilt = {"untuned": STEADY, "xla": [1.5] * 4}
    assert decided({"untuned": STEADY, "xla": [0.6] * 4}, spoilt) == ("untuned", False)
    # All of them slower in one block, at the power limit.
    assert decided(fast, {name: [2 * x for x in y] for name, y in fast.items()}) == (ROW, True)


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
        (lambda a, b: gated_gemm(a, b, b, epilogue=jnp.multiply), BF16, "gemm"),
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
    possible = {row_of(product, name) for name in names} - {None}
    assert possible
    for name in possible:
        with Tunings({(KIND, product.problem): entry(name)}):
            assert configs(f, *arrays) == [name]


LONG = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 8192), (8192, 1024)))


@pytest.mark.parametrize(
    ("f", "arrays"),
    [
        (lambda a, b: gemm(a, b, epilogue=jnp.sin), LONG),  # its relatives split k
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

    monkeypatch.setattr(measure_module._Race, "_fastest_relatives", fastest)
    monkeypatch.setattr(measure_module, "operand_sets", lambda *_: [])
    names = measure_module._Race(product, Numbers(), threading.Event()).rows()
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
    # What an H200 took for them: products near one of its limits.
    [(4096, 4096, 4096, 173.4), (64, 28672, 4096, 56.9), (1, 28672, 4096, 55.3)],
)
def test_no_kernel_is_faster_than_the_gpu(m, n, k, us):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n))]
    (product,) = tune_module.find_products(f, *arrays)
    size = 2 * (m * k + k * n + m * n)
    assert measure_module._bytes(product) == size
    assert 0.85 * us < 1e6 * least_seconds(product, size, PEAKS) < us
    assert least_seconds(product, size, H200) == 0


@pytest.mark.parametrize(
    ("patience", "best", "cublas", "expected"),
    [
        (5.0, 20e-6, 19e-6, True),
        (5.0, 20e-6, 19.8e-6, False),
        (5.0, 20e-6, 30e-6, False),
        (100.0, 20e-6, 30e-6, True),
        (5.0, 1.9e-6, 1.5e-6, False),
        (100.0, 4.0e-6, 1.5e-6, False),  # about a start and reading the operands
        (float("inf"), 1.9e-6, 3e-6, True),
    ],
)
def test_when_xla_is_asked(monkeypatch, patience, best, cublas, expected):
    monkeypatch.setattr(_core, "device_properties", lambda ordinal: PEAKS)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 1024), (1024, 6144))]
    (product,) = tune_module.find_products(f, *arrays)
    race = measure_module._Race(product, Numbers(), threading.Event())
    race._chains = dict.fromkeys(["untuned", ROW, "cublas"])
    race._least = {"untuned": 1.2 * best, ROW: best, "cublas": cublas, "gone": 1e-6}
    assert race.asks_xla(patience) == expected


@pytest.mark.any_jax
def test_a_candidate_that_fails_is_left_out(monkeypatch):
    monkeypatch.setattr(_core, "device_properties", lambda ordinal: H200)
    for name in ("candidates", "built_candidates"):
        monkeypatch.setattr(measure_module, name, lambda product, device: ["no row", ROW])
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


def test_programs_that_xla_divides_are_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: compiled.append(self))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), auto, devices=jax.devices("cpu")[:2])
    rows = jax.NamedSharding(mesh, jax.P("x"))
    tune_module.find_products(f, *SQUARE)
    assert not compiled
    constrained = lambda a, b: f(jax.lax.with_sharding_constraint(a, rows), b)  # noqa: E731
    for function in (constrained, jax.jit(f, in_shardings=(rows, None))):
        count = len(compiled)
        tune_module.find_products(function, *SQUARE)
        assert len(compiled) == count + 1


def test_numbers_are_normal_and_others_each_time():
    numbers = Numbers()
    kinds = [jax.ShapeDtypeStruct(s, d) for s in ((64, 128), (300, 7)) for d in ("float32", "f2")]
    drawn = [np.asarray(numbers.take(x), np.float32) for x in kinds * 3]
    for values, x in zip(drawn, kinds * 3, strict=True):
        assert values.shape == x.shape
        assert abs(values.std() - 1) < 0.1
    assert len({values.tobytes() for values in drawn}) == len(drawn)


def test_candidates_hold_what_is_taken_untuned():
    if len(_core.kernel_names()) < len(kernel_table.CONFIGS):
        pytest.skip("needs every kernel of the table")
    float32_result = functools.partial(gemm, preferred_element_type="float32")
    for g, arrays, expected in (
        (f, (bf16(1024, 16384), bf16(16384, 1024)), f"{ROW}/splits=2"),
        (f, (bf16(4096, 4096), bf16(4096, 4096)), "sm90_bf16_128x256x64_s4_c2x1_cooperative"),
        (f, (bf16(333, 777), bf16(777, 1111)), "sm90_"),
        (f, (bf16(8, 256, 256), bf16(8, 256, 256)), "sm90_"),
        (float32_result, (bf16(1024, 1024), bf16(1024, 1024)), "promote"),
        (lambda a, b: gated_gemm(a, b, b), SQUARE, "gated"),
        (lambda a, b: ragged_dot(a, b, SIZES), (bf16(64, 32), bf16(2, 32, 48)), "grouped_m"),
        (
            jax.grad(lambda b, a: ragged_dot(a, b, SIZES).astype("float32").sum()),
            (bf16(2, 32, 48), bf16(64, 32)),
            "grouped_k",
        ),
    ):
        products = tune_module.find_products(g, *arrays)
        names = [candidates(product, H200) for product in products]
        assert any(expected in each[0] for each in names), (names, expected)
        assert all(1 <= len(each) == len(set(each)) <= 12 for each in names)
        for product, each in zip(products, names, strict=True):
            for config in each:
                with Tunings({(KIND, product.problem): Entry.measured(config, 1.0, 1.0, 1.0)}):
                    assert config in configs(g, *arrays)
