"""One measured product: how it is computed fastest, and whether that still holds."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from typing import Any

from jax_tcgemm import _extension
from jax_tcgemm.kernels import names as kernel_names


@dataclasses.dataclass(frozen=True)
class Entry:
    """What was found of one problem on one kind of device.

    Attributes:
        config: as ``config=`` takes it; ``None`` where nothing was faster by more than noise than
            what is taken untuned.
        seconds: of ``config``.
        untuned_seconds: of what is taken untuned.
        xla_seconds: of XLA's own composition, the epilogue included; ``None`` if it was not timed.
        rows: digests of the rows of the kernel table that ``config`` names, by name.
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
        """Returns an entry of the rows as they are in this build."""
        names = [] if config in (None, kernel_names.XLA) else [kernel_names.read_config(config)[0]]
        rows = tuple((name, row_digest(name)) for name in names)
        return cls(config, seconds, untuned_seconds, xla_seconds, rows)

    @property
    def is_current(self) -> bool:
        """Whether the rows that it names are in this build, and are what was measured."""
        return all(
            _extension.has_row(name) and row_digest(name) == digest for name, digest in self.rows
        )

    def to_json(self) -> dict[str, Any]:
        """Returns what ``from_json`` takes."""
        return dataclasses.asdict(self) | {"rows": dict(self.rows)}

    @classmethod
    def from_json(cls, content: Any) -> Entry:
        """Returns the entry that was written.

        Raises:
            ValueError: it is none.
        """
        try:
            config = content["config"]
            times = content["seconds"], content["untuned_seconds"], content["xla_seconds"]
            rows = tuple(sorted(content["rows"].items()))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not an entry: {content!r}") from error
        texts = [text for pair in rows for text in pair]
        named = {None, kernel_names.XLA, *(name for name, _ in rows)}
        row, splits = kernel_names.read_config(config) if isinstance(config, str) else (config, 1)
        needed = times if config == kernel_names.XLA or times[2] is not None else times[:2]
        are_times = all(isinstance(time, float) and 0 < time < math.inf for time in needed)
        are_texts = all(isinstance(text, str) for text in texts)
        if not (row in named and splits > 0 and are_times and are_texts):
            raise ValueError(f"not an entry: {content!r}")
        return cls(config, *times, rows)


@functools.cache
def row_digest(name: str) -> str:
    """Returns a digest of a row of the kernel table; of a name that is none, of nothing."""
    row = kernel_names.find(name)
    if row is None:
        return hashlib.sha256(b"").hexdigest()[:12]
    # A field that is new to the table, and that this row does not have, makes no other row of it.
    said = [
        (field.name, getattr(row, field.name))
        for field in dataclasses.fields(row)
        if getattr(row, field.name) != field.default
    ]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:12]


def problem_key(**fields: Any) -> str:
    """Returns the text by which a problem is known: equal for equal fields, and JSON."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))
