"""Finds projections whose result attention reads; their kernels write the sequence last.

XLA computes the batched products of attention. It needs their operands ordered by sequence and
head, so it transposes the result of a projection:

- If XLA computes the projection itself, it transposes at once.
- If a kernel computes the projection, its result has the declared layout. XLA then transposes only
  after the rotary embedding, in a kernel that is several times slower.

A kernel of this package writes ``(batch, features, sequence)`` as fast as any other order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.transforms.graph import Node, Value
from jax_tcgemm.transforms.matrix_form import MatrixForm
from jax_tcgemm.transforms.neighbours import users_of
from jax_tcgemm.transforms.products import form_of, is_elementwise, is_product

# A kernel reads and writes vectors of this many 16-bit elements.
_VECTOR = 8
# Sequences up to this length, as in decoding, do not gain from it.
_SHORT = 64
# At most this many values between a projection and attention are followed.
_MOST_BETWEEN = 100
# Operations that keep the first two dimensions, in addition to views and element-wise ones.
_KEEPING = frozenset({"slice", "split", "concatenate", "broadcast_in_dim"})


def note_heads(items: Iterable[Any]) -> None:
    """Sets ``is_sequence_last`` of the products that are written with the sequence last."""
    items = list(items)
    users = users_of(items)
    for item in items:
        if is_product(item) and _has_sequence(item):
            item.is_sequence_last = _Way(item, users).leads_to_attention()


def _has_sequence(product: Node) -> bool:
    """Returns true for ``(batch, sequence, k)`` times one matrix, if the extents allow vectors.

    The sequence must be longer than ``_SHORT``.
    """
    form, (result,) = form_of(product), product.outputs
    if not isinstance(form, MatrixForm) or form.transpose_a or len(form.a_shape) != 3:
        return False
    sequence, features = form.a_shape[1], form.b_shape[-2 if form.transpose_b else -1]
    return (
        len(form.b_shape) == 2
        and len(result.shape) > 2
        and sequence > _SHORT
        and sequence % _VECTOR == features % _VECTOR == 0
    )


@dataclasses.dataclass
class _Way:
    """The operations that read a projection, up to attention.

    Attributes:
        product: the projection.
        users: the items that read each value.
    """

    product: Node
    users: Mapping[Value, Sequence[Any]]

    def leads_to_attention(self) -> bool:
        """Returns true if batched products read the projection, directly or after a rotation.

        The rotation is a rotary embedding.
        """
        (result,) = self.product.outputs
        waiting, seen = [result], {result}
        is_rotated = is_changed = False
        while waiting:
            value = waiting.pop()
            for user in self.users.get(value, ()):
                if not isinstance(user, Node) or user.context != self.product.context:
                    return False
                if user.name == "dot_general":
                    if not _reads_heads(user, value):
                        return False
                    continue
                if not self._keeps(user) or len(seen) > _MOST_BETWEEN:
                    return False
                is_rotated |= user.name == "concatenate"
                is_changed |= is_elementwise(user) and user.name != "convert_element_type"
                waiting += [x for x in user.outputs if x not in seen]
                seen.update(user.outputs)
        return len(seen) > 1 and (is_rotated or not is_changed)

    def _keeps(self, node: Node) -> bool:
        """Returns true if a node keeps batch and sequence as the first two dimensions."""
        if not (node.name in jaxprs.VIEWS or node.name in _KEEPING or is_elementwise(node)):
            return False
        if node.name == "concatenate" and node.params["dimension"] < 2:
            return False
        if node.name == "broadcast_in_dim" and node.params["broadcast_dimensions"][:2] != (0, 1):
            return False
        lead = self.product.outputs[0].shape[:2]
        return all(x.shape[:2] == lead and len(x.shape) > 2 for x in node.outputs)


def _reads_heads(product: Node, value: Value) -> bool:
    """Returns true if a product's batch dimensions are the value's batch and a later dimension.

    The later dimension comes after the sequence and is not the contraction dimension.
    """
    for side, each in enumerate(product.inputs):
        if each is value:
            (contracted, batch) = (pair[side] for pair in product.params["dimension_numbers"])
            is_ordered = 0 in batch and 1 not in batch and len(batch) > 1
            if not is_ordered or len(contracted) != 1 or len(value.shape) - len(batch) != 2:
                return False
    return True
