"""The kernels for packed weights: which are compiled, and which one computes a product.

``choose`` knows the sizes alone. The configurations were measured on an H200
(lab/packed_weights.md).
"""

from __future__ import annotations

import dataclasses
import math

# Extent of a tile of the layout, along n and along k.
_TILE = 64
# The rows that a tile may have.
TOKENS = (8, 16, 32, 64, 128)
# A cluster has at most this many blocks.
MOST_SPLIT = 8
# Number of multiprocessors of a Hopper GPU.
_SMS = 132
# With more tiles than this, k is not divided for few rows.
_ENOUGH_TILES = 100
# A part of k has at least this many, and in tiles of 128 rows the second number.
_LEAST_K = 1792
_LEAST_K_OF_MANY = 1024
# From this many rows on, it is faster to dequantize the weight and to multiply by that.
MOST_ROWS = 512
# Twice as many rows as a group has in the mean fit into a tile, up to this many.
_RAGGED_ROWS = 64
# The rows of a weight that may share a scale; longer groups must be whole stages.
GROUPS = (32, 64, 128)
_FORMATS = {"int4": "kInt4", "uint4": "kUint4", "int8": "kInt8", "float8_e4m3fn": "kE4m3"}
_TYPES = {"bfloat16": "kBf16", "float16": "kF16", "float32": "kF32"}


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """A configuration; the fields are those of ``PackedConfig`` in ``cuda/packed_config.h``.

    Attributes:
        tokens: rows of the left operand in a tile.
        row_blocks: blocks of 64 columns of the weight in a tile.
        k_blocks: blocks of 64 k in a stage.
        stages: stages of the ring.
        split_k: blocks of a cluster, which divide k.
        blocks_on_sm: blocks for which the registers of a multiprocessor suffice.
    """

    tokens: int
    row_blocks: int
    k_blocks: int
    stages: int
    split_k: int
    blocks_on_sm: int

    @property
    def stage_k(self) -> int:
        return _TILE * self.k_blocks

    @property
    def sums_are_scaled(self) -> bool:
        """True if scales multiply the sums, which rounds nothing, and not the weights."""
        return self.tokens <= 16

    def takes(self, group: int, k: int) -> bool:
        """Checks if the configuration computes products with such groups along ``k``.

        Args:
            group: number of rows of the weight that share a scale.
            k: contracted extent.
        """
        if self.split_k > -(-k // self.stage_k):
            return False
        if self.row_blocks * self.k_blocks >= _MOST_SCALED and group < _LEAST_GROUP_OF_MANY:
            return False
        return group in (*GROUPS, k) or group % self.stage_k == 0


# (bits, tokens): the configuration without a split of k.
_ROWS = {
    (4, 8): PackedRow(8, 1, 4, 5, 1, 4),
    (4, 16): PackedRow(16, 1, 4, 5, 1, 2),
    (4, 32): PackedRow(32, 2, 4, 3, 1, 2),
    (4, 64): PackedRow(64, 2, 4, 3, 1, 1),
    (4, 128): PackedRow(128, 2, 2, 4, 1, 1),
    (8, 8): PackedRow(8, 1, 2, 5, 1, 4),
    (8, 16): PackedRow(16, 1, 4, 3, 1, 2),
    (8, 32): PackedRow(32, 2, 2, 4, 1, 2),
    (8, 64): PackedRow(64, 2, 4, 3, 1, 1),
    (8, 128): PackedRow(128, 2, 2, 4, 1, 1),
}

# The same for weights of more than this many blocks of 64 columns.
_LARGE = {
    (4, 8): (200, PackedRow(8, 2, 4, 4, 1, 2)),
    (4, 16): (400, PackedRow(16, 2, 4, 4, 1, 2)),
    (8, 16): (264, PackedRow(16, 1, 2, 4, 1, 4)),
    (8, 64): (264, PackedRow(64, 4, 2, 4, 1, 1)),
}
# The same for two weights whose products a function gets. A tile has as many blocks of each.
_PAIRS = {
    (4, 8): PackedRow(8, 2, 4, 4, 1, 2),
    (4, 16): PackedRow(16, 2, 4, 4, 1, 1),
    (4, 64): PackedRow(64, 4, 4, 3, 1, 1),
    (8, 8): PackedRow(8, 2, 2, 5, 1, 2),
    (8, 16): PackedRow(16, 2, 2, 4, 1, 2),
    (8, 64): PackedRow(64, 4, 2, 4, 1, 1),
}
# Configurations that only a measurement chooses. Some of them also take groups that the others do
# not take.
_OTHERS = {
    (4, 8): (PackedRow(8, 1, 4, 5, 1, 2),),
    (4, 16): (PackedRow(16, 1, 4, 5, 1, 4),),
    (8, 8): (PackedRow(8, 1, 4, 3, 1, 2),),
}
# Tiles of this many blocks of 64 x 64 have no shared memory for the scales of smaller groups.
_MOST_SCALED = 16
_LEAST_GROUP_OF_MANY = 64
# The multiprocessors that clusters of more than two blocks use. Groups of multiprocessors are no
# multiples of large clusters, so that some multiprocessors remain idle.
_CLUSTERED = 112
# Twice as many parts of k must take at most this share of the time.
_LESS_TIME = 0.8
# The time of a tile of 64 rows as a share of that of 128 rows: 0.66 as measured, and a margin.
_HALF_A_TILE = 0.73


def choose(bits: int, m: int, n: int, k: int, group: int, count: int = 1) -> PackedRow | None:
    """Returns the configuration for a product, ``None`` if no kernel is faster than two steps.

    Args:
        bits: of a value of the weight.
        m: number of rows of the left operand.
        n: number of columns of the weight.
        k: contracted extent, a multiple of 64.
        group: number of rows of the weight that share a scale.
        count: number of such products in a call.
    """
    if m > MOST_ROWS:
        return None
    row = _of_tokens(bits, tokens_for(m), (m, n, k), group, count)
    if row.tokens < TOKENS[-1]:
        return row
    # Tiles of 64 rows may have fewer rows to spare, and fill the GPU better.
    smaller = _of_tokens(bits, TOKENS[-2], (m, n, k), group, count)
    ours, theirs = (
        _waves(each, _tiles(each, m, n, count), each.split_k) for each in (smaller, row)
    )
    is_faster = _HALF_A_TILE * ours <= theirs and smaller.takes(group, k)
    return smaller if is_faster else row


def _of_tokens(
    bits: int, tokens: int, shape: tuple[int, int, int], group: int, count: int
) -> PackedRow:
    m, n, k = shape
    row = _ROWS[bits, tokens]
    many, large = _LARGE.get((bits, tokens), (math.inf, row))
    row = large if m <= tokens and -(-n // _TILE) * count > many else row
    return with_split(_that_takes(group, k, row, *rows_of(bits, tokens)), m, n, k, count)


def rows_of(bits: int, tokens: int, weights: int = 1) -> tuple[PackedRow, ...]:
    """Returns all configurations without a split of k, the first of the table first.

    Args:
        bits: of a value of the weight.
        tokens: rows of the left operand in a tile.
        weights: number of weights whose products a function gets.
    """
    key = bits, tokens
    listed = [_ROWS[key], *_OTHERS.get(key, ())]
    if key in _LARGE:
        listed.insert(1, _LARGE[key][1])
    if key in _PAIRS:
        listed.insert(0 if weights > 1 else len(listed), _PAIRS[key])
    return tuple(dict.fromkeys(row for row in listed if row.row_blocks % weights == 0))


def _that_takes(group: int, k: int, *rows: PackedRow) -> PackedRow:
    """Returns the first configuration that takes such groups; the first one if none does."""
    return next((row for row in rows if row.takes(group, k)), rows[0])


def tokens_for(m: int) -> int:
    """Returns the rows in a tile of the left operand for ``m`` rows."""
    return next((each for each in TOKENS if m <= each), TOKENS[-1])


def with_split(row: PackedRow, m: int, n: int, k: int, count: int) -> PackedRow:
    """Returns a configuration with as many parts of k as fill the GPU."""
    tiles = _tiles(row, m, n, count)
    pays = _pays_for_few_rows if row.sums_are_scaled else _pays
    least = _LEAST_K_OF_MANY if row.tokens == TOKENS[-1] else _LEAST_K
    split = 1
    while pays(row, tiles, 2 * split) and 2 * split * least <= k and split < MOST_SPLIT:
        split *= 2
    return dataclasses.replace(row, split_k=split)


def _pays_for_few_rows(row: PackedRow, tiles: int, parts: int) -> bool:
    """Checks if the tiles leave room for a block and a half on each multiprocessor."""
    del row
    return tiles <= _ENOUGH_TILES and 2 * parts * tiles <= 3 * _SMS


def _pays(row: PackedRow, tiles: int, parts: int) -> bool:
    """Checks if ``parts`` take less time than half as many, by the waves of blocks."""
    return _waves(row, tiles, parts) <= _LESS_TIME * _waves(row, tiles, parts // 2)


def _waves(row: PackedRow, tiles: int, parts: int) -> float:
    """Returns the number of waves of blocks, as if each block had all of k."""
    at_once = min(row.blocks_on_sm, 2) * (_SMS if parts <= 2 else _CLUSTERED)
    return -(-tiles * parts // at_once) / parts


def _tiles(row: PackedRow, m: int, n: int, count: int) -> int:
    """Returns the number of tiles of ``count`` products."""
    return -(-n // (_TILE * row.row_blocks)) * -(-m // row.tokens) * count


def choose_ragged(
    bits: int, shape: tuple[int, int, int], group: int, experts: int
) -> PackedRow | None:
    """Returns the configuration for groups of rows that have a weight each, as ``choose`` does.

    The sizes of the groups are unknown. A tile has room for twice their mean up to 64 rows, so that
    few weights are read twice, and beyond that for the mean.

    Args:
        bits: of a value of a weight.
        shape: m, n and k; m counts the rows of all groups.
        group: number of rows of a weight that share a scale.
        experts: number of weights.
    """
    m, n, k = shape
    if -(-m // experts) > MOST_ROWS:
        return None
    return choose(bits, rows_of_group(m, experts), n, k, group, min(experts, m))


def rows_of_group(m: int, experts: int) -> int:
    """Returns the number of rows for which a tile has room if ``experts`` groups have ``m``."""
    mean = -(-m // experts)
    return min(m, max(mean, min(2 * mean, _RAGGED_ROWS)))


def choose_pair(bits: int, m: int, n: int, k: int, group: int) -> PackedRow | None:
    """Returns the configuration for two weights whose products one function gets.

    A tile has as many blocks of each weight. The arguments are those of ``choose``, for one weight.
    """
    if m > MOST_ROWS:
        return None
    row = _that_takes(group, k, *rows_of(bits, tokens_for(m), 2))
    return with_split(row, m, 2 * n, k, 1)


# Stands for a configuration of the pass that dequantizes a weight; the same numbers as in
# ``cuda/ffi/unpack.cc``.
UNPACK = PackedRow(8, 1, 2, 2, 1, 1)


def program(
    row: PackedRow,
    qtype: str,
    activation: str,
    scale: str,
    output: str,
    *,
    zeros: bool,
    group: int | None,
    ragged: bool = False,
    weights: int = 1,
) -> str:
    """Returns the initialiser of a ``PackedConfig``, as ``source_of`` of ``dispatch/packed.cc``.

    Args:
        row: the configuration.
        qtype: type of the weight's values.
        activation: dtype of the left operand.
        scale: dtype of the scales.
        output: dtype of the result.
        zeros: whether there are zero points.
        group: number of rows of the weight that share a scale; ``None`` for all.
        ragged: whether groups of rows of the left operand have a weight each.
        weights: number of weights whose products a function gets.
    """
    types = ", ".join(f"ElementType::{_TYPES[each]}" for each in (activation, scale, output))
    numbers = (min(group or row.stage_k, row.stage_k), *dataclasses.astuple(row))
    listed = ", ".join(map(str, numbers))
    if ragged or weights > 1:
        listed += f", {str(ragged).lower()}"
    if weights > 1:
        listed += f", {weights}"
    return f"{{PackedFormat::{_FORMATS[qtype]}, {types}, {str(zeros).lower()}, {listed}}}"
