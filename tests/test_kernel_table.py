"""The kernel table: its rows, and the built extension compared with them."""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
import re
import shutil
import subprocess

import pytest

from jax_tcgemm import _core, _extension
from jax_tcgemm.kernels import cpp
from jax_tcgemm.kernels.arithmetic import ARITHMETIC
from jax_tcgemm.kernels.built import built_epilogue
from jax_tcgemm.kernels.names import by_name, for_algorithm
from jax_tcgemm.kernels.table import CONFIGS
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES

pytestmark = pytest.mark.any_jax


def test_names_are_unique_and_found():
    assert len({config.name for config in CONFIGS}) == len(CONFIGS)
    for config in CONFIGS:
        assert by_name(config.name) is config


def test_every_algorithm_has_rows_of_every_loader():
    assert set(ARITHMETIC) == set(INPUT_DTYPES)
    for algorithm, dtype in INPUT_DTYPES.items():
        rows = for_algorithm(algorithm)
        loaders = {row.loader for row in rows}
        assert loaders >= {"cp_async", "realign", "direct"}
        assert ("tma" in loaders) == ARITHMETIC[algorithm].wgmma
        assert ("register" in loaders) == ARITHMETIC[algorithm].turing
        assert {row.element_bytes for row in rows} == {dtype.itemsize}
    kinds = itertools.product(INPUT_DTYPES, ("none", "m", "k"))
    nameless = [row for row in CONFIGS if not row.goes_by_name]
    assert sum(len(for_algorithm(*kind)) for kind in kinds) == len(CONFIGS) - len(nameless)
    assert len({(row.tile_m, row.tile_n) for row in CONFIGS}) >= 5


def test_unknown_name():
    with pytest.raises(
        ValueError, match=r"'fast' is not a kernel configuration; of .* nearest.*'sm"
    ):
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
        ({"arch": "simt"}, "directly"),
        ({"arch": "simt", "loader": "direct"}, "one element"),
        ({"algorithm": "F16_F16_F16", "promote": True}, "promoted"),
        ({"cluster_m": 2}, "clusters"),
        ({"swap_ab": True}, "transpose"),
        ({"epilogue": "none"}, "sums at least"),
    ],
)
def test_impossible_rows(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS[0], **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_m": 24}, "two lines"),
        ({"tile_n": 128}, "at once"),
        ({"tile_k": 64}, "64 bytes"),
        ({"warps_n": 2}, "each warp"),
        ({"split_k": 1}, "split_k"),
        ({"promote": False}, "float32"),
        ({"algorithm": "F16_F16_F16", "promote": False}, "sums are float32"),
        ({"epilogue": "sum"}, "every epilogue"),
        ({"gated": True}, "one weight"),
        ({"grouped": "m"}, "groups"),
    ],
)
def test_impossible_direct_rows(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(next(row for row in CONFIGS if row.is_direct), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loader": "cp_async"}, "tma"),
        ({"algorithm": "F16_F16_F16"}, "float32"),
        ({"tile_k": 32}, "128 bytes"),
        ({"tile_m": 96}, "64 rows"),
        ({"tile_n": 40}, "multiple of 32"),
        ({"schedule": "streaming"}, "schedule"),
        ({"schedule": "pingpong", "split_k": 2}, "pingpong"),
        ({"split_k": 3}, "split_k"),
        ({"split_k": 8, "cluster_m": 2}, "8 blocks"),
        ({"cluster_m": 3}, "1, 2 or 4"),
        ({"promote": True, "tile_n": 160, "stages": 4}, "two more sets"),
        ({"planes": True, "tile_n": 160, "stages": 4, "epilogue": "any"}, "two k-tiles"),
        ({"planes": True, "tile_n": 192, "tile_m": 64, "warps_m": 4, "stages": 6}, "two more sets"),
        ({"planes": True, "promote": True, "epilogue": "any"}, "of one kind"),
        ({"planes": True}, "every epilogue"),
        ({"epilogue": "all"}, "unknown epilogue"),
        ({"epilogue": "none", "algorithm": "TF32_TF32_F32", "tile_k": 32}, "swapped"),
        ({"epilogue": "sum", "split_k": 2}, "every epilogue"),
        ({"epilogue": "none", "tile_n": 128, "stages": 4, "gated": True}, "gating"),
        ({"algorithm": "S8_S8_S32", "tile_k": 128, "stages": 4}, "the build has no kernel"),
    ],
)
def test_impossible_sm90_rows(changes, message):
    row = by_name("sm90_bf16_128x64x64_s8_c1x1_cooperative")
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(row, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grouped": "columns"}, "unknown grouped"),
        ({"grouped": "m", "gated": True, "tile_n": 128, "stages": 6}, "one weight"),
        ({"grouped": "m", "split_k": 2}, "unsplit"),
        ({"grouped": "k", "tile_n": 32, "epilogue": "none"}, "whole slabs"),
        ({"grouped": "k"}, "no epilogue"),
    ],
)
def test_impossible_grouped_rows(changes, message):
    row = by_name("sm90_bf16_128x64x64_s8_c1x1_cooperative")
    row = dataclasses.replace(row, epilogue="any")
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(row, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "TF32_TF32_F32", "tile_k": 32}, "as their layouts need"),
        ({"tile_n": 68}, "multiple of 8"),
        ({"grouped": "m"}, "a bias at most"),
        ({"promote": True, "tile_n": 32}, "a bias at most"),
        ({"swap_ab": False, "stages": 4}, "multiple of 32"),
    ],
)
def test_impossible_rows_that_swap_operands(changes, message):
    row = by_name("sm90_bf16_128x72x64_s8_c2x1_cooperative_swap_ab")
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(row, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"tile_n": 224, "stages": 3},
        {"algorithm": "TF32_TF32_F32", "tile_k": 32},
        {"tile_m": 256, "warps_m": 16, "stages": 3},
    ],
)
def test_impossible_rows_of_three_consumers(changes):
    row = by_name("sm90_bf16_192x192x64_s4_c1x2_cooperative")
    row = dataclasses.replace(row, epilogue="any")
    with pytest.raises(ValueError, match="160 registers"):
        dataclasses.replace(row, **changes)


_OF_8_BITS = {"tile_k": 128, "epilogue": "none"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "TF32_TF32_F32", "tile_k": 32}, "float32 operands"),
        ({"tile_n": 8}, "16, 32 or 64"),
        ({"warps_m": 8, "tile_m": 128}, "one consumer warpgroup"),
        ({"schedule": "pingpong"}, "alternate"),
        ({"cluster_m": 2}, "share no operand"),
        ({"split_k": 3}, "split_k"),
        ({"split_k": 8}, "a share of the sums"),
        ({"tile_m": 256, "split_k": 4, "stages": 3}, "128 rows at most"),
        ({"tile_m": 256, "tile_n": 64, "stages": 3}, "of at most 64"),
        ({"algorithm": "E4M3_E4M3_F32", **_OF_8_BITS}, "scaled by blocks"),
        ({"algorithm": "S8_S8_S32", **_OF_8_BITS, "promote": True}, "scaled by blocks"),
        ({"algorithm": "E4M3_E5M2_F32_FAST", **_OF_8_BITS, "promote": False}, "calls the longer"),
    ],
)
def test_impossible_skinny_rows(changes, message):
    row = next(row for row in CONFIGS if row.skinny and (row.tile_m, row.tile_n) == (64, 16))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(row, **changes)


_INCLUDE = importlib.resources.files("jax_tcgemm") / "include"


@pytest.mark.skipif(not (shutil.which("g++") and _INCLUDE.is_dir()), reason="no g++ or headers")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (CONFIGS[0].name, {"stages": 12}),
        ("sm90_bf16_128x64x64_s8_c1x1_cooperative", {"stages": 12}),
        ("sm90_bf16_128x72x64_s8_c2x1_cooperative_swap_ab", {"stages": 9}),
        ("sm90_bf16_64x16x64_s8_c1x1_skinny", {"stages": 25}),
        # more sums than an unrolled epilogue has registers for
        ("sm90_bf16_128x64x64_s8_c1x1_cooperative", {"tile_m": 256, "tile_n": 160, "stages": 3}),
    ],
)
def test_the_compiler_refuses_rows_that_no_block_fits(tmp_path, name, changes):
    row = by_name(name)
    source = tmp_path / "rows.cc"
    source.write_text(
        '#include "kernel_config.h"\n'
        "using namespace jax_tcgemm;\n"
        f"static_assert(KernelConfig{cpp.config(row)}.fits());\n"
        f"static_assert(!KernelConfig{cpp.config(dataclasses.replace(row, **changes))}.fits());\n"
    )
    command = ["g++", "-std=c++20", "-fsyntax-only", "-I", str(_INCLUDE), source]
    subprocess.run(command, check=True)


def test_extension_holds_rows_of_the_table():
    names = {config.name for config in CONFIGS}
    assert set(_core.kernel_names()) <= names
    info = _core.build_info()
    if info["cuda"] and info["kernels_glob"] == "*":
        assert set(_core.kernel_names()) == names
    if not info["cuda"]:
        assert _core.registrations() == {}
    else:
        assert set(_core.registrations()) == {*_extension.TARGETS, _extension.MARK_TARGET}


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


# Layout<Major, Major> in the mangled name of a kernel.
_LAYOUT = r"I(?:LNS_5MajorE|LS\w_)\dELS\w_\dEE"


@pytest.mark.skipif(not _core.build_info()["cuda"], reason="built without kernels")
def test_no_sm90_kernel_uses_local_memory_or_is_serialised():
    """Reads the report of cuda/build/report_kernels.py: name, registers, local memory."""
    report = (importlib.resources.files("jax_tcgemm") / "sm90_kernels.txt").read_text().splitlines()
    assert [line for line in report if line.startswith("warning ")] == []
    local = {name: int(bytes_) for name, _, bytes_ in map(str.split, report)}
    for row in CONFIGS:
        if row.arch != "sm90" or row.name not in _core.kernel_names() or not built_epilogue(row):
            continue
        kernels = {name: bytes_ for name, bytes_ in local.items() if f"Row_{row.name}E" in name}
        # All pairs of layouts, with exceptions: some float32 rows cannot take two mn-major
        # operands. Groups of rows have a k-major A; groups of k have two mn-major operands.
        # Exchanged operands have a k-major A; planes and pairs have one layout.
        layouts = sum(len(re.findall(_LAYOUT, name)) for name in kernels)
        least = {"none": 3, "m": 2, "k": 1}[row.grouped]
        least = 1 if not row.goes_by_name else 2 if row.swap_ab else least
        assert layouts >= least, row.name
        assert set(kernels.values()) == {0}, kernels


def test_every_arithmetic_has_any_epilogue_of_unaligned_operands():
    """Tensor cores compute them: the plain FMA kernels would take many times as long."""
    for algorithm in ARITHMETIC:
        rows = for_algorithm(algorithm)
        assert any(row.loader == "realign" and row.epilogue == "any" for row in rows), algorithm
