"""``PtqProvider``: the products of qwix's quantized models by the kernels of this package.

This module needs qwix, so the package does not import it:
``from jax_tcgemm.adapters.qwix_ptq import PtqProvider``, then
``qwix.quantize_model(model, PtqProvider(rules))``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import qwix  # pyright: ignore[reportMissingImports]
from flax import nnx
from jax.typing import DTypeLike

from jax_tcgemm.api.dot_general import dot_general as dot_general_of_arrays
from jax_tcgemm.quantized.arrays import dequantize, has_table, is_quantized
from jax_tcgemm.quantized.packed import PackedWeight, pack

_PACKED_DTYPES = ("int4", "uint4", "int8", "float8_e4m3fn")


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes ``qwix.dot_general`` by ``jax_tcgemm.dot_general``.

    A quantized activation beside a ``PackedWeight`` is dequantized to the dtype of its scale. qwix
    dequantizes operands of the type ``"nf4"``.

    Args:
        lhs: array, ``QArray`` or ``PackedWeight``; only one operand may be packed.
        rhs: the same.
        dimension_numbers: as in ``lax.dot_general``.
        precision: as in ``lax.dot_general``.
        preferred_element_type: dtype of the result; ``None`` means the common dtype of activations
            and scales, as in qwix.
        out_sharding: as in ``lax.dot_general``.

    Returns:
        The product, as ``jax_tcgemm.dot_general`` returns it.

    Raises:
        TypeError: as ``jax_tcgemm.dot_general`` does.
        ValueError: as ``jax_tcgemm.dot_general`` does.
    """
    dtype = _result_dtype(lhs, rhs) if preferred_element_type is None else preferred_element_type
    lhs, rhs = (qwix.dequantize(x) if has_table(x) else x for x in (lhs, rhs))
    if any(isinstance(x, PackedWeight) for x in (lhs, rhs)):
        lhs, rhs = (dequantize(x, x.scale.dtype) if is_quantized(x) else x for x in (lhs, rhs))
    return dot_general_of_arrays(
        lhs, rhs, dimension_numbers, precision, dtype, out_sharding=out_sharding
    )


def einsum(subscripts: str, lhs: Any, rhs: Any, **options: Any) -> jax.Array:
    """Computes ``qwix.einsum`` of two operands by ``jax_tcgemm.dot_general``.

    Args:
        subscripts: as in ``jnp.einsum``.
        lhs: as in ``dot_general``.
        rhs: as in ``dot_general``.
        **options: other arguments of ``qwix.einsum``.

    Returns:
        The result of the einsum, of the dtype of ``dot_general``.

    Raises:
        TypeError: as ``dot_general`` does.
        ValueError: as ``dot_general`` does.
    """
    own = {"preferred_element_type": _result_dtype(lhs, rhs), "_qwix_dot_general": dot_general}
    return qwix.einsum(subscripts, lhs, rhs, **own | options)


def _result_dtype(*operands: Any) -> Any:
    """Returns the common dtype of operands, where that of a quantized one is its scales'.

    qwix's products have this dtype. 8-bit scales count as bfloat16.
    """
    dtypes = [jnp.dtype((x.scale if is_quantized(x) else x).dtype) for x in operands]
    return jnp.result_type(*(t if t.itemsize > 1 else jnp.bfloat16 for t in dtypes))


class PtqProvider(qwix.PtqProvider):
    """``qwix.PtqProvider`` whose products and einsums are those of this package.

    Args:
        rules: as in ``qwix.PtqProvider``.
        **options: other arguments of ``qwix.PtqProvider``.
    """

    def __init__(self, rules: Sequence[qwix.QuantizationRule], **options: Any):
        own = {"_dot_general_fn": dot_general, "_einsum_fn": einsum}
        super().__init__(rules, **own | options)


def pack_params(params: Any, predicate: Callable[[Any], bool] | None = None) -> Any:
    """Packs the weights of a model that qwix has quantized.

    The function packs matrices ``(k, n)`` of int4, uint4, int8 and float8_e4m3fn whose scales are
    those of columns, or of blocks along k. All other leaves stay as they are: the provider takes
    both. qwix's wrapper ``WithAux`` stays around a packed weight, so that ``PtqProvider`` accepts
    the tree.

    Args:
        params: the parameters of a Flax linen model (unboxed), or a Flax NNX model, which is
            changed in place.
        predicate: function of a ``WithAux``, which says whether to pack it; ``None`` means all.

    Returns:
        The parameters, or the model, with packed weights.
    """
    if isinstance(params, nnx.Module):
        _pack_modules(params, predicate)
        return params
    packed = functools.partial(_packed, predicate=predicate, box=None)
    return jax.tree.map(packed, params, is_leaf=_is_with_aux)


def _pack_modules(model: nnx.Module, predicate: Any) -> None:
    for _, module in nnx.iter_graph(model):
        if not isinstance(module, nnx.Module):
            continue
        for name, value in list(vars(module).items()):
            if _is_with_aux(value):
                setattr(module, name, _packed(value, predicate=predicate, box=nnx.Param))


def _is_with_aux(x: Any) -> bool:
    """Checks if this is qwix's ``WithAux``, which qwix does not export."""
    return hasattr(x, "array") and hasattr(x, "how")


def _packed(x: Any, *, predicate: Any, box: Any) -> Any:
    """Returns a ``WithAux`` with a packed weight; all else is returned as it is."""
    if not _is_with_aux(x) or not is_quantized(x.array) or has_table(x.array):
        return x
    array = jax.tree.map(_unboxed, x.array, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    if not _is_packable(array) or (predicate is not None and not predicate(x)):
        return x
    packed = pack(array)
    return x.replace(array=packed if box is None else jax.tree.map(box, packed))


def _unboxed(x: Any) -> Any:
    return x[...] if isinstance(x, nnx.Variable) else x


def _is_packable(array: Any) -> bool:
    """Checks if this is a matrix whose scales belong to columns or to blocks along k."""
    shape = jnp.shape(array.qvalue)
    has_type = jnp.dtype(array.qvalue.dtype).name in _PACKED_DTYPES
    return has_type and len(shape) == 2 and jnp.shape(array.scale)[1] == shape[1]
