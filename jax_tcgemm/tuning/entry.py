"""One measured product: its fastest configuration, and whether that is still valid."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from typing import Any

from jax_tcgemm import _extension
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels import packed_configs

# Values of ``config=`` that a measurement may choose and that name no row.
_NO_ROWS = (None, kernel_names.XLA, packed_configs.DEQUANTIZED)


@dataclasses.dataclass(frozen=True)
class Entry:
    """The measured choice for one problem on one kind of device.

    Attributes:
        config: a value for ``config=``; ``None`` if nothing was faster than the untuned choice by
            more than noise.
        seconds: the time of ``config``.
        untuned_seconds: the time of the untuned choice.
        xla_seconds: the time of XLA's own composition including the epilogue; ``None`` if it was
            not timed.
        rows: by name, digests of the rows that ``config`` names, of the kernel table or of the
            kernels for packed weights.
    """

    config: str | None
    seconds: float
    untuned_seconds: float
    xla_seconds: float | None
    rows: tuple[tuple[str, str], ...] = ()

    @classmethod
    def measured(
        cls, config: str | None, seconds: float, untuned_seconds: float, xla_seconds: float | None
    ) -> Entry:
        """Returns an entry with the digests of this build's rows."""
        names = [] if config in _NO_ROWS else [kernel_names.read_config(config)[0]]
        rows = tuple((name, row_digest(name)) for name in names)
        return cls(config, seconds, untuned_seconds, xla_seconds, rows)

    @property
    def is_current(self) -> bool:
        """True if this build has the named rows and they have not changed since the measurement."""
        return all(
            _extension.has_row(name) and row_digest(name) == digest for name, digest in self.rows
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as JSON content for ``from_json``."""
        return dataclasses.asdict(self) | {"rows": dict(self.rows)}

    @classmethod
    def from_json(cls, content: Any) -> Entry:
        """Returns the entry that ``to_json`` converted.

        Raises:
            ValueError: the content is no entry.
        """
        try:
            config = content["config"]
            times = content["seconds"], content["untuned_seconds"], content["xla_seconds"]
            rows = tuple(sorted(content["rows"].items()))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not an entry: {content!r}") from error
        texts = [text for pair in rows for text in pair]
        named = {*_NO_ROWS, *(name for name, _ in rows)}
        row, splits = kernel_names.read_config(config) if isinstance(config, str) else (config, 1)
        needed = times if config == kernel_names.XLA or times[2] is not None else times[:2]
        are_times = all(isinstance(time, float) and 0 < time < math.inf for time in needed)
        are_texts = all(isinstance(text, str) for text in texts)
        is_known = row in named and splits > 0 and (splits == 1 or row not in _NO_ROWS)
        if not (is_known and are_times and are_texts):
            raise ValueError(f"not an entry: {content!r}")
        return cls(config, *times, rows)


@functools.cache
def row_digest(name: str) -> str:
    """Returns a digest of a row; of an empty text if there is no such row."""
    row = kernel_names.find(name) or packed_configs.BY_NAME.get(name, (0, None))[1]
    if row is None:
        return hashlib.sha256(b"").hexdigest()[:12]
    # Fields with default values are left out, so a new field does not change the digest of rows
    # that do not use it.
    said = [
        (field.name, getattr(row, field.name))
        for field in dataclasses.fields(row)
        if getattr(row, field.name) != field.default
    ]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:12]


def problem_key(**fields: Any) -> str:
    """Returns the JSON text that identifies a problem; equal fields give equal texts."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))
