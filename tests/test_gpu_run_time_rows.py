"""On the GPU: kernels missing from the build, compiled at first use, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

# Products of float16 whose kernels most GPUs' builds lack, against float64.
PRODUCTS = """
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import gated_gemm, gemm, ragged_dot
from jax_tcgemm.epilogue import nvrtc

if "hidden" in sys.argv:
    nvrtc.find = lambda: "NVRTC is hidden"

rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float16)


def check(got, want):
    assert got.dtype == jnp.float16
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error < 1e-3 * np.abs(want).max(), error


def wide(*arrays):
    return [np.asarray(each, np.float64) for each in arrays]


def gelu(x):
    return np.asarray(jax.nn.gelu(jnp.asarray(x, jnp.float32)), np.float64)


for m, n, k in ((16, 4096, 1024), (384, 512, 256), (2048, 1536, 512), (72, 333, 129)):
    a, b, bias = normal(m, k), normal(k, n), normal(n)
    x, w, c = wide(a, b, bias)
    check(jax.jit(gemm)(a, b), x @ w)
    step = jax.jit(lambda a, b, c: gemm(a, b, bias=c, activation="gelu"))
    check(step(a, b, bias), gelu(x @ w + c))
a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((128, 256), (256, 192)))
exactly = jax.jit(lambda a, b: gemm(a, b, bias=b[0], activation="gelu", precision="highest"))
x, w = wide(a, b)
want = gelu(x @ w + w[0])
assert np.abs(np.asarray(exactly(a, b), np.float64) - want).max() < 1e-4 * np.abs(want).max()
a, b, u = normal(256, 512), normal(512, 256), normal(512, 256)
x, w, v = wide(a, b, u)
gate = x @ w
check(jax.jit(gated_gemm)(a, b, u), gate / (1 + np.exp(-gate)) * (x @ v))
weights = normal(4, 512, 256)
sizes = jnp.asarray([64, 0, 128, 64], jnp.int32)
groups = np.split(x, np.cumsum(np.asarray(sizes))[:-1])
want = np.concatenate([g @ w for g, w in zip(groups, wide(weights)[0])])
check(jax.jit(ragged_dot)(a, weights, sizes), want)
"""

EXPORT = """
import sys

import jax
import jax.numpy as jnp

import jax_tcgemm

def f(a, b):
    return jax_tcgemm.gemm(a, b, activation="relu")

types = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((48, 256), (256, 512))]
checks = jax_tcgemm.export_disabled_checks()
exported = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=checks)(*types)
open(sys.argv[1], "wb").write(exported.serialize())
"""

LOAD = """
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_tcgemm
from jax_tcgemm.epilogue import nvrtc

if "hidden" in sys.argv:
    nvrtc.find = lambda: "NVRTC is hidden"
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
rng = np.random.default_rng(0)
a, b = (jnp.asarray(rng.standard_normal(s), jnp.float16) for s in ((48, 256), (256, 512)))
want = np.maximum(np.asarray(a, np.float64) @ np.asarray(b, np.float64), 0)
assert np.abs(np.asarray(program.call(a, b), np.float64) - want).max() < 0.1
"""


def run(script: str, *arguments: str, tmp_path, **environment: str) -> str:
    """Runs a script in a process with its own cache and returns its log."""
    settings = {"JAX_TCGEMM_LOG": "1", "JAX_TCGEMM_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stderr


def compiled(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("jax_tcgemm: compiled ")]


@pytest.mark.any_jax
def test_kernels_are_compiled_once(tmp_path):
    assert len(compiled(run(PRODUCTS, tmp_path=tmp_path))) >= 4
    assert not compiled(run(PRODUCTS, tmp_path=tmp_path))


@pytest.mark.any_jax
def test_without_a_compiler_the_build_does(tmp_path):
    log = run(PRODUCTS, "hidden", tmp_path=tmp_path)
    assert "kernels of the build take its place: NVRTC is hidden" in log
    assert not compiled(log)


@pytest.mark.any_jax
def test_a_program_exported_without_a_gpu(tmp_path):
    path = str(tmp_path / "program")
    assert not compiled(run(EXPORT, path, tmp_path=tmp_path, JAX_PLATFORMS="cpu"))
    run(LOAD, path, tmp_path=tmp_path)
    assert not compiled(run(LOAD, path, "hidden", tmp_path=tmp_path))
