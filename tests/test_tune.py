"""The products that ``tune`` finds in a program, and how it measures them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import bf16
from tuned_calls import (
    ARRAYS,
    E4M3,
    FEW_ROWS,
    H200,
    KIND,
    ROW,
    SIZES,
    SQUARE,
    configs,
    entry,
    f,
    lowered,
    problems,
    tuned,
)

from jax_tcgemm import Tunings, _core, gated_gemm, gemm, mlp, ragged_dot, tune
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.transforms import tune as tune_module
from jax_tcgemm.transforms.candidates import candidates
from jax_tcgemm.transforms.numbers import Numbers, operand_sets
from jax_tcgemm.tuning import tunings
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.lookup import Measured

pytestmark = [pytest.mark.any_jax, pytest.mark.usefixtures("all_kernels", "on_an_h200")]


def scanned(a, b):
    return jax.lax.scan(lambda x, _: (gemm(x, b), None), a, length=3)[0]


def branching(a, b):
    return jax.lax.cond(a.sum() > 0, lambda: gemm(a, b), lambda: gemm(a, b, activation="relu"))


def sharded(a, b):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), auto, devices=jax.devices("cpu")[:2])
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(
        lambda a, b: gemm(a, b), mesh=mesh, in_specs=(spec, None), out_specs=spec
    )
    return mapped(a, b)


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (f, ["gemm nn 256x256x256"]),
        (lambda a, b: f(a, b) + f(b, a), ["gemm nn 256x256x256"]),
        (scanned, ["gemm nn 256x256x256"]),
        (branching, ["gemm nn 256x256x256", "gemm nn 256x256x256 relu"]),
        (sharded, ["gemm nn 128x256x256"]),
        (
            jax.grad(lambda a, b: gemm(a, b, activation="silu").astype("float32").sum(), (0, 1)),
            ["gemm nn 256x256x256", "gemm nt 256x256x256", "gemm tn 256x256x256"],
        ),
        (
            jax.grad(jax.checkpoint(lambda a, b: mlp(a, b, None, b).astype("float32").sum())),
            [
                "gemm nn 256x256x256",
                "gemm nt 256x256x256",
                "gemm nt 256x256x256 gelu c",
            ],
        ),
        (lambda a, b: gated_gemm(a, b, b), ["gated nn 256x256x256 silu"]),
        (lambda a, b: ragged_dot(a, b[None], SIZES[:1]), ["ragged_m nn 256x256x256 1 groups"]),
        (lambda a, b: gemm(a, b, epilogue=jnp.sin), ["gemm nn 256x256x256 function"]),
        (
            lambda a, b: gated_gemm(a, b, b, epilogue=jnp.multiply),
            ["gated nn 256x256x256 function"],
        ),
        (lambda a, b: gemm(a, b, epilogue=jnp.sin, config=ROW), []),
        (lambda a, b: a + b, []),
        (lambda a, b: gemm(a, b, config=ROW), []),
    ],
)
def test_products_of_a_program(f, expected):
    found = {tunings.described(problem).replace(" bf16", "") for problem in problems(f, *SQUARE)}
    assert found == set(expected)


def test_products_of_a_jitted_function_and_of_types():
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARRAYS]
    jitted = jax.jit(lambda a, b, activation: gemm(a, b, activation=activation), static_argnums=2)
    (product,) = tune_module.find_products(jitted, *types, "relu")
    assert product.types == tuple(types)
    assert product.spec.activation == "relu"
    (again,) = tune_module.find_products(jitted, *types, "relu")  # no cache hides the product
    assert again == product


def test_a_problem_is_known_by_what_its_time_depends_on():
    def only(f, *arrays):
        (problem,) = problems(f, *arrays)
        return problem

    base = only(f, *ARRAYS)
    # These are the same problem to a kernel.
    assert only(f, bf16(4, 64, 512), ARRAYS[1]) == base
    assert only(lambda a, b: gemm(a, b, alpha=1.0), *ARRAYS) == base
    scaled = [only(lambda a, b, x=x: gemm(a, b, alpha=x), *ARRAYS) for x in (0.5, 3.0)]
    assert scaled[0] == scaled[1]
    # These are other problems.
    others = [
        only(f, bf16(257, 512), ARRAYS[1]),
        only(f, bf16(1, 256, 512), bf16(2, 512, 384)),
        only(lambda a, b: gemm(a, b, transpose_b=True), ARRAYS[0], bf16(384, 512)),
        only(lambda a, b: gemm(a, b, preferred_element_type="float32"), *ARRAYS),
        only(lambda a, b: gemm(a, b, bias=b[0]), *ARRAYS),
        only(lambda a, b: gemm(a, b, activation="gelu"), *ARRAYS),
        only(lambda a, b: gemm(a, b, activation="silu"), *ARRAYS),
        only(lambda a, b: gated_gemm(a, b, b), *ARRAYS),
        only(f, *(x.astype(jnp.float16) for x in ARRAYS)),
        only(f, *(x.astype(jnp.float32) for x in ARRAYS)),
        scaled[0],
    ]
    assert len({base, *others}) == 1 + len(others)


def test_functions_are_problems_of_their_own():
    found = [
        problems(lambda a, b, f=f: gemm(a, b, epilogue=f), *ARRAYS)[0]
        for f in (jnp.sin, jnp.cos, lambda z: (z, jnp.abs(z)))
    ]
    found += problems(lambda a, b: gemm(a, b, a_scale=2.0), *FEW_ROWS)
    found += problems(lambda a, b: gemm(a, b), *FEW_ROWS)
    assert len(set(found)) == 5


def test_a_measured_row_of_a_function_is_taken():
    g = lambda a, b: gemm(a, b, epilogue=jnp.sin)  # noqa: E731
    assert configs(g, *ARRAYS) == [""]
    with tuned(ROW, g):
        assert configs(g, *ARRAYS) == [ROW]
    with tuned("xla", g):
        assert configs(g, *ARRAYS) == []
    with tuned("sm90_f16_128x128x64_s6_c2x1_pingpong", g):  # of another dtype
        assert configs(g, *ARRAYS) == [""]


def test_few_rows_of_8_bits_may_be_measured_with_weights_either_way():
    g = lambda a, b: gemm(a, b, a_scale=2.0)  # noqa: E731
    (product,) = tune_module.find_products(g, *FEW_ROWS)
    names = candidates(product, H200)
    streamed = [name for name in names if kernel_names.by_name(name).streams_b]
    assert 1 <= len(streamed) < len(names) <= 12
    for name in (streamed[0], next(name for name in names if name not in streamed)):
        with tuned(name, g, FEW_ROWS):
            text = lowered(g, *FEW_ROWS)
            assert configs(g, *FEW_ROWS) == [name]
        assert ("jax_tcgemm_transpose" in text) == (name not in streamed)


def test_candidates_of_many_rows_are_of_one_way():
    arrays = [jax.ShapeDtypeStruct(shape, E4M3) for shape in ((8192, 4096), (4096, 4096))]
    (product,) = tune_module.find_products(lambda a, b: gemm(a, b, a_scale=2.0), *arrays)
    names = candidates(product, H200)
    assert not any(kernel_names.by_name(name).streams_b for name in names)


def test_operands_of_functions_are_drawn():
    key = jax.random.key(3)

    def dropped(z, mask, key):
        kept = jax.random.bernoulli(key, 0.5, z.shape)
        return jnp.where(mask & kept, z, 0)

    arrays = (*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 512), (512, 8192))), key)
    mask = jax.ShapeDtypeStruct((4096, 8192), jnp.bool_)

    def g(a, b, key, mask):
        return gemm(a, b, epilogue=dropped, epilogue_operands=(mask, key))

    (product,) = tune_module.find_products(g, *arrays, mask)
    (drawn,) = operand_sets(product, Numbers(), 1)
    assert [x.dtype for x in drawn] == [x.dtype for x in product.types]
    assert [x.shape for x in drawn] == [x.shape for x in product.types]


def test_rows_that_take_no_functions_are_not_taken_from_tunings():
    g = lambda a, b: gemm(a, b, epilogue=jnp.sin)  # noqa: E731
    for row in (
        "sm80_bf16_64x64x32_w2x2_s3_realign",
        "sm90_bf16_64x128x64_s6_c1x1_pingpong_promote",
    ):
        with tuned(row, g):
            assert configs(g, *ARRAYS) == [""]


def test_tune_needs_a_gpu():
    with pytest.raises(RuntimeError, match=r"tune measures kernels on a GPU; .* is cpu"):
        tune(f, *ARRAYS)


class _Gpu:
    platform, device_kind = "gpu", KIND


def test_tune_measures_each_product_within_its_budget(monkeypatch, capfd):
    measured = []

    def measure(product, stop):
        measured.append(product)
        return Measured(entry(ROW), is_certain=True)

    monkeypatch.setattr(tune_module, "default_device", lambda: _Gpu)
    monkeypatch.setattr(tune_module._core, "kernel_names", lambda: [ROW])
    monkeypatch.setattr(tune_module, "measure", measure)
    g = lambda a, b: gemm(gemm(a, b[:, :32]), b[:32])  # noqa: E731
    found = tune(g, *ARRAYS)
    assert len(found) == len(measured) == 2
    assert [product.types[1].shape for product in measured] == [(512, 32), (32, 384)]
    with found:
        assert configs(g, *ARRAYS) == [ROW, ROW]
    assert "tune: 1/2" in capfd.readouterr().err
    assert len(tune(g, *ARRAYS, budget=-1.0, progress=False)) == 0
    assert capfd.readouterr().err == ""


def test_programs_that_xla_divides_are_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: compiled.append(self))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), auto, devices=jax.devices("cpu")[:2])
    rows = jax.NamedSharding(mesh, jax.P("x"))
    tune_module.find_products(f, *SQUARE)
    assert not compiled
    constrained = lambda a, b: f(jax.lax.with_sharding_constraint(a, rows), b)  # noqa: E731
    for function in (constrained, jax.jit(f, in_shardings=(rows, None))):
        count = len(compiled)
        tune_module.find_products(function, *SQUARE)
        assert len(compiled) == count + 1


def test_candidates_hold_what_is_taken_untuned():
    if len(_core.kernel_names()) < len(kernel_table.CONFIGS):
        pytest.skip("needs every kernel of the table")
    float32_result = functools.partial(gemm, preferred_element_type="float32")
    for g, arrays, expected in (
        (f, (bf16(1024, 16384), bf16(16384, 1024)), f"{ROW}/splits=2"),
        (f, (bf16(4096, 4096), bf16(4096, 4096)), "sm90_bf16_128x256x64_s4_c2x1_cooperative"),
        (f, (bf16(333, 777), bf16(777, 1111)), "sm90_"),
        (f, (bf16(8, 256, 256), bf16(8, 256, 256)), "sm90_"),
        (float32_result, (bf16(1024, 1024), bf16(1024, 1024)), "promote"),
        (lambda a, b: gated_gemm(a, b, b), SQUARE, "gated"),
        (lambda a, b: ragged_dot(a, b, SIZES), (bf16(64, 32), bf16(2, 32, 48)), "grouped_m"),
        (
            jax.grad(lambda b, a: ragged_dot(a, b, SIZES).astype("float32").sum()),
            (bf16(2, 32, 48), bf16(64, 32)),
            "grouped_k",
        ),
    ):
        products = tune_module.find_products(g, *arrays)
        names = [candidates(product, H200) for product in products]
        assert any(expected in each[0] for each in names), (names, expected)
        assert all(1 <= len(each) == len(set(each)) <= 12 for each in names)
        for product, each in zip(products, names, strict=True):
            for config in each:
                with Tunings({(KIND, product.problem): Entry.measured(config, 1.0, 1.0, 1.0)}):
                    assert config in configs(g, *arrays)
