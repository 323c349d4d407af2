"""A named row without the requested epilogue computes the product, and XLA the rest."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import assert_nothing_moves, bf16, picked

from jax_tcgemm import _extension, gemm
from jax_tcgemm.kernels.names import by_name
from jax_tcgemm.problem.log import print_once

pytestmark = pytest.mark.any_jax

SUMS = "sm90_bf16_128x64x64_s8_c1x1_cooperative"
PRODUCTS = "sm90_bf16_256x16x64_s3_c1x1_skinny"


@pytest.mark.parametrize("config", [SUMS, PRODUCTS])
@pytest.mark.parametrize(
    "epilogue",
    [
        *("activation", "residual", "row_scale", "float32 c", "float32 result", "float16 result"),
        "gradient",
    ],
)
def test_a_row_without_the_epilogue_computes_the_product(cuda_module, config, epilogue):
    options = {
        "activation": {"activation": "gelu"},
        "residual": {"residual": bf16(64, 64), "activation": "relu"},
        "row_scale": {"row_scale": jnp.ones(64)},
        "float32 c": {"c": jnp.ones((64, 64))},
        "float32 result": {"bias": bf16(64), "preferred_element_type": jnp.float32},
        "float16 result": {"bias": bf16(64), "preferred_element_type": jnp.float16},
        "gradient": {"bias": bf16(64), "activation": "silu"},
    }[epilogue]

    def f(a, b):
        d = gemm(a, b, config=config, **options)
        return d.astype(jnp.float32).sum() if epilogue == "gradient" else d

    function = jax.value_and_grad(f) if epilogue == "gradient" else f
    _, (call, *_) = cuda_module(function, bf16(64, 64), bf16(64, 64))
    assert picked(call, "operands", "results") == (["64x64xbf16"] * 2, ["64x64xf32"])
    assert picked(call, "config", "activation", "alpha") == (config, "", 1.0)
    assert not any(call[name] for name in call if name.startswith("has_"))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (SUMS, {}),
        (PRODUCTS, {}),
        (SUMS, {"bias": bf16(64), "alpha": 0.5}),
        (SUMS, {"c": bf16(64, 64), "beta": 2.0}),
        (SUMS, {"preferred_element_type": jnp.float32}),
        ("sm90_bf16_64x128x64_s6_c2x1_pingpong", {"activation": "gelu"}),
        # This row cannot write a float32 product, so another row applies the epilogue.
        ("sm90_bf16_128x160x64_s5_c2x1_pingpong_swap_ab", {"activation": "gelu"}),
    ],
)
def test_a_row_with_the_epilogue_computes_all(cuda_module, config, options):
    text, (call,) = cuda_module(
        functools.partial(gemm, config=config, **options), bf16(64, 64), bf16(64, 64)
    )
    assert_nothing_moves(text)
    assert call["config"] == config
    assert text.count("stablehlo.add") == text.count("stablehlo.multiply") == 0


def test_sums_of_odd_rows_are_every_rows(cuda_module):
    for config in (SUMS, "sm90_bf16_256x160x64_s3_c2x1_cooperative"):
        f = functools.partial(gemm, transpose_b=True, config=config)
        _, (call,) = cuda_module(functools.partial(f, bias=bf16(63)), bf16(64, 64), bf16(63, 64))
        assert call["has_bias"]
    _, (call,) = cuda_module(functools.partial(f, c=bf16(64, 63)), bf16(64, 64), bf16(63, 64))
    assert call["has_c"] == (by_name(config).epilogue == "any")


@pytest.mark.parametrize(
    ("built", "takes"),
    [
        ((SUMS,), {"none"}),  # this row adds aligned operands only
        ((PRODUCTS,), {"none"}),
        (("sm80_bf16_128x256x64_w2x4_s3",), {"none", "sum"}),
        ((SUMS, "simt_bf16_4x32x32_w4x1_s1"), {"none", "sum", "any"}),
    ],
)
def test_builds_that_lack_the_epilogue_leave_it_to_xla(cuda_module, monkeypatch, built, takes):
    assert by_name(built[0]).epilogue != "any"
    monkeypatch.setattr(_extension, "KERNEL_NAMES", frozenset(built))
    for work, options in {
        "none": {},
        "sum": {"bias": bf16(64)},
        "any": {"activation": "silu"},
    }.items():
        # A new function, since jax caches the lowering of a function.
        f = functools.partial(gemm, **options)
        _, calls = cuda_module(f, bf16(64, 64), bf16(64, 64))
        assert len(calls) == (work in takes), (built, work)
        if built[0] == SUMS:  # a named row computes what it can
            _, calls = cuda_module(functools.partial(f, config=SUMS), bf16(64, 64), bf16(64, 64))
            assert len(calls) == 1


def test_the_log_names_a_pass_after_the_product(cuda_module, monkeypatch, capfd):
    print_once.cache_clear()
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    cuda_module(lambda a, b: gemm(a, b, activation="relu", config=SUMS), bf16(24, 64), bf16(64, 64))
    line = capfd.readouterr().err.rstrip()
    assert line.endswith(f"BF16_BF16_F32, config {SUMS}, epilogue in a pass after it")
