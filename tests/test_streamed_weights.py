"""Few rows times 8-bit weights contiguous along n, lowered without a GPU: which are copied."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from quantized_values import E4M3

from jax_tcgemm import gated_gemm, gemm, ragged_dot

pytestmark = pytest.mark.any_jax

_OTHER_ROW = "sm90_e4m3e4m3_fast_128x128x128_s6_c2x1_pingpong"
_STREAMED_ROW = "sm90_e4m3e4m3_fast_16x128x128_s4_c1x1_k2_streamed"


@pytest.mark.parametrize(
    ("of_a", "of_b", "options", "moves"),
    [
        ((16, 64), (64, 48), {}, False),
        ((64, 64), (64, 48), {}, False),
        ((65, 64), (64, 48), {}, True),
        ((65, 64), (64, 48), {"config": _STREAMED_ROW}, False),
        ((16, 64), (64, 48), {"config": _OTHER_ROW}, True),
        ((16, 72), (72, 48), {}, True),
        ((16, 64), (64, 40), {}, True),
        ((4, 16, 64), (64, 48), {}, False),  # 64 rows
        ((5, 16, 64), (64, 48), {}, True),
        ((3, 16, 64), (3, 64, 48), {}, False),
        ((16, 256), (256, 128), {"by_blocks": True}, True),
    ],
)
def test_few_rows_take_weights_as_they_lie(all_kernels, of_a, of_b, options, moves):
    a, b = jax.ShapeDtypeStruct(of_a, E4M3), jax.ShapeDtypeStruct(of_b, E4M3)

    def f(a, b, config=None, by_blocks=False):
        scales = {"a_scale": jnp.ones((16, 2)), "b_scale": jnp.ones((2, 1))} if by_blocks else {}
        return gemm(a, b, config=config, **scales)

    traced = jax.jit(functools.partial(f, **options)).trace(a, b)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_tcgemm_compiled_gemm" in text
    assert ("jax_tcgemm_transpose" in text or "stablehlo.transpose" in text) == moves


_STREAMED_GROUPS = "sm90_e4m3e4m3_fast_16x128x128_s4_c1x1_streamed_grouped_m"


@pytest.mark.parametrize(
    ("m", "of_weights", "options", "moves"),
    [
        (40, (8, 64, 48), {}, False),
        (512, (8, 64, 48), {}, False),  # 64 rows for each group
        (513, (8, 64, 48), {}, True),
        (513, (8, 64, 48), {"config": _STREAMED_GROUPS}, False),
        (
            40,
            (8, 64, 48),
            {"config": "sm90_e4m3e4m3_fast_64x128x128_s6_c1x1_pingpong_grouped_m"},
            True,
        ),
        (40, (8, 64, 40), {}, True),
        (40, (8, 48, 64), {"transpose_rhs": True}, False),
        (5000, (8, 48, 64), {"transpose_rhs": True}, False),
    ],
)
def test_groups_of_few_rows_take_weights_as_they_lie(all_kernels, m, of_weights, options, moves):
    x, w = jax.ShapeDtypeStruct((m, 64), E4M3), jax.ShapeDtypeStruct(of_weights, E4M3)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    halved = functools.partial(ragged_dot, epilogue=lambda acc: acc / 2, **options)
    traced = jax.jit(halved).trace(x, w, sizes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_tcgemm_compiled_gemm" in text
    assert ("jax_tcgemm_transpose" in text or "stablehlo.transpose" in text) == moves


@pytest.mark.parametrize(
    ("options", "is_kernel"),
    [
        ({}, True),
        ({"precision": "highest"}, True),
        ({"config": _STREAMED_GROUPS}, True),
        ({"config": "xla"}, False),
        ({"activation": "relu"}, False),
        ({"bias": jnp.ones((8, 48))}, False),
    ],
)
def test_groups_alone_are_multiplied_as_they_are(all_kernels, options, is_kernel):
    x, w = jax.ShapeDtypeStruct((40, 64), E4M3), jax.ShapeDtypeStruct((8, 64, 48), E4M3)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    product = functools.partial(ragged_dot, preferred_element_type=jnp.float32, **options)
    text = jax.jit(product).trace(x, w, sizes).lower(lowering_platforms=("cuda",)).as_text()
    assert ("jax_tcgemm_compiled_gemm" in text) == is_kernel
    assert ("stablehlo.dot_general" in text) != is_kernel


def test_rows_for_groups_are_named_without_bias_and_by_their_own_sums():
    x, w = jnp.ones((40, 64), E4M3), jnp.ones((8, 64, 48), E4M3)
    sizes = jnp.full(8, 5)

    def run(config, **options):
        return ragged_dot(x, w, sizes, config=config, **options)

    assert run(_STREAMED_GROUPS).shape == (40, 48)
    assert run(_STREAMED_GROUPS, epilogue=lambda acc: acc).shape == (40, 48)
    with pytest.raises(ValueError, match="for groups of rows in these dtypes; accepted: "):
        run(_STREAMED_GROUPS, activation="relu")
    for other in ("sm90_s8_16x128x128_s4_c1x1_streamed_grouped_m", _STREAMED_ROW):
        with pytest.raises(ValueError, match="for groups of rows in E4M3_E4M3_F32_FAST"):
            run(other, epilogue=lambda acc: acc)


def test_few_rows_of_what_cannot_be_taken_as_it_lies(all_kernels):
    x = jax.ShapeDtypeStruct((16, 64), E4M3)
    halves = jax.ShapeDtypeStruct((64, 2 * 24), E4M3)  # the second half begins at 24
    packed = lambda x, w: gated_gemm(x, w, epilogue=lambda g, u: g * u)  # noqa: E731
    four = [jax.ShapeDtypeStruct(s, E4M3) for s in ((2, 3, 2, 3, 16, 64), (3, 2, 3, 2, 64, 48))]
    orders = ((0, 1, 2, 3, 4, 5), (1, 0, 3, 2, 4, 5))

    def permuted(a, b):
        return gemm(a, jnp.transpose(b, orders[1]), a_scale=2.0)

    for f, arrays in ((packed, (x, halves)), (permuted, four)):
        text = jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        assert "jax_tcgemm_compiled_gemm" in text
        assert "stablehlo.dot_general" not in text
