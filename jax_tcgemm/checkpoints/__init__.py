"""Readers for checkpoints with 4-bit weights: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.checkpoints import formats
from jax_tcgemm.checkpoints.scheme import refused, scheme_of, schemes
from jax_tcgemm.checkpoints.tensors import Tensors, config_of

__all__ = ["load"]


def load(
    path: str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
    *,
    keep: Callable[[str], bool] | None = None,
    packed: bool = True,
) -> dict[str, Any]:
    """Reads the ``safetensors`` files of a checkpoint whose weights have 4 bits.

    The function reads these formats:

    - GPTQ (``quant_method="gptq"``, ``checkpoint_format`` ``gptq`` or ``gptq_v2``),
    - AWQ (``"awq"``, ``version="gemm"``),
    - compressed-tensors (``"compressed-tensors"``, ``format="pack-quantized"``), for weights alone.

    No value is rounded: the dequantized weights are those that the file stands for. Weights with
    ``sym=True`` (``symmetric``) become int4 without zero points, and others uint4 with zero points.
    Scales keep their dtype.

    The reader raises an error for groups that are permuted along k (``g_idx`` of ``desc_act=True``)
    and for other numbers of bits.

    Args:
        path: one ``safetensors`` file, or a folder with one or several of them.
        config: the content of ``config.json``, or of its ``quantization_config``. ``None`` means
            the file ``config.json`` in the folder.
        keep: function of a name in the result, which says whether to read it; ``None`` means all.
        packed: whether weights are returned as ``PackedWeight``, for the kernels, or as
            ``Quantized``.

    Returns:
        A dictionary. The weight of the quantized module ``"model.layers.0.mlp.up_proj"`` has the
        name ``"model.layers.0.mlp.up_proj.weight"`` and the shape ``(k, n)``: inputs, then outputs.
        All other tensors are arrays under their own names and in their own shapes; the files store
        linear weights without quantization as ``(n, k)``.

    Raises:
        ImportError: ``safetensors`` is not installed.
        FileNotFoundError: there is no such file, or no ``config.json``.
        ValueError: a key of the configuration or a tensor is missing, or its value is not accepted.
            The error names the key and the value.

    Example:
        >>> params = checkpoints.load(folder)
        >>> y = gemm(x, params["model.layers.0.mlp.up_proj.weight"])
    """
    where, config = config_of(path) if config is None else ("config", config)
    found = schemes(where, config)
    form = formats.FORMATS[found[0].method]
    result: dict[str, Any] = {}
    with Tensors(path) as tensors:
        modules = form.modules(tensors)
        for name in tensors:
            module = form.module_of(name, modules)
            key = name if module is None else formats.joined(module, "weight")
            if keep is not None and not keep(key):
                continue
            if module is None:
                result[key] = _array(name, tensors[name])
            elif key in tensors:
                raise ValueError(f"the checkpoint has {key!r} twice, quantized and not")
            elif key not in result:
                scheme = scheme_of(where, module, found)
                result[key] = formats.weight(module, tensors, scheme, packed)
    return result


def _array(name: str, x: np.ndarray) -> jax.Array:
    """Returns a tensor as an array; integers keep their values, floats are rounded as in JAX."""
    made = jnp.asarray(x)
    if x.dtype.kind in "iu" and (wrong := np.asarray(made) != x).any():
        accepted = f"values of {made.dtype}, unless jax_enable_x64 is set"
        raise refused("checkpoint", name, int(x[wrong][0]), accepted)
    return made
