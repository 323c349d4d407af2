"""The program of one device: where its parts lie, and how it joins them with others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.lowering.overlapped import Exchange
from jax_tcgemm.partitioning.mesh import Digits
from jax_tcgemm.partitioning.rules import Call
from jax_tcgemm.partitioning.work import Plan

# The axis along which all devices of a program lie.
AXIS = "devices"


@dataclasses.dataclass(frozen=True)
class Shard:
    """The division as a device sees it while it computes its part.

    Attributes:
        call: the custom call.
        plan: how the call is divided.
    """

    call: Call
    plan: Plan

    def _groups(self, digits: Digits) -> list[list[int]]:
        groups = self.plan.devices.groups(digits)
        if not self.call.groups:
            return groups
        return [[own[i] for i in group] for own in self.call.groups for group in groups]

    def _value(self, digits: Digits) -> jax.Array:
        """Returns the number that this device's digits form, int32."""
        values = np.zeros(self.call.devices, np.int32)
        own = self.plan.devices.values(digits)
        for group in self.call.groups or (tuple(range(self.call.devices)),):
            values[list(group)] = own
        return lax.dynamic_index_in_dim(values, lax.axis_index(AXIS), keepdims=False)

    def start(self, name: str, *, after_sum: bool = False) -> jax.Array | int:
        """Returns where this device's part of a dimension begins, int32.

        Args:
            name: name of the dimension.
            after_sum: whether the dimension is that of a result, which the sum may divide further.
        """
        digits, beyond = self.plan.layout[name], self.plan.scattered.get(name, ())
        part = self.plan.part(name)
        start = self._value(digits) * part if digits else 0
        if beyond and after_sum:
            start = start + self._value(beyond) * self.plan.part(name, after_sum=True)
        return start

    def left(self, name: str) -> jax.Array | int:
        """Returns how far a dimension reaches beyond the beginning of this device's part."""
        return self.plan.work.extents[name] - self.start(name)

    def without_padding(
        self, x: jax.Array, axis: int, name: str, filler: jax.Array | None = None
    ) -> jax.Array:
        """Replaces elements beyond the end of a dimension; XLA leaves anything there.

        Args:
            x: the part of this device.
            axis: the axis of the dimension.
            name: the name of the dimension.
            filler: what replaces them, of extent 1 along the axis; by default zeros.
        """
        if self.plan.is_even(name):
            return x
        index = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(
            index < self.left(name), x, jnp.zeros_like(x) if filler is None else filler
        )

    def total(self, x: jax.Array) -> jax.Array:
        """Adds up the devices' parts of a sum.

        Each device gets the whole sum, or its part if the plan scatters the sum.

        Args:
            x: the part of this device.
        """
        digits = self.plan.summed_digits()
        for axis, name in enumerate(self.plan.work.product.dims):
            own = self.plan.scattered.get(name, ()) if name is not None else ()
            if own and set(own) <= set(digits):
                digits = tuple(digit for digit in digits if digit not in own)
                parts = self.plan.devices.parts(own)
                x = lax.pad(
                    x,
                    x.dtype.type(0),
                    [(0, -x.shape[axis] % parts if i == axis else 0, 0) for i in range(x.ndim)],
                )
                x = lax.psum_scatter(
                    x,
                    AXIS,
                    scatter_dimension=axis,
                    axis_index_groups=self._groups(own),
                    tiled=True,
                )
        return lax.psum(x, AXIS, axis_index_groups=self._groups(digits)) if digits else x

    def gathered(self, x: jax.Array) -> jax.Array:
        """Gathers the operand that the plan leaves divided.

        Args:
            x: the shard of this device.
        """
        plan = self.plan
        axis = plan.work.operands[plan.gathered_operand].dims.index(plan.rows)
        groups = self._groups(plan.gathered)
        return lax.all_gather(x, AXIS, axis=axis, axis_index_groups=groups, tiled=True)

    def exchange(self, names: Sequence[str]) -> Exchange:
        """Returns the devices that exchange rows beside the product.

        Args:
            names: the names of a result's dimensions.
        """
        groups = self._groups(self.plan.exchanged)
        numbers = tuple(number for group in groups for number in group)
        role = names.index(self.plan.rows) if self.plan.rows in names else 0
        return Exchange(numbers, len(groups[0]), role, lax.axis_index(AXIS))

    def joined(self, x: jax.Array, names: Sequence[str], join: str) -> jax.Array:
        """Joins the devices' parts of a reduction over dimensions of the result.

        Args:
            x: the part of this device.
            names: names of the dimensions.
            join: "Sum", "Maximum" or "Minimum".
        """
        plan = self.plan
        digits = tuple(
            digit for name in names for digit in (*plan.layout[name], *plan.scattered.get(name, ()))
        )
        if not digits:
            return x
        reduce = {"Sum": lax.psum, "Maximum": lax.pmax, "Minimum": lax.pmin}[join]
        reduce = functools.partial(reduce, axis_name=AXIS, axis_index_groups=self._groups(digits))
        if join == "Sum" or not jnp.issubdtype(x.dtype, jnp.floating):
            return reduce(x)
        # NaN has to stay, but all-reduces of floating-point numbers may drop it.
        return _of_ordered(reduce(_ordered(x, negative_nan=join == "Minimum")), x.dtype)

    def halves_together(self, x: jax.Array, axis: int, name: str) -> jax.Array:
        """Gives a device its parts of both halves of an array that is divided as one.

        The halves lie side by side, so the first of ``p`` devices have parts of one half, the last
        have parts of the other. Counted in halves of parts, device ``d`` has numbers ``2 d`` and
        ``2 d + 1`` and needs ``d`` and ``p + d``.

        Args:
            x: a device's part.
            axis: axis along which the halves lie.
            name: name of the dimension that each half is.
        """
        groups = self._groups(self.plan.layout[name])
        p = len(groups[0])
        half = x.shape[axis] // 2
        has = lax.split(x, (half, half), axis=axis)

        def received(wanted: int, slot: int) -> jax.Array:
            pairs = [
                (group[(wanted * p + d) // 2], group[d])
                for group in groups
                for d in range(slot, p, 2)
            ]
            return lax.ppermute(has[slot], AXIS, pairs)

        # Each part comes from one slot, depending on whether the device's number is even. The other
        # slot gives 0.
        return jnp.concatenate([received(i, 0) + received(i, 1) for i in (0, 1)], axis=axis)


def _ordered(x: jax.Array, *, negative_nan: bool) -> jax.Array:
    """Returns integers in the order of floating-point numbers, NaN below or above all others."""
    wide = x.astype(jnp.float32)
    nan = np.int32(-0x400000 if negative_nan else 0x7FC00000)
    bits = jnp.where(jnp.isnan(wide), nan, lax.bitcast_convert_type(wide, jnp.int32))
    return _flipped(bits)


def _of_ordered(ordered: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the numbers that ``_ordered`` was given."""
    return lax.bitcast_convert_type(_flipped(ordered), jnp.float32).astype(dtype)


def _flipped(bits: jax.Array) -> jax.Array:
    """Reverses the order of negative integers, whose bits are those of their magnitudes."""
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
