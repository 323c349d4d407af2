"""Times by CUDA events on a GPU, compared with CUPTI's, and beside a profile."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jax_tcgemm import _core
from jax_tcgemm.tools import benchmarking, stopwatch
from jax_tcgemm.tools.chain import compile_chain

pytestmark = pytest.mark.gpu


def chains_of(sizes):
    return {
        str(size): compile_chain(jnp.matmul, [(jnp.ones((size, size)),) * 2] * 4, one_by_one=True)
        for size in sizes
    }


def run(program, environment):
    """Runs a program in a separate process."""
    command = [sys.executable, "-P", "-c", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran


def test_as_cupti_but_for_gaps():
    if not benchmarking.cupti_works(jax.devices()[0]):
        pytest.skip("no CUPTI")
    chains = chains_of((512, 1024, 2048))
    events = stopwatch.time_chains(chains, jax.devices()[0], reps=8, block=2)
    cupti = benchmarking.time_chains(chains, reps=8, block=2, method="cupti")
    for name, timing in events.items():
        assert len(timing.seconds) == 8
        assert cupti[name].median * 0.9 < timing.median < cupti[name].median * 1.2 + 4e-6


def test_a_gate_opens_by_itself():
    marked = stopwatch._marked(jax.devices()[0])
    marked.gate()
    marked.gates += 1
    begun = time.perf_counter()
    jax.block_until_ready(marked.mark())
    assert 0.015 < time.perf_counter() - begun < 1
    (turn,) = _core.stopwatch_seconds(marked.ordinal)
    assert len(turn) == 1


_PROGRAM = """
import tempfile
import jax, jax.numpy as jnp
import jax_tcgemm
from jax_tcgemm.tuning import cache
a, b = jnp.ones((24, 520), jnp.bfloat16), jnp.ones((520, 776), jnp.bfloat16)
for m in (24, 16):
    with jax.profiler.trace(tempfile.mkdtemp()):
        jax.block_until_ready(jnp.dot(a, b))
    assert (jax_tcgemm.gemm(a[:m], b) == 520).all()
print(len(cache.everything()), "measured")
"""


def test_products_are_measured_by_default_between_profiles(tmp_path):
    variables = {"JAX_TCGEMM_CACHE_DIR": str(tmp_path), "XLA_FLAGS": ""}
    for name in ("CI", "PYTEST_VERSION", "PYTEST_CURRENT_TEST", "JAX_TCGEMM_TUNING"):
        os.environ.get(name) and variables.update({name: ""})
    environment = {k: v for k, v in (os.environ | variables).items() if v or k == "XLA_FLAGS"}
    assert "2 measured" in run(_PROGRAM, environment).stdout


_ROWS = """
import threading
import jax, jax.numpy as jnp
import jax_tcgemm
from jax_tcgemm.tools import stopwatch
from jax_tcgemm.transforms import race, tune
a, b = jnp.ones((24, 4096), jnp.bfloat16), jnp.ones((4096, 1024), jnp.bfloat16)
(product,) = tune.find_products(jax_tcgemm.gemm, a, b)
made = race.Race(product, race.Numbers(), threading.Event())
rows = [row for row in made.rows() if made._shares_program(row)]
made.enter({row: row for row in rows})
print("#", *rows)
times = made.timed(2, 1)
assert times.keys() == set(rows)
"""


def test_gates_name_the_rows_of_one_program():
    environment = os.environ | {"JAX_TCGEMM_LOG": "1", "JAX_TCGEMM_TUNING": "off", "XLA_FLAGS": ""}
    ran = run(_ROWS, environment)
    (named,) = (line for line in ran.stdout.splitlines() if line.startswith("# "))
    rows = {row.split("/")[0] for row in named.split()[1:]}
    assert len(rows) > 1
    for row in rows:  # each row ran
        assert row in ran.stderr
