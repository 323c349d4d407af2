"""On the GPU: MPS leaves the processes few SMs, where larger clusters may not fit."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest
from mps import CONTROL, outer_environment
from mps_client import NO_DEVICE, ROWS

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

CLIENT = pathlib.Path(__file__).with_name("mps_client.py")


@pytest.fixture
def mps(tmp_path):
    """Returns the environment for clients of this test's own MPS server."""
    if shutil.which(CONTROL) is None:
        pytest.skip(f"no {CONTROL}")
    environment = outer_environment()
    for name in ("PIPE", "LOG"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        environment[f"CUDA_MPS_{name}_DIRECTORY"] = str(folder)
    start = subprocess.run(
        [CONTROL, "-d"], env=environment, text=True, capture_output=True, timeout=60, check=False
    )
    if start.returncode != 0:
        pytest.skip(f"{CONTROL} does not start: {start.stdout}{start.stderr}")
    yield environment
    subprocess.run(
        [CONTROL], env=environment, input="quit -t 10\n", text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("percentage", [5, 10, 20])
def test_a_share_of_the_gpu(mps, percentage):
    """Every kind of product is right; smaller clusters replace too large ones."""
    if not {1, 2, 4, 8} <= set(ROWS):
        pytest.skip("needs rows with clusters of each size")
    mps["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(percentage)
    mps["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    mps["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    mps["JAX_TCGEMM_LOG"] = "1"
    client = subprocess.run(
        [sys.executable, CLIENT], env=mps, text=True, capture_output=True, timeout=300, check=False
    )
    if client.returncode == NO_DEVICE:
        pytest.skip(f"no GPU for a client of MPS: {client.stdout}")
    print(client.stdout, client.stderr)
    assert client.returncode == 0, client.stdout + client.stderr
    assert "ragged: right" in client.stdout
