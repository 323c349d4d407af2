"""Draws cases of the suites ``random`` and ``random_decode``: products that nobody tuned for.

Prints the cases in the format of ``suite.json``. The cases there have seeds that no fit has seen.

    python benchmarks/draw_cases.py random --seed 20261124 --count 100
    python benchmarks/draw_cases.py random_decode --seed 20261127 --count 60
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

# The largest products take 1 ms.
_MOST_PRODUCTS = 6e11


def _extent(rng: np.random.Generator, least: int, most: int) -> int:
    """Draws a multiple of 8, log-uniform."""
    return max(least, int(np.exp(rng.uniform(np.log(least), np.log(most))) // 8 * 8))


def draw_case(rng: np.random.Generator) -> dict[str, Any]:
    """Draws a case: 16-bit or TF32, single or batched, with or without an epilogue."""
    kind = rng.choice(["product", "epilogue", "batch", "tf32"], p=[0.4, 0.3, 0.15, 0.15])
    most = 2048 if kind == "batch" else 16384
    while True:
        m, n, k = _extent(rng, 16, most), _extent(rng, 64, most), _extent(rng, 64, most // 2)
        batch = int(rng.choice([2, 4, 8, 16, 64, 256])) if kind == "batch" else 1
        if m * n * k * batch < _MOST_PRODUCTS and batch * m * n < 2**28:
            break
    case: dict[str, Any] = {"m": m, "n": n, "k": k}
    case["dtype"] = "f32" if kind == "tf32" else str(rng.choice(["bf16", "f16"]))
    case["layout"] = str(rng.choice(["nn", "nt", "tn"]))
    if kind == "epilogue":
        case["epilogue"] = str(rng.choice(["bias", "bias+gelu"]))
    if kind == "batch":
        case["batch"] = batch
    return case


def draw_decode_case(rng: np.random.Generator) -> dict[str, Any]:
    """Draws a case of few rows, as when a model generates tokens one by one."""
    m = int(np.exp(rng.uniform(0, np.log(128.999))))
    case: dict[str, Any] = {"m": m, "n": _extent(rng, 512, 32768), "k": _extent(rng, 512, 32768)}
    case["dtype"] = str(rng.choice(["bf16", "f16", "f32"], p=[0.7, 0.2, 0.1]))
    case["layout"] = str(rng.choice(["nn", "nt", "tn", "tt"]))
    kind = rng.choice(["none", "out", "bias", "bias+gelu", "bias+silu", "gelu"], p=_DECODE_KINDS)
    if kind == "out" and case["dtype"] != "f32":
        case["out"] = "f32"
    elif kind not in ("none", "out"):
        case["epilogue"] = str(kind)
    return case


_DECODE_KINDS = (0.35, 0.15, 0.2, 0.1, 0.1, 0.1)
_DRAWS = {"random": draw_case, "random_decode": draw_decode_case}


def main() -> None:
    """Prints the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=_DRAWS)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    rows = [_DRAWS[args.suite](rng) for _ in range(args.count)]
    print(",\n".join(f"  {json.dumps(row)}" for row in rows))


if __name__ == "__main__":
    main()
