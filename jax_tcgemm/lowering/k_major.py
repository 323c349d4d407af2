"""Operands of 8 bits as ``wgmma`` takes them: k contiguous, in rows of whole multiples of 16 bytes.

What lies so is read where it is. What lies along m or n is transposed by a pass of our own, which
XLA's is many times slower than; what has other rows is padded.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _extension
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.lowering.custom_call import shapes_of
from jax_tcgemm.problem.alignment import COPY_BYTES
from jax_tcgemm.problem.ragged import RaggedSpec
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Axes, Operands, Shape, row_major


def filled_up(k: int) -> int:
    """Returns ``k`` as a multiple of what TMA addresses."""
    return -(-k // COPY_BYTES) * COPY_BYTES


@dataclasses.dataclass(frozen=True)
class Factor:
    """One operand, and what is to become of it.

    Attributes:
        shape: its shape.
        batch: its dimensions that are batches, ``None`` where it has no such dimension.
        mn: its dimension along m or n.
        k: its contracted dimension.
        moves: whether there is anything to be done.
    """

    shape: Shape
    batch: tuple[int | None, ...]
    mn: int
    k: int

    @property
    def is_k_major(self) -> bool:
        return self.k == len(self.shape) - 1

    @property
    def moves(self) -> bool:
        return not self.is_k_major or self.shape[self.k] % COPY_BYTES != 0

    @property
    def own_batch(self) -> tuple[int, ...]:
        """Its dimensions that are batches."""
        return tuple(dim for dim in self.batch if dim is not None)

    @property
    def axes(self) -> Axes:
        """Where batches, m or n, and k are, once it is as it should be."""
        if not self.moves or self.is_k_major:
            return (*self.batch, self.mn, self.k)
        own = self.own_batch
        places = (None if dim is None else own.index(dim) for dim in self.batch)
        return (*places, len(own), len(own) + 1)

    def result_shape(self) -> Shape:
        """Its shape then."""
        if not self.moves:
            return self.shape
        k = filled_up(self.shape[self.k])
        if self.is_k_major:
            return (*self.shape[:-1], k)
        return (*(self.shape[dim] for dim in self.own_batch), self.shape[self.mn], k)

    def made(self, x: jax.Array) -> jax.Array:
        """Returns the operand as it should be."""
        if not self.moves:
            return x
        if self.is_k_major:
            return _padded(x, filled_up(self.shape[self.k]))
        strides = row_major(self.shape)
        batch = [(self.shape[dim], strides[dim]) for dim in self.own_batch]
        step = _one_step(batch)
        if step is None or strides[self.mn] != 1:
            order = (*self.own_batch, self.mn, self.k)
            return _padded(jnp.transpose(x, order), filled_up(self.shape[self.k]))
        call = jax.ffi.ffi_call(
            _extension.TRANSPOSE_TARGET, jax.ShapeDtypeStruct(self.result_shape(), x.dtype)
        )
        return call(
            x,
            batch=np.int64(math.prod(extent for extent, _ in batch)),
            rows=np.int64(self.shape[self.k]),
            columns=np.int64(self.shape[self.mn]),
            in_ld=np.int64(strides[self.k]),
            in_batch_stride=np.int64(step),
            out_ld=np.int64(filled_up(self.shape[self.k])),
        )


def _padded(x: jax.Array, k: int) -> jax.Array:
    """Fills up the last dimension with zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, k - x.shape[-1])])


def _one_step(batch: Sequence[tuple[int, int]]) -> int | None:
    """Returns the step that leads through dimensions of these extents and steps, if one does."""
    batch = [(extent, step) for extent, step in batch if extent != 1]
    if not batch:
        return 0
    for (_, outer), (extent, step) in itertools.pairwise(batch):
        if outer != extent * step:
            return None
    return batch[-1][1]


def _of_gemm(shapes: Operands, spec: GemmSpec) -> tuple[GemmSpec, dict[str, Factor]]:
    """Returns the product as the kernel sees it, and its factors by name.

    Args:
        shapes: of the operands.
        spec: the product.
    """
    *batch, m, k = spec.axes.a
    factors = {"a": Factor(shapes.a, tuple(batch), m, k)}
    axes = {"a": factors["a"].axes}
    for name in ("b", "b2"):
        own = getattr(spec.axes, name)
        if own is not None:
            *batch, k, n = own
            factors[name] = Factor(getattr(shapes, name), tuple(batch), n, k)
            *batch, n, k = factors[name].axes
            axes[name] = (*batch, k, n)
    return spec.replace(axes=spec.axes._replace(**axes)), factors


def _of_ragged(own: Sequence[Any], spec: RaggedSpec) -> tuple[RaggedSpec, dict[str, Factor]]:
    """The same of a product over groups of rows."""
    lhs, rhs = own[:2]
    of_rhs = (1, 2) if spec.transpose_rhs else (2, 1)
    factors = {"a": Factor(lhs.shape, (), 0, 1), "b": Factor(rhs.shape, (0,), *of_rhs)}
    return dataclasses.replace(spec, transpose_rhs=True), factors


def of_product(
    own: Sequence[Any], product: GemmSpec | RaggedSpec
) -> tuple[Sequence[Any], Any, dict[str, Factor]]:
    """Returns operands and product as they will be, and what is to become of the factors."""
    if isinstance(product, RaggedSpec):
        made, factors = _of_ragged(own, product)
    else:
        shapes = shapes_of(product.unflatten(own[: len(product.operand_names)]))
        made, factors = _of_gemm(shapes, product)
    count = len(factors)
    then = [
        jax.ShapeDtypeStruct(factor.result_shape(), x.dtype)
        for factor, x in zip(factors.values(), own, strict=False)
    ]
    return [*then, *own[count:]], made, factors


def scale_steps(own: Sequence[Any], spec: CompiledSpec) -> list[tuple[Shape, Shape]]:
    """Returns of each scale by blocks the steps along ``(*batch, m, n)``, and those it ends with.

    The scales have the axes of the factors. What changes where batches fold are steps along them
    and along m; a scale of b moves along n by blocks.
    """
    if not spec.scaled:
        return []
    assert isinstance(spec.product, GemmSpec)
    axes = spec.product.axes

    def steps(scale: Any, axes: Sequence[int | None]) -> Shape:
        dense = row_major(scale.shape)
        return tuple(0 if axis is None else dense[axis] for axis in axes)

    a, b = steps(own[-2], axes.a), steps(own[-1], axes.b)
    return [((*a[:-1], 0), a[-1:]), ((*b[:-2], 0, 0), b[-2:])]
