"""The choice of a kernel for a packed weight, its program and its custom call. Without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import random
import re

import jax
import numpy as np
import packed_problems
import pytest
from cuda_calls import Gpu
from native_calls import INVALID_ARGUMENT, Handler, calls_of
from native_packed import MOST_SHARED_BYTES, buffers, draw_packed, shared_bytes
from packed_problems import FLOATS, Problem

from jax_tcgemm import FallbackError, _compat, _core, _extension, gemm, pack
from jax_tcgemm.epilogue import compiler, source
from jax_tcgemm.kernels import packed as kernels
from jax_tcgemm.kernels import packed_configs
from jax_tcgemm.problem.packed import BITS

CUDA = pathlib.Path(__file__).parent.parent / "cuda"
ROWS = list(range(1, kernels.MOST_ROWS + 1))


def chosen(bits, m, n, k, group=128):
    row = kernels.choose(bits, m, n, k, group)
    assert row is not None
    return row


@pytest.mark.parametrize("bits", [4, 8])
def test_every_number_of_rows_has_a_kernel(rng, bits):
    largest = chosen(bits, ROWS[-1], 4096, 4096).tokens
    for m in ROWS:
        n = int(rng.choice([1, 64, 100, 4096, 14336, 60000]))
        k = 64 * int(rng.integers(1, 300))
        row = chosen(bits, m, n, k)
        smaller = [each for each in (8, 16, 32, 64) if each < row.tokens]
        assert m <= row.tokens or row.tokens in (64, largest)
        assert not smaller or m > smaller[-1]
        assert row.split_k in (1, 2, 4, 8)
        assert row.split_k <= -(-k // row.stage_k)
    assert kernels.choose(bits, ROWS[-1] + 1, 4096, 4096, 128) is None


@pytest.mark.parametrize(
    ("bits", "m", "n", "k", "expected"),
    # The fastest of the rows that were timed on an H200.
    [
        (8, 14, 18944, 3584, "sm90_w8_16x64x128_s4_b4"),
        (8, 16, 14336, 4096, "sm90_w8_16x64x256_s3_b2"),
        (8, 33, 28672, 4096, "sm90_w8_64x256x128_s4_b1"),
        (8, 45, 8192, 8192, "sm90_w8_64x128x256_s3_b1/splits=2"),
        (4, 64, 8192, 8192, "sm90_w4_64x128x256_s3_b1/splits=2"),
        (4, 145, 2304, 9216, "sm90_w4_64x128x256_s3_b1/splits=2"),
        (8, 250, 1024, 4096, "sm90_w8_128x128x128_s4_b1/splits=4"),
        (4, 342, 8192, 28672, "sm90_w4_128x128x128_s4_b1/splits=2"),
        (4, 375, 3584, 3584, "sm90_w4_128x128x128_s4_b1"),
        (8, 411, 5120, 17408, "sm90_w8_128x128x128_s4_b1/splits=2"),
    ],
)
def test_measured_shapes(bits, m, n, k, expected):
    row = chosen(bits, m, n, k, 128 if bits == 4 else k)
    assert packed_configs.config_of(bits, row) == expected


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_take_the_groups_of_a_product(bits):
    """In 4 bits, tiles of 128 rows alone take these groups."""
    for m in ROWS:
        row = chosen(bits, m, 2304, 9216, 384)
        assert row.takes(384, 9216) == (bits == 8 or m > 64)


@pytest.mark.parametrize("bits", [4, 8])
def test_k_is_divided_while_multiprocessors_are_idle(bits):
    for m in ROWS[:64]:
        parts = [chosen(bits, m, n, 16384).split_k for n in (64, 1024, 4096, 10**6)]
        assert parts == sorted(parts, reverse=True)
        assert parts[0] > 1
        assert parts[-1] == 1
        assert chosen(bits, m, 64, 64).split_k == 1


def test_shared_memory_and_threads_of_each_configuration():
    for qtype, bits in BITS.items():
        shapes = list(itertools.product(ROWS, ((64, 64), (14336, 4096)), (32, 64, 128, 256)))
        rows = {(chosen(bits, m, *each, group), group) for m, each, group in shapes}
        rows |= {(kernels.choose_pair(bits, m, *each, group), group) for m, each, group in shapes}
        for (row, group), scale, has_zeros in itertools.product(rows, FLOATS, (False, True)):
            at = dataclasses.asdict(row) | {"format": qtype, "scale": scale, "group": group}
            at |= {"has_zeros": has_zeros and bits == 4}
            assert shared_bytes(at) <= MOST_SHARED_BYTES, at
            threads = 32 * (4 * row.row_blocks + 2)
            assert threads * row.blocks_on_sm <= 2048
            assert row.k_blocks in (2, 4)


@pytest.mark.usefixtures("no_gpu")
def test_shared_memory_is_that_of_the_extension():
    """The handler's error states the bytes."""
    rng = random.Random(0)
    handler, seen = Handler(_extension.PACKED_TARGET), 0
    for _ in range(300):
        at = draw_packed(rng).attributes | {"stages": 32}
        code, message = handler(at, *buffers(at))
        found = re.search(r"(\d+) bytes a block", message)
        assert bool(found) == (shared_bytes(at) > MOST_SHARED_BYTES)
        if found:
            seen += 1
            assert code == INVALID_ARGUMENT
            assert int(found[1]) == shared_bytes(at)
    assert seen > 100


def test_programs_use_the_names_of_the_headers():
    config = (CUDA / "packed_config.h").read_text()
    formats = re.search(r"enum class PackedFormat \{(.*?)\}", config)
    body = re.search(r"struct PackedConfig \{(.*?)\n\n", config, re.DOTALL)
    assert formats
    assert body
    fields = re.findall(r"^  (\w+) (\w+);", body[1], re.MULTILINE)
    row = chosen(4, 9, 256, 512)
    for qtype in BITS:
        names = (qtype, "float16", "float32", "bfloat16")
        text = kernels.program(row, *names, zeros=True, group=512)
        parts = [part.strip() for part in text.strip("{}").split(",")]
        assert len(parts) == len(fields)
        assert parts[0].removeprefix("PackedFormat::") in formats[1].replace(" ", "").split(",")
        assert parts[1:4] == [f"ElementType::{name}" for name in ("kF16", "kF32", "kBf16")]
        numbers = dict(zip([name for _, name in fields], parts, strict=True))
        assert numbers["has_zeros"] == "true"
        assert int(numbers["group"]) == row.stage_k
        for name, value in dataclasses.asdict(row).items():
            assert int(numbers[name]) == value


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("qtype", ["uint4", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("activation", "scale"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")],
)
def test_programs_compile(rows, qtype, activation, scale, tmp_path, monkeypatch):
    """A product whose program does not compile is computed by other kernels."""
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    row = chosen(BITS[qtype], rows, 4096, 4096)
    types = (qtype, activation, scale, "float32")
    text = kernels.program(row, *types, zeros=qtype == "uint4", group=128)
    assert compiler.compile_kernel(text, source.PACKED, "")


# Custom calls


def lowered(function, *arguments):
    if _extension.PACKED_TARGET not in _core.registrations():
        pytest.skip("no kernels were built")
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",))


def call_of(problem, **options):
    """Returns attributes, operands and results of the custom call for a problem, if any."""
    x, q = problem.operands(np.random.default_rng())
    run = lambda x, w: gemm(x, w, preferred_element_type=problem.output, **options)  # noqa: E731
    calls = calls_of(lowered(run, x, pack(q)).compiler_ir("stablehlo"))
    return next((call for target, *call in calls if target == _extension.PACKED_TARGET), None)


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (Problem(16, 100, 320, 64), {"batch": 1, "m": 16, "n": 100, "k": 320, "group": 64}),
        (Problem(3, 64, 128, 32, batch=(2, 4)), {"batch": 1, "m": 24, "weights_move": False}),
        (
            Problem(3, 64, 128, 64, batch=(2, 4), has_own_weights=True),
            {"batch": 8, "m": 3, "weights_move": True},
        ),
        (
            Problem(40, 64, 512, 512, "uint4", True, "float32", "bfloat16", "float16"),
            {
                "format": "uint4",
                "has_zeros": True,
                "group": 512,
                "scale": "float32",
                "activation": "bfloat16",
                "output": "float16",
                "tokens": 64,
            },
        ),
        (Problem(1, 64, 512, 128, "float8_e4m3fn"), {"format": "float8_e4m3fn", "tokens": 8}),
    ],
)
def test_attributes(problem, expected):
    attributes, operands, results = call_of(problem)
    assert expected.items() <= attributes.items()
    wanted_operands, wanted_results = buffers(attributes)
    # The leading dimensions may be several, or none.
    sizes = lambda found: [(name, np.prod(extents)) for name, extents in found]  # noqa: E731
    assert sizes(operands) == sizes(wanted_operands)
    assert sizes(results) == sizes(wanted_results)
    row = chosen(problem.bits, problem.rows, problem.n, problem.k)
    assert dataclasses.asdict(row).items() <= attributes.items()


@pytest.mark.usefixtures("all_kernels")
def test_values_are_no_part_of_the_program():
    problem = Problem(16, 100, 320, 64)
    attributes = [call_of(problem)[0] for _ in range(2)]
    assert attributes[0] == attributes[1]
    other = call_of(dataclasses.replace(problem, output="float32"))[0]
    assert other["digest"] != attributes[0]["digest"]


@pytest.mark.usefixtures("no_gpu")
def test_the_extension_accepts_the_calls_of_drawn_products(rng, monkeypatch):
    """Whole columns of 192 rows, less than a stage, are among them."""
    monkeypatch.setattr(packed_problems, "_MOST_ELEMENTS", 2**14)
    seed = int(rng.integers(2**32))
    problems = [packed_problems.draw(seed, i) for i in range(16)]
    problems += [Problem(m, 64, 64 * i, 64 * i) for m in (5, 40) for i in (1, 2, 3, 5)]
    handler = Handler(_extension.PACKED_TARGET)
    for problem in problems:
        found = call_of(problem)
        assert found is not None or not problem.has_kernel
        if found:
            code, message = handler(*found)
            assert code != INVALID_ARGUMENT, (message, problem)


# Dequantized weights, and fallbacks


def targets_of(problem, **options):
    x, q = problem.operands(np.random.default_rng())
    run = lambda x, w: gemm(x, w, preferred_element_type=problem.output, **options)  # noqa: E731
    return [call[0] for call in calls_of(lowered(run, x, pack(q)).compiler_ir("stablehlo"))]


MANY = kernels.MOST_ROWS + 1


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(
    "problem",
    [
        Problem(MANY, 256, 256, 64),
        Problem(-(-MANY // 2), 256, 256, 64, batch=(2,)),
        Problem(MANY, 256, 256, 64, "int8", batch=(2,), has_own_weights=True),
        Problem(8, 256, 192, 96),
        Problem(64, 256, 256, 64, activation="float16"),
    ],
)
def test_a_kernel_dequantizes(problem):
    """Many rows; groups that are no stages; float16 beside scales of another type."""
    assert targets_of(problem, config="kernel")[0] == _extension.UNPACK_TARGET
    assert targets_of(problem, config="xla") == []


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem(8, 64, 96, 32), "k=96 is not a multiple of 64"),
        (Problem(8, 64, 192, 24), "groups of 24 rows"),
    ],
)
def test_what_no_kernel_computes(problem, reason):
    """These reasons are in docs/fallback.md."""
    assert targets_of(problem) == []
    with pytest.raises(FallbackError, match=reason):
        targets_of(problem, config="kernel")


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("problem", [Problem(0, 64, 128, 64), Problem(8, 0, 128, 64)])
def test_nothing_to_multiply_is_no_error(problem):
    assert targets_of(problem, config="kernel") == []


@pytest.mark.usefixtures("all_kernels")
def test_fallbacks_of_other_gpus_and_builds(monkeypatch):
    problem = Problem(8, 64, 128, 64)
    assert targets_of(problem, config="kernel") == [_extension.PACKED_TARGET]
    gpus = [Gpu("8.0")]
    monkeypatch.setattr(_compat, "initialized_cuda_devices", lambda: gpus)
    with pytest.raises(FallbackError, match="no kernel on"):
        targets_of(problem, config="kernel")
    monkeypatch.setattr(_extension, "BUILT_TARGETS", frozenset())
    with pytest.raises(FallbackError, match="no kernels were built"):
        targets_of(problem, config="kernel")


@pytest.mark.usefixtures("all_kernels")
def test_xla_computes_symbolic_shapes():
    pytest.importorskip("flatbuffers")
    (rows,) = jax.export.symbolic_shape("m")
    x = jax.ShapeDtypeStruct((rows, 128), "bfloat16")
    w = pack(Problem(1, 64, 128, 64).operands(np.random.default_rng())[1])
    run = jax.jit(lambda x, w: gemm(x, w, config="kernel"))
    with pytest.raises(FallbackError, match="symbolic shapes"):
        jax.export.export(run, platforms=["cuda"])(x, w)
