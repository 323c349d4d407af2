"""A program over several devices, and its meshes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

BF16, F32 = jnp.bfloat16, jnp.float32

TARGET = "jax_tcgemm_partitioned"


@dataclasses.dataclass(frozen=True)
class Program:
    """A computation, and the shardings of its operands and results.

    Attributes:
        ours: the computation by this package.
        theirs: the same computation by ``jax.numpy``.
        shapes: the operands' shapes.
        specs: the operands' shardings.
        out: the result's sharding; with ``None`` the compiler chooses.
        dtype: the operands' dtype.
        gradients: the operands that have gradients.
        sizes: the operands that are group sizes and are not drawn.
        grads_as_operands: whether each gradient has its operand's sharding.
    """

    ours: Callable[..., jax.Array]
    theirs: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    out: P | None = None
    dtype: Any = F32
    gradients: tuple[int, ...] = (0, 1)
    sizes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    grads_as_operands: bool = False


@functools.cache
def mesh_of(shape: tuple[int, ...] = (4, 2), axis_type: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices("cpu")[: math.prod(shape)]
    names = ("x", "y", "z")[: len(shape)]
    return jax.make_mesh(shape, names, (axis_type,) * len(shape), devices=devices)


def uneven(ours, theirs, shapes, specs, sizes=None, **options):
    """Slices operands within the program, so that their shards have different sizes."""

    def cut(function):
        return lambda *args: function(
            *(lax.slice(x, (0,) * x.ndim, shape) for x, shape in zip(args, shapes, strict=True))
        )

    padded = tuple(
        shape if sizes and i in sizes else tuple(-(-extent // 4) * 4 for extent in shape)
        for i, shape in enumerate(shapes)
    )
    return Program(cut(ours), cut(theirs), padded, specs, sizes=sizes or {}, **options)
