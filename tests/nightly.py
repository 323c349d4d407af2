"""Parameters of tests that take too long for each change."""

from __future__ import annotations

from typing import Any

import pytest


def slow(value: Any) -> Any:
    """Returns a parameter with which a test runs nightly."""
    return pytest.param(value, marks=pytest.mark.nightly)
