"""Lowering of the pullback of an epilogue to one pass over the matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _extension
from jax_tcgemm.epilogue import compiler, source, translation
from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.epilogue.program import Program
from jax_tcgemm.lowering import devices
from jax_tcgemm.lowering.custom_call import MAX_BATCH_NDIM
from jax_tcgemm.lowering.jit_source import folded, function_attributes, kinds_of, source_of
from jax_tcgemm.problem.alignment import COPY_BYTES
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.spec import LARGE_MATRIX
from jax_tcgemm.problem.strides import MAX_EXTENT, Shape, StridedGemm


@dataclasses.dataclass(frozen=True)
class PassSpec:
    """A function that is computed without a product.

    Attributes:
        function: the function, for example the transpose of an epilogue's derivative.
        shape: shape of the matrices, ``(..., m, n)``.
    """

    function: EpilogueFunction
    shape: tuple[int, ...]


def cuda_pass(*operands: jax.Array, spec: PassSpec) -> list[jax.Array]:
    """Computes a function on CUDA devices, in one pass if the matrices are large.

    Args:
        *operands: the operands of the function.
        spec: the static parameters.
    """
    types = ", ".join(f"{x.dtype}{list(x.shape)}" for x in operands)
    call = _call_or_reason(spec)
    if isinstance(call, str):
        log(f"cotangent of an epilogue {types}: XLA's: {call}")
        return spec.function.computed(*operands)
    log(f"cotangent of an epilogue {types}: one pass ({len(call.program.outputs)} results)")
    return call.emit(operands)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A custom call that is ready to be emitted."""

    program: Program
    source: str
    shape: StridedGemm  # of the matrices
    leaf_strides: tuple[Shape, ...]

    def emit(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Emits the call."""
        known = [jnp.asarray(value) for value in self.program.known(operands)]
        call = jax.ffi.ffi_call(_extension.COMPILED_PASS_TARGET, self.program.outputs)
        outputs = call(*known, **self._attributes())
        return self.program.finished(outputs, operands)

    def _attributes(self) -> dict[str, Any]:
        """Returns the ``PassAttributes`` of ``cuda/ffi/compiled_pass.cc``."""
        function = function_attributes(self.program, self.leaf_strides, self.shape.n, self.source)
        return {
            "m": np.int64(self.shape.m),
            "n": np.int64(self.shape.n),
            "batch_shape": np.asarray(self.shape.batch, np.int64),
            **function,
        }


def _call_or_reason(spec: PassSpec) -> _Call | str:
    """Returns the custom call, or why there can be none."""
    shape = spec.shape
    if not all(isinstance(extent, int) for extent in shape):
        return "symbolic shapes"
    if len(shape) < 2 or math.prod(shape) < LARGE_MATRIX:
        return f"{math.prod(shape)} values"
    if max(shape) > MAX_EXTENT:
        return "an extent beyond 2^30"
    if _extension.COMPILED_PASS_TARGET not in _extension.BUILT_TARGETS:
        return "no kernels were built"
    old = devices.local_device(lambda capability: capability < devices.AMPERE)
    if old is not None:
        return f"no pass on {old}"
    made = translation.translate(spec.function, shape)
    if isinstance(made, str):
        return made
    matrices, strides = folded(shape, made)
    made = made.folded(matrices)
    if made.flat_rows and matrices.batch:
        return "an index along a batch"
    if len(matrices.batch) > MAX_BATCH_NDIM:
        return f"{len(matrices.batch)} batch dimensions that do not fold"
    reason = _slower(made, strides, matrices.n)
    if reason is not None:
        return reason
    text = source_of(made, strides, matrices.n, batched=bool(matrices.batch))
    call = _Call(made, text, matrices, strides)
    capability = devices.compute_capability()
    if capability is None:
        return call
    return compiler.obstacle(call.source, (source.PASS, ""), capability) or call


def _slower(made: Program, strides: Sequence[Shape], n: int) -> str | None:
    """Returns why XLA takes less time, if so; "One pass for derivatives" in lab/epilogues.md."""
    kinds = kinds_of(made, strides, n)
    if any(kind == ("kMatrix", False) for kind in kinds) or any(
        n * result.dtype.itemsize % COPY_BYTES for result in made.matrices
    ):
        return "a matrix whose rows do not begin at multiples of 16 bytes"
    pairs = zip(made.leaves, kinds, strict=True)
    matrices = [leaf for leaf, (along, _) in pairs if along == "kMatrix"]
    if all(x.dtype.itemsize > 2 for x in (*matrices, *made.matrices)):
        return "matrices of more than 16 bits"
    return None
