"""Rows of the kernel table as parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest

from jax_tcgemm import _core, _extension
from jax_tcgemm.kernels.choice_input import ChoiceInput
from jax_tcgemm.kernels.table import CONFIGS


def by_config(
    *,
    arch: str | None = None,
    gated: bool = False,
    grouped: str = "none",
    skinny: bool | None = None,
    epilogues: tuple[str, ...] = ("none", "sum", "any"),
) -> pytest.MarkDecorator:
    """Runs a test for each configuration (of ``arch``) with this ``gated`` and ``grouped``.

    ``skinny`` selects the configurations for few rows or columns (true) or all others (false).

    A test of grouped sm90 rows needs an sm90 GPU, since elsewhere another row would run instead.
    """
    return pytest.mark.parametrize(
        "config",
        [
            pytest.param(
                config,
                id=config.name,
                marks=[
                    pytest.mark.skipif(
                        config.name not in _extension.KERNEL_NAMES, reason="not in this build"
                    ),
                    *([pytest.mark.sm90] if grouped != "none" and config.arch == "sm90" else []),
                ],
            )
            for config in CONFIGS
            if arch in (None, config.arch) and config.epilogue in epilogues
            if (config.gated, config.grouped) == (gated, grouped)
            if skinny in (None, config.skinny)
            if config.goes_by_name
        ],
    )


def first_of(ranked: list[tuple[str, float, bool]]) -> str:
    """Names the untuned choice, followed by " fixup" if blocks add up parts of k."""
    if not ranked:
        return ""
    config, _, has_fixup = ranked[0]
    return config + " fixup" * has_fixup


def rank_rows(
    *arguments: Any, dense_splits: bool = False, warp_bytes: int = 0, **options: Any
) -> list[tuple[str, float, bool]]:
    """Ranks rows as `_core.rank_configs`; the other arguments are those of `ChoiceInput`."""
    return _core.rank_configs(ChoiceInput(*arguments, **options), dense_splits, warp_bytes)


def chosen_config(*arguments: Any, **options: Any) -> str:
    """Names a device's untuned choice; the arguments are those of `ChoiceInput`."""
    return first_of(rank_rows(*arguments, **options))
