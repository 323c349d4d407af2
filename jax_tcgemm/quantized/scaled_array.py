"""``ScaledArray``: an operand of a product, with the scale and zero point that it may have."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_tcgemm.problem.strides import Shape
from jax_tcgemm.quantized import arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledArray:
    """The operand ``(value - zero_point) * scale``.

    ``jax.tree.map`` applies a function to each part that is present.

    Attributes:
        value: the stored numbers, of any shape.
        scale: the factors, of the rank of ``value``, whose extents divide those of ``value``;
            ``None`` means 1.
        zero_point: the zero points, of the same shapes; ``None`` means 0.
    """

    value: jax.Array
    scale: jax.Array | None = None
    zero_point: jax.Array | None = None

    @staticmethod
    def of(x: Any) -> ScaledArray:
        """Returns the parts of a quantized operand; any other operand is its own value.

        Raises:
            TypeError: the values are places in a table of numbers.
            ValueError: the shape of the scale or of the zero point does not fit.
        """
        if not arrays.is_quantized(x):
            return ScaledArray(x)
        arrays.check_readable(x)
        for name in ("scale", "zero_point"):
            if getattr(x, name) is not None:
                shape = getattr(x, name).shape
                arrays.check_divides(name, shape, "qvalue", x.qvalue.shape)
        return ScaledArray(x.qvalue, x.scale, x.zero_point)

    @property
    def shape(self) -> Shape:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype

    @property
    def scale_shape(self) -> Shape:
        """The shape of the scale: all extents are 1 without one."""
        return (1,) * self.value.ndim if self.scale is None else self.scale.shape

    def is_constant_along(self, *dims: int) -> bool:
        """Checks if neither the scale nor the zero point changes along these dimensions."""
        factors = [x for x in (self.scale, self.zero_point) if x is not None]
        return all(x.shape[dim] == 1 for x in factors for dim in dims)

    def dequantized(self, dtype: Any) -> jax.Array:
        """Returns the operand in ``dtype``, rounded once."""
        if self.scale is None:
            return self.value.astype(dtype)
        return arrays.Quantized(self.value, self.scale, self.zero_point).dequantize(dtype)
