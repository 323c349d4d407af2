"""The benchmark's cases, and how each is measured beside its rivals."""

import dataclasses
import fnmatch
import functools
import itertools
import json
import sys

import cases
import chains
import jax
import jax.numpy as jnp
import measure
import numpy as np
import pallas_rival
import pytest
import xla_rival
from benchmark_cases import CASES, UNSUPPORTED, tiny
from nightly import slow

from jax_tcgemm import _extension
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.tools.chain import compile_chain

pytestmark = pytest.mark.any_jax

# One case of each kind: cases that differ only in extents run the same code.
KINDS = list(dict.fromkeys(tiny(case, suite="tiny") for case in CASES))
STEP = next(case for case in KINDS if case.step)
PACKED = [case for case in KINDS if case.is_packed and not case.scale.startswith("unpacked")]
MORE_KINDS = [
    tiny(CASES[0], layout=layout, batch=batch, broadcast=broadcast, epilogue=epilogue, out=out)
    for layout, (batch, broadcast), epilogue, out in itertools.product(
        ("nn", "tt"),
        ((1, ""), (3, ""), (3, "a"), (3, "b")),
        ("none", "alpha+beta_c+bias+silu+aux"),
        (None, "f32"),
    )
]


def nightly_unless_new(cases):
    """Runs on each change the first cases with each value of each field, except extents."""
    seen, found = set(), []
    for case in cases:
        values = vars(case) | dict.fromkeys(("suite", "m", "n", "k", "batch"), 0)
        # Groups of rows are code of their own for scaled operands.
        own = set((values | {"group_sizes": (bool(case.group_sizes), case.scale)}).items())
        found.append(slow(case) if own <= seen else case)
        seen |= own
    return found


def test_labels_are_unique():
    labels = [case.label for case in CASES]
    assert len(set(labels)) == len(labels) > 90
    assert max(map(len, labels)) < 60


def test_every_suite_is_there_and_what_is_unsupported_says_so():
    assert list(dict.fromkeys(case.suite for case in CASES)) == [
        *("large", "medium", "decode", "unaligned", "batched"),
        *(
            "epilogue",
            "medium_epilogue",
            "gated",
            "backward",
            "fused",
            "tf32",
            "ragged",
            "f32_out",
            "precise",
        ),
        *("user_epilogue", "fp8", "int8", "decode_8_bits", "complex", "weight_only"),
        *("random", "random_decode"),
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
        *({"step": "layer"}, {"scale": "group64"}),
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
    packed = {case.dtype_b: dataclasses.replace(case, m=10, n=20, k=256) for case in PACKED}
    assert packed["s4"].flops == 2 * 10 * 20 * 256
    assert packed["s4"].bytes == 256 * 20 // 2 + 2 * (10 * 256 + 2 * 20 + 10 * 20)
    assert packed["s8"].bytes == 256 * 20 + 2 * (10 * 256 + 20 + 10 * 20)


def test_operands_are_fresh_and_of_unit_products():
    case = tiny(CASES[0], m=64, n=64, k=256, epilogue="bias+c")
    (first,), *others = case.argument_sets()
    assert len(others) == 15
    assert set(first) == {"a", "b", "bias", "c"}
    assert not np.array_equal(first["a"], others[0][0]["a"])
    product = np.asarray(first["a"] @ first["b"], np.float32)
    assert 0.8 < product.std() < 1.2
    assert 0.8 < np.asarray(first["c"], np.float32).std() < 1.2


@pytest.mark.parametrize(
    "case", nightly_unless_new([*KINDS, *MORE_KINDS]), ids=lambda case: case.label
)
def test_ours_computes_what_the_rival_does(case):
    (arrays,) = case.argument_sets()[0]
    # Operands about 1. In a fused block, they would make the softmax select one score, which
    # rounding decides.
    if not case.scale and case.step != "fused block":
        arrays = {
            name: jax.random.normal(jax.random.key(index), shape, cases.DTYPES[case.dtype])
            for index, (name, shape) in enumerate(case.shapes.items())
        }
    # XLA's CPU backend lacks some 16-bit products with a float32 result.
    widens = case.out and not case.scale
    wide = {name: x.astype(case.out_dtype) for name, x in arrays.items()} if widens else arrays
    known = case.precision != "TF32_TF32_F32_X3"  # CPUs lack this preset of XLA
    rival = case if known else dataclasses.replace(case, precision="highest")
    compute = jax.jit(case.ours())
    ours, xla = compute(arrays), jax.jit(functools.partial(xla_rival.xla, rival))(wide)
    assert measure.disagreement(case, ours, xla) is None
    has_two = {"aux", "amax"}.intersection(case.parts) or case.function in (
        "fp8 amax",
        "two results",
    )
    results = len(arrays) if case.step else 1 + bool(has_two)
    assert len(jax.tree.leaves(ours)) == results
    # Checks the check: without the last operand the result is different.
    last = list(arrays)[-1]
    wrong = compute({**arrays, last: jax.tree.map(jnp.zeros_like, arrays[last])})
    assert "of its norm" in measure.disagreement(case, wrong, xla)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.label)
def test_the_fastest_form_of_a_packed_weight_is_the_rival(case, monkeypatch):
    sets = case.argument_sets()
    (arrays,) = sets[0]
    assert arrays["packed"].matrix_shape == (case.k, case.n)
    product = np.asarray(jax.jit(case.ours())(arrays), np.float32)
    assert 0.7 < product.std() < 1.3
    forms = xla_rival.forms(case)
    assert len(forms) == 3
    for form in forms.values():
        assert (
            measure.disagreement(case, jax.jit(form)(arrays), product.astype(jnp.bfloat16)) is None
        )

    def slower(name, form):
        repeat = 1 if name == "dequantized first" else 200

        def repeated(arrays):
            one = lambda factor: form({**arrays, "a": arrays["a"] * factor})  # noqa: E731
            return jax.lax.map(one, 1 + jnp.arange(repeat, dtype=arrays["a"].dtype)).sum(0)

        return repeated

    slow = {name: slower(name, form) for name, form in forms.items()}
    monkeypatch.setattr(xla_rival, "forms", lambda case: slow)
    row = measure.measure_case(case, options(against=("xla",)))
    assert "error" not in row
    assert row["xla_form"] == "dequantized first"
    assert row["ratio"] == row["xla_us"] / row["us"]


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
        for row in kernel_names.for_algorithm("BF16_BF16_F32")
        if fnmatch.fnmatch(row.name, glob) and not (row.copies_whole_chunks or row.gated)
    ]
    case = tiny(CASES[0])  # no extent allows 16-byte copies
    row = measure.measure_case(case, options(configs=glob))
    assert "error" not in row
    assert set(names) <= set(row["configs"]) <= set(measure.config_names(case, glob))
    assert row["choice_loss"] >= 1
    large = dataclasses.replace(case, m=4096, n=4096, k=4096)
    assert not any("simt" in name for name in measure.config_names(large, "*"))


def test_a_wrong_result_is_reported_and_not_timed(monkeypatch):
    monkeypatch.setattr(xla_rival, "xla", lambda case, arrays: 2 * case.ours()(arrays))
    row = measure.measure_case(tiny(CASES[0]), options())
    assert row["error"].startswith("differs from XLA's result: by 5.0e-01 of its norm")
    assert row["us"] is None


def test_an_exception_is_reported(monkeypatch):
    monkeypatch.setattr(xla_rival, "xla", lambda case, arrays: arrays["x"])
    assert measure.measure_case(tiny(CASES[0]), options())["error"] == "KeyError: 'x'"


def test_the_chosen_kernel_is_read_from_the_log(monkeypatch, capfd):
    line = "jax_tcgemm: m=5 n=7 k=6 batch=1 -> sm90_x"

    def logging_chain(function, sets):
        chain = compile_chain(function, sets)
        print(f"{line}_of_a_measurement", file=sys.__stderr__, flush=True)

        def run(sets):
            print(f"a warning\n{line}", file=sys.__stderr__, flush=True)
            return chain.compiled(sets)

        return dataclasses.replace(chain, compiled=run)

    monkeypatch.setattr(measure, "compile_chain", logging_chain)
    case = tiny(CASES[0])
    assert measure.compile_ours(case, case.argument_sets())[1] == "sm90_x"
    captured = capfd.readouterr().err
    assert "a warning" in captured
    assert line not in captured


def test_the_kernel_for_a_packed_weight_is_read_from_the_log(monkeypatch):
    lines = [
        "jax_tcgemm: tcgemm_packed int4 bfloat16[5, 256] n=70: kernel for 8 rows, 2 parts of k",
        "jax_tcgemm: tcgemm_packed int8 bfloat16[99, 256] n=70: fallback to XLA: many rows",
    ]

    def logging_chain(function, sets):
        print(lines[0], file=sys.__stderr__, flush=True)
        return compile_chain(function, sets)

    monkeypatch.setattr(measure, "compile_chain", logging_chain)
    sets = PACKED[0].argument_sets()
    assert measure.compile_ours(PACKED[0], sets)[1] == "kernel for 8 rows, 2 parts of k"
    lines.pop(0)
    assert measure.compile_ours(PACKED[1], sets)[1] == "fallback to XLA: many rows"
    assert measure.config_names(PACKED[0], "*") == []


def test_pallas_takes_plain_products_whose_extents_it_divides():
    labels = [case.label for case in CASES if pallas_rival.obstacle(case) is None]
    assert "bf16 nn 4096x4096x4096" in labels
    assert not any(
        "bias" in label or "nt" in label or "f32" in label or "by" in label for label in labels
    )


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
