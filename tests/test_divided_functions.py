"""User functions as epilogues of partitioned products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_epilogues
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_checks import both, is_divided, kinds, put
from sharded_program import mesh_of

from jax_tcgemm import gemm
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue import operations, portable
from jax_tcgemm.epilogue.part import Part, elementwise
from jax_tcgemm.partitioning import rules
from jax_tcgemm.problem.log import print_once
from jax_tcgemm.problem.serialize import from_json, to_json

pytestmark = pytest.mark.usefixtures("divided_everywhere")


def with_reductions(x, w, bias):
    def epilogue(product, bias):
        y = jnp.tanh(product + bias)
        scale = jnp.max(jnp.abs(y)) / 448
        share = jnp.sum(jnp.square(y), axis=-1, keepdims=True) / y.shape[-1]
        return jnp.min(y), y.astype(jnp.bfloat16), scale, y.sum(-2), lax.rsqrt(share + 1e-6)

    return gemm(x, w, epilogue=epilogue, epilogue_operands=(bias,))


LAYOUTS = {
    "rows": (P("x"), P(), P()),
    "columns": (P(), P(None, "x"), P("x")),
    "rows_and_columns": (P("y"), P(None, "x"), P("x")),
    "k": (P(None, "x"), P("x"), P()),
    "k_and_rows": (P("y", "x"), P("x"), P()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 32, 48), (60, 32, 44), (3, 24, 32, 40)])
def test_reductions_are_joined(normal, layout, shape):
    *batch, m, k, n = shape
    specs = LAYOUTS[layout]
    x_spec = P(*(None,) * len(batch), *specs[0])
    x = put(mesh_of(), normal(*batch, m, k) / 4, *x_spec)
    w, bias = put(mesh_of(), normal(k, n), *specs[1]), put(mesh_of(), normal(n), *specs[2])
    assert is_divided(with_reductions, x, w, bias)
    for got, expected in zip(*both(with_reductions, x, w, bias), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        got, expected = (np.asarray(each, np.float32) for each in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-5)


def test_what_is_reduced_over_parts_of_other_sizes(normal):
    """A reduction would include XLA's padding, so the rows are not partitioned."""
    x, w, bias = normal(64, 32), normal(32, 48), put(mesh_of(), normal(48))
    x, w = put(mesh_of(), x, "x"), put(mesh_of(), w)

    def cut(x, w, bias):
        return with_reductions(x[:61], w, bias)

    assert is_divided(cut, x, w, bias)
    for got, expected in zip(*both(cut, x, w, bias), strict=True):
        got, expected = (np.asarray(each, np.float32) for each in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-5)


def test_a_result_is_scattered(normal):
    """The product sums over k; each device applies the function to its own rows of the sum."""

    def program(x, w, rows):
        def epilogue(product, rows):
            y = product * rows + lax.broadcasted_iota(jnp.float32, product.shape, 0)
            return y, jnp.max(y), y.sum(1)

        y, most, sums = gemm(x, w, epilogue=epilogue, epilogue_operands=(rows,))
        return lax.with_sharding_constraint(y, NamedSharding(mesh_of(), P("x"))), most, sums

    x, w = put(mesh_of(), normal(64, 32), None, "x"), put(mesh_of(), normal(32, 48), "x")
    rows = put(mesh_of(), normal(64, 1), "x")
    for got, expected in zip(*both(program, x, w, rows), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mesh", [(2, 2), (4, 2)])
@pytest.mark.parametrize("wanted", [P("x"), P(None, "x"), P("x", "y"), P("y", "x")])
def test_a_result_that_lies_otherwise_than_the_product(normal, mesh, wanted):
    """m = n; the first result is transposed, and its requested sharding uses axes of the sum."""
    mesh = mesh_of(mesh)

    def program(x, w, c):
        def epilogue(product, c):
            return c * 1.0, product + c.T

        a, b = gemm(x, w, epilogue=epilogue, epilogue_operands=(c,))
        return lax.with_sharding_constraint(a, NamedSharding(mesh, wanted)), b

    for axes in ("x", ("x", "y")):
        x, w = put(mesh, normal(32, 32), None, axes), put(mesh, normal(32, 32), axes)
        c = put(mesh, normal(32, 32))
        assert is_divided(program, x, w, c)
        for got, expected in zip(*both(program, x, w, c), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_a_result_with_a_further_dimension(normal):
    def program(x, w):
        def epilogue(product):
            outer = product.sum(1)[None, :, None] * product.max(0)[None, None, :]
            return outer, product * 2

        outer, y = gemm(x, w, epilogue=epilogue)
        outer = lax.with_sharding_constraint(outer, NamedSharding(mesh_of(), P(None, None, "x")))
        return outer, lax.with_sharding_constraint(y, NamedSharding(mesh_of(), P(None, "x")))

    x, w = put(mesh_of(), normal(64, 32), None, "x"), put(mesh_of(), normal(32, 48), "x")
    assert is_divided(program, x, w)
    for got, expected in zip(*both(program, x, w), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


def test_a_value_with_two_axes_of_one_name(normal):
    """With as many matrices as rows, a value with two row axes cannot be partitioned by rows."""

    def program(x, w):
        def epilogue(product):
            sums = product.sum((0, 2))
            return product * 2, sums[:, None] * sums[None, :]

        return gemm(x, w, epilogue=epilogue)

    x, w = put(mesh_of(), normal(8, 8, 32), "x"), put(mesh_of(), normal(32, 48), None, "y")
    assert not is_divided(program, x, w)
    for got, expected in zip(*both(program, x, w), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


def test_reductions_of_numbers(normal):
    def program(x, w):
        return gemm(x, w, epilogue=lambda product: product * jnp.max(2.0) + jnp.sum(3.0))

    x, w = put(mesh_of(), normal(64, 32), "x"), put(mesh_of(), normal(32, 48), None, "y")
    assert is_divided(program, x, w)
    got, expected = both(program, x, w)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_nothing_travels_but_what_is_joined(normal):
    x, w = put(mesh_of(), normal(64, 32), "x"), put(mesh_of(), normal(32, 48))

    def program(x, w):
        return gemm(x, w, epilogue=lambda product: (jnp.sin(product), jnp.abs(product).max()))

    assert kinds(program, x, w) == ["all-reduce"]
    assert kinds(lambda x, w: program(x, w)[0], x, w) == []


@pytest.mark.any_jax
@pytest.mark.parametrize("seed", range(24))
def test_random_functions(seed, normal):
    """Traced functions, text and back, and several devices give the same results."""
    epilogue = random_epilogues.draw(seed)
    m, n = 24, 16
    values = [np.asarray(normal(m, n)), *random_epilogues.operands_of(epilogue, m, n)]

    def run(*arrays):
        return epilogue.run(False, *arrays)

    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
    made, _ = functions.trace(run, types, 1)
    carried = portable.portable(made, ("m", "n"))
    assert isinstance(carried, portable.PortableFunction), carried
    assert from_json(to_json(carried), rules.parameter_classes()) == carried
    part = Part(carried, {"m": m, "n": n}, {"m": 0, "n": 0})

    def again(*arrays):
        return part.after(part.within(*arrays), arrays[1:])

    expected = jax.jit(run)(*values)
    for got, exact in zip(jax.jit(again)(*values), expected, strict=True):
        assert got.dtype == exact.dtype
        np.testing.assert_array_equal(*(np.asarray(each, np.float32) for each in (got, exact)))

    def product(x, *others):
        return gemm(x, jnp.eye(n), epilogue=run, epilogue_operands=others)

    x = put(mesh_of(), values[0], "x", "y")
    assert is_divided(product, x, *values[1:])
    for got, exact in zip(jax.jit(product)(x, *values[1:]), expected, strict=True):
        assert got.dtype == exact.dtype
        got, exact = (np.asarray(each, np.float32) for each in (got, exact))
        # XLA fuses differently, so one value in a hundred may fall on the other side of a jump.
        off = ~np.isclose(got, exact, rtol=3e-2, atol=3e-2, equal_nan=True)
        assert off.mean() <= 0.01, np.argwhere(off)


@pytest.mark.parametrize("name", sorted(operations.ELEMENTWISE))
def test_each_operation_has_one_of_jax(name):
    assert callable(elementwise(name))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_maxima_keep_nan(normal, dtype):
    """All-reduces may drop NaN; infinities and zeros must stay, too."""

    def program(x, w):
        def epilogue(product):
            y = jnp.where(jnp.abs(product) > 2, product * jnp.inf, product).astype(dtype)
            return y, y.max(0), y.min(0), y.max(), y.min(1)

        return gemm(x, w, epilogue=epilogue)

    values = normal(64, 32)
    for rows in ([], [3], [3, 40]):
        x, w = np.array(values), np.zeros((32, 48), np.float32)
        w[np.arange(32), np.arange(32)] = 1
        x[rows, 3], x[50, 5], x[9, 6] = np.nan, 3, -3
        x, w = put(mesh_of(), x, "x"), put(mesh_of(), w, None, "y")
        for pair in zip(*both(program, x, w), strict=True):
            np.testing.assert_array_equal(*(np.asarray(each, np.float32) for each in pair))


def test_numbers_of_rows_are_those_of_the_whole(normal):
    def program(x, w):
        def epilogue(product):
            rows = lax.broadcasted_iota(jnp.int32, product.shape, 0)
            columns = lax.broadcasted_iota(jnp.float32, product.shape, 1)
            return jnp.where(rows >= columns, product, -jnp.inf), rows.astype(jnp.int8)

        return gemm(x, w, epilogue=epilogue)

    x, w = put(mesh_of(), normal(64, 32), "x"), put(mesh_of(), normal(32, 48), None, "y")
    assert is_divided(program, x, w)
    (masked, rows), expected = both(program, x, w)
    np.testing.assert_allclose(masked, expected[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(rows, expected[1])


def test_parts_of_other_sizes_are_not_reduced_after_a_sum(normal):
    def program(x, w):
        def epilogue(product):
            y = jnp.cos(product)
            return y, jnp.max(y, axis=0)

        y, most = gemm(x, w, epilogue=epilogue)
        y = jnp.pad(y, ((0, -len(y) % 4), (0, 0)))
        return lax.with_sharding_constraint(y, NamedSharding(mesh_of(), P("x"))), most

    x, w = put(mesh_of(), normal(61, 32), None, "x"), put(mesh_of(), normal(32, 48), "x")
    assert is_divided(program, x, w)
    for got, expected in zip(*both(program, x, w), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_a_named_row_of_a_part(normal):
    """The named row does not suit a device's part as it is: 9 of 36 columns."""
    x, w = put(mesh_of(), normal(64, 64)), put(mesh_of(), normal(64, 36), None, "x")
    config = "sm90_bf16_128x128x64_s6_c2x1_pingpong"

    def program(x, w):
        x, w = x.astype(jnp.bfloat16), jnp.pad(w, ((0, 0), (0, 4))).astype(jnp.bfloat16)
        return gemm(x, w, epilogue=jnp.tanh, config=config)

    assert is_divided(program, x, w)
    for got, expected in zip(*both(program, x, w), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2)


def test_operands_that_only_look_like_axes(normal):
    """With m = n, broadcasting alone decides which axis an operand has."""
    x, w = put(mesh_of(), normal(32, 32), "x"), put(mesh_of(), normal(32, 32), None, "y")
    vector = put(mesh_of(), normal(32), "x")

    def program(x, w, vector):
        def epilogue(product, vector):
            return product * vector[:, None] + vector

        return gemm(x, w, epilogue=epilogue, epilogue_operands=(vector,))

    # The vector runs along rows and along columns, so no axis can be partitioned alone.
    assert not is_divided(program, x, w, vector)
    got, expected = both(program, x, w, vector)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)

    def rows(x, w, vector):
        return gemm(x, w, epilogue=lambda p, v: p * v[:, None], epilogue_operands=(vector,))

    assert is_divided(rows, x, w, vector)
    got, expected = both(rows, x, w, vector)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def _normal_of_rbg(p):
    return p + jax.random.normal(jax.random.key(0, impl="rbg"), p.shape)


def _normal_of_split(p):
    return p + jax.random.normal(jax.random.split(jax.random.key(0))[1], p.shape)


REFUSED = {
    "random_bits of key<rbg>": _normal_of_rbg,
    "random_split": _normal_of_split,
    "within what has the product's shape": jax.nn.softmax,
    "reshape of": lambda p: p.reshape(8, 8, 48).reshape(p.shape),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_xla_divides(reason, normal, monkeypatch, capfd):
    print_once.cache_clear()
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    x, w = put(mesh_of(), normal(64, 32), "x"), put(mesh_of(), normal(32, 48), None, "y")

    def program(x, w):
        return gemm(x, w, epilogue=REFUSED[reason])

    assert not is_divided(program, x, w)
    err = capfd.readouterr().err
    assert "the product is divided without its function" in err
    assert reason in err
    got, expected = both(program, x, w)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_products_of_8_bits(normal):
    x = put(mesh_of(), np.round(normal(64, 32) * 20).astype(np.int8), "x")
    w = put(mesh_of(), np.round(normal(32, 48) * 20).astype(np.int8), None, "y")
    offset = put(mesh_of(), np.arange(48, dtype=np.int32), "y")

    def program(x, w, offset):
        def epilogue(product, offset):
            assert product.dtype == jnp.int32
            return (product - offset) >> 2

        options = {"epilogue": epilogue, "preferred_element_type": jnp.int32}
        return gemm(x, w, epilogue_operands=(offset,), **options)

    assert is_divided(program, x, w, offset)
    got, expected = both(program, x, w, offset)
    np.testing.assert_array_equal(got, expected)
