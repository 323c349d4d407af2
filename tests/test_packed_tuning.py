"""Measured choices for packed weights: names, candidates, keys, lookups, measurements. No GPU."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from typing import Any

import jax
import pytest
from native_calls import INVALID_ARGUMENT, Handler, calls_of
from native_packed import MOST_SHARED_BYTES, buffers, shared_bytes
from packed_forms import (
    FORMS,
    PACKED,
    SIZES,
    UNPACK,
    experts,
    pair,
    plain,
    rows,
    weight,
    with_function,
)
from packed_problems import FLOATS
from tuned_calls import KIND, entry, only

from jax_tcgemm import Tunings, _core, gated_gemm, gemm, ragged_dot
from jax_tcgemm.kernels import packed as kernels
from jax_tcgemm.kernels import packed_configs
from jax_tcgemm.lowering import packed_problem
from jax_tcgemm.problem.packed import BITS
from jax_tcgemm.transforms import tune as tune_module
from jax_tcgemm.tuning import cache, lookup, tunings
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.lookup import Measured

pytestmark = [pytest.mark.any_jax, pytest.mark.usefixtures("all_kernels", "on_an_h200")]


def calls(f, *types):
    """Returns the names and attributes of the custom calls of a program."""
    if PACKED not in _core.registrations():
        pytest.skip("no kernels were built")
    anew = jax.jit(lambda *arrays: f(*arrays))
    module: Any = anew.trace(*types).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    return [(name, at) for name, at, *_ in calls_of(module)]


def tuned(config, product):
    return Tunings({(KIND, product.problem): entry(config)})


def fields(config, bits=4, weights=1):
    """Returns the attributes of the custom call of a named configuration."""
    row = packed_configs.find(config, bits, weights)
    assert row is not None
    return dataclasses.asdict(row)


# Names


def test_names_lead_to_their_rows():
    assert len(packed_configs.BY_NAME) > 15
    assert packed_configs.find("dequantized", 4) is None
    for name, (bits, row) in packed_configs.BY_NAME.items():
        assert packed_configs.config_of(bits, row) == name
        for splits in (1, 2, 8):
            divided = dataclasses.replace(row, split_k=splits)
            config = packed_configs.config_of(bits, divided)
            assert packed_configs.find(config, bits) == divided
            assert packed_configs.find(config, 12 - bits) is None
        assert packed_configs.find(f"{name}/splits=3", bits) is None
        assert packed_configs.find(name, bits, 2) == (row if row.row_blocks > 1 else None)
        stored = Entry.from_json(json.loads(json.dumps(entry(name).to_json())))
        assert stored == entry(name)
        assert stored.is_current
        assert not dataclasses.replace(stored, rows=((name, "0" * 12),)).is_current


def test_rows_have_room_for_the_groups_that_they_take():
    seen = 0
    for bits, row in packed_configs.BY_NAME.values():
        for qtype, scale, zeros in ((q, s, z) for q in BITS for s in FLOATS for z in (False, True)):
            for group in (32, 64, 128, 256, 384):
                if BITS[qtype] == bits and row.takes(group, 768) and not (zeros and bits == 8):
                    at = dataclasses.asdict(row) | {"format": qtype, "scale": scale}
                    at |= {"group": group, "has_zeros": zeros}
                    assert shared_bytes(at) <= MOST_SHARED_BYTES, at
                    seen += 1
        assert 32 * (4 * row.row_blocks + 2) * row.blocks_on_sm <= 2048
    assert seen > 200


@pytest.mark.parametrize(
    ("config", "f", "message"),
    [
        ("sm90_w8_16x64x256_s3_b2", plain, "for packed weights of 4 bits; accepted: None"),
        ("sm90_w4_16x64x256_s5_b2", pair, "of 4 bits, two in a kernel; accepted: None"),
        ("sm90_w4_16x64x256_s5_b2/splits=3", plain, "no kernel configuration"),
        ("sm90_bf16_128x128x64_s6_c2x1_pingpong", plain, "'dequantized', or one of"),
        ("sm90_w4_16x64x256_s5_b2/splits=8", plain, "takes no packed weight with k=1024"),
        (5, plain, "config"),
    ],
)
def test_names_that_are_refused(config, f, message):
    named = {plain: gemm, pair: lambda x, w, **o: gated_gemm(x, w, w, **o)}[f]
    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(functools.partial(named, config=config), rows(k=1024), weight(k=1024))


@pytest.mark.parametrize("form", FORMS)
def test_a_named_row_is_called(form):
    f, types, target = FORMS[form]
    named = {plain: gemm, with_function: functools.partial(gemm, activation="silu")}
    named |= {pair: lambda x, w, **o: gated_gemm(x, w, w, **o)}
    named |= {experts: lambda x, w, **o: ragged_dot(x, w, SIZES, **o)}
    bits = BITS[types[1].qtype]
    name = next(x for x in packed_configs.BY_NAME if packed_configs.find(x, bits, 2))
    for config in (name, f"{name}/splits=4"):
        ((found, at),) = calls(functools.partial(named[f], config=config), *types)
        assert found == target
        assert fields(config, bits).items() <= at.items()
    assert calls(functools.partial(named[f], config="dequantized"), *types)[0][0] == UNPACK
    assert tune_module.find_products(functools.partial(named[f], config=name), *types) == []


# Candidates


def drawn_shape(rng):
    m = rng.choice([1, 8, 9, 16, 17, 33, 64, 65, 128, 200, 512, 513, 900, 1024, 1025])
    n = rng.choice([1, 64, 1024, 4096, 14336, 60000])
    return m, n, 64 * rng.choice([1, 4, 6, 64, 224])


def test_candidates():
    rng, most = random.Random(), 0
    for _ in range(2000):
        m, n, k = drawn_shape(rng)
        bits, group = rng.choice([4, 8]), rng.choice([32, 64, 128, k])
        kind = rng.choice([{}, {"count": 3}, {"weights": 2}, {"experts": 8}])
        names = packed_configs.candidates(bits, (m, n, k), group, **kind)
        assert 1 <= len(names) == len(set(names)) <= packed_configs.MOST
        most = max(most, len(names))
        for name in names:
            row = packed_configs.find(name, bits, kind.get("weights", 1))
            assert name == packed_configs.DEQUANTIZED or (row and row.takes(group, k)), name
        if "experts" in kind:
            untuned = kernels.choose_ragged(bits, (m, n, k), group, 8)
        elif "weights" in kind:
            untuned = kernels.choose_pair(bits, m, n, k, group)
        else:
            untuned = kernels.choose(bits, m, n, k, group, kind.get("count", 1))
        assert names[0] == packed_configs.config_of(bits, untuned)
    assert most == packed_configs.MOST
    assert len(packed_configs.candidates(4, (1025, 4096, 4096), 128)) == 1


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("form", ["plain", "int8"])
def test_the_extension_accepts_each_candidate(form):
    f, types, _ = FORMS[form]
    handler = Handler(PACKED)
    for name in packed_problem.candidates(only(f, *types).problem):
        ((_, at),) = calls(functools.partial(gemm, config=name), *types)
        code, message = handler(at, *buffers(at))
        assert code != INVALID_ARGUMENT, (name, message)


# Keys and lookups


def test_a_problem_is_known_by_what_its_time_depends_on():
    base = only(plain, rows(), weight()).problem
    assert only(plain, rows(2, 8), weight()).problem == base
    assert only(lambda x, w: gemm(x, w, config="kernel"), rows(), weight()).problem == base
    others = [
        only(plain, rows(17), weight()),
        only(plain, rows(), weight(n=193)),
        only(plain, rows(k=2048), weight(k=2048)),
        only(plain, rows(), weight(group=64)),
        only(plain, rows(), weight(group=-1)),
        only(plain, rows(), weight(dtype="uint4")),
        only(plain, rows(), weight(dtype="int8")),
        only(plain, rows(), weight(dtype="float8_e4m3fn")),
        only(plain, rows(), weight(scale_dtype="float32")),
        only(plain, rows(dtype="float16"), weight()),
        only(plain, rows(3, 16), weight(batch=(3,))),
        only(lambda x, w: gemm(x, w, preferred_element_type="float32"), rows(), weight()),
        only(with_function, rows(), weight()),
        only(lambda x, w: gemm(x, w, activation="gelu"), rows(), weight()),
        only(lambda x, w: gemm(x, w, activation="silu", config="kernel"), rows(32), weight()),
        only(pair, rows(), weight()),
        only(experts, rows(), weight(batch=(4,))),
        only(lambda x, w: ragged_dot(x, w, SIZES[:2]), rows(), weight(batch=(2,))),
    ]
    assert len({base, *(each.problem for each in others)}) == 1 + len(others)
    assert tunings.described(base) == "packed int4 16x192x4096 scales of 128"
    described = tunings.described(others[-1].problem)
    assert described == "packed_ragged int4 16x192x4096 scales of 128 2 groups"


@pytest.mark.parametrize("form", FORMS)
def test_a_measured_choice_is_taken(form, monkeypatch, capfd):
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    f, types, target = FORMS[form]
    product = only(f, *types)
    bits, weights = BITS[types[1].qtype], json.loads(product.problem)["weights"]
    names = packed_problem.candidates(product.problem)
    assert len(names) > 2
    for name in names:
        with tuned(name, product):
            ((found, at),) = calls(f, *types)
        assert found == target
        assert fields(name, bits, weights).items() <= at.items()
        assert f": config {name}, by active tunings\n" in capfd.readouterr().err
    with tuned("dequantized", product):
        assert calls(f, *types)[0][0] == UNPACK
    assert ", by active tunings" in capfd.readouterr().err
    with tuned("xla", product):
        assert calls(f, *types) == []
    assert ", by active tunings" in capfd.readouterr().err
    # The table decides.
    for config in (
        None,
        "sm90_bf16_128x128x64_s6_c2x1_pingpong",
        "sm90_w4_8x64x256_s5_b4/splits=3",
    ):
        with tuned(config, product):
            ((_, at),) = calls(f, *types)
        assert fields(names[0], bits, weights).items() <= at.items()


def test_rows_are_measured_where_the_table_dequantizes():
    types = rows(600), weight()
    (product,) = (
        each for each in tune_module.find_products(plain, *types) if each.primitive == "packed"
    )
    names = packed_problem.candidates(product.problem)
    assert names[0] == "dequantized"
    with tuned(names[1], product):
        ((found, at),) = calls(plain, *types)
    assert found == PACKED
    assert fields(names[1]).items() <= at.items()
    with tuned(None, product):
        assert calls(plain, *types)[0][0] == UNPACK


def test_strict_calls_ignore_a_measured_fallback():
    strict = functools.partial(gemm, config="kernel")
    with tuned("xla", only(strict, rows(), weight())):
        assert [name for name, _ in calls(strict, rows(), weight())] == [PACKED]


def test_first_use_is_measured_and_read_again(monkeypatch):
    types = rows(), weight()
    names = packed_problem.candidates(only(plain, *types).problem)
    asked = []

    def measure(product, patience):
        asked.append(product.problem)
        return Measured(entry(names[1]), is_certain=True)

    monkeypatch.setattr(lookup, "measure", measure)
    monkeypatch.setenv(lookup.SETTING, "tune")
    for _ in range(2):
        ((_, at),) = calls(plain, *types)
        assert fields(names[1]).items() <= at.items()
        monkeypatch.setattr(lookup, "_MEASURED", {})  # as in a new process
    assert len(asked) == 1
    assert cache.read(KIND, asked[0]) == entry(names[1])
    monkeypatch.setenv(lookup.SETTING, "off")
    ((_, at),) = calls(plain, *types)
    assert fields(names[0]).items() <= at.items()
