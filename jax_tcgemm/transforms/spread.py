"""``Spread``: how reshapes, transposes and broadcasts spread a stored array over another one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.transforms.graph import Node

# Operations that leave each element in its place.
_ALIKE = frozenset({"convert_element_type"}) | jaxprs.VARYING

# Extents and strides, outermost first. The stride is that of the stored array, in elements; 0 means
# that the same element is repeated.
_Factors = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the elements of a stored array are spread over another array.

    Attributes:
        axes: for each axis of the other array, its factors. Their extents multiply to that of the
            axis; extents of 1 are left out.
    """

    axes: tuple[_Factors, ...]

    @staticmethod
    def of(shape: Sequence[int]) -> Spread:
        """Returns the spread of an array over itself."""
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        pairs = zip(shape, strides, strict=True)
        return Spread(tuple([((n, stride),) if n != 1 else () for n, stride in pairs]))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([math.prod(n for n, _ in factors) for factors in self.axes])

    def reshaped(self, shape: Sequence[int]) -> Spread | None:
        """Returns the spread after a reshape; ``None`` if a factor is divided unevenly."""
        waiting = _merged([factor for factors in self.axes for factor in factors])[::-1]
        axes = []
        for extent in shape:
            own: list[tuple[int, int]] = []
            while (missing := extent // math.prod(n for n, _ in own)) > 1:
                n, stride = waiting.pop()
                taken = math.gcd(n, missing)
                if taken != min(n, missing):
                    return None
                own.append((taken, stride * (n // taken)))
                if taken < n:
                    waiting.append((n // taken, stride))
            axes.append(tuple(own))
        return Spread(tuple(axes))

    def after(self, node: Node) -> Spread | None:
        """Returns the spread over the result of an operation that moves or repeats elements."""
        if node.name in jaxprs.VIEWS:
            order = node.params["dimensions"] if node.name == "reshape" else None
            ordered = self if order is None else Spread(tuple([self.axes[i] for i in order]))
            return ordered.reshaped(node.outputs[0].shape)
        if node.name == "transpose":
            return Spread(tuple([self.axes[i] for i in node.params["permutation"]]))
        if node.name != "broadcast_in_dim":
            return self if node.name in _ALIKE else None
        shape, where = node.params["shape"], node.params["broadcast_dimensions"]
        if len(node.inputs) > 1:  # a shape that only the program knows
            return None
        axes: list[_Factors] = [()] * len(shape)
        for axis, own in zip(where, self.axes, strict=True):
            axes[axis] = own
        return Spread(tuple(axes)).broadcast(shape)

    def broadcast(self, shape: Sequence[int]) -> Spread:
        """Returns the spread over ``shape``, which repeats axes of extent 1, and scalars."""
        pairs = zip(self.axes or ((),) * len(shape), shape, strict=True)
        return Spread(tuple([own or (((n, 0),) if n != 1 else ()) for own, n in pairs]))

    @property
    def is_in_blocks(self) -> bool:
        """Checks if each axis repeats elements only within consecutive blocks of equal size."""
        are_repeated = [[stride == 0 for _, stride in factors] for factors in self.axes]
        return all(repeats == sorted(repeats) for repeats in are_repeated)

    def applied(self, x: jax.Array) -> jax.Array:
        """Returns the stored array in the order of the other, without its repetitions."""
        kept = [[f for f in factors if f[1]] for factors in self.axes]
        flat = [factor for factors in kept for factor in factors]
        order = sorted(range(len(flat)), key=lambda i: -flat[i][1])
        x = x.reshape([flat[i][0] for i in order]).transpose(np.argsort(order))
        return x.reshape([math.prod(n for n, _ in factors) for factors in kept])


def _merged(factors: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the factors with each two merged that one stride covers."""
    merged: list[tuple[int, int]] = []
    for n, stride in factors:
        if merged and merged[-1][1] == n * stride:
            n *= merged.pop()[0]
        merged.append((n, stride))
    return merged
