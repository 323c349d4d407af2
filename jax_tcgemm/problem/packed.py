"""The static descriptions of products with weights that are packed, or that a program packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

# Version of the layout that ``lowering/packed_layout.py`` describes.
VERSION = 1
# Extent of a tile of the layout, along n and along k.
TILE = 64
# The types of packed values, and their bits.
BITS = {"int4": 4, "uint4": 4, "int8": 8, "float8_e4m3fn": 8}


def tiles(extent: int) -> int:
    """Returns the number of tiles along a dimension."""
    return -(-extent // TILE)


@dataclasses.dataclass(frozen=True)
class PackedSpec:
    """The static parameters of a product with a packed weight.

    Attributes:
        qtype: name of the type of the values, a key of ``BITS``.
        group: number of rows of the weight that share a scale; it divides ``k``.
        has_zeros: whether the scales are pairs of scale and zero point.
        n: number of columns of the weight.
        k: contracted extent.
        out_dtype: dtype of the result.
        config: a value of ``config=``: a row's name, ``"dequantized"``, ``"kernel"``, ``"xla"`` or
            ``None``.
    """

    # Products with a function are a ``PackedFunctionSpec``.
    function: ClassVar[None] = None

    qtype: str
    group: int
    has_zeros: bool
    n: int
    k: int
    out_dtype: np.dtype
    config: str | None = None

    def with_config(self, config: str | None) -> PackedSpec:
        """Returns a copy with this configuration."""
        return dataclasses.replace(self, config=config)

    @property
    def bits(self) -> int:
        """Number of bits of a value."""
        return BITS[self.qtype]

    @property
    def groups(self) -> int:
        """Number of groups along k."""
        return self.k // self.group if self.group else 1


@dataclasses.dataclass(frozen=True)
class LayoutSpec:
    """The static parameters of the operation that packs values of 4 bits.

    Attributes:
        transposed: whether the values are ``(..., n, k)`` and not ``(..., k, n)``.
    """

    transposed: bool


@dataclasses.dataclass(frozen=True)
class UnpackedSpec:
    """The static parameters of a product with a weight in 4 bits as a program stores it.

    Attributes:
        transposed: whether the values are ``(n, k)`` and not ``(k, n)``.
        out_dtype: dtype of the result.
    """

    transposed: bool
    out_dtype: np.dtype

    def packed(self, values: Any, scale: Any, zero: Sequence[Any] = ()) -> PackedSpec:
        """Returns the parameters of the product after the weight is packed.

        Args:
            values: the values, or their type.
            scale: the scales ``(groups, n)``, or their type.
            zero: the zero points if there are any, of the same shape.
        """
        k, n = values.shape[::-1] if self.transposed else values.shape
        group = k // scale.shape[0]
        return PackedSpec(values.dtype.name, group, bool(zero), n, k, self.out_dtype)
