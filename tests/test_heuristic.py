"""The time model's choice of a row of the kernel table and of a split of k."""

from __future__ import annotations

import functools
import itertools

import pytest
from kernel_rows import chosen_config, rank_rows

from jax_tcgemm import _core
from jax_tcgemm.kernels.arithmetic import ARITHMETIC
from jax_tcgemm.kernels.names import by_name, read_config

pytestmark = pytest.mark.any_jax

ALL_KERNELS = pytest.mark.skipif(
    _core.build_info()["kernels_glob"] != "*",
    reason="not a build with all kernels",
)

# Streaming multiprocessors and shared memory of a block: A100, H100, a small card.
DEVICES = [(108, 163 * 1024), (132, 227 * 1024), (20, 99 * 1024)]


@pytest.mark.parametrize(("sm_count", "shared_memory"), DEVICES)
@pytest.mark.parametrize("algorithm", ARITHMETIC)
@pytest.mark.parametrize("aligned", [True, False])
def test_heuristic_chooses_a_row_that_fits(algorithm, aligned, sm_count, shared_memory):
    chosen = set()
    for m, n, k, batch in [
        (1, 1, 1, 1),
        (0, 5, 5, 1),
        (1, 4096, 4096, 1),
        (16, 4096, 4096, 1),
        (64, 64, 64, 4),
        (4096, 4096, 64, 1),
        (8192, 8192, 8192, 1),
        (128, 128, 128, 70000),
    ]:
        name = chosen_config(algorithm, m, n, k, batch, aligned, sm_count, shared_memory)
        row = by_name(name)
        chosen.add(name)
        assert row.algorithm == algorithm
        assert _core.row_facts(name).shared_memory_bytes <= shared_memory
        assert aligned or not row.copies_whole_chunks
        assert row.arch in ("sm80", "simt")  # sm90 does not run here, sm75 has a successor
    assert len(chosen) > 1


@ALL_KERNELS
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("algorithm", ["F16_F16_F32", "F16_F16_F16"])
def test_turing_takes_its_rows(algorithm, aligned):
    """The device is like a T4: 40 SMs, 64 KiB of shared memory."""
    turing = {"compute_capability": 75, "workspace_bytes": 2**24}
    for m, n, k, wide in ((4096, 4096, 4096, False), (72, 200, 136, False), (512, 512, 512, True)):
        options = {**turing, "float32_result": wide, "epilogue": "any"}
        names = rank(algorithm, m, n, k, 1, aligned, 40, 64 * 1024, **options)
        rows = [by_name(read_config(name)[0]) for name in names]
        assert {row.arch for row in rows} <= {"sm75", "simt"}
        chosen = rows[0]
        assert chosen.arch == "sm75"
        assert aligned or not chosen.copies_whole_chunks
        assert chosen.promote == (wide and chosen.arithmetic.promotes)
    split = rank(algorithm, 64, 64, 65536, 1, aligned, 40, 64 * 1024, **turing)
    assert "/splits=" in split[0]


def rank(*arguments, **options):
    """Names the rows that can compute a problem, fastest first."""
    return [name for name, _, _ in rank_rows(*arguments, **options)]


@ALL_KERNELS
@pytest.mark.parametrize(
    ("shape", "aligned", "float32_result", "expected"),
    [
        # For the three large products, one of the two fastest rows measured. For the others, the
        # kind of row that suits their size, alignment and result.
        ((4096, 4096, 4096), True, False, ("128x256x64", "256x128x64")),
        ((8192, 8192, 8192), True, False, ("128x256x64", "256x128x64")),
        ((8192, 14336, 4096), True, False, ("128x256x64", "256x128x64")),
        ((1024, 1024, 1024), True, False, ("64x64x64",)),
        ((16, 4096, 4096), True, False, ("16x64x64",)),
        ((32, 32, 32), True, False, ("simt",)),
        ((64, 64, 64), True, False, ("simt",)),
        ((32, 32, 33), False, False, ("simt",)),
        ((333, 777, 1111), False, False, ("64x64x32_w2x2_s3_realign",)),
        ((4096, 4096, 4096), True, True, ("128x128x64_w2x4_s3_promote",)),
        ((1000, 1000, 1000), False, True, ("64x64x32_w2x2_s3_realign_promote",)),
    ],
)
def test_heuristic_of_the_sm80_family_on_132_sms(shape, aligned, float32_result, expected):
    name = chosen_config(
        "BF16_BF16_F32", *shape, 1, aligned, 132, 227 * 1024, float32_result=float32_result
    )
    assert any(part in name for part in expected), name


@ALL_KERNELS
@pytest.mark.parametrize(
    ("algorithm", "shape", "layout", "expected"),
    [
        # The fastest row measured, or one within 3 % of it.
        ("BF16_BF16_F32", (4096, 4096, 4096), "nn", ("128x256x64_s4_c2x1",)),
        ("F16_F16_F32", (4096, 4096, 4096), "tt", ("128x256x64_s4_c2x1",)),
        ("BF16_BF16_F32", (8192, 8192, 8192), "nt", ("128x256x64", "128x192x64")),
        ("BF16_BF16_F32", (2048, 2048, 2048), "nn", ("128x256x64_s4_c1x1", "128x256x64_s4_c2x1")),
        ("BF16_BF16_F32", (128, 4096, 14336), "nn", ("128x64x64_s8_c1x1_k2",)),
        ("BF16_BF16_F32", (256, 28672, 4096), "nn", ("128x224x64_s4_c2x1",)),
        ("BF16_BF16_F32", (512, 512, 512), "nn", ("64x64x64_s6", "64x64x64_s8_c2x2")),
        ("BF16_BF16_F32", (32, 32, 32), "nn", ("simt",)),
        # Few rows or columns: the fastest row measured, or one as fast.
        (
            "BF16_BF16_F32",
            (1, 6144, 4096),
            "nn",
            ("64x16x64_s8_c1x1_skinny", "128x16x64_s4_c1x1_k4_skinny"),
        ),
        (
            "F16_F16_F32",
            (4, 4096, 4096),
            "nt",
            ("128x16x64_s4_c1x1_k4_skinny", "s8_c1x1_k2_skinny"),
        ),
        ("BF16_BF16_F32", (16, 28672, 4096), "nn", ("256x16x64_s3_c1x1_skinny",)),
        ("BF16_BF16_F32", (32, 4096, 14336), "nn", ("64x32x64_s8_c1x1_k2_skinny",)),
        ("BF16_BF16_F32", (64, 28672, 4096), "nn", ("256x64x64_s3_c1x1_skinny",)),
        ("BF16_BF16_F32", (4096, 64, 14336), "tt", ("64x64x64_s8_c1x1_k2_skinny",)),
        # Little work.
        ("BF16_BF16_F32", (64, 160, 96), "nt", ("16x16x32_k8_direct", "16x32x32_k4_direct")),
        ("F16_F16_F32", (24, 512, 184), "nn", ("16x16x32_k8_direct",)),
        ("TF32_TF32_F32", (32, 184, 88), "nt", ("16x16x16_k8_direct",)),
        ("TF32_TF32_F32", (4096, 4096, 4096), "nn", ("128x256x32",)),
        # Only this row's stage has room for two buffers of a transposed B.
        ("TF32_TF32_F32", (4096, 4096, 4096), "tn", ("256x128x32",)),
    ],
)
def test_heuristic_of_the_sm90_family_on_an_h200(algorithm, shape, layout, expected):
    name = chosen_config(
        algorithm, *shape, 1, True, 132, 227 * 1024, compute_capability=90, layout=layout
    )
    assert any(part in name for part in expected), name
    unaligned = chosen_config(
        algorithm, *shape, 1, False, 132, 227 * 1024, compute_capability=90, layout=layout
    )
    assert not by_name(unaligned).copies_whole_chunks


@ALL_KERNELS
def test_direct_rows_are_for_little_work_where_they_were_timed(choose_on_h200):
    def is_direct(*shape, **options):
        config = choose_on_h200("BF16_BF16_F32", *shape, **options)
        return by_name(read_config(config.removesuffix(" fixup"))[0]).is_direct

    assert is_direct(64, 160, 96)
    assert is_direct(64, 160, 96, float32_result=True)  # sums of parts of k are float32
    assert is_direct(32, 168, 192, layout="nt", epilogue="sum")
    assert is_direct(32, 32, 32, epilogue="sum")  # simt rows load epilogue code from afar
    assert is_direct(256, 256, 16)
    assert not is_direct(32, 32, 32)  # one step of simt
    assert not is_direct(40, 640, 872, layout="nt")  # one more memory trip for each 256 of k
    assert not is_direct(24, 2320, 192, epilogue="sum")  # nothing hides reading a bias
    assert not is_direct(656, 1088, 72)
    on_an_a100 = chosen_config("BF16_BF16_F32", 64, 160, 96, 1, True, 108, 163 * 1024)
    assert not by_name(on_an_a100).is_direct


def test_rows_that_swap_operands_add_a_bias_at_most(choose_on_h200):
    choose = functools.partial(choose_on_h200, "BF16_BF16_F32", 16384, 4096, 1024)
    # The fastest row measured.
    assert choose() == choose(layout="nt") == "sm90_bf16_128x160x64_s5_c2x1_pingpong_swap_ab"
    assert choose(epilogue="sum") == choose()
    c = {"epilogue": "sum", "has_c": True}
    for other in ({"layout": "tn"}, {"layout": "tt"}, c, {"epilogue": "any"}):
        assert "swap_ab" not in choose(**other)
    assert "swap_ab" not in choose(float32_result=True)


def test_float32_results_are_promoted_where_xla_adds_up_parts(choose_on_h200):
    def chosen(*shape, **options):
        config = choose_on_h200("BF16_BF16_F32", *shape, **options)
        return by_name(read_config(config.removesuffix(" fixup"))[0])

    assert chosen(1024, 1024, 4096, float32_result=True).promote
    for large in ((2048, 2048, 2048), (4096, 4096, 4096), (1024, 32000, 2048)):
        assert not chosen(*large, float32_result=True).promote
    assert chosen(2048, 2048, 2048, float32_result=True, grouped="m").promote
    # Problems that were not measured, and few rows, which XLA may multiply in other ways.
    for shape in ((4096, 4096, 16384), (64, 128256, 4096), (1, 4000000, 512)):
        assert chosen(*shape, float32_result=True).promote
    # If memory limits the kernel, promotion is free.
    for float32_result in (False, True):
        row = chosen(16, 4096, 4096, float32_result=float32_result)
        assert row.skinny
        assert row.promote


@pytest.mark.parametrize("algorithm", ["BF16_BF16_F32", "F16_F16_F32"])
def test_rows_take_the_epilogues_they_have(choose_on_h200, algorithm):
    chosen = {}
    for epilogue in ("none", "sum", "any"):
        rows = set()
        for m, n, k in itertools.product((16, 64, 256, 1000, 4096), (512, 4096, 28672), (64, 4096)):
            for layout in ("nn", "nt", "tn", "tt"):
                name = choose_on_h200(algorithm, m, n, k, epilogue=epilogue, layout=layout)
                row, splits = read_config(name.removesuffix(" fixup"))
                if splits == 1:
                    rows.add(by_name(row))
        chosen[epilogue] = {row.epilogue for row in rows}
    assert chosen["any"] == {"any"}
    assert "none" in chosen["none"] - chosen["sum"]
    # The code that adds up parts of k has every epilogue; the row need not have it.
    name = choose_on_h200(algorithm, 256, 256, 16384, epilogue="any", layout="nt")
    assert "splits" in name


def test_heuristic_adds_up_parts_of_k_within_the_kernel(choose_on_h200):
    choose = functools.partial(choose_on_h200, "BF16_BF16_F32")
    in_kernel = "sm90_bf16_128x128x64_s6_c2x1_pingpong/splits=2 fixup"
    assert choose(1024, 1024, 16384) == in_kernel
    assert choose(256, 4096, 14336) == in_kernel
    # The epilogue follows the sum.
    assert choose(1024, 1024, 16384, epilogue="sum") == in_kernel
    # The GPU must hold all parts at once.
    assert "fixup" not in choose(1024, 1024, 16384, sms=126)
    assert "fixup" not in choose(1024, 1024, 16384, float32_result=True)
    assert "/splits=" in choose(128, 128, 65536)
    assert "splits" not in choose(128, 128, 65536, workspace_bytes=2 * 4 * 128 * 128 - 1)


def test_parts_of_k_have_the_epilogue_that_their_row_has(rank_on_h200):
    def added_up(**options):
        ranked = rank_on_h200("BF16_BF16_F32", 256, 1000, 4096, **options)
        return {config for config, _, has_fixup in ranked if has_fixup}

    plain, any_row = added_up(), "sm90_bf16_128x128x64_s6_c2x1_pingpong/splits=2"
    assert any_row in plain
    assert {by_name(read_config(name)[0]).epilogue for name in plain} > {"any"}
    assert added_up(epilogue="sum") == plain
    fused = added_up(epilogue="any")
    assert fused == {name for name in plain if by_name(read_config(name)[0]).epilogue == "any"}
    for impossible in ({"has_c": True}, {"float32_result": True}, {"d_by_tma": False}):
        assert not added_up(epilogue="sum", **impossible)


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_heuristic_keeps_to_clusters_that_fit(choose_on_h200, limit):
    def choose(algorithm, *shape, **options):
        config = choose_on_h200(algorithm, *shape, max_cluster_size=limit, **options)
        return read_config(config.removesuffix(" fixup"))[0]

    for algorithm in ("BF16_BF16_F32", "F16_F16_F32", "TF32_TF32_F32"):
        for layout in ("nn", "nt", "tn", "tt"):
            for shape in ((4096, 4096, 4096), (1024, 1024, 16384), (64, 4096, 4096)):
                row = by_name(choose(algorithm, *shape, layout=layout))
                assert row.cluster_size <= limit
                assert (
                    row.arch == "sm90" or row.element_bytes == 4
                )  # no single block transposes these
    for options in ({"float32_result": True}, {"grouped": "m"}, {"grouped": "k"}):
        assert by_name(choose("BF16_BF16_F32", 4096, 4096, 4096, **options)).cluster_size <= limit
    assert by_name(choose_on_h200("BF16_BF16_F32", 4096, 4096, 4096)).cluster_size == 2


def test_heuristic_refuses_what_no_row_computes():
    with pytest.raises(ValueError, match="unknown algorithm"):
        chosen_config("F64_F64_F64", 64, 64, 64, 1, True, 132, 227 * 1024)


@ALL_KERNELS
def test_heuristic_knows_what_an_epilogue_costs():
    def choice(epilogue):
        arguments = "BF16_BF16_F32", 96, 4096, 1024, 1, True, 132, 227 * 1024
        return chosen_config(*arguments, compute_capability=90, epilogue=epilogue)

    # The unrolled sum costs next to nothing.
    assert choice("none") == choice("sum") == "sm90_bf16_128x64x64_s8_c1x4_cooperative"

    def cycles(epilogue):
        ranked = rank_rows(
            *("BF16_BF16_F32", 96, 4096, 1024, 1, True, 132, 227 * 1024),
            compute_capability=90,
            epilogue=epilogue,
        )
        row = "sm90_bf16_64x64x64_s6_c1x1_cooperative"
        return {name: cycles for name, cycles, _ in ranked}[row]

    assert cycles("none") < cycles("sum") < cycles("any")
    with pytest.raises(ValueError, match="epilogue 'gelu'"):
        choice("gelu")


def test_functions_of_few_results_are_free_in_small_tiles_alone(rank_on_h200):
    def cycles(**options):
        ranked = rank_on_h200("BF16_BF16_F32", 32, 8192, 2048, **options)
        return {name: cycles for name, cycles, _ in ranked}

    plain, function = cycles(), cycles(compiled=True, epilogue="any")
    assert next(iter(function)) == "sm90_bf16_64x32x64_s8_c1x1_k2_skinny"
    small, large = "sm90_bf16_64x32x64_s8_c1x1_skinny", "sm90_bf16_128x32x64_s3_c1x1_skinny"
    other = "sm90_bf16_64x128x64_s6_c1x4_pingpong"
    skinny = 1.15  # the factor of cuda/dispatch/choice.cc on functions in skinny rows
    assert function[small] == pytest.approx(skinny * plain[small])
    assert function[large] > 1.1 * skinny * plain[large]
    assert function[other] > 1.1 * plain[other]


@ALL_KERNELS
@pytest.mark.parametrize(
    ("row", "own", "shared"),
    [
        ("sm90_bf16_128x128x64_s6_c4x1_pingpong", "a", "b"),
        ("sm90_bf16_128x96x64_s6_c4x1_pingpong_swap_ab", "b", "a"),
    ],
)
def test_rows_that_begin_within_sectors_take_longer(row, own, shared):
    """The operand that each block reads alone costs the most."""

    def cycles(of, alignment):
        ranked = rank_rows(
            *("BF16_BF16_F32", 4096, 4096, 4096, 1, True, 132, 227 * 1024),
            compute_capability=90,
            layout="nt",
            **{f"row_alignment_{of}": alignment},
        )
        return {name: cycles for name, cycles, _ in ranked}[row]

    whole = cycles(own, 128)
    assert cycles(own, 64) == whole
    assert cycles(own, 16) > max(whole, cycles(shared, 16))
