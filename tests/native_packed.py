"""Random calls of the handlers for packed weights, and checks that they stay within buffers."""

from __future__ import annotations

import dataclasses
import math
import random

from native_calls import Buffer
from native_draws import BYTES, Call, count
from native_programs import Program, draw_pass, pass_is_within

from jax_tcgemm.kernels import packed as kernels
from jax_tcgemm.problem.packed import BITS

_FLOATS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# Extents up to 2^30 are accepted.
_MOST = 2**30
# Bytes of a tile of the layout, by the bits of a value.
_TILE_BYTES = {4: 2048, 8: 4096}
# The most shared memory of a block on a Hopper GPU.
MOST_SHARED_BYTES = 227 * 1024


def draw_packed(rng: random.Random) -> Call:
    qtype = rng.choice(list(BITS))
    has_zeros = BITS[qtype] == 4 and rng.random() < 0.5
    m, n = rng.choice([1, 7, 16, 33, 64, 65, 200]), rng.choice([1, 20, 64, 100, 130])
    group = rng.choice([32, 64, 128, 256, 512])
    k = math.lcm(group, 64) * rng.randint(1, 3)
    if rng.random() < 0.2:
        k = group = rng.choice([64, 128, 256, 320, 1088])
    batch = rng.randint(1, 3)
    row = kernels.choose(BITS[qtype], m, n, k, group)
    assert row is not None
    activation, scale = rng.choice(list(_FLOATS)[:2]), rng.choice(list(_FLOATS))
    output = rng.choice(list(_FLOATS))
    attributes = {"batch": batch, "m": m, "n": n, "k": k, "group": group}
    attributes |= dataclasses.asdict(row)
    attributes |= {"has_zeros": has_zeros, "weights_move": rng.random() < 0.5, "format": qtype}
    attributes |= {"activation": activation, "scale": scale, "output": output, "digest": "0" * 64}
    while shared_bytes(attributes) > MOST_SHARED_BYTES:
        attributes["stages"] -= 1
    operands, results = buffers(attributes)
    return Call(attributes, operands, results)


def draw_packed_ragged(rng: random.Random) -> Call:
    call = draw_packed(rng)
    at = call.attributes | {"weights_move": True}
    operands, results = _ragged_buffers(at)
    return Call(at, operands, results)


def _ragged_buffers(at: dict) -> tuple[list[Buffer], list[Buffer]]:
    """Returns the operands and results of a call for groups of rows, whose batch is of weights."""
    (_, *weights), _ = buffers(at | {"weights_move": True})
    rows: list[Buffer] = [
        (_FLOATS[at["activation"]], [at["m"], at["k"]]),
        (_FLOATS[at["output"]], [at["m"], at["n"]]),
    ]
    return [rows[0], *weights, ("s32", [at["batch"]])], [rows[1]]


def buffers(at: dict) -> tuple[list[Buffer], list[Buffer]]:
    """Returns the operands and results of a call with these attributes."""
    n_tiles, k_tiles = -(-at["n"] // 64), at["k"] // 64
    weights = [at["batch"]] if at["weights_move"] else []
    strips = [n_tiles, at["k"] // at["group"], 1 + at["has_zeros"], 64]
    values = [n_tiles, k_tiles, 128, _TILE_BYTES[BITS[at["format"]]] // 128]
    operands: list[Buffer] = [
        (_FLOATS[at["activation"]], [at["batch"], at["m"], at["k"]]),
        ("u8", [*weights, *values]),
        (_FLOATS[at["scale"]], [*weights, *strips]),
    ]
    return operands, [(_FLOATS[at["output"]], [at["batch"], at["m"], at["n"]])]


def packed_is_within(call: Call) -> bool:
    """Checks extents, bytes, alignment and the configuration of an accepted call."""
    at = call.attributes
    if not _are_extents(at, "m"):
        return False
    operands, results = buffers(at)
    alignments = [16, 16, 16, BYTES[results[0][0]]]
    return _are(call, [*operands, *results], alignments) and _fits(at)


def packed_ragged_is_within(call: Call) -> bool:
    """Checks an accepted call for groups of rows."""
    at = call.attributes
    if not _are_extents(at, "m") or not at["weights_move"]:
        return False
    operands, results = _ragged_buffers(at)
    if call.operands[3][0] != "s32":
        return False
    alignments = [16, 16, 16, 4, BYTES[results[0][0]]]
    return _are(call, [*operands, *results], alignments) and _fits(at)


def _are_extents(at: dict, *names: str) -> bool:
    if not all(0 < at[name] <= _MOST for name in ("batch", "n", "k", "group", *names)):
        return False
    return at["k"] % 64 == 0 and at["k"] % at["group"] == 0


def _are(call: Call, wanted: list[Buffer], alignments: list[int]) -> bool:
    """Checks the number, the bytes and the addresses of all buffers."""
    given = [*call.operands, *call.results]
    offsets = [*call.offsets, *[0] * len(given)]
    return (
        len(given) == len(wanted)
        and all(
            count(own) * BYTES[own[0]] == count(each) * BYTES[each[0]]
            for own, each in zip(given, wanted, strict=True)
        )
        and not any(offset % unit for offset, unit in zip(offsets, alignments, strict=False))
    )


def _fits(at: dict) -> bool:
    """Checks that the parts of k, and the shared memory, are within their bounds."""
    stage_k = 64 * at["k_blocks"]
    return (
        0 < at["split_k"] <= min(8, -(-at["k"] // stage_k))
        and (at["group"] in (32, 64, 128, at["k"]) or at["group"] % stage_k == 0)
        and shared_bytes(at) <= MOST_SHARED_BYTES
    )


def shared_bytes(at: dict) -> int:
    """Returns the shared memory of a block; the formula of ``cuda/packed_config.h``.

    Args:
        at: the attributes of a call; without k, a group is shorter than k.
    """
    stage_k = 64 * at["k_blocks"]
    is_short = at["group"] < stage_k and at["group"] != at.get("k")
    groups = stage_k // at["group"] if is_short else 1
    scales = groups * 64 * BYTES[_FLOATS[at["scale"]]] * (1 + at["has_zeros"])
    weights = at["k_blocks"] * _TILE_BYTES[BITS[at["format"]]]
    x = at["k_blocks"] * at["tokens"] * 128
    stage = -(-(x + at["row_blocks"] * (weights + scales)) // 1024) * 1024
    sums = at["tokens"] * (64 * at["row_blocks"] + 4) * 4
    return 1024 + max(at["stages"] * stage, sums) + 16 * at["stages"]


# Functions of the products


@dataclasses.dataclass
class FunctionProgram(Program):
    """The facts that a source states, and the configuration of the kernel in its first line."""

    config: str = ""

    def source(self) -> str:
        batched = "  static constexpr bool kBatched = false;"
        return f"{self.config}\n{batched}\n{super().source()}"


def draw_packed_function(rng: random.Random) -> Call:
    call = draw_pass(rng, (1, 1), rank=0, rows=True)
    drawn = draw_packed(rng).attributes
    at = {name: drawn[name] for name in ("k", "group", "has_zeros", "format", "activation")}
    at |= {"scale": drawn["scale"], "weights": rng.randint(1, 2)}
    m, n = call.attributes["m"], call.attributes["n"]
    choose = kernels.choose_pair if at["weights"] == 2 else kernels.choose
    row = choose(BITS[at["format"]], m, n, at["k"], at["group"])
    assert row is not None
    while shared_bytes(at | dataclasses.asdict(row)) > MOST_SHARED_BYTES:
        row = dataclasses.replace(row, stages=row.stages - 1)
    names = (at["format"], at["activation"], at["scale"], "float32")
    group = None if at["group"] == at["k"] else at["group"]
    options = {"zeros": at["has_zeros"], "group": group, "weights": at["weights"]}
    program = FunctionProgram(**vars(call.program), config=kernels.program(row, *names, **options))
    at |= {"m": m, "n": n, "source": program.source(), "digest": "0" * 64}
    for name in ("operand_strides", "operand_vectors", "result_elements"):
        at[name] = call.attributes[name]
    at |= dataclasses.asdict(row)
    return Call(at, [*_factors(at), *call.operands], call.results, program=program)


def _factors(at: dict) -> list[Buffer]:
    """Returns x, and values and scales of each weight."""
    (x, *weight), _ = buffers(at | {"batch": 1, "weights_move": False, "output": "float32"})
    return [x, *weight * at["weights"]]


def packed_function_is_within(call: Call) -> bool:
    at = call.attributes
    if at["weights"] not in (1, 2) or not _are_extents(at | {"batch": 1}, "m"):
        return False
    own = _factors(at)
    count_own = len(own)
    factors = Call(at, call.operands[:count_own], [], call.offsets[:count_own])
    rest = dataclasses.replace(call, attributes=at | {"batch_shape": []})
    return (
        len(call.operands) == count_own + len(at["operand_vectors"])
        and _are(factors, own, [16] * count_own)
        and _fits(at)
        and at["row_blocks"] % at["weights"] == 0
        and not call.program.reductions
        and pass_is_within(rest, count_own)
    )


# The pass that dequantizes


def draw_unpack(rng: random.Random) -> Call:
    qtype = rng.choice(list(BITS))
    group = rng.choice([16, 32, 96, 64, 128])
    at = {"batch": rng.randint(1, 3), "n": rng.choice([1, 20, 64, 130]), "group": group}
    at |= {"k": math.lcm(group, 64) * rng.randint(1, 3), "format": qtype, "digest": "0" * 64}
    at |= {"has_zeros": BITS[qtype] == 4 and rng.random() < 0.5}
    at |= {"scale": rng.choice(list(_FLOATS)), "output": rng.choice(list(_FLOATS)[:2])}
    operands, results = _unpack_buffers(at)
    return Call(at, operands, results)


def _unpack_buffers(at: dict) -> tuple[list[Buffer], list[Buffer]]:
    both = at | {"weights_move": True, "m": 1, "activation": at["output"]}
    (_, *operands), _ = buffers(both)
    return operands, [(_FLOATS[at["output"]], [at["batch"], at["n"], at["k"]])]


def unpack_is_within(call: Call) -> bool:
    """Checks extents, bytes and alignment of an accepted call."""
    at = call.attributes
    if not _are_extents(at) or at["group"] % 16:
        return False
    operands, results = _unpack_buffers(at)
    return _are(call, [*operands, *results], [16, 16, 16])


# The pass that packs


def draw_pack(rng: random.Random) -> Call:
    transposed = rng.random() < 0.5
    n = rng.choice([1, 20, 64, 130]) if transposed else 32 * rng.randint(1, 9)
    at = {"batch": rng.randint(1, 3), "n": n, "k": 64 * rng.randint(1, 5)}
    at["transposed"] = transposed
    operands, results = _pack_buffers(at)
    return Call(at, [(rng.choice(["s4", "u4"]), shape) for _, shape in operands], results)


def _pack_buffers(at: dict) -> tuple[list[Buffer], list[Buffer]]:
    shape = [at["n"], at["k"]] if at["transposed"] else [at["k"], at["n"]]
    tiles = [-(-at["n"] // 64), at["k"] // 64]
    return [("s4", [at["batch"], *shape])], [("u8", [at["batch"], *tiles, 128, 16])]


def pack_is_within(call: Call) -> bool:
    """Checks extents, types, bytes and alignment of an accepted call."""
    at = call.attributes
    is_sized = all(0 < at[name] <= _MOST for name in ("batch", "n", "k")) and at["k"] % 64 == 0
    if not is_sized or (at["n"] % 32 and not at["transposed"]):
        return False
    operands, results = _pack_buffers(at)
    return call.operands[0][0] in ("s4", "u4") and _are(call, [*operands, *results], [16, 16])
