"""How each primitive is divided: what its dimensions are, and what one device computes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from jax_tcgemm.partitioning.work import Work

# Which platforms' products are divided by the rules here: CUDA's by default, "everywhere" all (for
# tests, and to see on a CPU what a program does on GPUs), "never" none, which leaves XLA's own.
SETTING = "JAX_TCGEMM_PARTITION"

# To be raised with every change of what the rules make of a call.
REVISION = 1


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a primitive is divided.

    Attributes:
        accepts: whether operands of these types can be divided so; of the spec and the types.
        work: describes it; of the spec and the types of the call's operands.
        local: computes the results of one device; of a ``Shard``, the spec and its operands.
        classes: the dataclasses of its spec.
        told: makes of the spec what the custom call is told, and ``work`` and ``local`` are given.
    """

    accepts: Callable[[Any, Sequence[Any]], bool]
    work: Callable[[Any, Sequence[Any]], Work]
    local: Callable[..., list[jax.Array]]
    classes: tuple[type, ...]
    told: Callable[[Any], Any] = lambda spec: spec


_RULES: dict[str, Rule] = {}


def rule_of(primitive: str) -> Rule:
    """Returns the rule of the primitive of this name."""
    return _RULES[primitive]


def parameter_classes() -> tuple[type, ...]:
    """Returns the dataclasses that a call's parameters may be made of."""
    return (Call, *{each for rule in _RULES.values() for each in rule.classes})


def register(primitive: Primitive, rule: Rule) -> None:
    """Says how a primitive is divided."""
    _RULES[primitive.name] = rule


@dataclasses.dataclass(frozen=True)
class Call:
    """What the custom call is told, as text.

    Attributes:
        primitive: its name.
        spec: its static parameters.
        platform: what the program is lowered for.
        devices: how many devices the program runs on.
        groups: the devices of each part of a mesh that is divided by hand (``shard_map``) in some
            of its axes, in each of which XLA divides the call anew; empty if there are none.
        x64: whether there are 64-bit types.
        revision: of the rules. What they make of a call is no part of the key by which JAX's
            persistent cache knows a program; this is.
        tunings: digest of the tunings that are active.
        kernels: digest of the table of kernels, some of which measured choices name; likewise.
    """

    primitive: str
    spec: Any
    platform: str
    devices: int
    groups: tuple[tuple[int, ...], ...]
    x64: bool
    revision: int
    tunings: str = ""
    kernels: str = ""

    @property
    def rule(self) -> Rule:
        """How the primitive is divided."""
        return rule_of(self.primitive)

    @property
    def group_size(self) -> int:
        """How many devices the call is divided among."""
        return len(self.groups[0]) if self.groups else self.devices


def divides(platform: str) -> bool:
    """Says whether products are divided by the rules here on a platform.

    Raises:
        ValueError: the environment variable has another value than those it may have.
    """
    setting = os.environ.get(SETTING) or "cuda"
    if setting not in ("cuda", "everywhere", "never"):
        raise ValueError(f"{SETTING}={setting!r}; accepted: cuda, everywhere, never")
    return setting == "everywhere" or setting == platform


def accepts(primitive: Primitive, spec: Any, operands: Sequence[Any]) -> bool:
    """Says whether there is a rule for these operands of a primitive."""
    rule = _RULES.get(primitive.name)
    are_known = all(isinstance(extent, int) for x in operands for extent in x.shape)
    return rule is not None and are_known and rule.accepts(spec, operands)
