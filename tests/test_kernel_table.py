"""The kernel table: its rows, and the built extension against them."""

from __future__ import annotations

import dataclasses

import pytest

from jax_tcgemm import _core, _extension, kernel_table
from jax_tcgemm.kernel_table import ALGORITHM_TAGS, CONFIGS, by_name, for_algorithm
from jax_tcgemm.spec import INPUT_DTYPES


def test_names_are_unique_and_found():
    assert len({config.name for config in CONFIGS}) == len(CONFIGS)
    for config in CONFIGS:
        assert by_name(config.name) is config


def test_every_algorithm_has_rows_of_every_loader():
    assert set(ALGORITHM_TAGS) == set(INPUT_DTYPES)
    for algorithm, dtype in INPUT_DTYPES.items():
        rows = for_algorithm(algorithm)
        assert {row.loader for row in rows} == {"cp_async", "realign", "direct"}
        assert {row.element_bytes for row in rows} == {dtype.itemsize}
    assert sum(map(len, map(for_algorithm, INPUT_DTYPES))) == len(CONFIGS)
    assert len({(row.tile_m, row.tile_n) for row in CONFIGS}) >= 5


def test_unknown_name():
    with pytest.raises(ValueError, match=r"'fast' is not a kernel configuration.*sm80_bf16"):
        by_name("fast")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "sm10"}, "arch"),
        ({"algorithm": "F8"}, "algorithm"),
        ({"loader": "tma"}, "loader"),
        ({"tile_k": 48}, "tile_k"),
        ({"tile_m": 120}, "rows"),
        ({"tile_n": 40}, "columns"),
        ({"stages": 2}, "stages"),
        ({"stages": 12}, "shared memory"),
        ({"arch": "simt"}, "directly"),
        ({"arch": "simt", "loader": "direct"}, "one element"),
        ({"algorithm": "F16_F16_F16", "promote": True}, "promoted"),
    ],
)
def test_impossible_rows(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS[0], **changes)


def test_extension_holds_rows_of_the_table():
    names = {config.name for config in CONFIGS}
    assert set(_core.kernel_names()) <= names
    info = _core.build_info()
    if info["cuda"] and info["kernels_glob"] == "*":
        assert set(_core.kernel_names()) == names
    if not info["cuda"]:
        assert _core.registrations() == {}
    else:
        assert set(_core.registrations()) == {_extension.GEMM_TARGET}


def test_a_stale_extension_is_refused():
    full = {"cuda": "13.0", "kernels_glob": "*"}
    names = frozenset(config.name for config in CONFIGS)
    _extension.check_kernel_names(names, full)
    with pytest.raises(ImportError, match=r"rebuild.*sm80_old"):
        _extension.check_kernel_names(names | {"sm80_old"}, full)
    missing = CONFIGS[0].name
    with pytest.raises(ImportError, match=rf"rebuild.*{missing}"):
        _extension.check_kernel_names(names - {missing}, full)
    _extension.check_kernel_names(names - {missing}, full | {"kernels_glob": "*bf16*"})
    _extension.check_kernel_names(frozenset(), {"cuda": "", "kernels_glob": "*"})


# Streaming multiprocessors and shared memory of one block: A100, H100, a small card.
DEVICES = [(108, 163 * 1024), (132, 227 * 1024), (20, 99 * 1024)]


@pytest.mark.skipif(not _core.build_info()["cuda"], reason="built without kernels")
@pytest.mark.parametrize(("sm_count", "shared_memory"), DEVICES)
@pytest.mark.parametrize("algorithm", ALGORITHM_TAGS)
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
        name = _core.choose_config(algorithm, m, n, k, batch, aligned, sm_count, shared_memory)
        row = kernel_table.by_name(name)
        chosen.add(name)
        assert row.algorithm == algorithm
        assert row.shared_memory_bytes <= shared_memory
        assert aligned or row.loader != "cp_async"
    assert len(chosen) > 1


@pytest.mark.skipif(_core.build_info()["kernels_glob"] != "*", reason="not a full build")
@pytest.mark.skipif(not _core.build_info()["cuda"], reason="built without kernels")
@pytest.mark.parametrize(
    ("shape", "aligned", "float32_result", "expected"),
    [
        # For the three large products, one of the two fastest rows measured; for the others, the
        # kind of row that their size, alignment and result call for.
        ((4096, 4096, 4096), True, False, ("128x256x64", "256x128x64")),
        ((8192, 8192, 8192), True, False, ("128x256x64", "256x128x64")),
        ((8192, 14336, 4096), True, False, ("128x256x64", "256x128x64")),
        ((1024, 1024, 1024), True, False, ("64x64x64",)),
        ((16, 4096, 4096), True, False, ("16x64x64",)),
        ((32, 32, 32), True, False, ("simt",)),
        ((32, 32, 33), False, False, ("simt",)),
        ((333, 777, 1111), False, False, ("64x64x32_w2x2_s3_realign",)),
        ((4096, 4096, 4096), True, True, ("128x128x64_w2x4_s3_promote",)),
        ((1000, 1000, 1000), False, True, ("64x64x32_w2x2_s3_realign_promote",)),
    ],
)
def test_heuristic_on_an_h200(shape, aligned, float32_result, expected):
    name = _core.choose_config(
        "BF16_BF16_F32", *shape, 1, aligned, 132, 227 * 1024, float32_result=float32_result
    )
    assert any(part in name for part in expected), name


def test_heuristic_refuses_what_no_row_computes():
    if not _core.kernel_names():
        pytest.skip("built without kernels")
    with pytest.raises((ValueError, RuntimeError)):
        _core.choose_config("F64_F64_F64", 64, 64, 64, 1, True, 132, 227 * 1024)
