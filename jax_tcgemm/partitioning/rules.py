"""How each primitive is divided: its dimensions, and the computation of one device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from jax_tcgemm.partitioning.work import Work

# The platforms whose products the rules here divide. "cuda" is the default. "everywhere" means all
# (for tests, and to see on a CPU what a program does on GPUs). "never" means none, so that XLA
# divides its own.
SETTING = "JAX_TCGEMM_PARTITION"

# Raise this with every change of what the rules make of a call.
REVISION = 6


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a primitive is divided.

    Attributes:
        accepts: checks if operands can be divided this way, given the spec and their types.
        work: describes the work, given the spec and the types of the call's operands.
        local: computes the results of one device, given a ``Shard``, the spec and its operands.
        classes: the dataclasses of its spec.
        told: converts the spec to the form that the custom call carries and that ``work`` and
            ``local`` get.
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
    """Returns the dataclasses that a call's parameters may contain."""
    return (Call, *{each for rule in _RULES.values() for each in rule.classes})


def register(primitive: Primitive, rule: Rule) -> None:
    """Registers how a primitive is divided."""
    _RULES[primitive.name] = rule


@dataclasses.dataclass(frozen=True)
class Call:
    """The parameters that the custom call carries as text.

    Attributes:
        primitive: name of the primitive.
        spec: its static parameters.
        platform: platform that the program is lowered for.
        devices: number of devices that the program runs on.
        groups: the devices of each part of a mesh of which ``shard_map`` divides some axes by hand.
            XLA divides the call anew within each part. Empty if there are none.
        x64: whether there are 64-bit types.
        revision: revision of the rules. The key of JAX's persistent cache does not cover what the
            rules make of a call, but it covers this number.
        tunings: digest of the active tunings.
        kernels: digest of the kernel table, of which measured choices name rows. The key covers
            it, too.
        against: why no transfer may run beside the product; empty if it may.
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
    against: str = ""

    @property
    def rule(self) -> Rule:
        """How the primitive is divided."""
        return rule_of(self.primitive)

    @property
    def group_size(self) -> int:
        """The number of devices among which the call is divided."""
        return len(self.groups[0]) if self.groups else self.devices


def divides(platform: str) -> bool:
    """Checks if the rules here divide the products of a platform.

    Raises:
        ValueError: the environment variable has a value that is not accepted.
    """
    setting = os.environ.get(SETTING) or "cuda"
    if setting not in ("cuda", "everywhere", "never"):
        raise ValueError(f"{SETTING}={setting!r}; accepted: cuda, everywhere, never")
    return setting == "everywhere" or setting == platform


def accepts(primitive: Primitive, spec: Any, operands: Sequence[Any]) -> bool:
    """Checks if there is a rule for these operands of a primitive."""
    rule = _RULES.get(primitive.name)
    are_known = all(isinstance(extent, int) for x in operands for extent in x.shape)
    return rule is not None and are_known and rule.accepts(spec, operands)
