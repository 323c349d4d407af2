"""The table of arithmetic: what is multiplied, in what it is added up, and what may come out.

The only list of element types and of tensor-core instructions. ``cuda/build/generate.py`` writes it
out for the compiler, and Python takes names, sizes and types from here.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ElementType:
    """A type of the elements of an operand, an accumulator or a result.

    Attributes:
        name: NumPy's (``ml_dtypes``') name.
        tag: short name; also PTX's.
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
ELEMENT_TYPES = (BF16, F16, F32)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """One way to multiply matrices on tensor cores.

    Attributes:
        name: the ``jax.lax.DotAlgorithmPreset``, or a name of our own where there is none.
        tag: how it is written inside the names of kernels.
        a: type of the elements of A.
        b: type of the elements of B; today that of A.
        accumulator: type in which products are added up.
        outputs: types in which kernels write D, the one that they are built for first. Addends are
            of one of these as well.
        multiplied: PTX's type of what is multiplied; ``"tf32"`` is float32 rounded before.
        k: elements of k of one instruction of ``mma.sync`` or ``wgmma``: 32 bytes.
        turing: whether tensor cores of compute capability 7.5 multiply so, half of ``k`` at a time.
        wgmma: whether there are kernels for Hopper.
        k_major: whether ``wgmma`` takes k-major operands alone from shared memory.
        promotes: whether a float32 result wants parts of k added up in float32. The tensor cores
            cut sums off instead of rounding them, which such a result of 16-bit operands shows.
        is_default: whether operands of these types are multiplied so unless asked otherwise.
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

    @property
    def rounds_operands(self) -> bool:
        """Whether operands lose bits before they are multiplied."""
        return self.multiplied == "tf32"

    def __post_init__(self) -> None:
        if self.a != self.b:
            raise ValueError(f"{self.name}: no kernel takes A in {self.a} and B in {self.b}")
        if self.k * self.a.bytes != 32:
            raise ValueError(f"{self.name}: an instruction takes 32 bytes of k, not {self.k} times")
        if len(self.outputs) not in (1, 2) or self.outputs[-1] not in (F32, self.a):
            raise ValueError(f"{self.name}: D is of one type, or also of float32: {self.outputs}")
        if self.wgmma and self.accumulator != F32:
            raise ValueError(f"{self.name}: sums of the Hopper kernels are {F32.name}")


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


@dataclasses.dataclass(frozen=True)
class PlaneProduct:
    """A product of float32 operands by products of their planes, which are narrower.

    Plane 0 is the operand, rounded; plane i what the planes before leave over, times 2^(7 i). The
    products of planes i and j with i + j at most ``order`` are added up, the smallest first.
    Source: G. Henry, P. T. P. Tang and A. Heinecke, "Leveraging the bfloat16 artificial
    intelligence datatype for higher-precision computations", ARITH 2019.

    Attributes:
        name: the ``jax.lax.DotAlgorithmPreset``.
        factors: name of the row of the table of arithmetic that multiplies planes.
        count: planes of an operand.
        order: of the smallest products that count.
    """

    name: str
    factors: str
    count: int
    order: int

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Planes of A and of B that are multiplied, in that order."""
        planes = range(self.count)
        pairs = [(i, j) for i in planes for j in planes if i + j <= self.order]
        return tuple(sorted(pairs, key=lambda pair: -sum(pair)))


_PLANE_PRODUCTS = (
    PlaneProduct("F32_F32_F32", "BF16_BF16_F32", 3, 2),
    PlaneProduct("BF16_BF16_F32_X3", "BF16_BF16_F32", 2, 1),
    PlaneProduct("BF16_BF16_F32_X6", "BF16_BF16_F32", 3, 2),
    PlaneProduct("BF16_BF16_F32_X9", "BF16_BF16_F32", 3, 4),
)

PLANE_PRODUCTS: dict[str, PlaneProduct] = {row.name: row for row in _PLANE_PRODUCTS}
