"""Random calls of the extension's targets, and what holds of those within their buffers."""

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
NASTY = [-1, 0, 1, 2, 2**20, 2**24, 2**30, 2**30 + 1, 2**31, 2**32, 2**56, 2**60, 2**62, 2**63 - 1]


@dataclasses.dataclass
class Call:
    """A custom call.

    Attributes:
        attributes: by name.
        operands: types and extents.
        results: likewise.
    """

    attributes: dict[str, Any]
    operands: list[Buffer]
    results: list[Buffer]


def span(extents: Sequence[int], strides: Sequence[int]) -> int:
    """Counts the elements to the end of the last one that is addressed."""
    if 0 in extents:
        return 0
    return 1 + sum((e - 1) * s for e, s in zip(extents, strides, strict=True))


def contiguous(extents: Sequence[int]) -> list[int]:
    return [math.prod(extents[i + 1 :]) for i in range(len(extents))]


def count(buffer: Buffer) -> int:
    return math.prod(buffer[1])


def is_within(buffer: Buffer, extents: Sequence[int], strides: Sequence[int]) -> bool:
    return (
        len(strides) == len(extents)
        and min(strides, default=0) >= 0
        and span(extents, strides) <= count(buffer)
    )


# --- Valid calls, and what is to hold of an accepted one -------------------------------------


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
    flags |= {"has_bias2": is_gated and flags["has_bias"]}
    attributes: dict[str, Any] = dict.fromkeys(
        ("has_c", "has_alpha", "has_row_scale", "has_column_scale", "has_c2", "has_workspace"),
        False,
    ) | {"beside_collectives": False, "pairs_of_b": False, "padding_bytes": 0, "b2_offset": 0}
    attributes |= flags | {"m": m, "n": n, "k": k, "batch_shape": batch, "alpha": 1.0, "beta": 1.0}
    attributes |= {"activation": "Silu" if is_gated else "", "c_role": "add", "config": ""}
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
    matrices = 1 if not at["has_aux"] else 3 if at["gated"] else 2
    second = at["b2_offset"] + span(present[1][2], strides[1])
    dtype = "bf16" if at["algorithm"] == "BF16_BF16_F32" else "f16"
    return (
        len(call.operands) >= len(present)
        and all(is_within(each, extents, of) for each, (_, _, extents), of in pairs)
        and all(call.operands[i][0] == dtype for i, each in enumerate(present) if each[0] in "ab")
        and all(count(each) == elements for each in call.results[:matrices])
        and len(call.results) >= matrices
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


KINDS = [
    ("kMatrix", [1, 1, 1]),
    ("kColumns", [0, 0, 1]),
    ("kRows", [0, 1, 0]),
    ("kNothing", [0] * 3),
]
ELEMENTS = ["bf16", "f32", "s32", "s8"]


def draw_pass(rng: random.Random) -> Call:
    """Draws a program over operands of several kinds, with up to two dimensions of the batch."""
    m, n = (rng.choice([1, 8, 16, 33, 64]) for _ in range(2))
    batch = [rng.choice([1, 2, 3]) for _ in range(rng.randint(0, 2))]
    extents = [*batch, m, n]
    operands: list[Buffer] = []
    strides: list[int] = []
    vectors: list[int] = []
    operand_kinds = []
    for _ in range(rng.randint(0, 3)):
        along, moves = rng.choice(KINDS)
        dtype = rng.choice(ELEMENTS)
        steps = [each * (moves[0] if i < len(batch) else moves[i - len(batch) + 1])
                 for i, each in enumerate(contiguous(extents))]  # fmt: skip
        is_vector = steps[-1] == 1 and all(x * BYTES[dtype] % 16 == 0 for x in (*steps[:-1], n))
        operand_kinds.append(f"{{Along::{along}, {BYTES[dtype]}, {str(is_vector).lower()}}}")
        operands.append((dtype, [span(extents, steps)]))
        strides += steps
        vectors.append(int(is_vector))
    results: list[Buffer] = [(rng.choice(ELEMENTS), extents) for _ in range(rng.randint(1, 2))]
    result_kinds = [
        f"{{{BYTES[dtype]}, {str(n * BYTES[dtype] % 16 == 0).lower()}}}" for dtype, _ in results
    ]
    reductions = rng.randint(0, 1)
    source = (
        f"  static constexpr int kOperands = {len(operands)};\n  static constexpr "
        f"CompiledOperandKind kOperand[] = {{{', '.join(operand_kinds)}}};\n"
        f"  static constexpr int kResults = {len(results)};\n  static constexpr "
        f"CompiledResultKind kResult[] = {{{', '.join(result_kinds)}}};\n"
        f"  static constexpr int kReductions = {reductions};\n"
    )
    results += [("f32", [n])] * reductions
    attributes = {"m": m, "n": n, "batch_shape": batch, "operand_strides": strides}
    attributes |= {"operand_vectors": vectors, "source": source, "digest": ""}
    attributes["result_elements"] = [count(each) for each in results]
    return Call(attributes, operands, results)


def pass_is_within(call: Call, before: int = 0, groups: bool = False) -> bool:
    at = call.attributes
    extents = [*at["batch_shape"], at["m"], at["n"]]
    if 0 in extents:
        return True  # nothing is launched
    source = at["source"]
    operands, matrices = (int(source.split(f"{name} = ")[1].split(";")[0]) for name in
                          ("kOperands", "kResults"))  # fmt: skip
    elements = math.prod(extents[len(extents) - 2 :] if groups else extents)
    steps, rank = at["operand_strides"], len(extents)
    own = [steps[i * rank : (i + 1) * rank] for i in range(operands)]
    kinds = source.split("kOperand[] = {")[1].split(";")[0]
    sizes = [int(kind.split(", ")[1]) for kind in kinds.split("{")[1:]]
    result_kinds = source.split("kResult[] = {")[1].split(";")[0]
    result_sizes = [int(kind.split(",")[0]) for kind in result_kinds.split("{")[1:]]
    if len(call.operands) < before + operands or len(call.results) < matrices:
        return False
    pairs = zip(call.operands[before : before + operands], own, strict=True)
    return (
        all(is_within(each, extents, steps) for each, steps in pairs)
        and [BYTES[x[0]] for x in call.operands[before : before + operands]] == sizes
        and all(count(each) == elements for each in call.results[:matrices])
        and [BYTES[x[0]] for x in call.results[:matrices]] == result_sizes
    )


def draw_compiled(rng: random.Random) -> Call:
    """Draws a product in front of such a program, plain or over groups of rows."""
    inner = draw_pass(rng)
    at = inner.attributes
    has_groups = len(at["batch_shape"]) == 1 and rng.random() < 0.5
    k = rng.choice([8, 16, 64])
    m, n, batch = at["m"], at["n"], at["batch_shape"]
    if has_groups:
        inner.results = [(dtype, [m, n]) if shape == [*batch, m, n] else (dtype, shape)
                         for dtype, shape in inner.results]  # fmt: skip
        at["result_elements"] = [count(each) for each in inner.results]
    a, b = [*batch, m, k], [*batch, k, n]
    a_strides = [0, k, 1] if has_groups else contiguous(a)
    at |= {"k": k, "b2_offset": 0, "a_strides": a_strides, "b_strides": contiguous(b)}
    at |= {"a_scale_strides": [], "b_scale_strides": [], "warp_bytes": 0, "has_b2": False}
    at |= {"gated": False, "has_groups": has_groups, "algorithm": "BF16_BF16_F32", "config": ""}
    own: list[Buffer] = [("bf16", [span(a, a_strides)]), ("bf16", b)]
    own += [("s32", batch)] if has_groups else []
    return Call(at, [*own, *inner.operands], inner.results)


def compiled_is_within(call: Call) -> bool:
    at = call.attributes
    groups = at["has_groups"]
    if 0 in (*at["batch_shape"], at["m"], at["n"]):
        return True
    if len(call.operands) < 2 + groups:
        return False
    a = [*at["batch_shape"], at["m"], at["k"]]
    b = [*at["batch_shape"], at["k"], at["n"]]
    return (
        is_within(call.operands[0], a, at["a_strides"])
        and is_within(call.operands[1], b, at["b_strides"])
        and (not groups or count(call.operands[2]) == math.prod(at["batch_shape"]))
        and pass_is_within(call, 2 + groups, groups)
    )


TARGETS: dict[str, tuple[str, Callable[[random.Random], Call], Callable[[Call], bool]]] = {
    "gemm": (_extension.GEMM_TARGET, draw_gemm, gemm_is_within),
    "ragged_dot": (_extension.RAGGED_DOT_TARGET, draw_ragged, ragged_is_within),
    "transpose": (_extension.TRANSPOSE_TARGET, draw_transpose, transpose_is_within),
    "pass": (_extension.COMPILED_PASS_TARGET, draw_pass, pass_is_within),
    "compiled": (_extension.COMPILED_TARGET, draw_compiled, compiled_is_within),
}


def damaged(call: Call, rng: random.Random) -> Call:
    """Returns the call with some numbers, extents, types or buffers changed."""
    call = copy.deepcopy(call)
    at = call.attributes
    for _ in range(rng.randint(1, 3)):
        buffers = rng.choice([call.operands, call.results])
        match rng.randint(0, 5):
            case 0:
                name = rng.choice([x for x in at if type(at[x]) is int])
                at[name] = rng.choice(NASTY)
            case 1 | 2:
                name = rng.choice([x for x in at if isinstance(at[x], list)] or ["m"])
                if name != "m" and at[name]:
                    at[name][rng.randrange(len(at[name]))] = rng.choice(NASTY)
            case 3:
                name = rng.choice([x for x in at if isinstance(at[x], list)] or ["m"])
                if name != "m":
                    at[name] = [*at[name], 1] if rng.random() < 0.5 else at[name][1:]
            case 4 if buffers:
                i = rng.randrange(len(buffers))
                dtype, extents = buffers[i]
                size = rng.choice([0, 1, math.prod(extents) - 1, 2 * math.prod(extents)])
                buffers[i] = (dtype, [max(size, 0)])
            case 5 if buffers:
                i = rng.randrange(len(buffers))
                if rng.random() < 0.5:
                    buffers[i] = (rng.choice(list(BYTES)), buffers[i][1])
                else:
                    del buffers[i]
    return call
