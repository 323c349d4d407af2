"""Measured choices on the GPU: right for every configuration, and found by measuring."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemm_problems import draw, failure

from jax_tcgemm import Tunings, _core, gated_gemm, gemm, mlp, ragged_dot, tune
from jax_tcgemm.kernels.names import by_name, read_config
from jax_tcgemm.kernels.table import CONFIGS
from jax_tcgemm.lowering import devices
from jax_tcgemm.transforms import tune as tune_module
from jax_tcgemm.transforms.candidates import candidates
from jax_tcgemm.tuning import cache, lookup
from jax_tcgemm.tuning.entry import Entry

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

SPLIT = [row.name for row in CONFIGS if _core.row_facts(row.name).splits_k]


def named(product, config):
    entry = Entry.measured(config, 1e-6, 2e-6, 3e-6)
    return Tunings({(devices.local_kind(), product.problem): entry})


@pytest.mark.parametrize("part", range(8))
def test_random_products_are_right_whatever_is_named(rng, part):
    device = _core.device_properties(0)
    tried = 0
    while tried < 5:
        problem = draw(int(rng.integers(2**31)), 0)
        problem = dataclasses.replace(problem, call=problem.call | {"config": None})
        recorder = lookup.Recorder()
        with recorder:
            assert failure(problem, rng) is None
        for product in recorder.products.values():
            names = candidates(product, device)
            rows = {read_config(name)[0] for name in names}.intersection(SPLIT)
            names += [f"{row}/splits={rng.integers(2, 9)}" for row in rows]
            # XLA's own composition rounds before an epilogue, as jnp does; this check does not
            # allow that.
            xla = ["xla"] * (product.spec.work == "none")
            for config in [*rng.permutation(names)[:2], *xla]:
                with named(product, str(config)):
                    what = failure(problem, rng)
                assert what is None, (config, problem, what)
            tried += 1


@pytest.mark.parametrize("splits", [2, 3, 5, 8, 64])
@pytest.mark.parametrize("fused", [False, True])
def test_parts_of_k_by_name(rng, normal, assert_accurate, splits, fused):
    m, n, k = (8 * int(x) for x in rng.integers((1, 1, 512), (40, 80, 600)))
    for dtype, rows in ((jnp.bfloat16, "sm90_bf16"), (jnp.float16, "sm75_f16_")):
        arrays = [normal(*shape, dtype=dtype) for shape in ((m, k), (k, n), (n,))]
        check_parts_of_k(
            *arrays, fused, rng.permutation(rows_called(rows))[:5], splits, assert_accurate
        )


def rows_called(prefix):
    return [row for row in SPLIT if row.startswith(prefix)]


def check_parts_of_k(a, b, bias, fused, rows, splits, assert_accurate):
    options = {"bias": bias, "activation": "silu"} if fused else {}
    z = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    baseline = jnp.matmul(a, b)
    if fused:
        z = z + np.asarray(bias, np.float64)
        z = z / (1 + np.exp(-z))
        baseline = jax.nn.silu(baseline + bias)
    for row in rows:
        d = gemm(a, b, **options, config=f"{row}/splits={splits}")
        assert_accurate(d, baseline, z)


def test_what_is_named_is_what_runs():
    # The dispatch logs each choice once in a process, if logging is on from the start.
    rows = [rows_called(prefix)[0] for prefix in ("sm75_f16_", "sm90_bf16", "sm90_tf32")]
    named = [f"{row}/splits={parts}" for row in rows for parts in (2, 3)]
    program = f"""
import jax.numpy as jnp
from jax_tcgemm import gemm
for config in {named!r}:
    algorithm = config.split("_")[1]
    dtype = {{"bf16": jnp.bfloat16, "f16": jnp.float16, "tf32": jnp.float32}}[algorithm]
    gemm(jnp.ones((256, 6144), dtype), jnp.ones((6144, 256), dtype), config=config)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=os.environ | {"JAX_TCGEMM_LOG": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    for config in named:
        row, parts = read_config(config)
        tile_k = by_name(row).tile_k
        stages = -(-6144 // tile_k // parts)
        line = rf"split_stages={stages}( fixup)? -> {row}$"
        assert re.search(line, done.stderr, re.MULTILINE), (config, done.stderr)


def test_functions_and_products_of_8_bits_are_measured(rng, normal):
    x, w = normal(256, 512), normal(512, 384)
    few, weights = (normal(*s).astype(jnp.float8_e4m3fn) for s in ((8, 512), (512, 384)))
    mask = normal(256, 384) > 0

    def f(x, w, few, weights, mask):
        y = gemm(x, w, epilogue=lambda z, mask: jnp.where(mask, z, 0), epilogue_operands=(mask,))
        return y, gemm(few, weights, a_scale=0.1, preferred_element_type=jnp.float32)

    arrays = x, w, few, weights, mask
    found = tune(f, *arrays, progress=False)
    assert len(found) == 2
    expected = jax.jit(f)(*arrays)
    programs = lookup.Recorder()
    with programs:
        jax.jit(lambda *arrays: f(*arrays)).trace(*arrays).lower()
    for product in programs.products.values():
        for config in (*candidates(product, _core.device_properties(0)), "xla"):
            with named(product, config):
                results = jax.jit(lambda *arrays: f(*arrays))(*arrays)
            for y, z in zip(results, expected, strict=True):
                y, z = (np.asarray(each, np.float32) for each in (y, z))
                assert np.max(np.abs(y - z)) <= 2**-7 * np.max(np.abs(z)), config


def model(x, w, gate, up, experts, sizes):
    h = mlp(gemm(x, w), w, None, w.T)
    h = h + gated_gemm(h, gate, up)
    return ragged_dot(h, experts, sizes).astype(jnp.float32).sum()


def test_a_model_is_tuned(normal, monkeypatch, tmp_path, capfd):
    arrays = [
        normal(*shape, dtype=jnp.bfloat16) * shape[-2] ** -0.5
        for shape in ((512, 256), (256, 256), (256, 256), (256, 256), (2, 256, 256))
    ]
    arrays[0] = normal(512, 256, dtype=jnp.bfloat16)
    sizes = jnp.asarray([200, 312], jnp.int32)
    step = jax.value_and_grad(model, (0, 1, 2, 3, 4))
    before = jax.jit(step)(*arrays, sizes)
    found = tune(step, *arrays, sizes)
    assert len(found) >= 8
    assert "tune: 0/" in capfd.readouterr().err
    kinds = {json.loads(problem)["op"] for _, problem in found.entries}
    assert kinds == {"gemm", "gated", "ragged_m", "ragged_k"}
    for entry in found.entries.values():
        assert 0 < entry.seconds <= entry.untuned_seconds < 1e-3
        # Some of these take less than 2 us, for which XLA is not timed.
        assert entry.xla_seconds is None or 0 < entry.xla_seconds < 1e-2
        if entry.config is not None:
            assert entry.seconds < entry.untuned_seconds
    path = tmp_path / "tunings.json"
    found.save(path)
    assert Tunings.load(path) == found
    with found:
        after = jax.jit(step)(*arrays, sizes)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        x, y = (np.asarray(each, np.float32) for each in (x, y))
        assert np.linalg.norm(x - y) <= 2**-6 * np.linalg.norm(x)


def test_first_use_is_measured(normal, monkeypatch, tmp_path):
    monkeypatch.setenv(cache.SETTING, str(tmp_path))
    monkeypatch.setenv(lookup.SETTING, "tune")
    a, b = normal(328, 136, dtype=jnp.bfloat16), normal(136, 72, dtype=jnp.bfloat16)
    first = jax.jit(lambda a, b: gemm(a, b) + 0)(a, b)
    ((kind, problem), entry) = next(iter(cache.everything().entries.items()))
    assert kind == jax.devices()[0].device_kind
    assert json.loads(problem)["m"] == 328
    assert entry.untuned_seconds > 0
    # The second program finds the measurement.
    monkeypatch.setattr(tune_module, "measure", None)
    again = jax.jit(lambda a, b: gemm(a, b) + 0)(a, b)
    np.testing.assert_array_equal(first, again)
