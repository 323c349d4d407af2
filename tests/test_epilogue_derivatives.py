"""Derivatives of user epilogues: the values they keep, and the backward pass."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import _core, gemm, mlp
from jax_tcgemm.epilogue import cubins, function, linear, nvrtc, source, translation
from jax_tcgemm.lowering import jit_epilogue, jit_source
from jax_tcgemm.primitives import epilogue_derivative
from jax_tcgemm.primitives import jit_epilogue as jit_epilogue_primitive

pytestmark = pytest.mark.any_jax

M, N = 2048, 4096
BF16 = jnp.bfloat16


def _pullback(f, *kinds, shape=(M, N), accumulators=1):
    """Returns the derivative's specification, the values it needs and the arrays it needs."""
    products = [jax.ShapeDtypeStruct(shape, jnp.float32)] * accumulators
    shapes = {"": (), "n": shape[-1:], "m1": (*shape[:-1], 1), "mn": shape}
    operands = [jax.ShapeDtypeStruct(shapes[kind], BF16) for kind in kinds]
    traced, _ = function.trace(
        lambda *x: jax.tree.leaves(f(*x)), [*products, *operands], accumulators
    )
    kept = [jax.ShapeDtypeStruct(shape, BF16)] * accumulators
    masks = [jax.ShapeDtypeStruct(shape, bool)] * len(traced.masks)
    moving = range(accumulators + len(operands))
    return linear.of_epilogue(traced, jnp.dtype(jnp.float32), [*kept, *operands, *masks], moving)


def _program(f, *kinds, **options):
    spec, *_ = _pullback(f, *kinds, **options)
    made = translation.translate(spec.pullback, spec.shape)
    assert not isinstance(made, str), made
    return spec, made


def test_only_what_the_derivative_depends_on_is_kept():
    _, needed, _ = _pullback(lambda acc, bias: (acc + bias).astype(BF16), "n")
    assert needed == []
    _, needed, _ = _pullback(lambda acc, row: (acc * row).astype(BF16), "m1")
    assert needed == [0, 1]
    _, needed, _ = _pullback(lambda acc, bias: (jnp.tanh(acc) + bias).astype(BF16), "n")
    assert needed == [0]


def test_smaller_operands_get_partial_sums_of_the_same_pass():
    _, made = _program(
        lambda acc, row, column, scalar: (jnp.tanh(acc * row + column) * scalar).astype(BF16),
        "m1",
        "n",
        "",
    )
    assert len(made.matrices) == 1
    assert sorted(each.along for each in made.reductions) == ["kColumns", "kNothing", "kRows"]
    rows, columns = -(-M // 64), -(-N // 256)
    shapes = {each.along: each.shape for each in made.reductions}
    assert shapes == {"kColumns": (rows, N), "kRows": (M, columns), "kNothing": (rows, columns)}


def test_a_cotangent_that_only_passes_through_is_not_written():
    _, made = _program(lambda acc, residual: (jnp.tanh(acc) + residual).astype(BF16), "mn")
    assert len(made.matrices) == 1  # the cotangent of the product
    (leaf_of_cotangent, _) = made.leaves
    assert leaf_of_cotangent.shape == (M, N)
    # If its type differs, the kernel writes it.
    _, made = _program(lambda acc, residual: jnp.tanh(acc) + residual, "mn")
    assert len(made.matrices) == 2


def test_masks_are_read_and_drawn_once():
    def f(acc, bias):
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, acc.shape)
        return jnp.where(kept, jax.nn.gelu(acc + bias), 0).astype(BF16)

    _, made = _program(f, "n")
    assert not made.draws
    assert sum(leaf.dtype == bool for leaf in made.leaves) == 1
    products, bias = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((M, N), (N,)))
    traced, _ = function.trace(lambda *x: [f(*x)], [products, bias], 1)
    forward = translation.translate(traced.with_residuals(BF16))
    assert [str(x.dtype) for x in forward.matrices] == ["bfloat16", "bfloat16", "bool"]


def test_tanh_is_taken_once_and_beside_one():
    _, made = _program(lambda acc: jax.nn.gelu(acc).astype(BF16))
    lines = "\n".join(made.lines)
    assert lines.count("beside_tanh") == 1
    assert "tanhf" not in lines


_FUNCTIONS = {
    "dropout": (
        lambda acc, bias, r: (
            jnp.where(
                jax.random.bernoulli(jax.random.key(0), 0.9, acc.shape),
                jax.nn.gelu(acc + bias),
                0,
            )
            + r
        ).astype(BF16),
        ("n", "mn"),
    ),
    "everything": (
        lambda acc, row, column, scalar, x: (
            jax.nn.silu(acc * row + column) * scalar + jnp.maximum(x, acc),
            (acc * x).astype(jnp.float16),
        ),
        ("m1", "n", "", "mn"),
    ),
    "normal noise": (
        lambda acc: (acc * jax.random.normal(jax.random.key(1), acc.shape)).astype(BF16),
        (),
    ),
}


@pytest.mark.skipif(not _core.build_info()["cuda"], reason="built without kernels' headers")
@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.parametrize("shape", [(M, N), (M, 1031), (3, 333, 264)])
def test_passes_compile(name, shape):
    found = nvrtc.find()
    if isinstance(found, str):
        pytest.skip(found)
    f, kinds = _FUNCTIONS[name]
    if name == "normal noise" and len(shape) > 2:
        pytest.skip("an index along a batch is not translated")
    spec, made = _program(f, *kinds, shape=shape)
    folded, strides = jit_source.folded(spec.shape, made)
    text = jit_epilogue.source_of(made, strides, folded.n, batched=bool(folded.batch))
    program = source.of_kernel(text, source.PASS, "")
    assert found.compile(program, "sm_90a", cubins.include_folders())


def _drawn(seed, shape, dtype=BF16):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jnp.asarray(x).astype(dtype)


def _loss(f, product):
    def loss(a, b, *operands):
        results = product(f, a, b, *operands)
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in jax.tree.leaves(results))

    return loss


def _ours(f, a, b, *operands):
    return gemm(a, b, epilogue=f, epilogue_operands=operands)


def _theirs(f, a, b, *operands):
    return f(jnp.matmul(a, b, preferred_element_type=jnp.float32), *operands)


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_gradients_of_any_subset(name):
    f, kinds = _FUNCTIONS[name]
    m, n, k = 24, 40, 16
    shapes = {"": (), "n": (n,), "m1": (m, 1), "mn": (m, n)}
    operands = [_drawn(0, (m, k), jnp.float32), _drawn(1, (k, n), jnp.float32)]
    operands += [_drawn(2 + i, shapes[kind], jnp.float32) for i, kind in enumerate(kinds)]
    count = len(operands)
    for wanted in [tuple(range(count)), (0,), (count - 1,), tuple(range(1, count))]:
        ours, theirs = (
            jax.jit(jax.grad(_loss(f, product), wanted))(*operands) for product in (_ours, _theirs)
        )
        for x, y in zip(ours, theirs, strict=True):
            scale = np.abs(np.asarray(y)).max() + 1e-6
            assert np.abs(np.asarray(x) - np.asarray(y)).max() < 2e-2 * scale


def test_what_nobody_reads_is_not_computed():
    f = lambda acc, bias, x: (jnp.tanh(acc + bias) * x).astype(BF16)  # noqa: E731
    operands = _drawn(0, (16, 16)), _drawn(1, (16, 24)), _drawn(2, (24,)), _drawn(3, (16, 24))

    def of_bias(*x):
        return jax.grad(_loss(f, _ours), (0, 1, 2, 3))(*x)[2]

    jaxpr = jax.jit(of_bias).trace(*operands).jaxpr
    (pullback,) = _equations(jaxpr, epilogue_derivative.pullback_p)
    assert [x.aval.shape for x in pullback.outvars] == [(16, 24), (24,), (16, 24)]
    lean = jax.make_jaxpr(lambda *x: jax.grad(_loss(f, _ours), (2,))(*x))(*operands)
    (pullback,) = _equations(lean.jaxpr, epilogue_derivative.pullback_p)
    assert [x.aval.shape for x in pullback.outvars] == [(24,)]


def _equations(jaxpr, primitive):
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitive:
            yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner, primitive)


def test_results_without_a_cotangent_or_a_derivative():
    def f(acc, bias):
        y = jnp.tanh(acc + bias)
        return y, jnp.sign(y).astype(jnp.int8), (acc * 2).astype(BF16)

    a, b, bias = _drawn(0, (8, 16)), _drawn(1, (16, 8)), _drawn(2, (8,))

    def loss(product, *x):
        return jnp.sum(product(f, *x)[0])

    ours, theirs = (
        jax.grad(lambda *x, p=p: loss(p, *x), (0, 1, 2))(a, b, bias) for p in (_ours, _theirs)
    )
    for x, y in zip(ours, theirs, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.abs(x - y).max() < 0.05 * (np.abs(y).max() + 1e-6)


def _layer_operands(*shapes):
    return [_drawn(i, shape, jnp.float32) / 4 for i, shape in enumerate(shapes)]


# Cases that are easily confused


def test_rows_of_a_batch_are_counted_apart():
    f = lambda acc, x: (jnp.tril(acc) * x).astype(BF16)  # noqa: E731
    shape = (4, 64, 256)
    traced, _ = function.trace(
        lambda *x: [f(*x)], [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2, 1
    )
    assert translation.translate(traced).keeps_rows
    spec, made = _program(f, "mn", shape=shape)
    folded, _ = jit_source.folded(spec.shape, made)
    assert (folded.m, folded.batch) == (64, (4,))
    _, made = _program(lambda acc: jnp.sin(acc).astype(BF16), shape=shape)
    assert not made.keeps_rows


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ((0, 1, 2), (16, 48)),
        ((0, 1, 2, 3), (16, 3)),
        ((0, 3), (250, 3)),
        ((3,), (250, 3)),
        ((2,), (10, 2, 48)),
        ((1, 2), (10, 2, 48)),
        ((2, 3), (10, 2, 3)),
    ],
)
@pytest.mark.parametrize("join", ["sum", "max"])
def test_partial_results_of_a_batch_are_joined(axes, shape, join):
    """Rows of 25 end within a block of 16: only reductions of every row join blocks across them."""
    x = np.random.default_rng(axes).standard_normal((2, 5, 25, 48), np.float32)
    reduced = getattr(jnp, join)
    f = lambda acc: (jnp.sin(acc), reduced(acc, axes))  # noqa: E731
    own = [jax.ShapeDtypeStruct(y, BF16) for y in ((2, 5, 25, 32), (32, 48))]
    jaxpr = jax.make_jaxpr(lambda a, b: gemm(a, b, epilogue=f, preferred_element_type="f4"))(*own)
    (eqn,) = (x for x in jaxpr.jaxpr.eqns if x.primitive is jit_epilogue_primitive.compiled_p)
    spec = eqn.params["spec"]
    made = translation.translate(spec.function)
    plan = jit_epilogue.planned(own, spec, made)
    (partial,) = plan.program.outputs[1:]
    assert partial.shape == shape
    assert bool(plan.gemm.batch) == made.keeps_rows == (2 in axes and not {0, 1} <= {*axes})
    # The kernel joins each block of 16.
    blocks = getattr(np, join)
    y = x.reshape(*plan.gemm.batch, plan.gemm.m, plan.gemm.n)
    for axis, is_reduced in ((-2, 2 in axes), (-1, 3 in axes)):
        if is_reduced:
            starts = range(0, y.shape[axis], 16)
            parts = [np.take(y, range(i, min(i + 16, y.shape[axis])), axis) for i in starts]
            y = np.stack([blocks(part, axis) for part in parts], axis)
    _, found = plan.program.finished([jnp.sin(x), jnp.asarray(y)], [])
    np.testing.assert_allclose(found, reduced(x, axes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "f", [lambda acc: acc.T, lambda acc: acc + acc.T, lambda acc: (jnp.sin(acc) * 2).T]
)
def test_a_transposed_product_is_not_translated(f):
    traced, _ = function.trace(
        lambda acc: [f(acc)], [jax.ShapeDtypeStruct((64, 64), jnp.float32)], 1
    )
    assert translation.translate(traced) == "a product read at another place"
    x = _drawn(0, (64, 32), jnp.float32)
    np.testing.assert_allclose(gemm(x, x.T, epilogue=f), f(x @ x.T), rtol=1e-4, atol=1e-4)


# Two layers


def _dropout(acc, bias, slope):
    kept = jax.random.bernoulli(jax.random.key(0), 0.75, acc.shape)
    return jnp.where(kept, jax.nn.silu(acc * slope + bias) / 0.75, 0)


def _mlp(x, w1, bias, slope, w2, b2, r):
    return mlp(x, w1, None, w2, b2, residual=r, epilogue=_dropout, epilogue_operands=(bias, slope))


_MLP_SHAPES = (12, 16), (16, 24), (24,), (), (24, 8), (8,), (12, 8)


def test_mlp_goes_back_through_its_function_in_a_gemm():
    operands = _layer_operands(*_MLP_SHAPES)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *x: jnp.sum(jnp.sin(_mlp(*x))), tuple(range(7))))(
        *operands
    ).jaxpr
    assert not list(_equations(jaxpr, epilogue_derivative.pullback_p))
    forward, back = _equations(jaxpr, jit_epilogue_primitive.compiled_p)
    # The cotangent, and the sums for the bias and the slope.
    assert [x.aval.shape for x in back.outvars] == [(12, 24), (24,), ()]
    assert any(x.aval.dtype == bool for x in forward.outvars)
    made = translation.translate(back.params["spec"].function)
    assert not isinstance(made, str), made
    assert len(made.reductions) == 2


def test_what_goes_with_a_function_of_mlp():
    x, w1, bias, _, w2, *_ = _layer_operands(*_MLP_SHAPES)
    with pytest.raises(ValueError, match="got b1 as well"):
        mlp(x, w1, bias, w2, epilogue=jnp.tanh)
    with pytest.raises(ValueError, match="recompute_activation"):
        mlp(x, w1, None, w2, epilogue=jnp.tanh, recompute_activation=True)
    with pytest.raises(ValueError, match="the hidden layer"):
        mlp(x, w1, None, w2, epilogue=lambda acc: (acc, acc))
