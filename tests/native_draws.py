"""Random calls of the extension's targets, and checks that they stay within their buffers."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from native_calls import Buffer

from jax_tcgemm import _extension

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s32": 4, "s64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}
BYTES |= {"s4": 1, "u4": 1}  # as XLA's header counts them
NASTY = [-1, 0, 1, 2, 2**20, 2**24, 2**30, 2**30 + 1, 2**31, 2**32, 2**56, 2**60, 2**62, 2**63 - 1]


@dataclasses.dataclass
class Call:
    """A custom call.

    Attributes:
        attributes: the attributes by name.
        operands: the operands' types and extents.
        results: the results' types and extents.
        offsets: the distance of each buffer's address from a multiple of 256, operands first;
            missing offsets are 0.
        program: the program behind the source attribute; see ``native_programs``.
    """

    attributes: dict[str, Any]
    operands: list[Buffer]
    results: list[Buffer]
    offsets: list[int] = dataclasses.field(default_factory=list)
    program: Any = None


def span(extents: Sequence[int], strides: Sequence[int]) -> int:
    """Counts the elements up to and including the last one that is addressed."""
    if 0 in extents:
        return 0
    return 1 + sum((e - 1) * s for e, s in zip(extents, strides, strict=True))


def contiguous(extents: Sequence[int]) -> list[int]:
    return [math.prod(extents[i + 1 :]) for i in range(len(extents))]


def count(buffer: Buffer) -> int:
    return math.prod(buffer[1])


def size_of(buffer: Buffer) -> int:
    """Returns the size of a buffer in bytes."""
    return count(buffer) * BYTES[buffer[0]]


def is_within(buffer: Buffer, extents: Sequence[int], strides: Sequence[int]) -> bool:
    return (
        len(strides) == len(extents)
        and min(strides, default=0) >= 0
        and span(extents, strides) <= count(buffer)
    )


# --- Valid calls, and the conditions of an accepted one --------------------------------------


def draw_gemm(rng: random.Random) -> Call:
    m, n, k = (rng.choice([0, 1, 8, 16, 33, 64]) for _ in range(3))
    batch = [rng.choice([1, 2, 3]) for _ in range(rng.randint(0, 3))]
    dtype, out = rng.choice([("bf16", "bf16"), ("bf16", "f32"), ("f16", "f16")])
    is_gated = rng.random() < 0.3
    flags = {
        name: rng.random() < 0.3
        for name in ("has_c", "has_alpha", "has_row_scale", "has_column_scale")
        if not is_gated
    }
    flags |= {name: rng.random() < 0.3 for name in ("has_bias", "has_beta", "has_aux")}
    flags |= {"has_b2": is_gated and rng.random() < 0.5, "gated": is_gated}
    flags |= {"has_bias2": is_gated and flags["has_bias"], "has_workspace": rng.random() < 0.3}
    flags |= {"has_c2": flags["has_aux"] and flags.get("has_c", False)}
    attributes: dict[str, Any] = dict.fromkeys(
        ("has_c", "has_alpha", "has_row_scale", "has_column_scale"), False
    ) | {"beside_collectives": False, "pairs_of_b": False, "padding_bytes": 0, "b2_offset": 0}
    attributes |= flags | {"m": m, "n": n, "k": k, "batch_shape": batch, "alpha": 1.0, "beta": 1.0}
    attributes |= {"activation": "Silu" if is_gated else "", "config": ""}
    attributes |= {"c_role": "gated_derivative" if flags["has_c2"] else "add"}
    attributes |= {"activation_p0": 0.0, "activation_p1": 0.0}
    attributes["algorithm"] = "BF16_BF16_F32" if dtype == "bf16" else "F16_F16_F32"
    operands = []
    for name, flag, extents in gemm_operands(attributes):
        strides = contiguous(extents)
        elements = math.prod(extents)
        if name == "b" and is_gated and not flags["has_b2"]:
            attributes["b2_offset"] = elements
            elements *= 2
        if f"{name}_strides" not in attributes:
            attributes[f"{name}_strides"] = strides
        if flag:
            operand_type = dtype if name in ("a", "b", "b2") else out
            if name in ("alpha", "beta", "row_scale", "column_scale"):
                operand_type = "f32"
            operands.append((operand_type, [elements]))
    results = [(out, [math.prod(batch), m, n])] * (1 + flags["has_aux"] * (1 + is_gated))
    if flags["has_workspace"]:
        results.append(("u8", [4096]))
        attributes["padding_bytes"] = rng.choice([0, 4096])
    attributes.pop("b2_strides")
    attributes.pop("c2_strides")
    return Call(attributes, operands, results)


def gemm_operands(at: dict[str, Any]) -> list[tuple[str, bool, list[int]]]:
    """Returns name, presence and extents of each operand, in order."""
    batch, m, n, k = list(at["batch_shape"]), at["m"], at["n"], at["k"]
    return [
        ("a", True, [*batch, m, k]),
        ("b", True, [*batch, k, n]),
        ("c", at["has_c"], [*batch, m, n]),
        ("bias", at["has_bias"], [*batch, n]),
        ("alpha", at["has_alpha"], batch),
        ("beta", at["has_beta"], batch),
        ("row_scale", at["has_row_scale"], [*batch, m]),
        ("column_scale", at["has_column_scale"], [*batch, n]),
        ("b2", at["has_b2"], [*batch, k, n]),
        ("bias2", at["has_bias2"], [*batch, n]),
        ("c2", at["has_c2"], [*batch, m, n]),
    ]


def gemm_is_within(call: Call) -> bool:
    at = call.attributes
    present = [each for each in gemm_operands(at) if each[1]]
    strides_of = {"b2": "b", "c2": "c"}
    strides = [at[f"{strides_of.get(name, name)}_strides"] for name, *_ in present]
    pairs = zip(call.operands, present, strides, strict=False)
    elements = math.prod(at["batch_shape"]) * at["m"] * at["n"]
    if elements == 0:
        return True  # the handler launches nothing
    matrices = 1 if not at["has_aux"] else 3 if at["gated"] else 2
    second = at["b2_offset"] + span(present[1][2], strides[1])
    dtype = "bf16" if at["algorithm"] == "BF16_BF16_F32" else "f16"
    return (
        len(call.operands) >= len(present)
        and all(is_within(each, extents, of) for each, (_, _, extents), of in pairs)
        and all(call.operands[i][0] == dtype for i, each in enumerate(present) if each[0] in "ab")
        and all(count(each) == elements for each in call.results[:matrices])
        and len(call.results) >= matrices + at["has_workspace"]
        and (not at["has_workspace"] or 0 <= at["padding_bytes"] <= size_of(call.results[-1]))
        and (not at["gated"] or at["has_b2"] or 0 <= second <= count(call.operands[1]))
    )


def draw_ragged(rng: random.Random) -> Call:
    m, n, k, groups = (rng.choice([1, 8, 16, 33]) for _ in range(4))
    depth = rng.random() < 0.3
    has_bias, has_aux = (not depth and rng.random() < 0.5 for _ in range(2))
    attributes = {"m": m, "n": n, "k": k, "groups": groups, "depth": depth, "has_bias": has_bias}
    attributes |= {"transpose_rhs": rng.random() < 0.5, "has_aux": has_aux, "activation_p0": 0.0}
    attributes |= {"activation_p1": 0.0, "activation": "", "algorithm": "BF16_BF16_F32"}
    operands: list[Buffer] = [
        ("bf16", [m, k]),
        ("bf16", [k, n] if depth else [groups, k, n]),
        ("s32", [groups]),
    ]
    operands += [("bf16", [groups, n])] if has_bias else []
    result = [groups, m, n] if depth else [m, n]
    return Call(attributes | {"config": ""}, operands, [("bf16", result)] * (1 + has_aux))


def ragged_is_within(call: Call) -> bool:
    at = call.attributes
    m, n, k, groups = (at[name] for name in ("m", "n", "k", "groups"))
    wanted = [m * k, k * n * (1 if at["depth"] else groups), groups]
    wanted += [groups * n] if at["has_bias"] else []
    elements = m * n * (groups if at["depth"] else 1)
    return (
        [count(each) for each in call.operands[: len(wanted)]] == wanted
        and min(m, n, k, groups) > 0
        and len(call.results) > at["has_aux"]
        and all(count(each) == elements for each in call.results[: 1 + at["has_aux"]])
        and [each[0] for each in call.operands[:3]] == ["bf16", "bf16", "s32"]
    )


def draw_transpose(rng: random.Random) -> Call:
    batch, rows, columns = (rng.choice([1, 2, 16, 33]) for _ in range(3))
    out_ld = -(-rows // 16) * 16
    in_ld = columns + rng.choice([0, 7])
    attributes = {"batch": batch, "rows": rows, "columns": columns, "in_ld": in_ld}
    attributes |= {"in_batch_stride": rows * in_ld, "out_ld": out_ld}
    dtype = rng.choice(["s8", "u8"])
    return Call(attributes, [(dtype, [batch, rows, in_ld])], [(dtype, [batch, columns, out_ld])])


def transpose_is_within(call: Call) -> bool:
    at = call.attributes
    extents = [at["batch"], at["rows"], at["columns"]]
    written = at["batch"] * at["columns"] * at["out_ld"]
    return (
        is_within(call.operands[0], extents, [at["in_batch_stride"], at["in_ld"], 1])
        and count(call.results[0]) == written
        and at["out_ld"] >= at["rows"]
        and BYTES[call.operands[0][0]] == BYTES[call.results[0][0]] == 1
    )


TARGETS: dict[str, tuple[str, Callable[[random.Random], Call], Callable[[Call], bool]]] = {
    "gemm": (_extension.GEMM_TARGET, draw_gemm, gemm_is_within),
    "ragged_dot": (_extension.RAGGED_DOT_TARGET, draw_ragged, ragged_is_within),
    "transpose": (_extension.TRANSPOSE_TARGET, draw_transpose, transpose_is_within),
}


def damaged(call: Call, rng: random.Random) -> Call:
    """Returns the call with some numbers, extents, types, addresses or buffers changed."""
    call = copy.deepcopy(call)
    at = call.attributes
    lists = [name for name in at if isinstance(at[name], list)]
    for _ in range(rng.randint(1, 3)):
        buffers = rng.choice([call.operands, call.results])
        i = rng.randrange(max(1, len(buffers)))
        match rng.randint(0, 7):
            case 0:
                at[rng.choice([x for x in at if type(at[x]) is int])] = rng.choice(NASTY)
            case 1 | 2 if any(at[name] for name in lists):
                values = at[rng.choice([name for name in lists if at[name]])]
                values[rng.randrange(len(values))] = rng.choice(NASTY)
            case 3 if lists:
                name = rng.choice(lists)
                at[name] = [*at[name], 1] if rng.random() < 0.5 else at[name][1:]
            case 4 if buffers:
                elements = math.prod(buffers[i][1])
                size = rng.choice([0, 1, elements - 1, 2 * elements])
                buffers[i] = (buffers[i][0], [max(size, 0)])
            case 5 if buffers:
                buffers[i] = (rng.choice(list(BYTES)), buffers[i][1])
            case 6 if buffers:
                del buffers[i]
            case 7:
                call.offsets = [rng.choice([0, 0, 8]) for _ in (*call.operands, *call.results)]
    if call.program is not None and rng.random() < 0.3:
        call.program.damage(rng)
        at["source"] = call.program.source()
    return call
