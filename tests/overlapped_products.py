"""Helpers of the tests of overlapped products on GPUs: meshes, programs, comparisons."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from sharded_checks import put

from jax_tcgemm import mlp
from jax_tcgemm._extension import OVERLAPPED_TARGET

BF16 = jnp.bfloat16


def mesh_of(count, order=1):
    devices = [device for device in jax.devices() if device.platform == "gpu"]
    if len(devices) < count:
        pytest.skip(f"needs {count} GPUs")
    return jax.make_mesh((count,), ("x",), (AxisType.Auto,), devices=devices[:count][::order])


def calls(program):
    return program.as_text().count(f'custom_call_target="{OVERLAPPED_TARGET}"')


def close(actual, expected, tolerance=2e-2):
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max())


def wide(*operands):
    return [jnp.asarray(np.asarray(x, np.float32)) for x in operands]


def layers(mesh, normal, m=512, k=256, n=1024):
    return (
        put(mesh, normal(m, k, dtype=BF16), "x"),
        put(mesh, normal(k, n, dtype=BF16) / 16, None, "x"),
        put(mesh, normal(n, k, dtype=BF16) / 32, "x"),
    )


def two_layers(x, w, v):
    return mlp(x, w, None, v)


def formula(x, w, v):
    return jax.nn.gelu(x @ w) @ v
