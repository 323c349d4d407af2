"""Pure functions of shapes and shardings that decide how work is partitioned."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.lib import xla_client
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tcgemm import clip, softcap
from jax_tcgemm.partitioning.mesh import (
    Devices,
    _numberings,
    read_shardings,
    write_sharding,
)
from jax_tcgemm.partitioning.plan import make_plan
from jax_tcgemm.partitioning.ragged import RaggedSpec, dot_rule
from jax_tcgemm.partitioning.work import Array, Work
from jax_tcgemm.problem import ragged
from jax_tcgemm.problem.activations import ACTIVATIONS, resolve
from jax_tcgemm.problem.epilogue import FORMS, Epilogue
from jax_tcgemm.problem.serialize import from_json, to_json
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands


def hlo_sharding(shape, names, spec, ndim):
    mesh = jax.sharding.AbstractMesh(shape, names, (AxisType.Auto,) * len(shape))
    return NamedSharding(mesh, spec)._to_xla_hlo_sharding(ndim)


# Shardings


@pytest.mark.parametrize(("shape", "count"), [((4, 2), 8), ((2, 3), 6), ((3, 2, 2), 12), ((6,), 6)])
def test_shardings_are_read_and_written(shape, count):
    names = ("x", "y", "z")[: len(shape)]
    choices = [None, *names, *itertools.permutations(names, 2)]
    for spec in itertools.product(choices, repeat=2):
        used = [a for axes in spec if axes for a in (axes if isinstance(axes, tuple) else (axes,))]
        if len(set(used)) < len(used):
            continue
        sharding = hlo_sharding(shape, names, P(*spec), 2)
        devices, (tiling,) = read_shardings([sharding], [2], count)
        assert devices.count == count
        assert (
            write_sharding(tiling, devices, xla_client).is_equivalent(sharding)
            if hasattr(sharding, "is_equivalent")
            else write_sharding(tiling, devices, xla_client) == sharding
        )


def test_parts_that_no_digits_number_count_as_whole():
    sharding = xla_client.OpSharding()
    sharding.type = xla_client.OpSharding.Type.OTHER
    sharding.tile_assignment_dimensions = [8]
    sharding.tile_assignment_devices = [3, 1, 4, 0, 5, 2, 7, 6]
    regular = hlo_sharding((4, 2), ("x", "y"), P("x"), 1)
    shardings = [xla_client.HloSharding.from_proto(sharding), regular, None]
    _, tilings = read_shardings(shardings, [1, 1, 2], 8)
    assert tilings == [((),), ((0, 1),), ((), ())]


def test_groups_differ_in_the_digits_that_are_named():
    devices = Devices((2, 2, 2))
    assert devices.groups((0, 1)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert devices.groups((1, 0)) == [[0, 4, 2, 6], [1, 5, 3, 7]]
    assert devices.values((2, 0)).tolist() == [0, 2, 0, 2, 1, 3, 1, 3]


def test_there_are_few_orders_of_many_digits():
    assert [len(_numberings(count)) for count in (1, 8, 24, 96, 4096, 8192 * 3)] == [
        1,
        1,
        4,
        6,
        1,
        14,
    ]


# Plans

EIGHT = Devices((2, 2, 2))


def product(m, n, k):
    names = {"m": m, "n": n, "k": k}
    arrays = [Array(tuple(dims), 2, dims) for dims in ("mk", "kn", "mn")]
    product = arrays[2]
    return Work(names, tuple(arrays[:2]), product, (product,), frozenset((0, 1)), 2.0 * m * n * k)


def test_weights_are_gathered_for_many_rows_and_rows_exchanged_for_few():
    """FSDP: the same digits shard the rows of x and k of w."""
    x, w, d = ((0, 1, 2), ()), ((0, 1, 2), ()), ((0, 1, 2), ())
    plan = make_plan(product(65536, 4096, 4096), EIGHT, [x, w], [d])
    assert plan.layout == {"m": (0, 1, 2), "n": (), "k": ()}
    assert [what for what, _ in plan.moved] == ["all-gather of kn"]
    plan = make_plan(product(64, 32768, 32768), EIGHT, [x, w], [d])
    assert plan.layout["k"] == (0, 1, 2)
    assert plan.scattered == {"m": (0, 1, 2)}


def test_what_is_summed_is_not_gathered():
    plan = make_plan(product(64, 32, 48), EIGHT, [((), (0, 1)), ((0, 1), (2,))], [((), (2,))])
    assert plan.layout == {"m": (), "n": (2,), "k": (0, 1)}
    assert [what for what, _ in plan.moved] == ["all-reduce of mn"]


def test_a_weight_is_gathered_where_less_travels_than_in_a_sum():
    """The first digit shards k in x; the first and the second shard it in w."""
    plan = make_plan(product(16384, 16384, 512), EIGHT, [((), (0,)), ((0, 1), ())], [((), ())])
    assert all("all-reduce" not in what for what, _ in plan.moved)


def test_no_digit_divides_two():
    for tilings in itertools.product([(), (0,), (0, 1), (2,)], repeat=6):
        a, b, d = tilings[:2], tilings[2:4], tilings[4:]
        if any(set(x) & set(y) for x, y in (a, b, d)):
            continue
        plan = make_plan(product(64, 32, 48), EIGHT, [a, b], [d])
        digits = [digit for each in plan.layout.values() for digit in each]
        assert len(set(digits)) == len(digits)
        scattered = {digit for each in plan.scattered.values() for digit in each}
        assert scattered <= set(plan.summed_digits())


def test_parts_of_parts_are_scattered_only_where_they_are_parts_of_the_whole():
    x, w, d = ((0,), (1,)), ((1,), ()), ((0, 1), ())
    assert make_plan(product(64, 32, 48), EIGHT, [x, w], [d]).scattered == {"m": (1,)}
    assert make_plan(product(66, 32, 48), EIGHT, [x, w], [d]).scattered == {}


def test_more_devices_than_there_is_to_divide():
    for extents in itertools.product((0, 1, 2, 3, 8), repeat=3):
        a, b = ((2,), (0, 1)), ((0, 1), ())
        plan = make_plan(product(*extents), EIGHT, [a, b], [((2, 0, 1), ())])
        for name, extent in zip("mnk", extents, strict=True):
            assert EIGHT.parts(plan.layout[name]) <= max(1, extent)


def test_a_plan_of_many_devices_is_made_quickly():
    devices = Devices((2,) * 10)
    x, w = ((0, 1, 2, 3), (4, 5, 6)), ((4, 5, 6), (7, 8, 9))
    plan = make_plan(product(8192, 8192, 8192), devices, [x, w], [((0, 1, 2, 3), (7, 8, 9))])
    assert plan.layout == {"m": (0, 1, 2, 3), "n": (7, 8, 9), "k": (4, 5, 6)}


# Text


def specs():
    made = softcap(30.0), clip(-np.inf, 0.1), resolve("gelu"), resolve(None)
    for activation in [None, *ACTIVATIONS, *made]:
        yield GemmSpec(
            Operands((0, 1), (None, 1, 0), bias=(0,)),
            jnp.dtype(jnp.bfloat16),
            (lax.Precision.DEFAULT, lax.Precision.HIGHEST),
            Epilogue(activation=activation, alpha=0.1, beta=2 + 1j),
        )
    for form in FORMS:
        yield GemmSpec(
            Operands((1, 0), (0, 1)),
            jnp.dtype(jnp.float16),
            lax.DotAlgorithmPreset.BF16_BF16_F32,
            Epilogue(form),
            config="some_row",
            packed=form == "gated",
            overwrite_c=True,
        )
    yield RaggedSpec(jnp.dtype(jnp.float32), (lax.Precision.HIGH,) * 2, True)


def test_parameters_come_back_from_text():
    classes = (GemmSpec, RaggedSpec, Epilogue)
    for spec in specs():
        text = to_json(spec)
        assert from_json(text, classes) == spec
        assert to_json(from_json(text, classes)) == text


def test_texts_of_exported_programs_are_read():
    """Programs that were exported before products had a field for groups still run."""
    highest = (lax.Precision.HIGHEST,) * 2
    text = (
        '{"RaggedSpec":{"config":null,"epilogue":{"Epilogue":{"activation":null,"alpha":'
        '{"float":"0x1.0000000000000p+0"},"beta":{"float":"0x1.0000000000000p+0"},"form":"add",'
        '"results":[true,false]}},"out_dtype":{"dtype":"float32"},"precision":'
        '[{"Precision":"HIGHEST"},{"Precision":"HIGHEST"}],"transpose_rhs":true}}'
    )
    product = ragged.dot(jnp.dtype(jnp.float32), highest, transpose_b=True, has_bias=True)
    assert to_json(dot_rule(lambda x, spec: []).told(product)) == text
    gemm = GemmSpec(Operands((0, 1), (0, 1)), jnp.dtype(jnp.float32), highest)
    older = to_json(gemm).replace('"grouped":"none",', "")
    assert "grouped" not in older
    assert from_json(older, (GemmSpec, Epilogue)) == gemm
