"""Random numbers in epilogues of products that are partitioned or have a batch."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_checks import both, is_divided, put
from sharded_program import mesh_of

from jax_tcgemm import _core, gemm
from jax_tcgemm.epilogue import compiler, portable, translation
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue.part import Part
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.lowering.jit_source import source_of
from jax_tcgemm.partitioning import functions as partitioning_functions

pytestmark = pytest.mark.usefixtures("divided_everywhere")

DRAWN = {
    "bits of an operand": lambda shape, key: jax.random.bits(key, shape),
    "bytes": lambda shape, key: jax.random.bits(key, shape, "uint8"),
    "of a seed": lambda shape, key: jax.random.bits(jax.random.key(shape[0]), shape, "uint16"),
    "of another key": lambda shape, key: jax.random.uniform(jax.random.fold_in(key, 5), shape),
    "of words": lambda shape, key: jax.random.normal(jax.random.PRNGKey(3), shape),
    "along rows": lambda shape, key: jax.random.normal(key, (*shape[:-1], 1)),
    "twice": lambda shape, key: jax.random.bits(key, shape) ^ jax.random.bits(key, shape[1:]),
}


@pytest.mark.parametrize("closed_over", [False, True])
@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_are_those_of_the_whole(normal, name, closed_over):
    """The numbers are equal bit for bit, both returned beside a product and combined with it."""

    def program(x, w, key):
        def epilogue(product, *given):
            drawn = DRAWN[name](product.shape, *(given or (key,)))
            return jnp.broadcast_to(drawn, product.shape), product + (drawn > 0.5)

        return gemm(x, w, epilogue=epilogue, epilogue_operands=() if closed_over else (key,))

    key = jax.random.key(11)
    x, w = put(mesh_of(), normal(64, 32), "x"), put(mesh_of(), normal(32, 48), None, "y")
    assert is_divided(program, x, w, key)
    drawn, result = jax.jit(program)(x, w, key)
    wanted = jnp.broadcast_to(DRAWN[name](result.shape, key), result.shape)
    np.testing.assert_array_equal(np.asarray(drawn), np.asarray(wanted))
    expected = jnp.asarray(np.asarray(x)) @ np.asarray(w) + (np.asarray(wanted) > 0.5)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def counts(made, rows, columns):
    """Returns the program and the counters it draws from, by evaluating its C++ up to the draw."""
    program = translation.translate(made)
    assert not isinstance(program, str), program
    m, n = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    values = {"m": m, "n": n} | {f"x{i}": 0 for i in range(len(program.leaves))}
    for line in program.lines:
        drawn = re.search(r"random_(?:bits|words)\(.*, (\w+)\)+;", line)
        if drawn:
            return program, values[drawn[1]]
        text = re.sub(r"^const \w+ |static_cast<\w+>|ll\b|(?<=\d)u|;", "", line)
        text = text.replace("io.m(i)", "m").replace("io.n(i)", "n").replace("[i]", "")
        exec(text.replace("/", "//"), values)
    raise AssertionError(program.lines)


@pytest.mark.parametrize("shape", [(64, 48), (3, 8, 16), (2, 3, 4, 8), (1, 5, 1, 8)])
def test_counts_of_draws(shape):
    """This holds for a batch, too: the kernel treats its matrices as more rows."""

    def epilogue(product):
        return [jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, shape), product, 0)]

    product = jax.ShapeDtypeStruct(shape, jnp.float32)
    function, _ = functions.trace(epilogue, [product], 1)
    rows = np.prod(shape[:-1])
    program, found = counts(function, rows, shape[-1])
    assert program.flat_rows == (len(shape) > 2 and max(shape[:-2]) > 1)
    np.testing.assert_array_equal(found, np.arange(np.prod(shape)).reshape(rows, shape[-1]))
    # The second half of a larger whole, along rows and along the outermost dimension.
    whole = (2 * shape[0], *shape[1:])
    function, _ = functions.trace(
        lambda p: [p + jax.random.uniform(jax.random.key(1), whole)],
        [jax.ShapeDtypeStruct(whole, jnp.float32)],
        1,
    )
    names = tuple("abmn"[-len(shape) :])
    portable_function = portable.portable(function, names)
    assert not isinstance(portable_function, str), portable_function
    start = {name: np.int32(shape[0]) if name == names[0] else 0 for name in names}
    part = Part(portable_function, dict(zip(names, shape, strict=True)), start)
    made, _ = functions.trace(part.within, [product], 1)
    _, found = counts(made, rows, shape[-1])
    np.testing.assert_array_equal(
        np.broadcast_to(found, (rows, shape[-1])),
        np.prod(shape) + np.arange(np.prod(shape)).reshape(rows, shape[-1]),
    )


def test_counts_of_draws_in_another_order():
    def epilogue(product):
        return [product + jax.random.uniform(jax.random.key(1), (8, 8, 16)).transpose(1, 0, 2)]

    function, _ = functions.trace(epilogue, [jax.ShapeDtypeStruct((8, 8, 16), jnp.float32)], 1)
    _, found = counts(function, 64, 16)
    wanted = np.arange(8 * 8 * 16).reshape(8, 8, 16).transpose(1, 0, 2)
    np.testing.assert_array_equal(found, wanted.reshape(64, 16))


def test_64_bits_are_left_to_xla(normal):
    key = jax.random.key(5)

    def program(x, w):
        def epilogue(product):
            return jnp.where(jax.random.bernoulli(key, 0.5, (len(product), 1)), product, 0)

        return gemm(x, w, epilogue=epilogue)

    with jax.enable_x64(True):
        x, w = put(mesh_of(), normal(64, 32), "x"), put(mesh_of(), normal(32, 48), None, "y")
        assert not is_divided(program, x, w)
        got, expected = both(program, x, w)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_draws_follow_the_configuration_of_jax(normal):
    """The same function draws with partitionable counters and without."""
    key = jax.random.key(5)

    def program(x, w):
        return gemm(x, w, epilogue=lambda product: jax.random.bits(key, product.shape))

    x, w = put(mesh_of(), normal(64, 32), "x"), put(mesh_of(), normal(32, 48), None, "y")
    for partitionable in (True, False, True):
        with jax.threefry_partitionable(partitionable):
            assert is_divided(program, x, w) == partitionable
            got, wanted = jax.jit(program)(x, w), jax.random.bits(key, (64, 48))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def test_words_of_a_key_are_no_axis(normal):
    key = jax.random.PRNGKey(3)

    def program(x, w):
        def epilogue(product, key):
            return product + key.astype(jnp.float32) * 1e-9 + jax.random.uniform(key, product.shape)

        return gemm(x, w, epilogue=epilogue, epilogue_operands=(key,))

    x, w = put(mesh_of(), normal(64, 32), "x"), put(mesh_of(), normal(32, 2), None, "y")
    assert not is_divided(program, x, w)
    got, expected = both(program, x, w)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_what_a_device_is_told_to_compute_has_a_translation(normal, monkeypatch):
    """The part's offset is an operand: a kernel cannot ask which device it runs on."""
    told = []

    def spec(product, function, **options):
        told.append(function)
        return CompiledSpec(product, function, **options)

    monkeypatch.setattr(partitioning_functions, "CompiledSpec", spec)

    def program(x, w):
        return gemm(x, w, epilogue=lambda product: product + DRAWN["bytes"](product.shape, key))

    key = jax.random.key(2)
    x, w = put(mesh_of(), normal(64, 32), "x"), put(mesh_of(), normal(32, 48), None, "y")
    assert is_divided(program, x, w)
    jax.jit(program)(x, w)
    (function,) = set(told)
    made = translation.translate(function)
    assert not isinstance(made, str), made
    assert made.draws


def test_a_part_draws_in_the_kernel(normal):
    """A device's part translates, and its counters begin at the part's offset."""

    def epilogue(product):
        return [jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, product.shape), product, 0)]

    function, _ = functions.trace(epilogue, [jax.ShapeDtypeStruct((64, 48), jnp.float32)], 1)
    found = portable.portable(function, ("m", "n"))
    assert not isinstance(found, str), found
    part = Part(found, {"m": 16, "n": 24}, {"m": jnp.int32(32), "n": 0})
    product = jax.ShapeDtypeStruct((16, 24), jnp.float32)
    made, held = functions.trace(part.within, [product], 1)
    program = translation.translate(made)
    assert not isinstance(program, str), program
    assert program.draws
    assert "random_words(" in "\n".join(program.lines)
    strides = [leaf.strides(2) for leaf in program.leaves]
    text = source_of(program, strides, 24, batched=False)
    if _core.build_info()["cuda"]:  # the build has the kernels' headers
        assert compiler.compile_kernel(text, "sm90_bf16_128x128x64_s6_c2x1_pingpong", "nn")
    values = normal(16, 24)
    (kept,) = made(values, *held)
    whole = jax.random.bernoulli(jax.random.key(1), 0.5, (64, 48))[32:48, :24]
    np.testing.assert_array_equal(kept, jnp.where(whole, values, 0))
