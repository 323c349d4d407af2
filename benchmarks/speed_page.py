"""Writes docs/speed.md from the recorded results.

Usage: python -P benchmarks/speed_page.py
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "speed.md"
RESULTS = {
    name: ROOT / "benchmarks" / "results" / f"{name.lower()}.json" for name in ("H200", "H100")
}

_SUITES = {
    "large": "large 16-bit products",
    "medium": "medium ones",
    "decode": "1 to 128 rows",
    "unaligned": "rows that are not aligned to 16 bytes",
    "batched": "batches",
    "epilogue": "bias, activation, C, residual",
    "medium_epilogue": "epilogues and functions of 128 to 512 rows",
    "medium_epilogue_tuned": "the same, measured while lowering",
    "gated": "gated products",
    "backward": "layers with gradients",
    "fused": "transformer blocks through `fuse`",
    "user_epilogue": "functions as epilogues",
    "ragged": "groups of rows",
    "f32_out": "float32 results of 16-bit operands",
    "tf32": "float32 by TF32",
    "precise": 'float32 at `precision="highest"`',
    "complex": "complex64",
    "fp8": "float8",
    "int8": "int8",
    "decode_8_bits": "1 to 128 rows of 8-bit operands",
    "weight_only": "weights in 4 and 8 bits, packed before or by the program",
    "random_untuned": "random products, by the model alone",
    "random": "random products, with the packaged tunings",
    "random_tuned": "random products, measured",
    "random_decode_untuned": "random products of 1 to 128 rows, by the model alone",
    "random_decode_tuned": "the same, measured",
}

_CASES = (
    *(("large", f"bf16 nn {size}x{size}x{size}") for size in (2048, 4096, 8192)),
    ("medium", "bf16 nn 1024x1024x1024"),
    ("medium", "bf16 nn 128x6144x4096"),
    ("medium", "bf16 nn 512x4096x4096"),
    ("decode", "bf16 nn 1x4096x4096"),
    ("decode", "bf16 nn 64x4096x4096"),
    ("epilogue", "bf16 nn 8192x14336x4096 bias+gelu"),
    ("epilogue", "bf16 nn 2048x4096x4096 c"),
    ("gated", "bf16 nn 2048x14336x4096 silu_glu"),
    ("ragged", "bf16 nn 8192x14336x4096 8 even groups"),
    ("unaligned", "bf16 nn 4097x4097x4097"),
    ("unaligned", "bf16 nn 333x777x1111"),
    ("batched", "bf16 nn 256x256x256 batch 256"),
    ("tf32", "f32 nn 4096x4096x4096"),
    ("precise", "f32 nn 4096x4096x4096 highest"),
)

_MODELS = {
    "gpt2 train": "GPT-2 XL, 4 layers, 4 x 1024 tokens (transformers), training",
    "bert train": "BERT large, 4 layers (transformers), training",
    "llama train": "Llama, 3 layers of 2048 / 5504, 4 x 1024 tokens (transformers), training",
    "llama prefill": "the same Llama, prefill",
    "llama decode 16": "the same Llama, cache of 1024, decoding, batch 16",
    "llama decode 1": "the same, batch 1",
    "mistral decode 16": "Mistral 7B, 2 layers, cache of 1024 (transformers), decoding, batch 16",
    "vit train": "ViT base, 6 layers (linen), training",
    "vit scanned train": "the same ViT, scanned with remat",
    "gqa train": "Gemma 3 1B, 4 layers, grouped queries (NNX), training",
    "gqa decode 16": "the same Gemma, cache of 1024, decoding, batch 16",
    "gqa decode 1": "the same, batch 1",
    "llama3 decode 16": "Llama 3 8B, 2 layers, cache of 1024 (NNX), decoding, batch 16",
    "equinox train": "transformer of Equinox's layers, training",
    "haiku train": "transformer of Haiku's layers, training",
    "keras train": "transformer of Keras's layers, training",
    "unet train": "UNet of Stable Diffusion 1.5, 64 x 64 (diffusers), training",
    "experts train": "eight experts by `lax.ragged_dot`, 2 layers, training",
}

_INTRODUCTION = """\
# Speed

`python -P benchmarks/speed_page.py` writes this page from the records of an
[H200](../benchmarks/results/h200.json) and of an [H100](../benchmarks/results/h100.json).
All figures are XLA's time divided by ours: above 1, this package is faster.
[benchmarks/README.md](../benchmarks/README.md) says what the suites are and how to measure them.

- Products: kernel times by CUPTI, medians. Ours and XLA's best for the same result, with
  autotuning, alternate in one process; buffers rotate past the L2 cache.
- The packaged tunings are active, unless the table says otherwise. Where they name XLA, both times
  are XLA's.
- Random products come from a generator that no tuning and no fit has seen.
- XLA's choices differ from run to run, and GPUs from one another: means of large products by 0.03,
  those of medium ones by 0.07 and of gated ones by 0.05.
"""


_OF_MODELS = """\
## Unchanged public models through `fuse` (H200)

bfloat16, all defaults, an empty cache, a process for each model. Steps are wall times, `jax.jit`
alone and `fuse` by turns, at commit {commits}. "First" marks what ran first in its process. Its
first result includes the start of cuBLAS and of XLA's autotuner, 1 to 2 s. Temporaries are the
memory that a step needs beside arguments and results. [fusion.md](fusion.md#how-fast) explains the
figures.
"""

# As docs/themed_pictures.py expects it; GitHub shows it as well.
_PICTURE = """\
<picture>
  <source media="(prefers-color-scheme: dark)" srcset="speed-dark.svg">
  <img alt="TFLOP/s of gemm and of XLA for each case of the suites" src="speed-light.svg">
</picture>
"""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _commits(results: dict[str, Any], suite: str) -> str:
    default = results["header"]["commit"]
    rows = [row for row in results["rows"] if row["suite"] == suite]
    return ", ".join(sorted({row.get("commit", default) for row in rows}))


def _suites(results: dict[str, Any]) -> Iterator[Sequence[str]]:
    for suite, text in _SUITES.items():
        rows = [row for row in results["rows"] if row["suite"] == suite and row["ratio"]]
        if rows:
            ratios = [row["ratio"] for row in rows]
            mean, few = statistics.geometric_mean(ratios), sum(ratio < 0.97 for ratio in ratios)
            numbers = (f"{mean:.2f}", f"{min(ratios):.3f}", f"{few} of {len(ratios)}")
            yield (f"`{suite}`", text, *numbers, _commits(results, suite))


def _cases(results: dict[str, Any]) -> Iterator[Sequence[str]]:
    found = {(row["suite"], row["case"]): row for row in results["rows"]}
    for key in _CASES:
        row = found[key]
        times = (f"{row['us']:.1f}", f"{row['xla_us']:.1f}", f"{row['tflops']:.0f}")
        sustained = row.get("sustained_ratio")
        yield (row["case"], *times, f"{row['ratio']:.2f}", f"{sustained:.2f}" if sustained else "")


_WAYS = ("jit", "fuse")


def _models(results: dict[str, Any]) -> Iterator[Sequence[str]]:
    found = {row["case"]: row for row in results["rows"] if row["suite"] == "models"}
    for case, text in _MODELS.items():
        row = found.pop(case)
        times = (f"{row['jit_ms']:.2f}", f"{row['fuse_ms']:.2f}", f"{row['ratio']:.2f}")
        first = [
            f"{row[f'{way}_first_s']:.1f}" + ", first" * (row["first"] == way) for way in _WAYS
        ]
        temporaries = [f"{row[f'{way}_temporaries'] * 1e-6:.0f}" for way in _WAYS]
        yield (text, *times, *first, *temporaries)
    assert not found, f"no description of {[*found]}"


def page() -> str:
    """Returns the text of the page."""
    parts = [_INTRODUCTION]
    of = {name: json.loads(path.read_text()) for name, path in RESULTS.items()}
    for name, results in of.items():
        header = results["header"]
        versions = header["versions"]
        parts.append(
            f"## {name}\n\nRecorded on {header['date'][:10]}, JAX {versions['jax']}, CUDA "
            f"{versions['cuda']}, driver {header['gpu']['driver_version']}.\n"
        )
        head = ("suite", "what", "geometric mean", "worst", "below 0.97", "commit")
        parts.append(_table(head, list(_suites(results))))
    head = ("product", "us", "XLA us", "TFLOP/s", "XLA / ours", "under sustained load")
    parts.append(
        "## Some products (H200)\n\nLayouts of `a` and `b`: `n` is row-major, `t` is transposed.\n"
    )
    parts.append(_PICTURE)
    parts.append(_table(head, list(_cases(of["H200"]))))
    parts.append(_OF_MODELS.format(commits=_commits(of["H200"], "models")))
    head = ("step", "`jit`, ms", "`fuse`, ms", "ratio", "first result, s: `jit`", "`fuse`")
    head += ("temporaries, MB: `jit`", "`fuse`")
    parts.append(_table(head, list(_models(of["H200"]))))
    return "\n".join(parts)


def main() -> int:
    """Writes the page."""
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
