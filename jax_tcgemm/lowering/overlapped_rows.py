"""Rows in the order in which devices exchange them, for products with batch dimensions.

The devices divide one dimension of the rows, such as the sequence in ``(batch, sequence, k)``. The
call of ``overlapped.py`` takes the rows of each device together. If an outer dimension has several
elements, this module brings the rows into that order and back. XLA cancels the orders of a product
and of the next one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.lowering import overlapped, reference
from jax_tcgemm.lowering.overlapped import Exchange
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, matrix_last, result_axes

_Results = list[jax.Array] | str


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The dimensions of the rows, ``(*batch, m)``, one of which the devices divide.

    Attributes:
        extents: their extents.
        role: the one that the devices divide.
        peers: the number of devices.
    """

    extents: tuple[int, ...]
    role: int
    peers: int

    @property
    def _split(self) -> tuple[int, ...]:
        own = self.extents[self.role] // self.peers
        return (*self.extents[: self.role], self.peers, own, *self.extents[self.role + 1 :])

    @property
    def of_device(self) -> tuple[int, ...]:
        """The extents of the rows of one device."""
        return (*self._split[: self.role], *self._split[self.role + 1 :])

    def by_device(self, x: jax.Array) -> jax.Array:
        """Returns the rows of ``(*extents, rest)`` device by device, ``(rows, rest)``."""
        rest = x.shape[len(self.extents) :]
        parts = jnp.moveaxis(x.reshape(*self._split, *rest), self.role, 0)
        return parts.reshape(-1, *rest)

    def in_order(self, x: jax.Array) -> jax.Array:
        """Returns what ``by_device`` was given."""
        rest = x.shape[1:]
        parts = x.reshape(self.peers, *self.of_device, *rest)
        return jnp.moveaxis(parts, 0, self.role).reshape(*self.extents, *rest)


def gathered_product(x: Operands, spec: GemmSpec, exchange: Exchange) -> _Results:
    """Does ``overlapped.gathered_product`` with rows in any order; same arguments."""
    rows = _rows(x, spec, exchange, exchange.peers)
    if rows is None:
        return overlapped.gathered_product(x, spec, exchange)
    flat = _flat(x, spec, rows)
    if isinstance(flat, str):
        return flat
    a = lax.transpose(x.a, matrix_last(spec.axes.a))
    own = flat[0]._replace(a=a.reshape(-1, a.shape[-1]))
    results = _product(overlapped.gathered_product, own, flat[1], exchange)
    return results if isinstance(results, str) else list(map(rows.in_order, results))


def scattered_product(x: Operands, spec: GemmSpec, exchange: Exchange) -> _Results:
    """Does ``overlapped.scattered_product`` with rows in any order; same arguments."""
    rows = _rows(x, spec, exchange, 1)
    if rows is None:
        return overlapped.scattered_product(x, spec, exchange)
    flat = _flat(x, spec, rows)
    if isinstance(flat, str):
        return flat
    a = rows.by_device(lax.transpose(x.a, matrix_last(spec.axes.a)))
    results = _product(overlapped.scattered_product, flat[0]._replace(a=a), flat[1], exchange)
    if isinstance(results, str):
        return results
    return [d.reshape(*rows.of_device, d.shape[-1]) for d in results]


def _product(
    product: Callable[..., _Results], x: Operands, spec: GemmSpec, exchange: Exchange
) -> _Results:
    return product(x, spec, dataclasses.replace(exchange, role=0))


def _rows(x: Operands, spec: GemmSpec, exchange: Exchange, times: int) -> _Rows | None:
    """Returns the rows, or ``None`` if those of a device follow each other already.

    Args:
        x: the operands.
        spec: the primitive's parameters.
        exchange: the devices.
        times: how many times as long the divided dimension is as in ``a``.
    """
    shape = [x.a.shape[axis] for axis in spec.axes.a[:-1]]
    if math.prod(shape[: exchange.role]) == 1:
        return None
    shape[exchange.role] *= times
    return _Rows(tuple(shape), exchange.role, exchange.peers)


def _flat(x: Operands, spec: GemmSpec, rows: _Rows) -> tuple[Operands, GemmSpec] | str:
    """Returns the operands with one dimension of rows, device by device; ``a`` stays as it is."""
    batch = spec.batch_ndim
    axes: dict[str, tuple[int | None, ...] | None] = {"a": (0, 1)}
    values: dict[str, jax.Array] = {}
    for name in ("b", "b2", "bias", "bias2", "alpha", "beta", "column_scale"):
        own = getattr(spec.axes, name)
        if own is not None and any(axis is not None for axis in own[:batch]):
            return f"{name} differs between rows"
        axes[name] = own and own[batch:]
    for name in ("c", "c2", "row_scale"):
        value = getattr(x, name)
        if value is not None:
            own = result_axes(name, getattr(spec.axes, name))
            columns = 1 if own[-1] is None else value.shape[own[-1]]
            whole = jnp.broadcast_to(reference.aligned(value, own), (*rows.extents, columns))
            values[name] = rows.by_device(whole)
            axes[name] = (0, 1) if name != "row_scale" else (0,)
            if name == "row_scale":
                values[name] = values[name][:, 0]
    return x._replace(**values), spec.replace(axes=spec.axes._replace(**axes))
