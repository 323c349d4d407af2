"""Quantized weights in the linear layers of Flax, linen and NNX.

This module needs Flax, so the package does not import it:
``from jax_tcgemm.adapters.flax_dense import dense_options, pack_linears``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.linen.dtypes
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_tcgemm.api.dot_general import dot_general
from jax_tcgemm.api.quantization import quantize
from jax_tcgemm.quantized.packed import PackedWeight, is_weight, pack


def promote_dtype(*args: Any, dtype: DTypeLike | None = None, inexact: bool = True) -> Any:
    """Flax's ``promote_dtype`` that leaves quantized weights as they are.

    Pass it as ``promote_dtype=`` to a layer, beside ``dot_general=jax_tcgemm.dot_general``.

    Args:
        *args: arrays, quantized weights and ``None`` (linen), or one tuple of these (NNX).
        dtype: dtype of the arrays in the result; ``None`` means the common one.
        inexact: whether the common dtype must be that of floating-point or complex numbers.

    Returns:
        A list; the arrays among ``args`` have the same dtype.
    """
    given = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    arrays = [None if is_weight(x) else x for x in given]
    promoted = flax.linen.dtypes.promote_dtype(*arrays, dtype=dtype, inexact=inexact)
    return [x if is_weight(x) else y for x, y in zip(given, promoted, strict=True)]


def dense_options(
    dtype: DTypeLike = jnp.int4,
    group: int | None = 128,
    *,
    kernel_init: Callable[..., jax.Array] | None = None,
) -> dict[str, Any]:
    """Returns the arguments with which ``linen.Dense`` takes packed weights.

    ``nn.Dense(features, **dense_options(jnp.int4))`` has a ``PackedWeight`` as its parameter
    ``kernel``. ``init`` draws, quantizes and packs it; ``pack(quantize(kernel, dtype, tile=(group,
    1)))`` makes one of trained weights.

    Args:
        dtype: dtype of the weights, as in ``quantize``.
        group: number of consecutive k that share a scale; ``None`` means all.
        kernel_init: initializer of the weights before they are quantized; ``None`` means Flax's.

    Returns:
        ``kernel_init``, ``dot_general`` and ``promote_dtype``.
    """
    drawn = nn.linear.default_kernel_init if kernel_init is None else kernel_init

    def packed(*args: Any, **options: Any) -> PackedWeight:
        return _packed(drawn(*args, **options), dtype, group)

    return {"kernel_init": packed, "dot_general": dot_general, "promote_dtype": promote_dtype}


class QuantizedParam(nnx.Param):
    """An ``nnx.Param`` with a ``PackedWeight`` or a ``Quantized``, for ``nnx.Linear``."""

    def __getitem__(self, key: Any) -> Any:
        if key is not ...:
            return super().__getitem__(key)
        # Older Flax has the property alone, which newer Flax deprecates.
        return self.get_value() if hasattr(self, "get_value") else self.value


def pack_linears(
    model: nnx.Module,
    dtype: DTypeLike = jnp.int4,
    group: int | None = 128,
    *,
    predicate: Callable[[tuple[Any, ...], nnx.Linear], bool] | None = None,
) -> nnx.Module:
    """Quantizes and packs the weights of each ``nnx.Linear`` of a model, in place.

    Args:
        model: the model.
        dtype: dtype of the weights, as in ``quantize``.
        group: number of consecutive k that share a scale; ``None`` means all.
        predicate: function of a layer's path and of the layer, which says whether to pack its
            weight; ``None`` means all.

    Returns:
        The model.

    Raises:
        ValueError: ``group`` does not divide k.
    """
    for path, module in nnx.iter_graph(model):
        if not isinstance(module, nnx.Linear) or isinstance(module.kernel, QuantizedParam):
            continue
        if predicate is None or predicate(path, module):
            module.kernel = QuantizedParam(_packed(module.kernel[...], dtype, group))
            module.dot_general = dot_general
            module.promote_dtype = promote_dtype
    return model


def _packed(weight: jax.Array, dtype: DTypeLike, group: int | None) -> PackedWeight:
    tile = (-1 if group is None else group, 1)
    return pack(quantize(weight, dtype, tile=tile, scale_dtype=_scale_dtype(weight.dtype)))


def _scale_dtype(dtype: Any) -> Any:
    """Returns the dtype of scales for a weight of this dtype."""
    return dtype if dtype in (jnp.bfloat16, jnp.float16) else jnp.float32
