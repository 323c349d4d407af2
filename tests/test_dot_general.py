"""`dot_general` against `lax.dot_general`: random problems, moved operands, calls passed to lax."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dot_problems import Problem, draw, exact_product
from fused_call import assert_trees_close
from jax import lax
from jax.sharding import PartitionSpec

from jax_tcgemm import dot_general
from jax_tcgemm.problem.log import print_once

# Random problems


def results(problems: list[Problem], arrays: list, on_cpu: bool):
    """Yields each problem with its arrays, `dot_general`'s result and the baseline's."""

    def run(problems, arrays):
        return [
            (problem.by(dot_general, *x), problem.baseline(*x, on_cpu))
            for problem, x in zip(problems, arrays, strict=True)
        ]

    try:
        together = jax.jit(functools.partial(run, problems))(arrays)
    except jax.errors.JaxRuntimeError:
        # XLA cannot compile some products. They are few; this drops them.
        compiled = [pair for pair in zip(problems, arrays, strict=True) if lax_compiles([pair])]
        assert len(compiled) > 0.8 * len(problems)
        problems, arrays = map(list, zip(*compiled, strict=True))
        if lax_compiles(compiled):
            together = jax.jit(functools.partial(run, problems))(arrays)
        else:  # XLA can compile each, but not all in one program
            together = [jax.jit(functools.partial(run, [p]))([x])[0] for p, x in compiled]
    yield from zip(problems, arrays, together, strict=True)


def lax_compiles(pairs: list[tuple[Problem, list]]) -> bool:
    """Checks if XLA compiles these problems in one program, with its own `dot_general`."""
    problems = [problem for problem, _ in pairs]

    def run(arrays):
        return [
            (problem.by(lax.dot_general, *x), problem.baseline(*x, False))
            for problem, x in zip(problems, arrays, strict=True)
        ]

    try:
        jax.jit(run).lower([x for _, x in pairs]).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@pytest.fixture
def check_problems(rng, exact, assert_accurate):
    """Compares problems in one program, since compiling takes nearly all of the time."""

    def check(problems: list[Problem], on_cpu: bool):
        arrays = [problem.arrays(rng) for problem in problems]
        for problem, x, (got, baseline) in results(problems, arrays, on_cpu):
            try:
                by_lax = jax.eval_shape(lambda *x, p=problem: p.by(lax.dot_general, *x), *x)
                assert (got.shape, got.dtype) == (by_lax.shape, by_lax.dtype)
                lhs, rhs = (exact(problem.rounded(operand, on_cpu)) for operand in x)
                truth = exact_product(lhs, rhs, problem.dimension_numbers)
                if not jnp.issubdtype(got.dtype, jnp.inexact):
                    # On some GPUs, XLA's own results are doubled if another product has the same
                    # operands.
                    np.testing.assert_array_equal(got, truth)
                    continue
                in_tf32 = not on_cpu and jnp.float32 in (problem.lhs_dtype, problem.rhs_dtype)
                slack = problem.slack(lhs, rhs, in_tf32)
                # XLA computes both results there. For some layouts it adds up one product after the
                # other. Among 2312 products the error reached 1.8 times the slack; with
                # `lax.dot_general`, a quarter of the slack.
                assert_accurate(got, baseline, truth, 2 * slack if on_cpu else slack)
            except AssertionError as error:
                raise AssertionError(f"{problem}: {error}") from None

    return check


@pytest.mark.any_jax
def test_random_problems(check_problems, rng):
    check_problems([draw(rng, 24) for _ in range(60)], on_cpu=True)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(10))
def test_random_problems_on_the_gpu(check_problems, rng, part):
    check_problems([draw(rng, 300) for _ in range(50)], on_cpu=False)


# Moved operands


def numbers(subscripts: str):
    """Returns the dimension numbers of `"lhs,rhs->out"`; letters in all three are the batch."""
    lhs, rhs, out = subscripts.replace("->", ",").split(",")
    shared = [letter for letter in lhs if letter in rhs]
    contracted, batch = (
        [x for x in shared if x not in out],
        [x for x in out if x in shared],
    )
    assert [*out] == [*batch, *(x for x in lhs + rhs if x not in shared)], subscripts
    return tuple(
        (tuple(map(lhs.index, names)), tuple(map(rhs.index, names)))
        for names in (contracted, batch)
    )


EXTENTS = dict(zip("bthqfdkmnouv", (2, 5, 3, 6, 16, 8, 12, 7, 10, 4, 1, 1), strict=True))


def arrays(subscripts, normal, dtype=jnp.float32, **extents):
    extents = EXTENTS | extents
    lhs, rhs = subscripts.split("->")[0].split(",")
    return [normal(*(extents[letter] for letter in term), dtype=dtype) for term in (lhs, rhs)]


def contraction(subscripts, function=dot_general):
    return lambda lhs, rhs: function(lhs, rhs, numbers(subscripts))


@pytest.mark.parametrize(
    ("subscripts", "m", "n", "k", "batch"),
    [
        ("mk,kn->mn", 7, 10, 12, []),
        ("km,nk->mn", 7, 10, 12, []),
        ("btf,fo->bto", 10, 4, 16, []),  # a dense layer
        ("btf,bto->fo", 16, 4, 10, []),  # the gradient of its weights
        ("btf,fhd->bthd", 10, 24, 16, []),  # a projection to several heads
        ("bthd,hdf->btf", 10, 16, 24, []),  # back to one dimension
        ("bqhd,bthd->bhqt", 6, 5, 8, [2, 3]),  # attention's scores
        ("bhqt,bthd->bhqd", 6, 8, 5, [2, 3]),  # attention's output
        ("ukm,kvn->umvn", 7, 10, 12, []),
        ("bkm,kn->bmn", 7, 10, 12, [2]),  # two separate row dimensions
        ("mk,k->m", 1, 7, 12, []),
        ("k,nk->n", 1, 10, 12, []),
        ("bkm,bk->bm", 1, 7, 12, [2]),
        ("k,bkn->bn", 1, 10, 12, [2]),
    ],
)
def test_in_place(cuda_module, normal, subscripts, m, n, k, batch):
    text, (call,) = cuda_module(contraction(subscripts), *arrays(subscripts, normal))
    assert "stablehlo.transpose" not in text
    assert "stablehlo.dot_general" not in text
    got = tuple(call[name] for name in ("m", "n", "k", "batch_shape"))
    assert got == (m, n, k, batch)


@pytest.mark.parametrize(
    ("subscripts", "extents", "moved"),
    [
        ("tmd,dtn->mn", {}, ["lhs"]),
        ("mtd,nthd->mnh", {}, ["rhs"]),
        ("mtd,dtn->mn", {}, ["lhs"]),  # moving either operand suffices: it moves the smaller one
        ("mtd,dtn->mn", {"m": 11}, ["rhs"]),
        ("tmd,dnt->mn", {}, ["lhs", "rhs"]),
        ("mk,tkn->mtn", {}, ["rhs"]),
        ("tkm,kn->tmn", {"t": 99, "m": 2}, ["lhs"]),  # 99 products of two rows
        ("tkm,k->tm", {"t": 99, "m": 2}, ["lhs"]),
        ("kmb,bkn->bmn", {}, ["lhs"]),  # not contiguous along m or k
    ],
)
def test_moved(cuda_module, normal, exact, assert_accurate, subscripts, extents, moved):
    lhs, rhs = arrays(subscripts, normal, **extents)
    text, (_,) = cuda_module(contraction(subscripts), lhs, rhs)
    sources = re.findall(r"stablehlo.transpose .* : \(tensor<([\dx]+)xf32>\)", text)
    shapes = {"lhs": lhs.shape, "rhs": rhs.shape}
    assert sources == ["x".join(map(str, shapes[name])) for name in moved]
    assert_accurate(
        contraction(subscripts)(lhs, rhs),
        contraction(subscripts, lax.dot_general)(lhs, rhs),
        exact_product(exact(lhs), exact(rhs), numbers(subscripts)),
    )


@pytest.mark.parametrize("subscripts", ["btf,fo->bto", "btf,fhd->bthd", "bthd,hdf->btf"])
def test_layers_are_differentiated_in_place(cuda_module, normal, subscripts):
    def pullback(lhs, rhs):
        out, pull = jax.vjp(contraction(subscripts), lhs, rhs)
        return pull(out)

    text, calls = cuda_module(pullback, *arrays(subscripts, normal))
    assert "stablehlo.transpose" not in text
    assert [call["batch_shape"] for call in calls] == [[]] * 3


@pytest.mark.parametrize(("m", "is_moved"), [(7, True), (70, False)])
def test_gradient_of_rows_in_two_places(normal, m, is_moved):
    """The contraction sums over both row dimensions if moving lhs costs less than a sum."""
    args = arrays("bkm,kn->bmn", normal, m=m)

    def pullback(function):
        return lambda *args: jax.vjp(contraction("bkm,kn->bmn", function), *args)[1](g)[1]

    g = normal(2, m, 10)
    text = str(jax.make_jaxpr(pullback(dot_general))(*args))
    assert ("transpose" in text, "reduce_sum" in text) == (is_moved, not is_moved)
    assert_trees_close(pullback(dot_general)(*args), pullback(lax.dot_general)(*args))


# Calls passed to lax


def primitives(function, *args):
    return {eqn.primitive.name for eqn in jax.make_jaxpr(function)(*args).eqns}


PLAIN = (((1,), (0,)), ((), ()))
OUTER = (((), ()), ((), ()))


@pytest.mark.parametrize(
    ("lhs", "rhs", "options"),
    [
        (jnp.int8, jnp.int8, {}),
        (jnp.int8, jnp.int8, {"preferred_element_type": jnp.float32}),
        (jnp.complex64, jnp.float32, {}),
        (jnp.float8_e4m3b11fnuz, jnp.float8_e5m2, {"preferred_element_type": jnp.bfloat16}),
        (jnp.float8_e4m3fn, jnp.bfloat16, {}),
        (jnp.float32, jnp.float32, {"precision": "highest"}),
        (jnp.float32, jnp.float32, {"precision": lax.DotAlgorithmPreset.F32_F32_F32}),
        (jnp.float32, jnp.float32, {"preferred_element_type": jnp.int32}),
        (jnp.float64, jnp.float64, {}),
        (jnp.float64, jnp.float32, {}),
        (jnp.bfloat16, jnp.bfloat16, {"preferred_element_type": jnp.float64}),
    ],
)
def test_types_without_a_kernel(lhs, rhs, options):
    with jax.enable_x64(True):
        args = jnp.ones((3, 4), lhs), jnp.ones((4, 5), rhs)
        assert primitives(lambda x, y: dot_general(x, y, PLAIN, **options), *args) == {
            "dot_general"
        }
        got = dot_general(*args, PLAIN, **options)
        expected = lax.dot_general(*args, PLAIN, **options)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("lhs", "rhs", "dimension_numbers"),
    [
        ((3,), (4,), OUTER),
        ((3, 1), (1, 4), PLAIN),
        ((4,), (4,), (((0,), (0,)), ((), ()))),
        ((3, 4), (3, 4), (((1,), (1,)), ((0,), (0,)))),
        ((1, 4), (4, 1), PLAIN),
        ((3, 0), (0, 4), PLAIN),
        ((0, 3), (3, 4), PLAIN),
        ((0, 2, 3), (0, 3, 4), (((2,), (1,)), ((0,), (0,)))),
    ],
)
def test_no_matrix_product(normal, lhs, rhs, dimension_numbers):
    def f(x, y):
        return dot_general(x, y, dimension_numbers)

    args = normal(*lhs), normal(*rhs)
    assert primitives(f, *args) == {"dot_general"}
    np.testing.assert_array_equal(f(*args), lax.dot_general(*args, dimension_numbers))


def test_default_matmul_precision_is_heard(normal):
    args = normal(3, 4), normal(4, 5)
    with jax.default_matmul_precision("highest"):
        assert primitives(lambda x, y: dot_general(x, y, PLAIN), *args) == {"dot_general"}
    assert "tcgemm" in primitives(lambda x, y: dot_general(x, y, PLAIN), *args)


def test_each_operand_keeps_its_precision(normal):
    """Precisions follow the operands when they change places, as for a vector on the right."""
    jaxpr = jax.make_jaxpr(lambda x, y: dot_general(x, y, PLAIN, ("high", "default")))
    spec = jaxpr(normal(3, 4), normal(4, 1)).eqns[-2].params["spec"]
    assert spec.precision == (lax.Precision.DEFAULT, lax.Precision.HIGH)


def test_the_log_says_why(normal, monkeypatch, capfd):
    print_once.cache_clear()
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    dot_general(normal(13), normal(17), OUTER)  # nothing else has traced these types
    line = capfd.readouterr().err
    assert "dot_general float32[13] x float32[17]" in line
    assert line.rstrip().endswith("fallback to XLA: nothing is contracted")


def test_shardings_and_other_arguments_are_handed_on(normal):
    mesh = jax.make_mesh(
        (2,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices("cpu")[:2]
    )
    lhs, rhs = normal(4, 6), normal(6, 5)
    with jax.set_mesh(mesh):
        rows = jax.device_put(lhs, PartitionSpec("x"))
        out = jax.jit(dot_general, static_argnums=2)(rows, rhs, PLAIN)
        assert out.sharding.spec == PartitionSpec("x", None)
        out = dot_general(lhs, rhs, PLAIN, out_sharding=PartitionSpec("x"))
        assert out.sharding.spec == PartitionSpec("x", None)
        whole = jax.device_put(lhs, PartitionSpec())
        assert "tcgemm" in primitives(lambda x: dot_general(x, rhs, PLAIN), whole)
        assert_trees_close(dot_general(whole, rhs, PLAIN), lhs @ rhs)
    with pytest.raises(TypeError, match="no_such_argument"):
        dot_general(lhs, rhs, PLAIN, no_such_argument=None)


@pytest.mark.parametrize(
    "arguments",
    [
        (np.ones((3, 4)), np.ones((5, 6)), PLAIN),
        (np.ones((3, 4)), np.ones((4, 6)), (((2,), (0,)), ((), ()))),
        (np.ones((3, 4)), np.ones((4, 6)), (((-1,), (0,)), ((), ()))),
        (np.ones((3, 4)), np.ones((4, 6)), (((1,), (0,)), ((1,), (0,)))),
        (np.ones((3, 4)), np.ones((4, 6)), ((("1",), (0,)), ((), ()))),
        (np.ones((3, 4)), np.ones((4, 6)), "mk,kn"),
        (np.ones((3, 4)), np.ones((4, 6)), PLAIN, "such precision"),
        (np.ones((3, 4)), np.ones((4, 6)), PLAIN, None, "such dtype"),
        (np.ones((3, 4)), [[1.0]], PLAIN),
        (np.ones((3, 4)), None, PLAIN),
        (np.ones((3, 4), np.int32), np.ones((4, 6), np.int32), PLAIN, None, np.int8),
        (np.ones((3, 4), jnp.float8_e5m2), np.ones((4, 6), jnp.float8_e5m2fnuz), PLAIN),
    ],
)
def test_errors_are_those_of_lax(arguments):
    def error(function):
        with pytest.raises((TypeError, ValueError)) as caught:
            function(*arguments)
        return caught.type, str(caught.value).splitlines()[0]

    assert error(dot_general) == error(lax.dot_general)
