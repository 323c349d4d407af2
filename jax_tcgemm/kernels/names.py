"""Values of ``config=``: names of rows in the kernel table, ``"xla"``, ``"kernel"``."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import TypeGuard

from jax_tcgemm import _core
from jax_tcgemm.kernels.config import KernelConfig
from jax_tcgemm.kernels.table import BY_NAME, CONFIGS, RUN_TIME_CONFIGS


def find(name: str) -> KernelConfig | None:
    """Returns the row called ``name``, if there is one."""
    return BY_NAME.get(name)


def by_name(name: str) -> KernelConfig:
    """Returns the row called ``name``.

    Raises:
        ValueError: there is none; the message lists those whose names are nearest.
    """
    try:
        return BY_NAME[name]
    except KeyError:
        raise ValueError(
            f"config={name!r} is not a kernel configuration; of {len(BY_NAME)} the nearest are "
            f"{_nearest(name, BY_NAME)}"
        ) from None


def _nearest(name: str, names: Collection[str]) -> list[str]:
    return difflib.get_close_matches(name, names, n=8, cutoff=0.0)


# Values of ``config=`` beside rows: XLA's own composition, or any kernel but not XLA's.
XLA = "xla"
KERNEL = "kernel"
# Beside these, ``config=`` takes rows only.
NO_ROWS = (None, XLA, KERNEL)
# A call with this value takes the configuration that the stopwatch's last gate names, so that one
# compiled program can time many configurations (cuda/ffi/stopwatch.h).
MEASURED = "measured"

_SPLITS = "/splits="


def read_config(config: str) -> tuple[str, int]:
    """Returns the row's name and the number of parts of k, 0 if that number is invalid.

    Args:
        config: ``"ROW"`` or ``"ROW/splits=N"``, as ``cuda/dispatch/choice.cc`` reads it.
    """
    name, _, number = config.partition(_SPLITS)
    if not number:
        return config, 1
    is_number = number in map(str, range(2, _core.MOST_SPLITS + 1))
    return name, int(number) if is_number else 0


def is_row(config: str | None) -> TypeGuard[str]:
    """Checks if a configuration names a row, with or without parts of k."""
    return config not in (*NO_ROWS, MEASURED)


def accepted(name: str, rows: Collection[KernelConfig]) -> str:
    """Returns the part of an error message that lists what ``config=`` accepts.

    Args:
        name: the name that is not accepted.
        rows: the rows that are.
    """
    splitting = _nearest(name, [row.name for row in rows if _core.row_facts(row.name).splits_k])[:1]
    text = f"{', '.join(map(repr, NO_ROWS))}, or one of {len(rows)} rows of "
    text += "jax_tcgemm/kernels/table.py"
    if rows:
        text += f", of which the nearest are {_nearest(name, [row.name for row in rows])}"
    if splitting:
        text += f"; rows that split k also with {_SPLITS}N, such as '{splitting[0]}{_SPLITS}2'"
    return text


def can_be(
    config: str | None, algorithm: str, *, gated: bool = False, grouped: str = "none"
) -> bool:
    """Checks if a configuration is for such products."""
    if config in (None, XLA):
        return True
    name, splits = read_config(config)
    row = find(name)
    if row is None or splits == 0 or (splits > 1 and not _core.row_facts(name).splits_k):
        return False
    return row in for_algorithm(algorithm, grouped) and row.gated == gated


def for_algorithm(algorithm: str, grouped: str = "none") -> tuple[KernelConfig, ...]:
    """Returns the rows for ``algorithm`` and such groups.

    ``algorithm`` is the name of a row in the table of arithmetic. Rows for planes and pairs are
    left out: they take no operands of these types, and ``config=`` may not name them.
    """
    return tuple(
        config
        for config in (*CONFIGS, *RUN_TIME_CONFIGS)
        if config.algorithm == algorithm and config.grouped == grouped and config.goes_by_name
    )
