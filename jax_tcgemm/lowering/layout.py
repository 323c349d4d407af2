"""8-bit operands as ``wgmma`` takes them: k contiguous, rows of multiples of 16 bytes.

Operands in this layout are read in place. A pass of our own transposes operands that are contiguous
along m or n; XLA's transposition is many times slower. Operands with other row lengths are padded.
Exception: kernels for few rows read a B that is contiguous along n in place.
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
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.lowering.custom_call import shapes_of
from jax_tcgemm.problem.alignment import COPY_BYTES
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Axes, Shape, row_major


def filled_up(k: int) -> int:
    """Returns ``k`` rounded up to a multiple of what TMA addresses."""
    return -(-k // COPY_BYTES) * COPY_BYTES


@dataclasses.dataclass(frozen=True)
class Factor:
    """One operand and the change of layout that it needs.

    Attributes:
        shape: its shape.
        batch: its batch dimensions, ``None`` where it has no such dimension.
        mn: its dimension along m or n.
        k: its contracted dimension.
        stays: whether it is read in place in any layout.
        moves: whether it has to be copied.
    """

    shape: Shape
    batch: tuple[int | None, ...]
    mn: int
    k: int
    stays: bool = False

    @property
    def is_k_major(self) -> bool:
        return self.k == len(self.shape) - 1

    @property
    def moves(self) -> bool:
        return not (self.stays or (self.is_k_major and self.shape[self.k] % COPY_BYTES == 0))

    @property
    def own_batch(self) -> tuple[int, ...]:
        """The batch dimensions that it has."""
        return tuple(dim for dim in self.batch if dim is not None)

    @property
    def axes(self) -> Axes:
        """The axes of the batch, of m or n, and of k after the change of layout."""
        if not self.moves or self.is_k_major:
            return (*self.batch, self.mn, self.k)
        own = self.own_batch
        places = (None if dim is None else own.index(dim) for dim in self.batch)
        return (*places, len(own), len(own) + 1)

    def result_shape(self) -> Shape:
        """Returns the shape after the change of layout."""
        if not self.moves:
            return self.shape
        k = filled_up(self.shape[self.k])
        if self.is_k_major:
            return (*self.shape[:-1], k)
        return (*(self.shape[dim] for dim in self.own_batch), self.shape[self.mn], k)

    def made(self, x: jax.Array) -> jax.Array:
        """Returns the operand in the new layout."""
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
    """Pads the last dimension with zeros to ``k`` elements."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, k - x.shape[-1])])


def _one_step(batch: Sequence[tuple[int, int]]) -> int | None:
    """Returns the stride that walks dimensions of these extents and strides, if one does."""
    batch = [(extent, step) for extent, step in batch if extent != 1]
    if not batch:
        return 0
    for (_, outer), (extent, step) in itertools.pairwise(batch):
        if outer != extent * step:
            return None
    return batch[-1][1]


# Up to this many rows of A, kernels read weights in place. Measured on an H200
# (lab/README.md).
_FEW_ROWS = 64


def _streams(rows: int, weights: Sequence[Factor], config: str | None) -> bool:
    """Checks if a kernel for few rows reads the weights in place, along n.

    Args:
        rows: rows of A for each weight.
        weights: one or two weights.
        config: the requested row.
    """
    fits = all(
        b.mn == len(b.shape) - 1
        and b.shape[b.mn] % COPY_BYTES == 0
        and b.shape[b.k] % COPY_BYTES == 0
        for b in weights
    )
    if not fits or config == kernel_names.XLA:
        return False
    if config is not None:
        return kernel_names.by_name(kernel_names.read_config(config)[0]).streams_b
    return rows <= _FEW_ROWS


def _rows_by_weight(a: Factor, weight: Factor) -> int:
    """Returns how many rows one weight multiplies, including batches of A that share it."""
    shared = zip(a.batch, weight.batch, strict=True)
    rows = (a.shape[of_a] for of_a, of_b in shared if of_b is None and of_a is not None)
    return a.shape[a.mn] * math.prod(rows)


def of_product(
    own: Sequence[Any], spec: GemmSpec, may_stream: bool
) -> tuple[Sequence[Any], GemmSpec, dict[str, Factor]]:
    """Returns operands and product after the change of layout, and the factors by name.

    Args:
        own: operands of the product, and any others that go with it.
        spec: the product.
        may_stream: whether kernels for few rows may read weights in place.
    """
    shapes = shapes_of(spec.unflatten(own[: len(spec.operand_names)]))
    *batch, m, k = spec.axes.a
    a = Factor(shapes.a, tuple(batch), m, k)
    weights = {}
    for name in ("b", "b2"):
        places = getattr(spec.axes, name)
        if places is not None:
            *batch, k, n = places
            weights[name] = Factor(getattr(shapes, name), tuple(batch), n, k)
    rows = _rows_by_weight(a, weights["b"])
    if spec.is_grouped:  # the rows of each group if all groups have one size
        rows = -(-rows // max(1, shapes.group_sizes[0]))
    if may_stream and _streams(rows, tuple(weights.values()), spec.config):
        weights = {name: dataclasses.replace(b, stays=True) for name, b in weights.items()}
    axes = {"a": a.axes}
    for name, b in weights.items():
        *batch, n, k = b.axes
        axes[name] = (*batch, k, n)
    factors = {"a": a, **weights}
    then = [
        jax.ShapeDtypeStruct(factor.result_shape(), x.dtype)
        for factor, x in zip(factors.values(), own, strict=False)
    ]
    made = spec.replace(axes=spec.axes._replace(**axes))
    return [*then, *own[len(factors) :]], made, factors


def scale_steps(own: Sequence[Any], spec: CompiledSpec) -> list[tuple[Shape, Shape]]:
    """Returns, for each block scale, its strides along ``(*batch, m, n)`` and its last strides.

    The scales have the axes of the factors. Folding batches changes only the strides along the
    batches and along m. A scale of b moves along n by blocks.
    """
    if not spec.scaled:
        return []
    axes = spec.product.axes

    def steps(scale: Any, axes: Sequence[int | None]) -> Shape:
        dense = row_major(scale.shape)
        return tuple(0 if axis is None else dense[axis] for axis in axes)

    a, b = steps(own[-2], axes.a), steps(own[-1], axes.b)
    return [((*a[:-1], 0), a[-1:]), ((*b[:-2], 0, 0), b[-2:])]
