"""The custom call of a product with a compiled function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _extension
from jax_tcgemm.epilogue.program import Program
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels.arithmetic import ALL_ARITHMETIC
from jax_tcgemm.lowering import fallback, layout
from jax_tcgemm.lowering.custom_call import second_weight_offset
from jax_tcgemm.lowering.jit_source import function_attributes
from jax_tcgemm.problem.alignment import layouts
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES
from jax_tcgemm.problem.strides import Shape, StridedGemm


@dataclasses.dataclass(frozen=True)
class Call:
    """A custom call that is ready to be emitted."""

    program: Program
    source: str
    gemm: StridedGemm
    leaf_strides: tuple[Shape, ...]
    algorithm: str
    warp_bytes: int
    factors: tuple[layout.Factor, ...] = ()  # 8-bit operands, which emit makes k-major
    scale_strides: tuple[Shape, ...] = ()  # of a and b, along batches and then m, k or k, n
    workspace_bytes: int = 0  # in which blocks add up parts of k

    def emit(
        self,
        own: Sequence[jax.Array],
        others: Sequence[jax.Array],
        spec: CompiledSpec,
        *,
        target: str = _extension.COMPILED_TARGET,
        last: Sequence[jax.Array] = (),
        more: Mapping[str, Any] | None = None,
    ) -> list[jax.Array]:
        """Emits the call.

        Args:
            own: operands of the product.
            others: those of the function.
            spec: the static parameters.
            target: the call.
            last: its further operands.
            more: its further attributes.
        """
        if self.factors:
            count = len(self.factors)
            factors = [f.made(x) for f, x in zip(self.factors, own, strict=False)]
        else:
            count = len(own) - spec.is_grouped  # group_sizes are no factor
            factors = [operand.astype(INPUT_DTYPES[self.algorithm]) for operand in own[:count]]
        known = [jnp.asarray(value) for value in self.program.known(others)]
        results = self.program.outputs
        if self.workspace_bytes and target == _extension.COMPILED_TARGET:
            results = (*results, jax.ShapeDtypeStruct((self.workspace_bytes,), jnp.uint8))
        call = jax.ffi.ffi_call(target, results)
        named = {**self._attributes(spec), **(more or {})}
        outputs = call(*factors, *own[count:], *known, *last, **named)
        return self.program.finished(outputs[: len(self.program.outputs)], others)

    @property
    def layout(self) -> str:
        """The layouts of ``a`` and ``b``: ``n``, or ``t`` for a transposed one."""
        return layouts(self.gemm)

    @property
    def is_few(self) -> bool:
        """Returns true if there are few rows or columns of 16-bit operands."""
        is_half = ALL_ARITHMETIC[self.algorithm].a.bytes == 2
        return is_half and min(self.gemm.m, self.gemm.n) <= fallback.FEW_ROWS

    @property
    def reduces(self) -> bool:
        """Returns true if the program reduces blocks of 16 x 16 results."""
        return bool(self.program.reductions)

    @property
    def shows_sums(self) -> bool:
        """Returns true if results show the last bits of the sums, as ``decode_program`` of C++."""
        is_wide = self.reduces or any(x.dtype.itemsize > 2 for x in self.program.matrices)
        return is_wide and self.program.shows_sums

    def _attributes(self, spec: CompiledSpec) -> dict[str, Any]:
        """Returns the ``CompiledAttributes`` of ``cuda/ffi/compiled.cc``."""
        gemm, product = self.gemm, spec.product
        a_scale, b_scale = self.scale_strides or ((), ())
        return {
            "m": np.int64(gemm.m),
            "n": np.int64(gemm.n),
            "k": np.int64(gemm.k),
            "b2_offset": np.int64(second_weight_offset(gemm, product)),
            "batch_shape": np.asarray(gemm.batch, np.int64),
            "a_strides": np.asarray(gemm.strides.a, np.int64),
            "b_strides": np.asarray(gemm.strides.b, np.int64),
            "a_scale_strides": np.asarray(a_scale, np.int64),
            "b_scale_strides": np.asarray(b_scale, np.int64),
            "warp_bytes": np.int64(self.warp_bytes),
            "has_b2": product.axes.b2 is not None,
            "gated": spec.is_gated,
            "has_groups": product.is_grouped,
            "algorithm": self.algorithm,
            "config": product.config or "",
            **function_attributes(self.program, self.leaf_strides, gemm.n, self.source),
        }
