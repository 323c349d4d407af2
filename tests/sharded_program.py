"""What a program over several devices is, and the devices."""

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
    """What is computed, and where its operands and results lie.

    Attributes:
        ours: by this package.
        theirs: the same by ``jax.numpy``.
        shapes: of the operands.
        specs: their shardings.
        out: that of the result; ``None`` leaves it to the compiler.
        dtype: of the operands.
        gradients: of which operands there are some.
        sizes: the operands that are not drawn but are sizes of groups.
        grads_as_operands: whether each gradient is to lie as its operand does.
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
    """Cuts operands within the program, so that their parts are of different sizes."""

    def cut(function):
        return lambda *args: function(
            *(lax.slice(x, (0,) * x.ndim, shape) for x, shape in zip(args, shapes, strict=True))
        )

    padded = tuple(
        shape if sizes and i in sizes else tuple(-(-extent // 4) * 4 for extent in shape)
        for i, shape in enumerate(shapes)
    )
    return Program(cut(ours), cut(theirs), padded, specs, sizes=sizes or {}, **options)
