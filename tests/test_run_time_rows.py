"""Rows of the kernel table that the build lacks: the list of them, and that they compile."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from kernel_rows import rank_rows

from jax_tcgemm import _core, _extension
from jax_tcgemm.epilogue import compiler, cubins, nvrtc
from jax_tcgemm.kernels import built
from jax_tcgemm.kernels.arithmetic import ELEMENT_TYPES
from jax_tcgemm.kernels.names import by_name, read_config
from jax_tcgemm.kernels.table import CONFIGS

pytestmark = pytest.mark.any_jax

# Numbers of enumerators in cuda/, as defined for a plain product, a bias, gelu, and the gradient of
# gelu.
PRODUCT, BIAS, ACTIVATE, ANYTHING = 0, 1, 4, 5
WORK = {"none": 0, "sum": 1, "any": 2}
DEVICE: dict[str, Any] = {"sm_count": 132, "shared_memory_per_block": 227 << 10}


def known(row, finish: int = PRODUCT, activation: int = 0, **others: int) -> str:
    """Returns the output of cuda/dispatch/run_time_row.cc for a result in the type of A."""
    words = {"activation": activation, "role_of_c": 0, "d_type": _d_type(row)}
    if row.arch == "sm90":
        words |= {"finish": finish, "swap_ab": int(row.swap_ab or row.pairs), "skinny": row.skinny}
    else:
        words |= {"sum": finish <= BIAS, "plain": 0, "direct": row.is_direct}
    words |= others
    return "".join(f"#define JAX_TCGEMM_KNOWN_{k.upper()} {int(v)}\n" for k, v in words.items())


def _d_type(row) -> int:
    return ELEMENT_TYPES.index(row.arithmetic.a)


def _layout(row) -> str:
    """Returns a layout that the row's kernels take, in terms of the kernel's A and B."""
    if row.planes:
        return "nt"
    if row.swap_ab or row.pairs or row.grouped == "k":
        return "tt" if row.swap_ab or row.pairs else "tn"
    return "nt" if row.arithmetic.a.bytes == 4 and row.arch == "sm90" else "nn"


RUN_TIME = [row for row in CONFIGS if built.built_epilogue(row) != row.epilogue]
# One row of each kind of kernel, which CI compiles; `nightly` compiles all.
KINDS = {
    (row.arch, row.loader, row.skinny, row.swap_ab, row.schedule, row.grouped, row.gated): row
    for row in RUN_TIME
}


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    cubins.clear_memory()


def test_the_build_has_rows_of_the_table():
    for name, epilogue in built._BUILT.items():
        row = by_name(name)
        assert WORK[epilogue] <= WORK[row.epilogue], name
        assert built.built_epilogue(row) == epilogue
    for row in CONFIGS:
        if row.arch == "simt":
            assert built.built_epilogue(row) == row.epilogue
    for arch in ("sm75", "sm80", "sm90"):
        of_float16 = [row for row in CONFIGS if row.arch == arch and "_f16" in row.name]
        assert sum(built.built_epilogue(row) is not None for row in of_float16) == 2


@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("algorithm", ["F16_F16_F32", "F16_F16_F16", "BF16_BF16_F32"])
def test_the_build_alone_computes_every_product(algorithm, capability):
    """If nothing can be compiled, the build's kernels run, with any epilogue."""
    if (algorithm, capability) == ("BF16_BF16_F32", 75):
        return  # it has no bfloat16 tensor cores
    rng = np.random.default_rng()
    grouped = ("none", "m", "k") if algorithm != "F16_F16_F16" else ("none",)
    for epilogue, group, aligned, wide in itertools.product(
        ("none", "sum", "any"), grouped, (True, False), (False, algorithm != "F16_F16_F16")
    ):
        m, n, k = (int(8 * 2 ** rng.uniform(0, 9)) for _ in range(3))
        ranked = rank_rows(
            *(algorithm, m, n, k, 1, aligned),
            **DEVICE,
            float32_result=wide,
            compute_capability=capability,
            epilogue="none" if group == "k" else epilogue,
            grouped=group,
            run_time_rows=False,
        )
        assert ranked
        row = by_name(read_config(ranked[0][0])[0])
        assert built.built_epilogue(row) is not None


def test_without_a_compiler_slow_rows_give_way_to_xla():
    """XLA computes the product if the build only has fallback rows for it."""
    if not _core.build_info()["cuda"]:
        pytest.skip("built without kernels")
    for options, is_fast in (
        ({"algorithm": "F16_F16_F32", "work": "any"}, True),
        ({"algorithm": "F16_F16_F32", "work": "any", "gated": True}, False),
        ({"algorithm": "BF16_BF16_F32", "work": "any", "gated": True}, True),
        ({"algorithm": "F16_F16_F32", "grouped": "m"}, False),
        ({"algorithm": "BF16_BF16_F32", "grouped": "m"}, True),
        ({"algorithm": "BF16_BF16_F32", "grouped": "m", "work": "any"}, False),
    ):
        assert _extension.has_kernel(**options)
        assert _extension.has_kernel(**options, may_compile=False) is is_fast, options


def test_a_kernel_that_has_to_be_compiled_must_be_faster():
    """It must beat all built kernels by more than the model's cost of waiting."""
    rng = np.random.default_rng()
    taken = 0
    for _ in range(200):
        # These sizes exceed what was timed (cuda/dispatch/time_correction.cc): the model alone
        # decides.
        m, n = (int(128 * 2 ** rng.uniform(0, 6)) for _ in range(2))
        k = int(8200 * 2 ** rng.uniform(0, 1))
        problem = {**DEVICE, "compute_capability": 90, "epilogue": "any"}
        both = rank_rows("F16_F16_F32", m, n, k, 1, True, **problem)
        alone = rank_rows("F16_F16_F32", m, n, k, 1, True, **problem, run_time_rows=False)
        row = by_name(read_config(both[0][0])[0])
        if "splits" not in both[0][0] and built.built_epilogue(row) != "any":
            assert both[0][1] < alone[0][1]
            taken += 1
        else:
            assert both[0] == alone[0]
    assert taken > 0


@pytest.mark.parametrize("row", KINDS.values(), ids=lambda row: row.name)
def test_rows_of_each_kind_compile(row, fresh_cache, capfd, monkeypatch):
    if not _core.build_info()["cuda"]:
        pytest.skip("built without kernels")
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    capability = int(row.arch[2:])
    assert compiler.compile_kernel(known(row), row.name, _layout(row), False, capability)
    assert f"compiled {row.name} ({_layout(row)}) for sm_" in capfd.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("row", RUN_TIME, ids=lambda row: row.name)
def test_every_row_compiles_with_every_epilogue(row, fresh_cache):
    if not _core.build_info()["cuda"]:
        pytest.skip("built without kernels")
    finishes = {"none": 1, "sum": 2, "any": 6}[row.epilogue]
    capability = int(row.arch[2:])
    for finish in range(finishes):
        text = known(row, finish, activation=1 if finish >= ACTIVATE else 0)
        assert compiler.compile_kernel(text, row.name, _layout(row), False, capability)


def test_two_begin_and_one_compiles(fresh_cache, monkeypatch):
    """A thread waits for a kernel whose compilation another thread has begun."""
    if not _core.build_info()["cuda"]:
        pytest.skip("built without kernels")
    row = by_name("sm90_f16_64x16x64_s8_c1x1_skinny")
    count = []
    compile_ = nvrtc.Nvrtc.compile
    monkeypatch.setattr(
        nvrtc.Nvrtc, "compile", lambda *arguments: count.append(1) or compile_(*arguments)
    )
    arguments = (known(row), row.name, "nn", False, 90)
    compiler.begin(*arguments)
    assert compiler.compile_kernel(*arguments) == compiler.compile_kernel(*arguments)
    assert len(count) == 1


def test_an_architecture_that_the_compiler_does_not_know(fresh_cache, capfd, monkeypatch):
    if not _core.build_info()["cuda"]:
        pytest.skip("built without kernels")
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    row = next(row for row in RUN_TIME if row.arch == "sm80")
    with pytest.raises(nvrtc.CompileError):
        compiler.compile_kernel(known(row), row.name, "nn", False, 999)
    assert "kernels of the build take its place" in capfd.readouterr().err
