"""Writes checkpoints of 4-bit weights by the formats' public descriptions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

MODULE = "model.layers.0.mlp.up_proj"
# Column of eight that nibble i holds.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: np.ndarray, axis: int, columns: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Packs eight codes along an axis into an int32; nibble i holds the code columns[i]."""
    codes = np.moveaxis(codes.astype(np.uint32), axis, -1)
    missing = -codes.shape[-1] % 8
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    packed = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    for i, column in enumerate(columns):
        packed |= codes[..., column::8] << np.uint32(4 * i)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


class Drawn:
    """A drawn weight, `(k, n)`: codes, zero points, scales, and the array they stand for."""

    def __init__(self, rng, k, n, group, *, symmetric, lowest=0, dtype=np.float16):
        groups = 1 if group == -1 else k // group
        self.group, self.symmetric, self.shape = group, symmetric, (k, n)
        self.codes = rng.integers(0, 16, (k, n))
        zeros = rng.integers(lowest, lowest + 16, (groups, n))
        self.zeros = np.full_like(zeros, 8) if symmetric else zeros
        self.scales = rng.uniform(0.5, 2, (groups, n)).astype(dtype)
        of = np.arange(k) // (k // groups)
        self.array = (self.codes - self.zeros[of]).astype(np.float32) * self.scales.astype(
            np.float32
        )[of]


def gptq(x: Drawn, form: str = "gptq", **config: Any) -> tuple[dict, dict]:
    offset = 1 if form == "gptq" else 0
    return {
        "qweight": words(x.codes, 0),
        "qzeros": words(x.zeros - offset, 1),
        "scales": x.scales,
        "g_idx": (np.arange(x.shape[0]) // (x.shape[0] // len(x.scales))).astype(np.int32),
    }, {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": x.group,
        "sym": x.symmetric,
        "desc_act": False,
        "checkpoint_format": form,
        **config,
    }


def gptq_v2(x: Drawn, **config: Any) -> tuple[dict, dict]:
    return gptq(x, "gptq_v2", **config)


def awq(x: Drawn, **config: Any) -> tuple[dict, dict]:
    return {
        "qweight": words(x.codes, 1, AWQ_COLUMNS),
        "qzeros": words(x.zeros, 1, AWQ_COLUMNS),
        "scales": x.scales,
    }, {
        "quant_method": "awq",
        "bits": 4,
        "group_size": x.group,
        "zero_point": True,
        "version": "gemm",
        **config,
    }


def compressed(x: Drawn, **config: Any) -> tuple[dict, dict]:
    own = {
        "weight_packed": words(x.codes.T, 1),
        "weight_scale": np.ascontiguousarray(x.scales.T),
        "weight_shape": np.array(x.shape[::-1], np.int64),
    }
    if not x.symmetric:
        own["weight_zero_point"] = words(x.zeros.T, 0)
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": x.symmetric,
        "strategy": "channel" if x.group == -1 else "group",
        "group_size": None if x.group == -1 else x.group,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return own, {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        **config,
    }


def named(tensors: dict[str, np.ndarray], module: str = MODULE) -> dict[str, np.ndarray]:
    return {f"{module}.{name}": value for name, value in tensors.items()}


def save(folder, tensors, config, name="model.safetensors") -> None:
    """Writes a file of tensors and `config.json`."""
    from safetensors import numpy as safetensors

    safetensors.save_file(tensors, folder / name)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
