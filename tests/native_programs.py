"""Random calls with a program as epilogue or as a separate pass: see ``native_draws``."""

from __future__ import annotations

import dataclasses
import math
import random

from native_calls import Buffer
from native_draws import BYTES, Call, contiguous, count, is_within, size_of, span

_ALONG = {"kMatrix": (1, 1, 1), "kColumns": (0, 0, 1), "kRows": (0, 1, 0), "kNothing": (0, 0, 0)}
_ELEMENTS = ["bf16", "f32", "s32", "s8"]
_SCALE_BLOCK = 128


@dataclasses.dataclass
class Program:
    """The facts that a source states.

    Attributes:
        operands: for each operand, the dimensions along which it moves, its element size in bytes,
            and whether the kernel reads it by vectors.
        results: for each matrix, its element size in bytes and whether the kernel writes it by
            vectors.
        reductions: for each reduction, the dimensions along which its result moves.
        scaled: whether the factors have block scales.
        block: the rows and columns of the results that one reduction step joins.
    """

    operands: list[tuple[str, int, bool]]
    results: list[tuple[int, bool]]
    reductions: list[str]
    scaled: bool
    block: tuple[int, int]

    def source(self) -> str:
        """Returns what ``of_program`` of ``jax_tcgemm/epilogue/program_source.py`` writes."""
        operands = [f"{{Along::{x}, {size}, {_cpp(v)}}}" for x, size, v in self.operands]
        results = [f"{{{size}, {_cpp(v)}}}" for size, v in self.results]
        visits = [
            f"    visitor.template reduction<float, {i}, Along::{along}, Sum>(0.f);"
            for i, along in enumerate(self.reductions, len(results))
        ]
        constant = "  static constexpr"
        operand_list = ", ".join(operands) or "{Along::kNothing, 4, false}"
        result_list = ", ".join(results) or "{4, false}"
        lines = [
            f"{constant} bool kBlockScales = {_cpp(self.scaled)};",
            f"{constant} int kOperands = {len(operands)};",
            f"{constant} CompiledOperandKind kOperand[] = {{{operand_list}}};",
            f"{constant} int kResults = {len(results)};",
            f"{constant} CompiledResultKind kResult[] = {{{result_list}}};",
            f"{constant} int kReductions = {len(visits)};",
            *visits,
        ]
        return "\n".join(lines)

    def damage(self, rng: random.Random) -> None:
        """Changes one of the facts."""
        match rng.randint(0, 4):
            case 0 if self.operands:
                i = rng.randrange(len(self.operands))
                along, size, vector = self.operands[i]
                self.operands[i] = rng.choice(
                    [(along, 2 * size, vector), (along, size, not vector)]
                )
            case 1 if self.results:
                i = rng.randrange(len(self.results))
                size, vector = self.results[i]
                self.results[i] = rng.choice([(2 * size, vector), (size, not vector)])
            case 2 if self.reductions:
                self.reductions[rng.randrange(len(self.reductions))] = rng.choice(list(_ALONG)[1:])
            case 3:
                self.scaled = not self.scaled
            case 4:
                facts = rng.choice([self.operands, self.results, self.reductions])
                if facts:
                    facts.pop()

    def reduced(self, along: str, matrices: int, m: int, n: int) -> int:
        """Counts the elements that a reduction leaves."""
        rows = m if along == "kRows" else -(-m // self.block[0])
        return matrices * rows * (n if along == "kColumns" else -(-n // self.block[1]))


def _cpp(truth: bool) -> str:
    return str(truth).lower()


def draw_pass(
    rng: random.Random,
    block: tuple[int, int] = (64, 256),
    rank: int | None = None,
    rows: bool = False,
) -> Call:
    """Draws a program over operands of several kinds.

    Args:
        rng: the generator.
        block: see ``Program``.
        rank: the number of batch dimensions; by default up to two.
        rows: whether the results are one matrix whose rows the batch divides.
    """
    m, n = (rng.choice([1, 8, 16, 33, 64, 300]) for _ in range(2))
    batch = [rng.choice([1, 2, 3]) for _ in range(rng.randint(0, 2) if rank is None else rank)]
    extents, results_of = [*batch, m, n], [m, n] if rows else [*batch, m, n]
    program = Program([], [], [], False, block)
    operands: list[Buffer] = []
    strides: list[int] = []
    for _ in range(rng.randint(0, 3)):
        along, moves = rng.choice(list(_ALONG.items()))
        dtype = rng.choice(_ELEMENTS)
        every = [moves[0]] * len(batch) + list(moves[1:])
        steps = [step * moved for step, moved in zip(contiguous(extents), every, strict=True)]
        is_vector = steps[-1] == 1 and all(x * BYTES[dtype] % 16 == 0 for x in (*steps[:-1], n))
        program.operands.append((along, BYTES[dtype], is_vector))
        operands.append((dtype, [span(extents, steps)]))
        strides += steps
    results: list[Buffer] = [(rng.choice(_ELEMENTS), results_of) for _ in range(rng.randint(0, 2))]
    program.results = [(BYTES[dtype], n * BYTES[dtype] % 16 == 0) for dtype, _ in results]
    if not rows:
        fewest = 0 if results else 1
        program.reductions = [rng.choice(list(_ALONG)[1:]) for _ in range(rng.randint(fewest, 2))]
    elif not results:
        return draw_pass(rng, block, rank, rows)
    reduced = [program.reduced(along, math.prod(batch), m, n) for along in program.reductions]
    results += [("f32", [elements]) for elements in reduced]
    vectors = [int(is_vector) for *_, is_vector in program.operands]
    attributes = {"m": m, "n": n, "batch_shape": batch, "operand_strides": strides}
    attributes |= {"operand_vectors": vectors, "source": program.source(), "digest": ""}
    attributes["result_elements"] = [count(each) for each in results]
    return Call(attributes, operands, results, program=program)


def pass_is_within(call: Call, before: int = 0, groups: bool = False, workspaces: int = 0) -> bool:
    """Checks if the handler may accept a call.

    Args:
        call: the call.
        before: the number of operands before those of the program.
        groups: whether the batch divides the rows of one matrix.
        workspaces: the most results of any size after those of the program.
    """
    at, program = call.attributes, call.program
    m, n = at["m"], at["n"]
    extents = [*at["batch_shape"], m, n]
    if 0 in extents:
        return True  # the handler launches nothing
    own = call.operands[before:]
    offsets = [*call.offsets, *[0] * (len(call.operands) + len(call.results))]
    of_results = offsets[len(call.operands) :][: len(call.results)]
    steps, rank = at["operand_strides"], len(extents)
    matrices = 1 if groups else math.prod(at["batch_shape"])
    counts = [matrices * m * n] * len(program.results)
    counts += [program.reduced(along, matrices, m, n) for along in program.reductions]
    results = call.results[: len(counts)]
    has_results = 0 <= len(call.results) - len(counts) <= workspaces
    if len(own) < len(program.operands) or not has_results:
        return False
    for i, (_, size, is_vector) in enumerate(program.operands):
        moves = steps[i * rank : (i + 1) * rank]
        if not is_within(own[i], extents, moves) or BYTES[own[i][0]] != size:
            return False
        aligned = [*moves[:-1], n]
        if is_vector and (
            moves[-1] != 1 or any(step * size % 16 for step in aligned) or offsets[before + i] % 16
        ):
            return False
    sizes = [size for size, _ in program.results] + [4] * len(program.reductions)
    return (
        [count(each) for each in results] == counts
        and [BYTES[dtype] for dtype, _ in results] == sizes
        and all(n * size % 16 == 0 for size, is_vector in program.results if is_vector)
        and all(offset % 16 == 0 for offset in of_results)
    )


def draw_compiled(rng: random.Random) -> Call:
    """Draws a product: plain, with two weights, with scaled factors, or over groups of rows."""
    kind = rng.choice(["plain", "two weights", "scaled", "groups"])
    has_groups, is_scaled = kind == "groups", kind == "scaled"
    call = draw_pass(rng, (16, 16), 1 if has_groups else None, has_groups)
    at = call.attributes
    k = rng.choice([16, 64, 256])
    m, n, batch = at["m"], at["n"], at["batch_shape"]
    a, b = [*batch, m, k], [*batch, k, n]
    a_strides = [0, k, 1] if has_groups else contiguous(a)
    dtype = "s8" if is_scaled else "bf16"
    # The contraction dimension of 8-bit operands is contiguous.
    b_strides = [*contiguous(b)[:-2], 1, k] if is_scaled else contiguous(b)
    at |= {"k": k, "b2_offset": 0, "a_strides": a_strides, "b_strides": b_strides, "config": ""}
    at |= {"a_scale_strides": [], "b_scale_strides": [], "warp_bytes": 0}
    at |= {"has_b2": kind == "two weights", "gated": kind == "two weights"}
    at |= {"has_groups": has_groups, "algorithm": "S8_S8_S32" if is_scaled else "BF16_BF16_F32"}
    own: list[Buffer] = [(dtype, [span(a, a_strides)]), (dtype, [math.prod(b)])]
    if kind == "two weights":
        own.append(own[1])
    if has_groups:
        own.append(("s32", batch))
    if is_scaled:
        call.program.scaled = True
        at["source"] = call.program.source()
        for name, extents in _scales(at):
            at[f"{name}_scale_strides"] = contiguous(extents)
            own.append(("f32", extents))
    call.operands = [*own, *call.operands]
    if kind == "plain" and rng.random() < 0.5:
        call.results.append(("u8", [rng.choice([1, 8192, 1 << 20])]))
    return call


def _scales(at: dict) -> list[tuple[str, list[int]]]:
    """Returns the extents of the scales of a and b."""
    batch, m, n, k = at["batch_shape"], at["m"], at["n"], at["k"]
    blocks = -(-k // _SCALE_BLOCK)
    return [("a", [*batch, m, blocks]), ("b", [*batch, blocks, -(-n // _SCALE_BLOCK)])]


def compiled_is_within(call: Call) -> bool:
    at, operands = call.attributes, call.operands
    if 0 in (*at["batch_shape"], at["m"], at["n"]):
        return True
    groups = at["has_groups"]
    a = [*at["batch_shape"], at["m"], at["k"]]
    b = [*at["batch_shape"], at["k"], at["n"]]
    wanted = [(a, at["a_strides"]), (b, at["b_strides"])]
    wanted += [(b, at["b_strides"])] * at["has_b2"]
    wanted += [([math.prod(at["batch_shape"])], [1])] * groups
    is_scaled = bool(at["a_scale_strides"])
    if is_scaled:
        wanted += [(extents, at[f"{name}_scale_strides"]) for name, extents in _scales(at)]
    size = 1 if at["algorithm"] == "S8_S8_S32" else 2
    return (
        len(operands) >= len(wanted)
        and all(is_within(x, *each) for x, each in zip(operands, wanted, strict=False))
        and all(BYTES[each[0]] == size for each in operands[: 2 + at["has_b2"]])
        and call.program.scaled == is_scaled
        and (not groups or size_of(operands[2]) == 4 * math.prod(at["batch_shape"]))
        and pass_is_within(call, len(wanted), groups, workspaces=1)
    )
