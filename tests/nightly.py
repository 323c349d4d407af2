"""Parameters of tests that take too long to run on each change."""

from __future__ import annotations

from typing import Any

import pytest


def slow(value: Any) -> Any:
    """Returns a parameter that runs nightly only."""
    return pytest.param(value, marks=pytest.mark.nightly)
