"""An estimate of the least time that a GPU needs for a product."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from jax_tcgemm.problem.arithmetic import INPUT_DTYPES
from jax_tcgemm.tuning.lookup import Product

# The time from a kernel's start to its first load, plus the time from its last load to its end.
_START_SECONDS = 1e-6
# The shares of the peak memory and tensor-core throughput that the fastest kernels reach.
_MEMORY_REACHED, _TENSOR_REACHED = 0.9, 0.83
# Operations per cycle of one SM of compute capability 9.0, times the bytes of an element.
_TENSOR_OPERATIONS = 8192


def least_seconds(product: Product, size: int, device: Mapping[str, Any]) -> float:
    """Returns the least time of a product, or 0 if the GPU's peaks are not known.

    The result is the longer of the memory time (all operands and results once) and the time of the
    multiplications, plus the start of a kernel.

    Args:
        product: the product, as the lowering describes it.
        size: bytes of the operands and results.
        device: the result of ``_core.device_properties``.
    """
    clock, bandwidth = device.get("clock_rate", 0), device.get("memory_bandwidth", 0)
    if device["compute_capability"] != 90 or not (clock and bandwidth):
        return 0.0
    fields = json.loads(product.problem)
    products = fields.get("weights", 2 if fields["op"] == "gated" else 1)
    operations = 2.0 * products * math.prod(fields.get("batch", []))
    operations *= fields["m"] * fields["n"] * fields["k"]
    # With an algorithm preset, the product may convert its operands first.
    multiplied = INPUT_DTYPES.get(fields["algorithm"]) or product.types[0].dtype
    peak = device["sm_count"] * clock * _TENSOR_OPERATIONS / multiplied.itemsize
    memory = size / (_MEMORY_REACHED * bandwidth)
    return _START_SECONDS + max(operations / (_TENSOR_REACHED * peak), memory)
