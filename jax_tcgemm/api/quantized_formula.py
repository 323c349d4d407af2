"""The epilogue of a product of 8-bit operands, as a function."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.lowering import reference
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Axes, Operands


def of_rank(x: jax.Array, z: jax.Array) -> jax.Array:
    """Returns ``x`` with leading dimensions of 1, which ``jax.numpy_rank_promotion`` may demand."""
    return lax.expand_dims(x, range(z.ndim - x.ndim)) if x.ndim < z.ndim else x


@dataclasses.dataclass(frozen=True)
class Formula:
    """The epilogue of a scaled product: that of ``gemm``, then possibly an 8-bit result.

    Attributes:
        operands: the arrays that are given, by name: those of ``spec``, ``residual`` and
            ``out_scale``, which divides an 8-bit result.
        spec: a gemm with the epilogue up to the residual; its dtype is that of the computation.
        residual_axes: axes of ``residual``, empty without one.
        out_dtype: dtype of the result.
        returns_amax: whether the largest absolute value of the result is a second result.
    """

    operands: dict[str, jax.Array]
    spec: GemmSpec
    residual_axes: Axes
    out_dtype: np.dtype
    returns_amax: bool

    @property
    def is_plain(self) -> bool:
        """True if the only result is the rounded product."""
        return not (self.operands or self.returns_amax) and self.spec.work == "none"

    def apply(self, product: jax.Array, *values: jax.Array) -> list[jax.Array]:
        """Computes the results from the product and the operands, and rounds once."""
        wide = self.spec.out_dtype
        x = dict(zip(self.operands, values, strict=True))
        residual, out_scale = x.pop("residual", None), x.pop("out_scale", None)
        (z,) = reference.epilogue([product.astype(wide)], Operands(None, None, **x), self.spec)
        if residual is not None:
            z = z + reference.aligned(residual, self.residual_axes).astype(wide)
        results = [z.astype(self.out_dtype) if out_scale is None else self._rounded(z, out_scale)]
        if self.returns_amax:
            results.append(jnp.max(jnp.abs(z), axis=(-2, -1)).astype(jnp.float32))
        return results

    def _rounded(self, z: jax.Array, out_scale: jax.Array) -> jax.Array:
        z = z / out_scale.astype(z.dtype)
        is_integer = jnp.issubdtype(self.out_dtype, jnp.integer)
        limits = jnp.iinfo(self.out_dtype) if is_integer else jnp.finfo(self.out_dtype)
        z = jnp.clip(jnp.round(z) if is_integer else z, float(limits.min), float(limits.max))
        return z.astype(self.out_dtype)
