"""Functions as epilogues where a GPU other than Hopper's is local: XLA's, unless one was timed."""

from __future__ import annotations

import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_tcgemm import _compat, _core, fuse, gated_gemm, gemm
from jax_tcgemm.kernels import table
from jax_tcgemm.lowering import devices
from jax_tcgemm.transforms import measure, race
from jax_tcgemm.transforms import tune as tune_module
from jax_tcgemm.transforms.numbers import Numbers
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.tunings import untuned

_L4 = {"sm_count": 58, "shared_memory_per_block": 99 * 1024, "compute_capability": 89}
_ROW = "sm80_bf16_128x128x32_w2x2_s4"
_SHAPES = (512, 256), (256, 384)


@pytest.fixture(autouse=True)
def _on_an_l4(monkeypatch):
    monkeypatch.setattr(
        devices, "local_device", lambda matches: "NVIDIA L4" if matches((8, 9)) else None
    )


def _lowered(function: Any, *shapes: tuple[int, ...]) -> str:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def _with(f: Any, **options: Any) -> Any:
    return lambda a, b: gemm(a, b, epilogue=f, **options)


@pytest.mark.parametrize("f", [jnp.sin, lambda z: (jnp.sin(z), z.max(0))])
def test_kernels_compute_what_is_asked_for(f):
    assert "compiled_gemm" not in _lowered(_with(f), *_SHAPES)
    assert "compiled_gemm" in _lowered(_with(f, config="kernel"), *_SHAPES)
    with untuned():
        assert "compiled_gemm" not in _lowered(_with(f), *_SHAPES)


@pytest.mark.parametrize(("config", "count"), [(None, 0), ("xla", 0), (_ROW, 1)])
def test_a_measurement_decides(monkeypatch, config, count):
    """The untuned choice is XLA here, so no row was faster if that won."""
    found = Entry.measured(config, 1e-6, 1e-6, 1e-6), "a measurement"
    monkeypatch.setattr(devices, "find_choice", lambda product: found)
    assert _lowered(_with(jnp.sin), *_SHAPES).count("@jax_tcgemm_compiled_gemm") == count


def test_two_weights_have_no_kernel():
    f = lambda g, u: jnp.tanh(g) * u  # noqa: E731
    run = lambda a, *w: gated_gemm(a, *w, epilogue=f, config="kernel")  # noqa: E731
    with pytest.raises(ValueError, match="no kernel for functions of such products on NVIDIA L4"):
        _lowered(run, (256, 128), (128, 192), (128, 192))


def test_fuse_leaves_a_program_as_it_is():
    def f(a, b, c):
        return jnp.sin(a @ b + c) * 2

    texts = [_lowered(each, *_SHAPES, (384,)) for each in (f, fuse(f))]
    for text in texts:
        assert "custom_call" not in text
        assert "xf32>" not in text  # a product that is not rounded


def test_rows_are_timed_for_functions(monkeypatch):
    """The untuned choice of the race is XLA, so the model's first row takes part by its name."""
    monkeypatch.setattr(_core, "device_properties", lambda ordinal: _L4)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 1024), (1024, 4096))]
    (product,) = tune_module.find_products(_with(jnp.sin), *arrays)
    monkeypatch.setattr(race.Race, "_fastest_relatives", lambda race, plain: [])
    monkeypatch.setattr(race, "operand_sets", lambda *_: [])
    names = race.Race(product, Numbers(), threading.Event()).rows()
    assert names
    assert {table.BY_NAME[name].arch for name in names} == {"sm80"}
    assert measure._takes_rows(product)
    assert measure._is_timed(product)
    hopper = types.SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H200")
    monkeypatch.undo()
    monkeypatch.setattr(_compat, "initialized_cuda_devices", lambda: [hopper])
    assert not measure._takes_rows(product)
