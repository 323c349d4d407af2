"""Outcomes and layouts of random products, for the programs that draw them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass
class Outcome:
    """The result of a problem: a word for the summary, and what is wrong, if anything is."""

    family: str
    wrong: str | None = None


def stored(x: Any, letter: str) -> Any:
    return jnp.swapaxes(x, -1, -2) if letter == "t" else x
