"""Which GPUs and dtypes lower to kernels, and why others do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import bf16

from jax_tcgemm import _compat, _core, _extension, gemm


class Turing:
    compute_capability = "7.5"
    device_kind = "Tesla T4"


@pytest.mark.parametrize("why", ["no kernels", "algorithm", "precision", "old GPU"])
def test_reference_where_there_is_no_kernel(cuda_module, monkeypatch, why):
    a, b = bf16(4, 6), bf16(6, 5)
    precision = None
    if why == "no kernels":
        monkeypatch.setattr(_extension, "KERNEL_NAMES", frozenset())
    elif why == "algorithm":
        tf32 = frozenset(name for name in _extension.KERNEL_NAMES if "tf32" in name)
        monkeypatch.setattr(_extension, "KERNEL_NAMES", tf32)
    elif why == "precision":
        precision = "BF16_BF16_BF16"
    else:
        monkeypatch.setattr(_compat, "initialized_cuda_devices", lambda: [Turing()])
    text, calls = cuda_module(lambda a, b: gemm(a, b, precision=precision), a, b)
    assert not calls
    assert "dot_general" in text


@pytest.mark.parametrize(
    ("built_for", "dtype", "bias", "reason"),
    [
        ("75", jnp.float16, True, None),
        ("80-virtual,75-real", jnp.float16, True, None),
        ("all-major", jnp.float16, True, None),
        ("75", jnp.float16, False, "on Tesla T4 that was not tuned"),
        ("75", jnp.bfloat16, True, "BF16_BF16_F32 needs compute capability 8.0"),
        ("80", jnp.float16, True, "no kernel for Tesla T4 in this build; set CUDAARCHS"),
    ],
)
def test_turing(cuda_module, monkeypatch, said, built_for, dtype, bias, reason):
    """On Turing, built kernels compute float16 with an epilogue; without one, only if tuned."""
    info = {**_core.build_info(), "architectures": built_for}
    monkeypatch.setattr(_core, "build_info", lambda: info)
    monkeypatch.setattr(_compat, "initialized_cuda_devices", lambda: [Turing()])
    a, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((16, 24), (24, 8)))
    biases = {"bias": jax.ShapeDtypeStruct((8,), dtype)} if bias else {}
    _, calls = cuda_module(lambda a, b, biases: gemm(a, b, **biases), a, b, biases)
    assert len(calls) == (reason is None)
    if reason is not None:
        assert reason in said[-1]


@pytest.mark.usefixtures("hopper")
def test_new_gpu_is_taken(cuda_module):
    _, calls = cuda_module(lambda a, b: gemm(a, b), bf16(4, 6), bf16(6, 5))
    assert len(calls) == 1
