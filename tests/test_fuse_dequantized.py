"""Products under `fuse` whose weight the program dequantizes from its arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusions import operations
from packed_values import assert_close_in_norm

from jax_tcgemm import fuse, gemm, pack, quantize
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.lowering import unpacked
from jax_tcgemm.transforms import dequantized
from jax_tcgemm.transforms.graph import inner_nodes

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")

M, K, N, GROUP = 8, 192, 64, 32


@pytest.fixture
def weights(rng, normal):
    """Returns stored values, scales and zero points by name."""
    w = normal(K, N)
    signed = quantize(w, jnp.int4, tile=(GROUP, 1))
    unsigned = quantize(w, jnp.uint4, tile=(GROUP, 1))
    return {
        "x": normal(M, K, dtype=jnp.bfloat16),
        "signed": signed,
        "unsigned": unsigned,
        "columns": quantize(w, jnp.int4, tile=(-1, 1)),
    }


def by_groups(x, q, s):
    """The usual form: the values in three dimensions."""
    w = q.reshape(K // GROUP, GROUP, N).astype(x.dtype) * s[:, None, :].astype(x.dtype)
    return x @ w.reshape(K, N)


def stored_by_groups(x, q, s):
    return x @ (q.astype(jnp.float32) * s).astype(x.dtype).reshape(K, N)


def with_zero_points(x, q, s, z):
    values = q.astype(jnp.int8) - jnp.repeat(z, GROUP, 0).astype(jnp.int8)
    return x @ (values.astype(x.dtype) * jnp.repeat(s, GROUP, 0).astype(x.dtype))


def after_the_conversion(x, q, s, z):
    q = q.astype(x.dtype).reshape(K // GROUP, GROUP, N)
    w = s.astype(x.dtype)[:, None] * (q - z[:, None].astype(x.dtype))
    return jnp.einsum("mk,kn->mn", x, w.reshape(K, N))


FORMS = {
    "a method": lambda x, a: (lambda x, q: x @ q.dequantize(x.dtype), (x, a["signed"])),
    "groups": lambda x, a: (by_groups, (x, a["signed"].qvalue, a["signed"].scale)),
    "stored by groups": lambda x, a: (
        stored_by_groups,
        (x, a["signed"].qvalue.reshape(-1, GROUP, N), a["signed"].scale[:, None]),
    ),
    "transposed": lambda x, a: (
        lambda x, q: x @ q.dequantize(x.dtype).T,
        (x, a["signed"].T),
    ),
    "on the left": lambda x, a: (
        lambda x, q: (q.dequantize(x.dtype).T @ x.T).T,
        (x, a["signed"]),
    ),
    "zero points": lambda x, a: (
        with_zero_points,
        (x, a["unsigned"].qvalue, a["unsigned"].scale, a["unsigned"].zero_point),
    ),
    "zero points after": lambda x, a: (
        after_the_conversion,
        (x, a["unsigned"].qvalue, a["unsigned"].scale, a["unsigned"].zero_point),
    ),
    "columns": lambda x, a: (
        lambda x, q, s: x @ (q.astype(x.dtype) * s.astype(x.dtype)),
        (x, a["columns"].qvalue, a["columns"].scale[0]),
    ),
    "no scale": lambda x, a: (lambda x, q: x @ q.astype(x.dtype), (x, a["columns"].qvalue)),
    "one scale": lambda x, a: (
        lambda x, q, s: x @ (q.astype(x.dtype) * s),
        (x, a["columns"].qvalue, jnp.bfloat16(0.25)),
    ),
    "one zero point": lambda x, a: (
        lambda x, q, z: x @ (q.astype(jnp.int8) - z.astype(jnp.int8)).astype(x.dtype),
        (x, a["columns"].qvalue, jnp.asarray(3, jnp.int4)),
    ),
    "rows of two dimensions": lambda x, a: (
        lambda x, q: x.reshape(2, -1, K) @ q.dequantize(x.dtype),
        (x, a["signed"]),
    ),
}


def packed(f, *args):
    """Returns the equations that pack a weight and multiply it."""
    eqns = jax.make_jaxpr(fuse(f))(*args).jaxpr.eqns
    every = [each for eqn in eqns for each in inner_nodes(eqn, jaxprs.CALLS)]
    return [eqn for eqn in every if eqn.primitive.name == "tcgemm_unpacked"]


@pytest.mark.parametrize("form", FORMS)
def test_forms(weights, form):
    f, args = FORMS[form](weights["x"], weights)
    assert_close_in_norm(fuse(f)(*args), f(*args))
    (eqn,) = packed(f, *args)
    stored = args[1].qvalue if hasattr(args[1], "qvalue") else args[1]
    x, values, _, scale, *zero = (x.aval for x in eqn.invars)
    assert (x.shape[-1], values.dtype) == (K, stored.dtype)
    assert values.shape == ((N, K) if eqn.params["spec"].transposed else (K, N))
    groups = 1 if form in ("columns", "no scale", "one scale", "one zero point") else K // GROUP
    assert all(y.shape == (groups, N) for y in (scale, *zero))
    assert len(zero) == ("zero" in form)


@pytest.mark.any_jax
def test_small_weights_are_left_to_xla(weights, monkeypatch):
    monkeypatch.setattr(unpacked, "LEAST_VALUES", K * N + 1)
    f, args = FORMS["groups"](weights["x"], weights)
    (decision,) = fuse(f).report(*args)
    assert decision.way == "XLA"
    assert "few rows" in decision.reason


@pytest.mark.any_jax
@pytest.mark.parametrize("rows", [256, 257])
def test_many_rows_are_dequantized(weights, rows):
    f, (_, *stored) = FORMS["groups"](weights["x"], weights)
    args = (jnp.ones((rows, K), jnp.bfloat16), *stored)
    assert len(packed(f, *args)) == (rows == 256)


def by_columns(x, q, s):
    """The values and scales are stored as ``(n, k)``."""
    return x @ (q.astype(x.dtype) * jnp.repeat(s, GROUP, 1).astype(x.dtype)).T


@pytest.mark.any_jax
def test_which_many_rows_xla_multiplies(normal, monkeypatch):
    """XLA multiplies by a large weight `(k, n)` without an epilogue, if `x` has no more numbers."""
    k, n = 1024, 2048
    monkeypatch.setattr(dequantized, "LEAST_VALUES", k * n)
    q = quantize(normal(k, n), jnp.int4, tile=(GROUP, 1))
    x = normal(512, k, dtype=jnp.bfloat16)

    def by_rows(x, q, s):
        w = q.reshape(-1, GROUP, n).astype(x.dtype) * s[:, None, :].astype(x.dtype)
        return x @ w.reshape(k, n)

    def decision(f, x, *stored):
        (found,) = fuse(f).report(x, *stored)
        return found

    rows, columns = (q.qvalue, q.scale), (q.qvalue.T, q.scale.T)
    found = decision(by_rows, x, *rows)
    assert found.way == "XLA"
    assert "XLA dequantizes the int4 weight" in found.reason
    activated = lambda *args: jax.nn.gelu(by_rows(*args))  # noqa: E731
    assert decision(activated, x, *rows).way == "kernel with epilogue"
    assert decision(by_columns, x, *columns).way == "kernel"
    assert decision(by_rows, jnp.ones((n + 1, k), x.dtype), *rows).way == "kernel"
    monkeypatch.setattr(dequantized, "LEAST_VALUES", k * n + 1)
    assert decision(by_rows, x, *rows).way == "kernel"


def test_a_weight_that_is_transposed_first(weights):
    """The pass reads the stored order, so that no 4-bit values are transposed."""
    q = weights["signed"]

    def f(x, q, s):
        return x @ (q.T.astype(x.dtype) * jnp.repeat(s.T, GROUP, 0).astype(x.dtype))

    args = weights["x"], q.qvalue.T, q.scale.T
    (eqn,) = packed(f, *args)
    assert eqn.params["spec"].transposed
    assert eqn.invars[1].aval.shape == (N, K)
    types = [x.aval for each in jax.make_jaxpr(fuse(f))(*args).jaxpr.eqns for x in each.outvars]
    assert not any(x.dtype == jnp.int4 and x.shape == (K, N) for x in types)
    assert_close_in_norm(fuse(f)(*args), f(*args))


@pytest.mark.any_jax
def test_the_report_names_the_stored_weight(weights):
    f, args = FORMS["groups"](weights["x"], weights)
    (decision,) = fuse(f).report(*args)
    assert decision.way == "kernel"
    assert decision.reason == "packs the stored int4 weight and multiplies it"
    assert decision.product.startswith(f"bfloat16[{M},{K}], int4[{K},{N}]")


def test_in_a_scan_and_a_jit(weights):
    q = weights["signed"]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[q] * 3)

    def f(x, stack):
        def layer(x, q):
            y = x @ q.dequantize(x.dtype)
            return jax.nn.tanh(jnp.pad(y, ((0, 0), (0, K - N)))), None

        return jax.lax.scan(jax.jit(layer), x, stack)[0]

    args = weights["x"], stack
    assert operations(fuse(f), *args)["tcgemm_unpacked"] == 1
    assert_close_in_norm(jax.jit(fuse(f))(*args), f(*args))


@pytest.mark.any_jax
def test_packed_weights_stay(weights):
    def f(x, p, w):
        return jax.nn.gelu(gemm(x, p, bias=jnp.ones(N, x.dtype))) @ w

    args = weights["x"], pack(weights["signed"]), jnp.ones((N, K), jnp.bfloat16)
    assert operations(fuse(f), *args)["tcgemm_packed_function"] == 1
    assert_close_in_norm(fuse(f)(*args), f(*args))


@pytest.mark.any_jax
def test_equal_products_of_other_layouts_are_apart(weights):
    """The same equation reads a weight in groups along k, and one with its axes exchanged."""
    x, q = weights["x"], weights["columns"].qvalue
    square, s = q[:N], weights["columns"].scale[0]

    def f(x, q, s):
        w = q.astype(x.dtype) * s.astype(x.dtype)
        return x @ w, x @ (q.astype(x.dtype).T * s.astype(x.dtype))

    for ours, theirs in zip(fuse(f)(x[:, :N], square, s), f(x[:, :N], square, s), strict=True):
        assert_close_in_norm(ours, theirs)


REFUSED = {
    "computed values": lambda x, q, s: x @ ((q + 1).astype(x.dtype) * s),
    "two scales": lambda x, q, s: x @ (q.astype(x.dtype) * s * s),
    "no blocks": lambda x, q, s: x @ (q.astype(x.dtype) * jnp.tile(s[:, : N // 2], (1, 2))),
    "interleaved": lambda x, q, s: (
        x @ (q.astype(x.dtype).reshape(GROUP, -1, N) * s.reshape(1, 1, N)[:, :, ::-1]).reshape(K, N)
    ),
    "strided groups": lambda x, q, s: (
        x @ (q.astype(x.dtype).reshape(N, K).T * jnp.tile(s.T[: K // 4], (4, N))[:K, :N])
    ),
    "a narrow type": lambda x, q, s: x @ (q.astype(jnp.uint8).astype(x.dtype) * s),
    "a difference that overflows": lambda x, q, s: x @ ((q - q[:1]).astype(x.dtype) * s),
    "a zero point that overflows": lambda x, q, s: (
        x @ ((q.astype(jnp.int8) - jnp.full((1, N), 100, jnp.int8)).astype(x.dtype) * s)
    ),
    "float32 rows": lambda x, q, s: x.astype(jnp.float32) @ (q.astype(jnp.float32) * s),
    "a weight of float32": lambda x, q, s: x @ (q.astype(jnp.float32) * s),
    "a weight of float16": lambda x, q, s: x @ (q.astype(jnp.float16) * s.astype(jnp.float16)),
    "a scale that may overflow": lambda x, q, s: (
        x.astype(jnp.float16) @ (q.astype(jnp.float16) * s.astype(jnp.float16))
    ),
    "a batch": lambda x, q, s: jnp.einsum("mk,kn->kmn", x, q.astype(x.dtype) * s),
}


@pytest.mark.any_jax
@pytest.mark.parametrize("form", REFUSED)
def test_other_weights_are_not_taken(weights, form):
    args = weights["x"], weights["columns"].qvalue, weights["columns"].scale.astype(jnp.bfloat16)
    assert_close_in_norm(fuse(REFUSED[form])(*args), REFUSED[form](*args))
    assert not packed(REFUSED[form], *args)


@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("zero", "difference", "is_taken"),
    [
        ("int4", "int4", False),
        ("int4", "int8", True),
        ("uint4", "int8", True),
        ("uint4", "uint8", False),
        ("int8", "int16", False),  # a packed zero point has 4 bits
    ],
)
def test_integer_differences_must_not_wrap(rng, weights, zero, difference, is_taken):
    q = weights["columns"].qvalue
    z = jnp.asarray(rng.integers(0 if zero == "uint4" else -8, 8, (1, N))).astype(zero)

    def f(x, q, z):
        return x @ (q.astype(difference) - z.astype(difference)).astype(x.dtype)

    args = weights["x"], q, z
    assert_close_in_norm(fuse(f)(*args), f(*args))
    assert len(packed(f, *args)) == is_taken


@pytest.mark.any_jax
def test_operands_that_no_array_makes(normal):
    """``jnp.eye`` consists of operations without inputs."""
    x = normal(40, 32, dtype=jnp.bfloat16)
    f = lambda x: x @ jnp.eye(32, dtype=x.dtype)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(fuse(f))(x), x)
