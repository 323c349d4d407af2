"""Measured choices: what they are known by, where they are looked for, and what they change."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import bf16

from jax_tcgemm import Tunings, gated_gemm, gemm, mlp, ragged_dot, tune
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.lowering import devices
from jax_tcgemm.transforms import tune as tune_module
from jax_tcgemm.tuning import cache, lookup, tunings
from jax_tcgemm.tuning.entry import Entry, problem_key, row_digest

ROW = "sm90_bf16_128x128x64_s6_c2x1_pingpong"
OTHER = "sm90_bf16_64x64x64_s6_c1x1_cooperative"
KIND = "NVIDIA H200"
SIZES = jnp.asarray([40, 24], jnp.int32)

pytestmark = pytest.mark.usefixtures("all_kernels")


@pytest.fixture(autouse=True)
def _on_an_h200(monkeypatch, tmp_path):
    """Lowers as on a machine with an H200, reads files, and finds none that was there."""
    monkeypatch.setattr(devices, "local_kind", lambda: KIND)
    monkeypatch.setenv(cache.SETTING, str(tmp_path / "cache"))
    monkeypatch.setenv(lookup.SETTING, "read")
    monkeypatch.setattr(lookup, "packaged", lambda kind: Tunings())


def f(a, b):
    return gemm(a, b)


ARRAYS = bf16(256, 512), bf16(512, 384)


def lowered(f, *arrays):
    anew = jax.jit(lambda *arrays: f(*arrays))  # no program is kept that files had no part in
    return anew.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def configs(f, *arrays):
    """What the custom calls of a program name; none is empty."""
    return re.findall(r'(?<!_)config = "([^"]*)"', lowered(f, *arrays))


def entry(config):
    return Entry.measured(config, 1e-6, 2e-6, 1.5e-6)


def problems(f, *arrays):
    return [each.problem for each in tune_module.find_products(f, *arrays)]


def tuned(config, f=f, arrays=ARRAYS, kind=KIND):
    return Tunings({(kind, each): entry(config) for each in problems(f, *arrays)})


# --- What can be named -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "arrays"),
    [
        (lambda a, b, **o: gemm(a, b, **o), ARRAYS),
        (lambda a, b, **o: gemm(a, b, bias=b[0], activation="gelu", **o), ARRAYS),
        (lambda a, b, **o: gated_gemm(a, b, b, **o), ARRAYS),
        (lambda a, b, **o: ragged_dot(a, b, SIZES, **o), (bf16(64, 32), bf16(2, 32, 48))),
    ],
)
def test_xla_by_name(f, arrays):
    assert len(configs(f, *arrays)) == 1
    assert configs(lambda *x: f(*x, config="xla"), *arrays) == []
    ours = f(*(x + 1 for x in arrays), config="xla")
    np.testing.assert_array_equal(ours, f(*(x + 1 for x in arrays)))


@pytest.mark.parametrize(
    ("options", "dtype", "wide"),
    [
        ({}, "bfloat16", False),
        ({"bias": True, "activation": "gelu"}, "bfloat16", False),
        ({"bias": True}, "float16", False),
        ({"bias": True, "alpha": 0.5}, "float16", True),  # the product may be beyond its numbers
        ({"bias": True, "alpha": 0.5}, "bfloat16", False),
        ({"bias": True, "preferred_element_type": "float32"}, "bfloat16", True),
        ({"wide_bias": True}, "bfloat16", True),
    ],
)
def test_xla_is_asked_for_as_jnp_would(options, dtype, wide):
    a, b = (x.astype(dtype) for x in ARRAYS)
    bias = jnp.zeros(384, "float32" if options.pop("wide_bias", None) else dtype)
    if options.pop("bias", None) or bias.dtype == "float32":
        options["bias"] = bias
    text = lowered(lambda a, b: gemm(a, b, config="xla", **options), a, b)
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    assert "stablehlo.dot_general" in text
    assert ("f32" in text) == wide
    assert (f"-> tensor<256x384x{short}>" in text) or wide


def test_parts_of_k_by_name():
    text = lowered(lambda a, b: gemm(a, b, config=f"{ROW}/splits=4"), *ARRAYS)
    assert f'config = "{ROW}/splits=4"' in text
    # Four products of whole tiles of clusters in float32, and flags.
    assert f"tensor<{4 * 4 * 256 * 384 + 8192}xui8>" in text
    # With an epilogue, which what adds up the parts has.
    arrays = *ARRAYS, bf16(384)
    named = configs(
        lambda a, b, c: gemm(a, b, bias=c, activation="silu", config=f"{ROW}/splits=2"), *arrays
    )
    assert named == [f"{ROW}/splits=2"]


@pytest.mark.parametrize(
    "config",
    [
        f"{ROW}/splits=0",
        f"{ROW}/splits=1",
        f"{ROW}/splits=x",
        f"{ROW}/splits=",
        "xla/splits=2",
        f"/splits=2{ROW}",
        "sm90_bf16_128x64x64_s8_c1x1_k2_cooperative/splits=2",
        "sm90_bf16_64x16x64_s8_c1x1_skinny/splits=2",
    ],
)
def test_what_is_no_name(config):
    with pytest.raises(ValueError, match="is not a kernel configuration") as raised:
        gemm(*ARRAYS, config=config)
    assert "'xla'" in str(raised.value)
    assert "splits=N" in str(raised.value)


def test_rows_that_split_k_are_those_of_the_dispatch():
    from jax_tcgemm import _core

    if len(_core.kernel_names()) < len(kernel_table.CONFIGS):
        pytest.skip("needs every kernel of the table")
    split = set()
    for algorithm in {row.algorithm for row in kernel_table.CONFIGS}:
        for wide in (False, True):
            problem = (algorithm, 512, 512, 2**15, 1, True, 132, 227 * 1024)
            options = {"workspace_bytes": 2**30, "compute_capability": 90, "float32_result": wide}
            for layout in ("nn", "tn", "nt"):
                ranked = _core.rank_configs(*problem, layout=layout, **options)
                read = [kernel_table.read_config(config) for config, _, _ in ranked]
                split |= {name for name, splits in read if splits > 1}
    assert split == {row.name for row in kernel_table.CONFIGS if row.splits_k}


# --- What is found in a program --------------------------------------------------------------


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


SQUARE = bf16(256, 256), bf16(256, 256)


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


# --- What tunings change ---------------------------------------------------------------------


def test_what_is_active_names_the_row():
    assert configs(f, *ARRAYS) == [""]
    with tuned(ROW):
        assert configs(f, *ARRAYS) == [ROW]
        assert configs(f, bf16(128, 512), ARRAYS[1]) == [""]  # nothing is known of it
        assert configs(lambda a, b: gemm(a, b, config=OTHER), *ARRAYS) == [OTHER]
    with tuned(f"{OTHER}/splits=2"):
        assert configs(f, *ARRAYS) == [f"{OTHER}/splits=2"]
    with tuned("xla"):
        assert configs(f, *ARRAYS) == []
    with tuned(None):
        assert configs(f, *ARRAYS) == [""]
    with tuned(ROW, kind="NVIDIA L4"):
        assert configs(f, *ARRAYS) == [""]
    assert configs(f, *ARRAYS) == [""]


def test_unaligned_operands_of_a_tuned_row_are_padded():
    arrays = bf16(515, 777), bf16(777, 1030)
    with tuned(ROW, arrays=arrays):
        (before, after) = [lowered(g, *arrays) for g in (lambda a, b: gemm(a, b) * 1, f)]
    for text in (before, after):
        assert f'config = "{ROW}"' in text
        assert re.search(r"padding_bytes = [1-9]", text)


@pytest.mark.parametrize("grad", [False, True])
def test_gated_and_ragged_products_are_tuned(grad):
    rows = {
        "gated": next(row.name for row in kernel_table.CONFIGS if row.gated and row.arch == "sm90"),
        "m": next(row.name for row in kernel_table.CONFIGS if row.grouped == "m"),
    }
    for f, arrays, row in (
        (lambda a, b: gated_gemm(a, b, b), SQUARE, rows["gated"]),
        (lambda a, b: ragged_dot(a, b, SIZES), (bf16(64, 32), bf16(2, 32, 48)), rows["m"]),
    ):
        g = jax.grad(lambda *x, f=f: f(*x).astype("float32").sum()) if grad else f
        entries = {
            (KIND, problem): entry("xla" if grad else row) for problem in problems(g, *arrays)
        }
        with Tunings(entries):
            assert configs(g, *arrays) == ([] if grad else [row])


def test_programs_of_jit_are_those_of_their_tunings():
    traces = []

    @jax.jit
    def g(a, b):
        traces.append(None)
        return gemm(a, b)

    first, same, other = tuned(ROW), tuned(ROW), tuned("xla")
    assert first == same != other
    for active, count in ((None, 1), (first, 2), (same, 2), (other, 3), (first, 3), (None, 3)):
        if active is None:
            g(*ARRAYS)
        else:
            with active:
                g(*ARRAYS)
        assert len(traces) == count


def test_joined_and_nested():
    arrays = bf16(128, 512), ARRAYS[1]
    one, two = tuned(ROW), tuned(OTHER, arrays=arrays)
    both = one | two
    assert len(both) == 2
    assert len(both | tuned("xla")) == 2
    with both | tuned("xla"):
        assert configs(f, *ARRAYS) == []
        assert configs(f, *arrays) == [OTHER]
    with one, two:
        assert configs(f, *ARRAYS) == [ROW]
        with tuned("xla"):
            assert configs(f, *ARRAYS) == []
            assert configs(f, *arrays) == [OTHER]
        assert configs(f, *arrays) == [OTHER]
    with one, one:
        pass
    assert tunings.active() is None


def test_saved_and_loaded(tmp_path):
    both = tuned(ROW) | tuned("xla", arrays=(bf16(8, 512), ARRAYS[1])) | tuned(None, kind="L4")
    path = tmp_path / "tunings.json"
    both.save(path)
    assert Tunings.load(path) == both
    assert [name for name in os.listdir(tmp_path) if name != "cache"] == ["tunings.json"]
    text = str(both)
    assert ROW in text
    assert "as untuned" in text
    assert "gemm bf16 nn 8x384x512" in text
    assert "0.750 untuned, 1.500 tuned" in text
    assert repr(both) == "<Tunings of 3 products, for L4, NVIDIA H200>"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "devices": {}}',
        '{"format": 1, "devices": {"x": [{"problem": {}, "entry": {}}]}}',
        '{"format": 1, "devices": {"x": [{"problem": {}}]}}',
    ],
)
def test_what_is_no_file_of_tunings(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"file\.json holds no tunings"):
        Tunings.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"config": OTHER},  # which has no digest
        {"config": 1},
        {"seconds": 0.0},
        {"seconds": "1"},
        {"seconds": float("nan")},
        {"rows": [ROW]},
        {"rows": {ROW: 1}},
    ],
)
def test_what_is_no_entry(change):
    good = entry(ROW).to_json()
    assert Entry.from_json(json.loads(json.dumps(good))) == entry(ROW)
    with pytest.raises(ValueError, match="not an entry"):
        Entry.from_json(good | change)


def test_an_entry_ends_with_its_row():
    changed = Entry(ROW, 1e-6, 2e-6, 3e-6, ((ROW, "another"),))
    gone = Entry("gone", 1e-6, 2e-6, 3e-6, (("gone", row_digest("gone")),))
    for old in (changed, gone):
        assert not old.is_current
        with Tunings({(KIND, problem): old for problem in problems(f, *ARRAYS)}):
            assert configs(f, *ARRAYS) == [""]


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    axes = (tuned(ROW) | tuned("xla", arrays=(bf16(8, 512), ARRAYS[1]))).plot()
    assert len(axes.get_yticks()) == 2


# --- Where they are looked for ---------------------------------------------------------------


def test_order_of_places(monkeypatch):
    (problem,) = problems(f, *ARRAYS)
    monkeypatch.setattr(lookup, "packaged", lambda kind: tuned("xla"))
    assert configs(f, *ARRAYS) == []
    assert cache.write(KIND, problem, entry(ROW)) is None
    assert configs(f, *ARRAYS) == [ROW]
    with tuned(OTHER):
        assert configs(f, *ARRAYS) == [OTHER]
    with tunings.untuned():
        assert configs(f, *ARRAYS) == [""]
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)  # of several processes
    assert configs(f, *ARRAYS) == []
    monkeypatch.undo()


def test_settings(monkeypatch):
    (problem,) = problems(f, *ARRAYS)
    cache.write(KIND, problem, entry(ROW))
    monkeypatch.setenv(lookup.SETTING, "off")
    assert configs(f, *ARRAYS) == [""]
    with tuned(OTHER):
        assert configs(f, *ARRAYS) == [OTHER]
    monkeypatch.setenv(lookup.SETTING, "sometimes")
    with pytest.raises(ValueError, match="JAX_TCGEMM_TUNING='sometimes' must be one of"):
        configs(f, *ARRAYS)
    monkeypatch.setenv(lookup.SETTING, "read")
    monkeypatch.setenv(cache.SETTING, "")
    assert configs(f, *ARRAYS) == [""]
    monkeypatch.undo()


def test_first_use_is_measured_once(monkeypatch):
    measured = []

    def measure(product):
        # In a thread of its own programs can run, which in this one is being traced.
        measured.append(product)
        return entry(ROW)

    monkeypatch.setattr(lookup, "measure", measure)
    assert configs(f, *ARRAYS) == [""]
    monkeypatch.setenv(lookup.SETTING, "tune")
    assert configs(f, *ARRAYS) == [ROW]
    assert configs(f, *ARRAYS) == [ROW]
    (product,) = measured
    assert cache.read(KIND, product.problem) == entry(ROW)
    assert cache.everything() == tuned(ROW)


def test_a_measurement_runs_programs_while_one_is_traced(monkeypatch):
    def measure(product):
        assert float(jax.jit(lambda x: x + 1)(jnp.float32(1))) == 2
        return entry(ROW)

    monkeypatch.setattr(tune_module, "measure", measure)
    monkeypatch.setattr(lookup, "measure", tune_module.measure_while_lowering)
    monkeypatch.setenv(lookup.SETTING, "tune")
    assert configs(f, *ARRAYS) == [ROW]


def test_a_gpu_that_nothing_was_fitted_to(monkeypatch):
    monkeypatch.setattr(
        devices, "local_device", lambda matches: "NVIDIA L4" if matches((8, 9)) else None
    )
    monkeypatch.setattr(devices, "local_kind", lambda: "NVIDIA L4")
    assert configs(f, *ARRAYS) == []
    assert configs(lambda a, b: gemm(a, b, config=OTHER), *ARRAYS) == [OTHER]
    assert configs(lambda a, b: gemm(a, b, bias=b[0]), *ARRAYS) == [""]
    with tuned(OTHER, kind="NVIDIA L4"):
        assert configs(f, *ARRAYS) == [OTHER]


# --- Files -----------------------------------------------------------------------------------

PROBLEM = problem_key(op="gemm", m=1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\udcff",
        json.dumps({"device": KIND, "problem": PROBLEM}),
        json.dumps({"device": KIND, "problem": "another", "entry": entry(ROW).to_json()}),
        json.dumps({"device": KIND, "problem": PROBLEM, "entry": entry(ROW).to_json()})[:-5],
        json.dumps(
            {
                "device": KIND,
                "problem": PROBLEM,
                "entry": entry(ROW).to_json() | {"rows": {ROW: "old"}},
            }
        ),
    ],
)
def test_a_broken_file_is_none(text):
    assert cache.write(KIND, PROBLEM, entry(ROW)) is None
    assert cache.read(KIND, PROBLEM) == entry(ROW)
    (path,) = cache.folder().iterdir()
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert cache.read(KIND, PROBLEM) is None
    assert cache.write(KIND, PROBLEM, entry("xla")) is None
    assert cache.read(KIND, PROBLEM) == entry("xla")


def test_what_cannot_be_read_or_written(monkeypatch, tmp_path):
    cache.write(KIND, PROBLEM, entry(ROW))
    (path,) = cache.folder().iterdir()
    path.unlink()
    path.mkdir()  # a folder in its place
    assert cache.read(KIND, PROBLEM) is None
    assert cache.write(KIND, PROBLEM, entry(ROW))
    assert list(cache.folder().iterdir()) == [path]
    path.rmdir()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert "No space left" in cache.write(KIND, PROBLEM, entry(ROW))
        assert list(cache.folder().iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.SETTING, str(tmp_path / "file"))
    assert cache.write(KIND, PROBLEM, entry(ROW))
    assert cache.read(KIND, PROBLEM) is None
    assert len(cache.everything()) == 0


_WRITE_FOR_EVER = """
import sys
import numpy as np
from test_tuning import CONFIGS, Entry, KIND, cache, numbered
rng = np.random.default_rng(int(sys.argv[1]))
while True:
    config = CONFIGS[rng.integers(4)]
    us = 1e-6 * (1 + CONFIGS.index(config))
    cache.write(KIND, numbered(int(rng.integers(3))), Entry(config, us, us, us, ROWS[config]))
"""
CONFIGS = (ROW, OTHER, "xla", None)


def numbered(m):
    return problem_key(op="gemm", m=m)


def test_processes_that_write_at_once_and_are_killed():
    rows = {config: entry(config).rows for config in CONFIGS}
    program = f"ROWS = {rows!r}\n{_WRITE_FOR_EVER}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-P", "-c", program, str(seed)], env=environment)
        for seed in range(8)
    ]
    found, killed, end = 0, 0, time.monotonic() + 120
    while found < 3000 and time.monotonic() < end:
        for m in range(3):
            got = cache.read(KIND, numbered(m))
            if got is not None:  # whole, whoever wrote it
                assert got.seconds == 1e-6 * (1 + CONFIGS.index(got.config))
                found += 1
        if found % 1000 < 3 and killed < 6:
            processes[killed].kill()
            killed += bool(found)
    codes = [process.poll() for process in processes[killed:]]
    for process in processes:
        process.kill()
        process.wait()
    assert codes == [None] * len(codes)
    assert found >= 3000
    for m in range(3):
        assert cache.write(KIND, numbered(m), entry(ROW)) is None
    assert set(cache.everything().entries.values()) == {entry(ROW)}


# --- tune ------------------------------------------------------------------------------------


def test_tune_needs_a_gpu():
    with pytest.raises(RuntimeError, match=r"tune measures kernels on a GPU; .* is cpu"):
        tune(f, *ARRAYS)


class _Gpu:
    platform, device_kind = "gpu", KIND


def test_tune_measures_each_product_within_its_budget(monkeypatch, capfd):
    measured = []

    def measure(product, numbers):
        measured.append(product)
        return entry(ROW)

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


@pytest.mark.parametrize(
    ("f", "arrays"),
    [
        (lambda a, b: gemm(a, b, bias=b[0], activation="relu"), SQUARE),
        (lambda a, b: gemm(a, b, b, preferred_element_type="float32"), SQUARE),
        (lambda a, b: gated_gemm(a, b, b), SQUARE),
        (lambda a, b: ragged_dot(a, b[None], SIZES[:1]), SQUARE),
        (lambda a, b: gemm(a, b), (jnp.zeros((3, 5, 7)), jnp.zeros((7, 9)))),
    ],
)
def test_competitors_are_compiled_and_timed(monkeypatch, f, arrays):
    # Here all of them are XLA's, by wall time.
    h200 = {"sm_count": 132, "shared_memory_per_block": 227 * 1024, "compute_capability": 90}
    monkeypatch.setattr(tune_module._core, "device_properties", lambda ordinal: h200)
    monkeypatch.setattr(tune_module, "candidates", lambda product, device: [ROW, OTHER])
    monkeypatch.setattr(tune_module, "_apply", _without_rows(tune_module._apply))
    (product,) = tune_module.find_products(f, *arrays)
    found = tune_module.measure(product)
    assert 0 < found.seconds <= found.untuned_seconds < 1
    assert 0 < found.xla_seconds < 1
    assert found.config in (None, "xla", ROW, OTHER)


def _without_rows(apply):
    """Rows are of one arithmetic, and these tests' products of others."""
    return lambda product, config, *operands: apply(
        product, config if config == "xla" else None, *operands
    )


def test_numbers_are_normal_and_others_each_time():
    numbers = tune_module.Numbers()
    kinds = [jax.ShapeDtypeStruct(s, d) for s in ((64, 128), (300, 7)) for d in ("float32", "f2")]
    drawn = [np.asarray(numbers.take(x), np.float32) for x in kinds * 3]
    for values, x in zip(drawn, kinds * 3, strict=True):
        assert values.shape == x.shape
        assert abs(values.std() - 1) < 0.1
    assert len({values.tobytes() for values in drawn}) == len(drawn)


def test_candidates_hold_what_is_taken_untuned():
    from jax_tcgemm import _core
    from jax_tcgemm.transforms.candidates import candidates

    if len(_core.kernel_names()) < len(kernel_table.CONFIGS):
        pytest.skip("needs every kernel of the table")
    h200 = {"sm_count": 132, "shared_memory_per_block": 227 * 1024, "compute_capability": 90}
    for g, arrays, expected in (
        (f, (bf16(1024, 16384), bf16(16384, 1024)), f"{ROW}/splits=2"),
        (f, (bf16(4096, 4096), bf16(4096, 4096)), "sm90_bf16_128x256x64_s4_c2x1_cooperative"),
        (f, (bf16(333, 777), bf16(777, 1111)), "sm90_"),
        (f, (bf16(8, 256, 256), bf16(8, 256, 256)), "sm90_"),
        (lambda a, b: gemm(a, b, preferred_element_type="float32"), SQUARE, "promote"),
        (lambda a, b: gated_gemm(a, b, b), SQUARE, "gated"),
        (lambda a, b: ragged_dot(a, b, SIZES), (bf16(64, 32), bf16(2, 32, 48)), "grouped_m"),
        (
            jax.grad(lambda b, a: ragged_dot(a, b, SIZES).astype("float32").sum()),
            (bf16(2, 32, 48), bf16(64, 32)),
            "grouped_k",
        ),
    ):
        products = tune_module.find_products(g, *arrays)
        names = [candidates(product, h200) for product in products]
        assert any(expected in each[0] for each in names), (names, expected)
        assert all(1 <= len(each) == len(set(each)) <= 12 for each in names)
        for product, each in zip(products, names, strict=True):
            for config in each:
                with Tunings({(KIND, product.problem): Entry.measured(config, 1.0, 1.0, 1.0)}):
                    assert config in configs(g, *arrays)
