"""Products of numbers below 8 bits, beside every other type, give the same results as JAX."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from nightly import slow

from jax_tcgemm import dot_general, gated_gemm, gemm, ragged_dot

pytestmark = pytest.mark.any_jax

NARROW = ("int2", "int4", "uint2", "uint4")
DTYPES = (*NARROW, "bool", "int8", "bfloat16", "float32")
PREFERRED = (None, "int4", "int8", "int32", "bfloat16", "float32")
# Types for all functions except gemm, to limit compilation time.
FEWER = ("int4", "uint2", "bool", "int8", "bfloat16")
_DIMS = (((1,), (0,)), ((), ()))
_SIZES = np.array([1, 2], np.int32)

# Each function takes x, two weights and preferred_element_type.
OURS = {
    "gemm": lambda x, w, _, out: gemm(x, w, preferred_element_type=out),
    "gated_gemm": lambda x, w, v, out: gated_gemm(
        x, w, v, activation=None, preferred_element_type=out
    ),
    "ragged_dot": lambda x, w, v, out: ragged_dot(
        x, jnp.stack([w, v]), _SIZES, preferred_element_type=out
    ),
    "dot_general": lambda x, w, _, out: dot_general(x, w, _DIMS, preferred_element_type=out),
}
THEIRS = {
    "gemm": lambda x, w, _, out: jnp.matmul(x, w, preferred_element_type=out),
    "gated_gemm": lambda x, w, v, out: (
        jnp.matmul(x, w, preferred_element_type=out) * jnp.matmul(x, v, preferred_element_type=out)
    ),
    "ragged_dot": lambda x, w, v, out: lax.ragged_dot(
        x, jnp.stack([w, v]), _SIZES, preferred_element_type=out
    ),
    "dot_general": lambda x, w, _, out: lax.dot_general(x, w, _DIMS, preferred_element_type=out),
}


def _drawn(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Draws numbers whose sums over k are exact in bfloat16."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        values = rng.integers(
            max(-8, int(limits.min)), min(7, int(limits.max)), shape, endpoint=True
        )
    else:
        values = rng.integers(-6, 7, shape) / 4
    return values.astype(jnp.dtype(dtype))


def _type_or_error(function, *operands: jax.Array, out: str | None) -> str | Exception:
    try:
        return jax.eval_shape(lambda *x: function(*x, out), *operands).dtype.name
    except Exception as error:
        return error


def _refused_by_xla(a: str, b: str, dtype: str) -> bool:
    """Checks if XLA's CPU compiler may lack the product of these types."""
    is_narrow = bool({a, b} & {*NARROW})
    return dtype in ("int2", "uint2") or (is_narrow and (a == b or "bool" in (a, b)))


def _in_wider_types(name: str, x, w, v, out: str):
    """Computes JAX's result in types whose products XLA has."""
    is_exact = out == "bool" or jnp.issubdtype(out, jnp.integer)
    wide = jnp.int32 if is_exact else jnp.float32
    x, w, v = (each.astype(wide) for each in (x, w, v))
    product = jnp.dot(x, w, preferred_element_type=wide)
    if name == "gated_gemm":
        product = product * jnp.dot(x, v, preferred_element_type=wide)
    if name == "ragged_dot":
        product = product.at[1:].set(jnp.dot(x[1:], v, preferred_element_type=wide))
    return product.astype(out)


def _matrix(rng: np.random.Generator, name: str) -> tuple[list[str], list[tuple], list]:
    """Returns errors at trace time, and the cases that trace: names and operands."""
    wrong, cases, operands = [], [], []
    dtypes = DTYPES if name == "gemm" else FEWER
    for a, b in itertools.product(dtypes, dtypes):
        if not {a, b} & {*NARROW, "bool", "int8"}:
            continue
        own = tuple(_drawn(rng, *args) for args in ((a, 3, 4), (b, 4, 5), (b, 4, 5)))
        for out in PREFERRED:
            ours = _type_or_error(OURS[name], *own, out=out)
            theirs = _type_or_error(THEIRS[name], *own, out=out)
            if name == "ragged_dot" and isinstance(theirs, str) and out is None:
                common = _type_or_error(lambda x, w, v, _: x[0, 0] * w[0, 0], *own, out=None)
                theirs = common if isinstance(common, str) else theirs
            if isinstance(ours, str) and ours == theirs:
                cases.append((a, b, out, ours))
                operands.append(own)
            elif isinstance(ours, str) or isinstance(theirs, str):
                wrong.append(f"{a} by {b} to {out}: {ours!r}, JAX {theirs!r}")
            elif not isinstance(ours, (TypeError, ValueError)):
                wrong.append(f"{a} by {b} to {out}: {ours!r}")
    return wrong, cases, operands


def _computed(function, cases: list[tuple], operands: list) -> list:
    """Computes all cases in as few programs as XLA compiles; errors are results, too."""

    def every(operands):
        return [function(*each) for each in zip(cases, operands, strict=True)]

    try:
        return jax.block_until_ready(jax.jit(every)(operands))
    except Exception as error:
        if len(cases) == 1:
            return [error]
    middle = len(cases) // 2
    halves = slice(middle), slice(middle, None)
    return [x for half in halves for x in _computed(function, cases[half], operands[half])]


def _different(rng: np.random.Generator, name: str) -> list[str]:
    """Returns the products of the matrix that differ from JAX's on a CPU."""
    wrong, cases, operands = _matrix(rng, name)
    if name == "dot_general":  # lax's own products; XLA refuses them as well
        kept = [i for i, (a, b, _, out) in enumerate(cases) if not _refused_by_xla(a, b, out)]
        cases, operands = [cases[i] for i in kept], [operands[i] for i in kept]

    def ours(case, own):
        return OURS[name](*own, case[2])

    def theirs(case, own):
        a, b, out, dtype = case
        if _refused_by_xla(a, b, dtype):
            return _in_wider_types(name, *own, dtype)
        return THEIRS[name](*own, out)

    got = _computed(ours, cases, operands)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = _computed(theirs, cases, operands)
    for case, x, y in zip(cases, got, expected, strict=True):
        if isinstance(x, Exception) or isinstance(y, Exception):
            wrong.append(f"{case}: {x!r}, JAX {y!r}"[:300])
            continue
        x, y = (np.asarray(each).astype(np.float64) for each in (x, y))
        # Our gated product is rounded once; the reference rounds each factor as well.
        tolerance = 2**-6 if name == "gated_gemm" and case[3] == "bfloat16" else 0
        if not np.allclose(x, y, rtol=tolerance, atol=0):
            wrong.append(f"{case}: {x.tolist()}, JAX {y.tolist()}")
    return wrong


@pytest.mark.parametrize("name", ["gemm", *(slow(x) for x in OURS if x != "gemm")])
def test_every_pair_of_types_is_as_in_jax(rng, name):
    assert not (wrong := _different(rng, name)), "\n".join(wrong)


@pytest.mark.gpu
def test_every_pair_of_types_is_as_in_jax_on_a_gpu(rng):
    wrong = {name: _different(rng, name) for name in ("gemm", "gated_gemm", "ragged_dot")}
    assert not any(wrong.values()), "\n".join(f"{k}: {x}" for k, v in wrong.items() for x in v)


@pytest.mark.parametrize("mode", ["standard", "strict"])
@pytest.mark.parametrize("weight", NARROW)
def test_activations_by_narrow_weights(rng, normal, weight, mode):
    """Covers eager, jit and vmap modes, and the gradient of the activations."""
    x, w = normal(2, 6, 8, dtype=jnp.bfloat16), jnp.asarray(_drawn(rng, weight, 8, 5))
    plain = jnp.matmul(x, w.astype(jnp.bfloat16))

    def product(x):
        return gemm(x, w, preferred_element_type=jnp.bfloat16)

    with jax.numpy_dtype_promotion(mode):
        for way in (product, jax.jit(product), jax.vmap(product)):
            y = way(x)
            assert y.dtype == jnp.bfloat16
            np.testing.assert_array_equal(y, plain)
        gradient = jax.grad(lambda x: product(x).astype(jnp.float32).sum())(x)
    assert gradient.dtype == jnp.bfloat16
    rows = w.astype(jnp.float32).sum(1)
    np.testing.assert_array_equal(gradient, jnp.broadcast_to(rows, x.shape))


def test_a_refused_pair_is_named(rng):
    x, w = _drawn(rng, "bfloat16", 3, 4), _drawn(rng, "int4", 4, 5)
    with pytest.raises(TypeError, match=r"a\.dtype=bfloat16, b\.dtype=int4"):
        gemm(x, w)
    with pytest.raises(TypeError, match=r"x\.dtype=bfloat16, w_gate\.dtype=int4"):
        gated_gemm(x, w, w)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int4", "uint2"])
def test_functions_get_whole_sums_of_integers(dtype):
    rng = np.random.default_rng()
    limits = jnp.iinfo(dtype)
    x, w = (
        jnp.asarray(rng.integers(limits.max // 2, limits.max, shape, endpoint=True), dtype)
        for shape in ((3, 70), (70, 5))
    )
    product = np.asarray(x).astype(np.int64) @ np.asarray(w).astype(np.int64)
    ours = (
        gemm(x, w, epilogue=lambda z: z),
        gated_gemm(x, w, w, epilogue=lambda z, _: z),
        # JAX 0.8.0 may crash in jnp.stack of uint2.
        ragged_dot(x, jnp.asarray(np.stack([w, w])), _SIZES, epilogue=lambda z: z),
    )
    name = "uint32" if dtype.startswith("u") else "int32"
    for result in ours:
        assert result.dtype == name
        np.testing.assert_array_equal(result, product.astype(name))


@pytest.mark.parametrize(
    ("preferred", "product"),
    [(None, "int32"), ("int8", "int8"), ("int32", "int32"), ("bfloat16", "int32")],
)
def test_functions_of_int8_get_the_integers_that_are_asked_for(preferred, product):
    x, w = jnp.full((3, 70), 100, jnp.int8), jnp.full((70, 5), 100, jnp.int8)
    seen = []

    def epilogue(z, *_):
        seen.append(z.dtype)
        return z.astype(jnp.float32)

    ours = (
        gemm(x, w, epilogue=epilogue, preferred_element_type=preferred),
        gated_gemm(x, w, w, epilogue=epilogue, preferred_element_type=preferred),
        ragged_dot(x, w[None], _SIZES[1:] + 1, epilogue=epilogue, preferred_element_type=preferred),
    )
    assert seen == [product] * 3
    expected = np.full((3, 5), 700_000).astype(product).astype(np.float32)
    for result in ours:
        assert result.dtype == (preferred or "float32")
        np.testing.assert_array_equal(result, expected.astype(result.dtype))


@pytest.mark.parametrize("out", [None, "float32", "bfloat16"])
def test_floats_of_four_bits(rng, exact, out):
    x, w, v = (
        jnp.asarray(rng.integers(-6, 7, shape) / 2, jnp.float4_e2m1fn)
        for shape in ((3, 4), (4, 5), (4, 5))
    )
    y = exact(x) @ exact(w)
    expected = y.astype(jnp.dtype(out or jnp.float4_e2m1fn))
    for f in (gemm, jax.jit(gemm, static_argnames="preferred_element_type")):
        z = f(x, w, preferred_element_type=out)
        assert z.dtype == (out or "float4_e2m1fn")
        np.testing.assert_array_equal(exact(z), exact(expected))
    np.testing.assert_array_equal(exact(gemm(x, w, epilogue=jnp.abs)), np.abs(y))
    z = gated_gemm(x, w, v, activation=None, preferred_element_type="float32")
    np.testing.assert_array_equal(exact(z), y * (exact(x) @ exact(v)))
