"""Keys of functions: equal only if both functions compute and differentiate the same."""

from __future__ import annotations

import collections
import dataclasses
import enum
import gc

import function_pairs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_pairs import PAIRS
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.problem.activations import clip, softcap
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.exact import exactly, number_of

pytestmark = pytest.mark.any_jax

PRODUCT = jax.ShapeDtypeStruct(function_pairs.SHAPE, jnp.float32)


def traced(function):
    return functions.trace(lambda z: [function(z)], [PRODUCT], 1)[0]


def traced_with_operands(function):
    """Returns a function and its operand arrays, as bytes."""
    made, held = functions.trace(lambda z: [function(z)], [PRODUCT], 1)
    return made, [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in held]


@pytest.mark.parametrize("options", [{}, {"precision": 1, "suppress": True, "threshold": 1}])
@pytest.mark.parametrize("name", PAIRS)
def test_functions_that_differ_in_one_thing_are_not_equal(name, options):
    with np.printoptions(**options):
        one, other = map(traced_with_operands, PAIRS[name]())
    assert one != other, "neither the functions nor their operands differ"


@pytest.mark.parametrize("name", PAIRS)
def test_functions_that_differ_in_one_thing_are_not_equal_with_hidden_constants(name):
    with function_pairs.simplified_constants():
        one, other = map(traced_with_operands, PAIRS[name]())
    assert one != other


TABLE = jnp.arange(72.0)

REPEATED = {
    "a literal": lambda: lambda z: z * 0.1,
    "calls": lambda: lambda z: jax.nn.gelu(z) + jax.nn.softmax(z),
    "a call": lambda: jax.jit(lambda z: jnp.clip(z, 0.0, 1.0)),
    "a loop": lambda: lambda z: jax.lax.fori_loop(0, 3, lambda i, x: x * i, z),
    "a branch": lambda: lambda z: jax.lax.cond(z[0, 0] > 0, jnp.sin, jnp.cos, z),
    "random numbers": lambda: (
        lambda z: jnp.where(jax.random.bernoulli(jax.random.key(3), 0.5, z.shape), z, 0)
    ),
    "rematerialized": lambda: jax.checkpoint(lambda z: jnp.sin(jnp.cos(z))),
    "a product": lambda: lambda z: jnp.einsum("ij,kj->ik", z, z),
    "gathered": lambda: lambda z: z[jnp.array([1, 0])].sum(0) + z,
    "a table in a call": lambda: jax.jit(lambda z: z * TABLE),
}


@pytest.mark.parametrize("name", REPEATED)
def test_functions_that_compute_the_same_are_equal(name):
    """Two equal layers of a model compile once."""
    one, other = traced(REPEATED[name]()), traced(REPEATED[name]())
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


def test_functions_with_rules_are_equal_where_nothing_is_differentiated():
    one, other = traced(lambda z: jax.nn.relu(z)), traced(lambda z: jax.nn.relu(z))
    assert one.without_rules == other.without_rules
    assert one.without_rules != traced(lambda z: jax.nn.relu6(z)).without_rules


def test_tables_in_calls_are_operands():
    """Functions with other tables have the same key, so they compile once."""
    tables = [jnp.full(function_pairs.SHAPE, float(i)) for i in range(3)]
    made = [
        functions.trace(lambda z, f=f: [f(z)], [PRODUCT], 1)
        for table in tables
        for f in (jax.jit(lambda z, t=table: jax.jit(lambda y: y * t)(z) + t),)
    ]
    assert len({function for function, _ in made}) == 1
    for (_, held), table in zip(made, tables, strict=True):
        assert len(held) == 1
        np.testing.assert_array_equal(held[0], table)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class IntegerColor(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "x y")
OtherPair = collections.namedtuple("OtherPair", "x y")


@dataclasses.dataclass(frozen=True)
class Fields:
    x: object


class Changing:
    def __init__(self, x):
        self.x = x


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """Gives a parameter without a hash the hash that JAX needs."""

    x: object


def _nan(bits):
    return np.uint64(bits).view(np.float64).item()


# Values of a parameter; no two are the same.
PARAMETERS = [
    *(1, 1.0, True, 1 + 0j, "1", b"1", 2, 0, False, None, "", (), []),
    *(0.0, -0.0, complex(0.0, -0.0), complex(-0.0, 0.0), np.inf, -np.inf),
    *(_nan(0x7FF8000000000000), _nan(0x7FF8000000000001), _nan(0xFFF8000000000000)),
    *(0.1, np.nextafter(0.1, 1).item(), np.float64(0.1), np.float32(0.1), np.float32(1)),
    *((1, 2), [1, 2], (1, 2.0), ((1,), 2), (1, (2,)), ((1, 2),), (1, 2, ()), Pair(1, 2)),
    *(OtherPair(1, 2), {"x": 1}, {"x": 1.0}, {"x": 1, "y": 2}, {1: "x"}, frozenset({1, 2})),
    *(frozenset({1, 2.5}), Color.RED, Color.BLUE, IntegerColor.RED, Fields(1), Fields(1.0)),
    *(Fields(Fields(1)), Fields((0.0,)), Fields((-0.0,)), slice(1), slice(2), Ellipsis),
    *(np.dtype("float32"), np.dtype("int32"), jnp.dtype("bfloat16"), jnp.dtype("float8_e4m3fn")),
    *(jnp.dtype("float8_e5m2"), np.float32, np.int32, jax.random.key(0).dtype),
    *(np.arange(3), np.arange(3.0), np.arange(3)[None], np.array([0.0, -0.0]), np.zeros(2)),
    *(np.array(1), np.array([], np.float32), np.array([], np.int32), jnp.zeros(4, "bfloat16")),
    *(np.zeros(4, np.float16), np.arange(5000), np.arange(5000) + (np.arange(5000) == 2500)),
    *(jax.random.key(0), jax.random.key(1), jax.random.split(jax.random.key(0))),
    *(jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec("y"), "ab", ("a", "b")),
    *(lambda: 1, lambda: 1, Changing(1), Changing(1), object(), object()),
]


def _with_parameter():
    primitive = Primitive("parameterized")
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x, **_: x, multiple_results=False))
    return lambda value: traced(lambda z: primitive.bind(z, value=Held(value)))


def test_parameters_that_are_not_the_same():
    """They differ in type, in a bit, in an inner element, or in the structure that holds them."""
    function = _with_parameter()
    made = [function(value) for value in PARAMETERS]
    wrong = [
        (i, j)
        for i, one in enumerate(made)
        for j, other in enumerate(made)
        if (one == other) != (i == j)
    ]
    assert not wrong, [(PARAMETERS[i], PARAMETERS[j]) for i, j in wrong]


def test_parameters_that_are_the_same():
    function = _with_parameter()
    for make in (
        lambda: (1, 2.5, "x", None, {"y": -0.0}),
        lambda: np.arange(7.0),
        lambda: jnp.arange(7.0),
        lambda: Fields(Fields(np.float32(0.3))),
        lambda: frozenset({"a", "b", "c", 4}),
        lambda: jax.sharding.PartitionSpec("x", None),
        lambda: Pair(_nan(0x7FF8000000000001), jnp.dtype("bfloat16")),
    ):
        assert function(make()) == function(make())


def test_rules_stay_alive_with_the_key():
    """Python reuses the `id()` of freed objects."""

    def made():
        rule = jax.custom_jvp(lambda z: z * 2)
        rule.defjvp(lambda p, t: (rule(*p), t[0]))
        function = traced(rule)
        (eqn,) = (x for x in function.jaxpr.jaxpr.eqns if "custom_jvp" in x.primitive.name)
        return function.key, id(eqn.params["jvp_jaxpr_fun"])

    key, rule = made()
    gc.collect()
    assert rule in map(id, key.same)


def test_extents_that_are_symbols():
    one, other = (jax.export.symbolic_shape("m, n", scope=jax.export.SymbolicScope()) for _ in "12")

    def of(extents):
        return functions.trace(lambda z: [z * 2], [jax.ShapeDtypeStruct(extents, jnp.float32)], 1)[
            0
        ]

    assert of(one) == of(one)
    assert of(one) != of(other)
    assert of(one) != of(one[::-1])
    assert of((one[0] + 1, one[1])) == of((one[0] + 1, one[1]))


NUMBERS = [0, 0.0, -0.0, False, 1, 1.0, True, 1j, complex(0.0, -0.0), -1, float("nan"), 10**20]


def test_numbers_as_keys():
    keys = [exactly(x) for x in NUMBERS]
    assert len(set(keys)) == len(keys)
    for number, key in zip(NUMBERS, keys, strict=True):
        found = number_of(key)
        assert type(found) is type(number)
        assert repr(found) == repr(number)
    assert exactly((0.0, "x")) != exactly((-0.0, "x"))
    assert exactly(float("nan")) == exactly(float("nan"))


def test_descriptions_are_equal_where_their_numbers_are():
    for made in ([Epilogue(alpha=x) for x in NUMBERS], [Epilogue(beta=x) for x in NUMBERS]):
        assert len(set(made)) == len(NUMBERS)
    assert Epilogue(alpha=0.5, activation="gelu") == Epilogue(alpha=0.5, activation="gelu")
    assert Epilogue(alpha=float("nan")) == Epilogue(alpha=float("nan"))
    assert clip(0.0, 1.0) == clip(0, 1)
    assert clip(0.0, 1.0) != clip(-0.0, 1.0)
    assert softcap(2.0) == softcap(2)
