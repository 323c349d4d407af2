"""Names of the kernels for packed weights, and which of them a measurement compares.

A row is called ``sm90_w4_16x64x256_s5_b2``: bits of the weight, extents of a tile along m, n and k,
stages, blocks on a multiprocessor. ``"ROW/splits=2"`` divides k into two parts.
"""

from __future__ import annotations

import dataclasses

from jax_tcgemm.kernels import packed
from jax_tcgemm.kernels.names import NO_ROWS, XLA, read_config
from jax_tcgemm.kernels.packed import TOKENS, PackedRow

# The configuration that dequantizes the weight by a kernel, for an ordinary product.
DEQUANTIZED = "dequantized"
# A measurement compares at most this many configurations, the untuned one included.
MOST = 8
# Dequantizing is compared from this many rows on, and rows up to twice ``MOST_ROWS``.
_LEAST_DEQUANTIZED = 257
_MOST_MEASURED = 2 * packed.MOST_ROWS
# The numbers of parts of k that the kernels support.
_SPLITS = (1, 2, 4, 8)


def _name(bits: int, row: PackedRow) -> str:
    tile = f"{row.tokens}x{64 * row.row_blocks}x{row.stage_k}"
    return f"sm90_w{bits}_{tile}_s{row.stages}_b{row.blocks_on_sm}"


_KEYS = [(bits, tokens) for bits in (4, 8) for tokens in TOKENS]
# The bits and configuration of each row, without a split of k.
BY_NAME = {_name(key[0], row): (key[0], row) for key in _KEYS for row in packed.rows_of(*key)}


def config_of(bits: int, row: PackedRow | None) -> str:
    """Returns the value of ``config=`` that names a configuration; ``None`` dequantizes."""
    if row is None:
        return DEQUANTIZED
    return _name(bits, row) + (f"/splits={row.split_k}" if row.split_k > 1 else "")


def find(config: str | None, bits: int, weights: int = 1) -> PackedRow | None:
    """Returns the configuration that ``config=`` names, ``None`` if there is no such row.

    Args:
        config: a value of ``config=``.
        bits: of a value of the weight.
        weights: number of weights whose products a function gets.
    """
    name, splits = read_config(config or "")
    of_bits, row = BY_NAME.get(name, (0, None))
    if row is None or of_bits != bits or splits not in _SPLITS or row.row_blocks % weights:
        return None
    return dataclasses.replace(row, split_k=splits)


def can_be(config: str | None, bits: int, weights: int = 1) -> bool:
    """Checks if a measured configuration is for such products, as ``find`` does."""
    return config in (None, XLA, DEQUANTIZED) or find(config, bits, weights) is not None


def accepted(bits: int, weights: int = 1) -> str:
    """Returns the part of an error message that lists what ``config=`` accepts."""
    rows = [name for name in BY_NAME if find(name, bits, weights) is not None]
    others = ", ".join(map(repr, (*NO_ROWS, DEQUANTIZED)))
    return f"{others}, or one of {rows}, also with '/splits=2', '/splits=4' or '/splits=8'"


def candidates(
    bits: int,
    shape: tuple[int, int, int],
    group: int,
    *,
    count: int = 1,
    weights: int = 1,
    experts: int = 0,
) -> list[str]:
    """Returns the configurations that are worth timing, the untuned one first.

    Args:
        bits: of a value of the weight.
        shape: m, n and k; m counts the rows of all groups.
        group: number of rows of the weight that share a scale.
        count: number of such products in a call.
        weights: number of weights whose products a function gets.
        experts: number of groups of rows that have a weight each, 0 without such groups.
    """
    m, n, k = shape
    if experts:
        untuned = packed.choose_ragged(bits, shape, group, experts)
        m, count = packed.rows_of_group(m, experts), min(experts, m)
    elif weights > 1:
        untuned = packed.choose_pair(bits, m, n, k, group)
    else:
        untuned = packed.choose(bits, m, n, k, group, count)
    if m > _MOST_MEASURED or (untuned is None and weights > 1):
        return [config_of(bits, untuned)]
    possible = [
        packed.with_split(row, m, n * weights, k, count)
        for tokens in _near(m, is_ragged=experts > 0)
        for row in packed.rows_of(bits, tokens, weights)
    ]
    first = untuned or possible[0]
    near = [*_with_parts(first, 2, 0.5), *possible]
    near += [row for each in possible for row in _with_parts(each, 2)]
    fitting = [row for row in near if row.takes(group, k)]
    names = [config_of(bits, row) for row in (untuned, *fitting)]
    if m >= _LEAST_DEQUANTIZED:
        names.insert(2, DEQUANTIZED)
    return list(dict.fromkeys(names))[:MOST]


def _with_parts(row: PackedRow, *factors: float) -> list[PackedRow]:
    """Returns a configuration with other numbers of parts of k, those that kernels support."""
    parts = [int(factor * row.split_k) for factor in factors]
    return [dataclasses.replace(row, split_k=each) for each in parts if each in _SPLITS]


def _near(m: int, *, is_ragged: bool) -> list[int]:
    """Returns the rows of tiles that are near ``m``, the most likely first."""
    at = TOKENS.index(packed.tokens_for(m))
    if is_ragged:
        return [TOKENS[i] for i in (at, at - 1, at + 1) if 0 <= i < len(TOKENS)]
    # With 9 to 16 rows, tiles of 8 rows read the weight twice and took 1.3 times as long.
    return [TOKENS[i] for i in (at, at - 1)] if at > 1 else [TOKENS[at]]
