"""The quantized weights that primitives multiply: packed ones, and ones that the program packs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.lowering import unpacked as lowering
from jax_tcgemm.primitives import unpacked as primitive
from jax_tcgemm.problem.packed import UnpackedSpec
from jax_tcgemm.problem.strides import Shape
from jax_tcgemm.quantized.arrays import is_quantized, spread
from jax_tcgemm.quantized.packed import PackedWeight, why_unpackable

# The sums of the packed product are float32. Other presets ask for other sums.
_PRESETS = {
    lax.DotAlgorithmPreset.BF16_BF16_F32: jnp.bfloat16,
    lax.DotAlgorithmPreset.F16_F16_F32: jnp.float16,
}
# The types of results of weights that the program packs.
_RESULTS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))
# Packed zero points are exact if they have 4 bits, like the values.
_ZEROS = ("int4", "uint4")


@dataclasses.dataclass(frozen=True)
class UnpackedWeight:
    """The right operand ``(k, n)`` of a product, which the program packs.

    Attributes:
        q: a ``Quantized``, or an object with its fields.
        transposed: whether ``q`` is ``(n, k)``.
    """

    q: Any
    transposed: bool

    # As of a ``PackedWeight``; stacks of weights are dequantized.
    batch = ()

    @property
    def shape(self) -> Shape:
        return self.q.qvalue.shape[::-1] if self.transposed else self.q.qvalue.shape

    @property
    def groups(self) -> int:
        """The number of blocks along k with a scale and a zero point."""
        k_axis = 1 if self.transposed else 0
        parts = [x for x in (self.q.scale, self.q.zero_point) if x is not None]
        return math.lcm(*(x.shape[k_axis] for x in parts))

    def product(self, x: jax.Array, out_dtype: DTypeLike, out_sharding: Any = None) -> jax.Array:
        """Returns ``x @ w``.

        Args:
            x: ``(..., m, k)``, bfloat16 or float16.
            out_dtype: dtype of the result.
            out_sharding: as in ``gemm``.
        """
        order = (1, 0) if self.transposed else (0, 1)
        shape = self.groups, self.shape[1]
        parts = [self.q.scale, self.q.zero_point]
        parts = [spread(jnp.transpose(y, order), shape) for y in parts if y is not None]
        spec = UnpackedSpec(self.transposed, jnp.dtype(out_dtype))
        return primitive.bind(x, jnp.asarray(self.q.qvalue), parts, spec, out_sharding)


Weight = PackedWeight | UnpackedWeight


def multiplied(
    w: Any,
    x: Any,
    precision: Any,
    preferred: DTypeLike | None = None,
    config: str | None = None,
    *,
    transposed: bool = False,
) -> Weight | None:
    """Returns the weight that a primitive multiplies; ``None`` if the weight is dequantized.

    Args:
        w: the right operand.
        x: the left operand, or its type.
        precision: as in ``gemm``.
        preferred: dtype of the result; ``None`` means that of ``x``.
        config: as in ``gemm``.
        transposed: whether ``w`` is ``(n, k)``.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    precision = _compat.canonicalize_precision(precision)
    # Algorithms of JAX are named tuples.
    if type(precision) is not tuple and _PRESETS.get(precision) != x.dtype:
        return None
    if isinstance(w, PackedWeight):
        return None if transposed else w
    if config is not None or jnp.dtype(x.dtype if preferred is None else preferred) not in _RESULTS:
        return None
    return _unpacked_weight(w, x, transposed=transposed)


def _unpacked_weight(w: Any, x: Any, *, transposed: bool) -> UnpackedWeight | None:
    """Returns the weight of a product if the program should pack it, else ``None``.

    The answer depends on types alone.

    Args:
        w: any right operand, ``(k, n)``, or ``(n, k)`` if ``transposed``.
        x: the left operand ``(..., k)``.
        transposed: see ``w``.
    """
    if not is_quantized(w) or len(w.qvalue.shape) != 2:
        return None
    parts = [y for y in (w.qvalue, w.scale, w.zero_point) if y is not None]
    if not all(isinstance(n, int) and n > 0 for y in (x, *parts) for n in y.shape):
        return None
    if why_unpackable(w) is not None:
        return None
    if _compat.is_sharded(*(y for y in parts if isinstance(y, jax.Array))):
        return None  # it is dequantized where it is divided
    if w.zero_point is not None and w.zero_point.dtype.name not in _ZEROS:
        return None
    found = UnpackedWeight(w, transposed)
    if x.shape[-1] != found.shape[0]:
        return None
    strips = jax.ShapeDtypeStruct((found.groups, found.shape[1]), w.scale.dtype)
    zero = () if w.zero_point is None else (w.zero_point,)
    spec = UnpackedSpec(transposed, x.dtype).packed(w.qvalue, strips, zero)
    is_read = lowering.unfit(x, strips, spec, transposed=transposed) is None
    return found if is_read else None
