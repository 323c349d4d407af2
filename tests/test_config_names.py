"""The values of ``config=``: rows, rows that split k, XLA's own composition."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import bf16
from kernel_rows import rank_rows
from tuned_calls import (
    ARRAYS,
    ROW,
    SIZES,
    configs,
    lowered,
)

from jax_tcgemm import _core, gated_gemm, gemm, ragged_dot
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels import table as kernel_table

pytestmark = pytest.mark.usefixtures("all_kernels", "on_an_h200")


@pytest.mark.parametrize(
    ("f", "arrays"),
    [
        (lambda a, b, **o: gemm(a, b, **o), ARRAYS),
        (lambda a, b, **o: gemm(a, b, bias=b[0], activation="gelu", **o), ARRAYS),
        (lambda a, b, **o: gated_gemm(a, b, b, **o), ARRAYS),
        (lambda a, b, **o: ragged_dot(a, b, SIZES, **o), (bf16(64, 32), bf16(2, 32, 48))),
    ],
)
def test_xla_by_name(f, arrays):
    assert len(configs(f, *arrays)) == 1
    assert configs(lambda *x: f(*x, config="xla"), *arrays) == []
    ours = f(*(x + 1 for x in arrays), config="xla")
    np.testing.assert_array_equal(ours, f(*(x + 1 for x in arrays)))


def sums(text):
    """Returns the result types of the products in a program."""
    return re.findall(r"stablehlo.dot_general.* -> tensor<[x\d]*x(\w+)>", text)


@pytest.mark.parametrize(
    ("options", "dtype", "product"),
    [
        ({}, "bfloat16", "bf16"),
        ({}, "float16", "f16"),
        ({"bias": "bfloat16", "activation": "gelu"}, "bfloat16", "bf16"),
        ({"bias": "float16"}, "float16", "f16"),
        ({"c": "bfloat16"}, "bfloat16", "bf16"),
        # Sums that jnp does not have, scaled products, and values that may exceed float16's range.
        ({"bias": "float16", "activation": "silu"}, "float16", "f32"),
        ({"bias": "float16", "alpha": 0.5}, "float16", "f32"),
        ({"c": "bfloat16", "beta": -1.0}, "bfloat16", "f32"),
        ({"bias": "float32"}, "bfloat16", "f32"),
        ({"residual": "bfloat16", "activation": "silu"}, "bfloat16", "f32"),
        ({"preferred_element_type": "float32"}, "bfloat16", "f32"),
    ],
)
def test_xla_is_asked_for_as_jnp_would(options, dtype, product):
    a, b = (x.astype(dtype) for x in ARRAYS)
    shapes = {"bias": (384,), "c": (256, 384), "residual": (256, 384)}
    options = {
        name: jnp.zeros(shapes[name], value) if name in shapes else value
        for name, value in options.items()
    }
    text = lowered(lambda a, b: gemm(a, b, config="xla", **options), a, b)
    assert sums(text) == [product]
    # Activations run in float32, and so do products that XLA computes as a fallback.
    assert ("f32" in text) == (product == "f32" or "activation" in options)


def test_xla_by_name_is_kept_where_a_gated_product_is_taken_apart():
    biases = bf16(3, 384)
    gated = lambda b, x, w: gated_gemm(x, w, w, bias_gate=b, config="xla")  # noqa: E731
    mapped = jax.vmap(gated, (0, None, None))
    assert configs(mapped, biases, *ARRAYS) == []
    packed = lambda x, w: gated_gemm(x, w, config="xla")  # noqa: E731
    grad = jax.grad(lambda x, w: packed(x, w).astype("float32").sum(), (0, 1))
    assert configs(packed, *ARRAYS) == []
    assert configs(grad, *ARRAYS) != []  # derivatives choose their own configuration


def test_parts_of_k_by_name():
    text = lowered(lambda a, b: gemm(a, b, config=f"{ROW}/splits=4"), *ARRAYS)
    assert f'config = "{ROW}/splits=4"' in text
    # Four products of whole tiles of clusters in float32, and flags.
    assert f"tensor<{4 * 4 * 256 * 384 + 8192}xui8>" in text
    # The code that adds up the parts applies the epilogue.
    arrays = *ARRAYS, bf16(384)
    named = configs(
        lambda a, b, c: gemm(a, b, bias=c, activation="silu", config=f"{ROW}/splits=2"), *arrays
    )
    assert named == [f"{ROW}/splits=2"]


@pytest.mark.parametrize(
    "config",
    [
        f"{ROW}/splits=0",
        f"{ROW}/splits=1",
        f"{ROW}/splits=x",
        f"{ROW}/splits=65",
        f"{ROW}/splits=99999999999999999999",
        f"{ROW}/splits=\u0663",
        f"{ROW}/splits=02",
        f"{ROW}/splits=",
        "xla/splits=2",
        f"/splits=2{ROW}",
        "sm90_bf16_128x64x64_s8_c1x1_k2_cooperative/splits=2",
        "sm90_bf16_64x16x64_s8_c1x1_skinny/splits=2",
    ],
)
def test_what_is_no_name(config):
    with pytest.raises(ValueError, match="is not a kernel configuration") as raised:
        gemm(*ARRAYS, config=config)
    assert "'xla'" in str(raised.value)
    assert "splits=N" in str(raised.value)
    assert len(str(raised.value)) < 1200  # not all rows of the table


def test_rows_that_split_k_are_those_of_the_dispatch():
    if _core.build_info()["kernels_glob"] != "*":
        pytest.skip("needs every kernel of the table")
    split = set()
    for algorithm in {row.algorithm for row in kernel_table.CONFIGS}:
        for wide, capability in itertools.product((False, True), (75, 90)):
            problem = (algorithm, 512, 512, 2**15, 1, True, 132, 227 * 1024)
            options = {"compute_capability": capability, "float32_result": wide}
            options |= {"workspace_bytes": 2**30}
            for layout in ("nn", "tn", "nt"):
                ranked = rank_rows(*problem, layout=layout, **options)
                read = [kernel_names.read_config(config) for config, _, _ in ranked]
                split |= {name for name, splits in read if splits > 1}
    names = [row.name for row in kernel_table.CONFIGS]
    assert split == {name for name in names if _core.row_facts(name).splits_k}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: gemm(x, x, config="measured"),
        lambda x: gated_gemm(x, x, x, config="measured"),
        lambda x: ragged_dot(x, x[None], jnp.array([64]), config="measured"),
        lambda x: gemm(x, x, epilogue=jnp.sin, config="measured"),
    ],
)
def test_what_measurements_ask_for_is_refused(function):
    with pytest.raises(ValueError, match=r"'measured' is no.* kernel configuration"):
        function(jnp.ones((64, 64), jnp.bfloat16))
