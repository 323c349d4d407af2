"""The table of arithmetic: types of the operands, the accumulators and the results.

This is the only list of element types and of tensor-core instructions. ``cuda/build/generate.py``
writes it out for the compiler, and Python takes names, sizes and types from here.
"""

from __future__ import annotations

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class ElementType:
    """An element type of operands, accumulators or results.

    Attributes:
        name: name in NumPy (``ml_dtypes``).
        tag: short name, as in PTX.
        bytes: size of an element.
        cpp: the type in device code.
        ffi: the enumerator of ``xla::ffi::DataType``.
        tma: the type in a TMA descriptor, ``CU_TENSOR_MAP_DATA_TYPE_*``.
    """

    name: str
    tag: str
    bytes: int
    cpp: str
    ffi: str
    tma: str


BF16 = ElementType("bfloat16", "bf16", 2, "__nv_bfloat16", "BF16", "BFLOAT16")
F16 = ElementType("float16", "f16", 2, "__half", "F16", "FLOAT16")
F32 = ElementType("float32", "f32", 4, "float", "F32", "FLOAT32")
E4M3 = ElementType("float8_e4m3fn", "e4m3", 1, "__nv_fp8_e4m3", "F8E4M3FN", "UINT8")
E5M2 = ElementType("float8_e5m2", "e5m2", 1, "__nv_fp8_e5m2", "F8E5M2", "UINT8")
S8 = ElementType("int8", "s8", 1, "int8_t", "S8", "UINT8")
S32 = ElementType("int32", "s32", 4, "int32_t", "S32", "INT32")
# Kernels of the build write D in these types. Only kernels compiled at run time use the others.
BUILT_TYPES = (BF16, F16, F32)
ELEMENT_TYPES = (*BUILT_TYPES, E4M3, E5M2, S8, S32)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """One way to multiply matrices on tensor cores.

    Attributes:
        name: the ``jax.lax.DotAlgorithmPreset``, or our own name if there is no preset.
        tag: its name inside the names of kernels.
        a: element type of A.
        b: element type of B, of the same size as A's.
        accumulator: type in which products are added up.
        outputs: types in which kernels write D. Kernels are built for the first one. Addends have
            one of these types as well.
        multiplied: PTX type of the multiplied values; ``"tf32"`` is float32, rounded beforehand. If
            the operands' types differ, it is the type of A.
        k: elements of k in one instruction of ``mma.sync`` or ``wgmma``: 32 bytes.
        turing: whether tensor cores of compute capability 7.5 have it, with half of ``k`` at a
            time.
        wgmma: whether there are kernels for Hopper.
        k_major: whether ``wgmma`` takes only k-major operands from shared memory.
        promotes: whether a float32 result needs parts of k added up in float32. The tensor cores
            truncate sums instead of rounding them, and a float32 result of 16-bit operands shows
            this. With 8-bit operands, any result needs it.
        is_default: whether it is the default for operands of these types.
        at_run_time: whether the build has no kernels for it. NVRTC compiles each kernel with its
            epilogue when a program needs it.
    """

    name: str
    tag: str
    a: ElementType
    b: ElementType
    accumulator: ElementType
    outputs: tuple[ElementType, ...]
    multiplied: str
    k: int
    turing: bool = False
    wgmma: bool = True
    k_major: bool = False
    promotes: bool = False
    is_default: bool = True
    at_run_time: bool = False

    @property
    def multiplied_b(self) -> str:
        """PTX type of the multiplied values of B."""
        return self.multiplied if self.a == self.b else self.b.tag

    @property
    def rounds_operands(self) -> bool:
        """Returns true if operands lose bits before they are multiplied."""
        return self.multiplied == "tf32"

    def __post_init__(self) -> None:
        if self.a != self.b and not (self.at_run_time and self.a.bytes == self.b.bytes):
            raise ValueError(f"{self.name}: no kernel takes A in {self.a} and B in {self.b}")
        if self.k * self.a.bytes != 32:
            raise ValueError(f"{self.name}: an instruction takes 32 bytes of k, not {self.k} times")
        if len(self.outputs) not in (1, 2) or self.outputs[-1] not in (F32, self.a):
            raise ValueError(f"{self.name}: D is of one type, or also of float32: {self.outputs}")
        sums = (F32, S32) if self.at_run_time else (F32,)
        if self.wgmma and self.accumulator not in sums:
            raise ValueError(f"{self.name}: sums of the Hopper kernels are of {sums}")


_ROWS = (
    Arithmetic("BF16_BF16_F32", "bf16", BF16, BF16, F32, (BF16, F32), "bf16", 16, promotes=True),
    Arithmetic(
        *("F16_F16_F32", "f16", F16, F16, F32, (F16, F32), "f16", 16),
        turing=True,
        promotes=True,
    ),
    Arithmetic(
        *("F16_F16_F16", "f16acc16", F16, F16, F16, (F16, F32), "f16", 16),
        turing=True,
        wgmma=False,
        is_default=False,
    ),
    Arithmetic("TF32_TF32_F32", "tf32", F32, F32, F32, (F32,), "tf32", 8, k_major=True),
)

ARITHMETIC: dict[str, Arithmetic] = {row.name: row for row in _ROWS}


def _quantized() -> list[Arithmetic]:
    """Returns rows for 8-bit floats, with plain and with promoted sums, and for int8."""
    late = {"is_default": False, "at_run_time": True, "k_major": True}
    rows = []
    for a, b in itertools.product((E4M3, E5M2), repeat=2):
        name, tag = f"{a.tag}_{b.tag}_f32".upper(), f"{a.tag}{b.tag}"
        for fast in ("", "_FAST"):
            promotes = not fast
            row = (name + fast, tag + fast.lower(), a, b, F32, (BF16, F32), a.tag, 32)
            rows.append(Arithmetic(*row, promotes=promotes, **late))
    rows.append(Arithmetic("S8_S8_S32", "s8", S8, S8, S32, (BF16, F32), "s8", 32, **late))
    return rows


# Rows whose kernels are compiled at run time. JAX's presets only name sums in float32:
# ANY_F8_ANY_F8_F32 and its _FAST_ACCUM.
RUN_TIME_ARITHMETIC: dict[str, Arithmetic] = {row.name: row for row in _quantized()}

ALL_ARITHMETIC: dict[str, Arithmetic] = {**ARITHMETIC, **RUN_TIME_ARITHMETIC}


@dataclasses.dataclass(frozen=True)
class PlaneProduct:
    """A product of float32 operands, computed by products of their narrower planes.

    Plane 0 is the rounded operand. Plane i is the remainder after the planes before it, times
    2^(7 i). The products of planes i and j with i + j at most ``order`` are added up, the smallest
    first.
    Source: G. Henry, P. T. P. Tang and A. Heinecke, "Leveraging the bfloat16 artificial
    intelligence datatype for higher-precision computations", ARITH 2019.

    Attributes:
        name: the ``jax.lax.DotAlgorithmPreset``.
        factors: name of the row in the table of arithmetic that multiplies planes.
        count: number of planes of an operand.
        order: the largest i + j of products that are added up.
    """

    name: str
    factors: str
    count: int
    order: int

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs of planes of A and B that are multiplied, in this order."""
        planes = range(self.count)
        pairs = [(i, j) for i in planes for j in planes if i + j <= self.order]
        return tuple(sorted(pairs, key=lambda pair: -sum(pair)))


_PLANE_PRODUCTS = (
    PlaneProduct("F32_F32_F32", "BF16_BF16_F32", 3, 2),
    PlaneProduct("BF16_BF16_F32_X3", "BF16_BF16_F32", 2, 1),
    PlaneProduct("BF16_BF16_F32_X6", "BF16_BF16_F32", 3, 2),
    PlaneProduct("BF16_BF16_F32_X9", "BF16_BF16_F32", 3, 4),
    # Three bfloat16 planes hold as much as two TF32 planes, and take less time.
    PlaneProduct("TF32_TF32_F32_X3", "BF16_BF16_F32", 3, 2),
)

PLANE_PRODUCTS: dict[str, PlaneProduct] = {row.name: row for row in _PLANE_PRODUCTS}
