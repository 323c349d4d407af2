"""About the least time that a GPU can take for a product."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from jax_tcgemm.problem.arithmetic import INPUT_DTYPES
from jax_tcgemm.tuning.lookup import Product

# From a kernel's start to its first load, and from its last to its end.
_START_SECONDS = 1e-6
# The shares of the peaks of memory and tensor cores that the fastest kernels reach.
_MEMORY_REACHED, _TENSOR_REACHED = 0.9, 0.83
# Operations of an SM of compute capability 9.0 in a cycle, times the bytes of an element.
_TENSOR_OPERATIONS = 8192


def least_seconds(product: Product, size: int, device: Mapping[str, Any]) -> float:
    """Returns the longer of reading and writing everything once and multiplying, and a start.

    0 where the GPU's peaks are not known.

    Args:
        product: as lowering has it.
        size: bytes of the operands and results.
        device: as ``_core.device_properties`` describes it.
    """
    clock, bandwidth = device.get("clock_rate", 0), device.get("memory_bandwidth", 0)
    if device["compute_capability"] != 90 or not (clock and bandwidth):
        return 0.0
    fields = json.loads(product.problem)
    products = 2 if fields["op"] == "gated" else 1
    operations = 2.0 * products * math.prod(fields.get("batch", []))
    operations *= fields["m"] * fields["n"] * fields["k"]
    # A preset may convert the operands before they are multiplied.
    multiplied = INPUT_DTYPES.get(fields["algorithm"]) or product.types[0].dtype
    peak = device["sm_count"] * clock * _TENSOR_OPERATIONS / multiplied.itemsize
    memory = size / (_MEMORY_REACHED * bandwidth)
    return _START_SECONDS + max(operations / (_TENSOR_REACHED * peak), memory)
