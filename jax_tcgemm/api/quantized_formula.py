"""The epilogue of a product of 8-bit operands, as a function."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.problem.activations import resolve


def of_rank(x: jax.Array, z: jax.Array) -> jax.Array:
    """Returns ``x`` with leading dimensions of 1, which ``jax.numpy_rank_promotion`` may demand."""
    return lax.expand_dims(x, range(z.ndim - x.ndim)) if x.ndim < z.ndim else x


@dataclasses.dataclass(frozen=True)
class Formula:
    """The epilogue of a scaled product: that of ``gemm``, then possibly an 8-bit result.

    Attributes:
        operands: the arrays that are given, by name: ``c``, ``bias``, ``residual``, ``row_scale``,
            ``column_scale``, ``alpha``, ``beta``, ``out_scale``.
        activation: as in ``gemm``.
        alpha: factor of the product if it is not an operand.
        beta: factor of ``c`` if it is not an operand.
        out_dtype: dtype of the result.
        quantizes: whether the result is divided by ``out_scale`` and clipped.
        returns_amax: whether the largest absolute value of the result is a second result.
    """

    operands: dict[str, jax.Array]
    activation: Any
    alpha: complex
    beta: complex
    out_dtype: np.dtype
    quantizes: bool
    returns_amax: bool

    @property
    def wide(self) -> np.dtype:
        """The dtype in which the formula is computed."""
        is_integer = jnp.issubdtype(self.out_dtype, jnp.integer) and not self.quantizes
        return jnp.dtype(self.out_dtype if is_integer else jnp.float32)

    @property
    def is_plain(self) -> bool:
        """True if the only result is the rounded product."""
        is_changed = self.operands or self.quantizes or self.returns_amax or self.alpha != 1
        return not is_changed and self.activation is None

    def apply(self, product: jax.Array, *values: jax.Array) -> list[jax.Array]:
        """Computes the results from the product and the operands, and rounds once."""
        z = product.astype(self.wide)
        given = zip(self.operands, values, strict=True)
        x = {name: value.astype(self.wide) for name, value in given}
        alpha, beta = x.get("alpha", self.alpha), x.get("beta", self.beta)
        if "alpha" in x or alpha != 1:
            z = z * alpha
        for name, axis in (("row_scale", -1), ("column_scale", -2)):
            if name in x:
                z = z * of_rank(jnp.expand_dims(x[name], axis), z)
        if "c" in x:
            is_sum = "beta" not in x and beta == 1
            c = of_rank(x["c"], z)
            z = z + (c if is_sum else c * beta)
        if "bias" in x:
            z = z + of_rank(jnp.expand_dims(x["bias"], -2), z)
        if self.activation is not None:
            z = resolve(self.activation).reference(z).astype(self.wide)
        if "residual" in x:
            z = z + of_rank(x["residual"], z)
        results = [self._rounded(z, x)]
        if self.returns_amax:
            results.append(jnp.max(jnp.abs(z), axis=(-2, -1)).astype(jnp.float32))
        return results

    def _rounded(self, z: jax.Array, x: dict[str, jax.Array]) -> jax.Array:
        if self.quantizes:
            z = z / x["out_scale"]
            is_integer = jnp.issubdtype(self.out_dtype, jnp.integer)
            limits = jnp.iinfo(self.out_dtype) if is_integer else jnp.finfo(self.out_dtype)
            z = jnp.clip(jnp.round(z) if is_integer else z, float(limits.min), float(limits.max))
        return z.astype(self.out_dtype)
