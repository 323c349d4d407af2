"""Rows for packed weights by name on a Hopper GPU, and measured choices among them."""

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
from packed_problems import Problem, exact_weight, wrong

from jax_tcgemm import _extension, gated_gemm, gemm, pack, ragged_dot, tune
from jax_tcgemm.kernels import packed_configs
from jax_tcgemm.problem.packed import BITS

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

SIZES = jnp.asarray([5, 0, 7, 4], jnp.int32)


def drawn(rng, row, bits: int) -> Problem:
    """Draws a problem that a row computes, with up to two tiles of rows."""
    group = int(rng.choice([each for each in (32, 64, 128) if row.takes(each, 128)]))
    k = 128 * int(rng.integers(10, 20))
    if rng.random() < 0.25:
        group = k
    qtype = str(rng.choice([each for each, size in BITS.items() if size == bits]))
    m, n = int(rng.integers(row.tokens // 2, 2 * row.tokens)) + 1, int(rng.integers(1, 400))
    has_zeros = bits == 4 and bool(rng.random() < 0.5)
    scale = "bfloat16" if rng.random() < 0.5 else "float32"
    return Problem(m, n, k, group, qtype, has_zeros, scale)


@pytest.mark.parametrize("name", packed_configs.BY_NAME)
def test_named_rows(rng, name):
    bits, row = packed_configs.BY_NAME[name]
    problem = drawn(rng, row, bits)
    splits = int(rng.choice([1, 2, 4]))
    config = name + f"/splits={splits}" * (splits > 1)
    x, q = problem.operands(rng)
    run = jax.jit(lambda x, w: gemm(x, w, config=config))
    w = pack(q)
    assert f"@{_extension.PACKED_TARGET}(" in run.lower(x, w).as_text()
    what = wrong(run(x, w), x, q, is_exact=row.sums_are_scaled)
    assert what is None, (config, problem, what)
    if row.row_blocks % 2 == 0:
        other = problem.operands(rng)[1]
        pair = jax.jit(
            lambda x, w, u: gated_gemm(x, w, u, epilogue=lambda g, u: (g, u), config=config)
        )
        u = pack(other)
        assert f"@{_extension.PACKED_FUNCTION_TARGET}(" in pair.lower(x, w, u).as_text()
        for got, each in zip(pair(x, w, u), (q, other), strict=True):
            what = wrong(got, x, each, is_exact=row.sums_are_scaled)
            assert what is None, (config, problem, what)


def test_each_form_is_tuned(rng):
    x, q = Problem(16, 192, 1024, 128).operands(rng)
    w = pack(q)
    experts = jax.tree.map(lambda y: jnp.stack([y] * 4), w)

    def f(x, w, experts):
        outer = gemm(x, w, epilogue=lambda z: 2 * z, preferred_element_type="float32")
        both = gated_gemm(x, w, w, epilogue=lambda g, u: g + u, preferred_element_type="float32")
        return gemm(x, w), outer, both, ragged_dot(x, experts, SIZES)

    found = tune(f, x, w, experts, progress=False)
    problems = [json.loads(problem) for _, problem in found.entries]
    assert sorted((each["op"], each["weights"]) for each in problems) == [
        ("packed", 1),
        ("packed_function", 1),
        ("packed_function", 2),
        ("packed_ragged", 1),
    ]
    for entry in found.entries.values():
        assert 0 < entry.seconds <= entry.untuned_seconds < 1e-3
    with found:
        plain, outer, both, grouped = jax.jit(f)(x, w, experts)
    for got in (plain, grouped):
        assert wrong(got, x, q) is None
    for got in (outer, both):
        assert wrong(got / 2, x, q) is None


PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax_tcgemm import Quantized, gemm, pack
given = np.load(sys.argv[1])
values, scale = jnp.asarray(given["values"]).astype("int4"), jnp.asarray(given["scale"])
q = Quantized(values, scale, None, values.dtype)
x = jnp.asarray(given["x"], "bfloat16")
y = jax.jit(lambda x, w: gemm(x, w))(x, pack(q))
np.save(sys.argv[2], np.asarray(y.astype(jnp.float32)))
"""


def test_a_new_process_reads_the_measurement(rng, tmp_path):
    problem = Problem(33, 320, 4096, 128, scale="float32")
    x, q = problem.operands(rng)
    given = {"values": q.qvalue.astype("int8"), "scale": q.scale, "x": x.astype("float32")}
    np.savez(tmp_path / "given.npz", **{name: np.asarray(y) for name, y in given.items()})
    env = os.environ | {"JAX_TCGEMM_LOG": "1", "JAX_TCGEMM_CACHE_DIR": str(tmp_path / "cache")}
    results, configs = [], []
    for mode, source in (("tune", "a measurement"), ("read", "a file"), ("tune", "a file")):
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, tmp_path / "given.npz", tmp_path / "result.npy"],
            env=env | {"JAX_TCGEMM_TUNING": mode},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        found = re.findall(rf"tcgemm_packed .*: config (\S+), by {source}$", done.stderr, re.M)
        if not found and mode == "tune" and "its times scatter" in done.stderr:
            pytest.skip("another process uses the GPU, so nothing is stored")
        configs += found
        results.append(np.load(tmp_path / "result.npy"))
    assert len(set(configs)) == 1, configs
    assert len(configs) == 3
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint8), other.view(np.uint8))
    exact = np.asarray(x, np.float64) @ exact_weight(q)
    error = np.linalg.norm(results[0] - exact) / np.linalg.norm(exact)
    assert error < 2.0**-7, dataclasses.asdict(problem)
