"""How a checkpoint is quantized, by ``quantization_config`` of its ``config.json``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

BITS = 4
METHODS = ("gptq", "awq", "compressed-tensors")
_GPTQ_FORMATS = ("gptq", "gptq_v2")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the weights of some modules are quantized to 4 bits.

    Attributes:
        method: one of ``METHODS``.
        group: number of consecutive k that share a scale, or -1 for all.
        symmetric: whether all zero points are 8, so that codes stand for ``code - 8``.
        zero_offset: the zero point minus the stored number.
        targets: the modules, as in ``config_groups`` of compressed-tensors.
    """

    method: str
    group: int
    symmetric: bool
    zero_offset: int = 0
    targets: tuple[str, ...] = ()

    def names(self, module: str) -> bool:
        """Checks if ``targets`` has the name of this module or a pattern that matches it."""
        return any(
            bool(re.match(target[3:], module)) if target.startswith("re:") else target == module
            for target in self.targets
        )


def refused(where: str, key: str, value: Any, accepted: str) -> ValueError:
    """Returns the error for a value that the readers do not know."""
    return ValueError(f"{where}: {key}={value!r} cannot be read; accepted: {accepted}")


def schemes(where: str, config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Returns the schemes of a checkpoint; only compressed-tensors has more than one.

    Args:
        where: name of the configuration, for errors.
        config: the content of ``config.json``, or of its ``quantization_config``.

    Raises:
        ValueError: a key is missing, or its value is not accepted.
    """
    if isinstance(config, Mapping):
        config = config.get("quantization_config", config)
    if not isinstance(config, Mapping):
        raise refused(where, "quantization_config", config, "an object")
    method = config.get("quant_method")
    if method not in METHODS:
        raise refused(where, "quant_method", method, ", ".join(METHODS))
    if method == "compressed-tensors":
        return _compressed_tensors(where, config)
    _check_bits(where, "bits", config.get("bits", config.get("w_bit")))
    group = _group(where, "group_size", config.get("group_size", config.get("q_group_size")))
    if method == "awq":
        version = config.get("version", "gemm")
        if str(version).lower() != "gemm":
            raise refused(where, "version", version, "gemm")
        return (Scheme(method, group, symmetric=False),)
    stored = config.get("checkpoint_format", config.get("format", "gptq"))
    if stored not in _GPTQ_FORMATS:
        raise refused(where, "checkpoint_format", stored, ", ".join(_GPTQ_FORMATS))
    if config.get("pack_dtype", "int32") != "int32":
        raise refused(where, "pack_dtype", config["pack_dtype"], "int32")
    if config.get("dynamic"):
        raise refused(where, "dynamic", config["dynamic"], "one setting for all modules")
    offset = 1 if stored == "gptq" else 0
    return (Scheme(method, group, bool(config.get("sym", False)), offset),)


def scheme_of(where: str, module: str, found: Sequence[Scheme]) -> Scheme:
    """Returns the scheme of one module.

    A scheme that names the module, or matches its name, comes first. Otherwise the only scheme
    applies, because the classes of modules (``Linear``) are not known.

    Raises:
        ValueError: more than one scheme may apply.
    """
    named = [scheme for scheme in found if scheme.names(module)]
    others = [scheme for scheme in found if any(not t.startswith("re:") for t in scheme.targets)]
    left = named or (list(found) if len(found) == 1 else others)
    if len(left) != 1:
        targets = [scheme.targets for scheme in found]
        raise refused(where, "targets", targets, f"one that applies to the module {module!r}")
    return left[0]


def _compressed_tensors(where: str, config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Returns one scheme for each of ``config_groups``."""
    if config.get("format") != "pack-quantized":
        raise refused(where, "format", config.get("format"), "pack-quantized")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise refused(where, "config_groups", groups, "a group or more")
    found = []
    for name, group in groups.items():
        prefix = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise refused(where, prefix, group, "a group")
        for side in ("input_activations", "output_activations"):
            if (activations := group.get(side)) is not None:
                raise refused(where, f"{prefix}.{side}", activations, "None")
        targets = group.get("targets") or ()
        if not isinstance(targets, (list, tuple)) or not all(map(_is_pattern, targets)):
            raise refused(where, f"{prefix}.targets", targets, "names, or patterns after 're:'")
        weights = group.get("weights") or {}
        prefix += ".weights"
        if not isinstance(weights, Mapping):
            raise refused(where, prefix, weights, "an object")
        _check_bits(where, f"{prefix}.num_bits", weights.get("num_bits"))
        if weights.get("type", "int") != "int":
            raise refused(where, f"{prefix}.type", weights["type"], "int")
        strategy = weights.get("strategy")
        if strategy not in ("group", "channel"):
            raise refused(where, f"{prefix}.strategy", strategy, "group, channel")
        size = -1
        if strategy == "group":
            size = _group(where, f"{prefix}.group_size", weights.get("group_size"))
        symmetric = bool(weights.get("symmetric", True))
        found.append(Scheme(str(config["quant_method"]), size, symmetric, targets=tuple(targets)))
    return tuple(found)


def _is_pattern(target: Any) -> bool:
    """Checks for the name of a module, or ``re:`` and a regular expression."""
    try:
        return isinstance(target, str) and bool(re.compile(target.removeprefix("re:")))
    except re.error:
        return not target.startswith("re:")


def _check_bits(where: str, key: str, bits: Any) -> None:
    if bits != BITS:
        raise refused(where, key, bits, str(BITS))


def _group(where: str, key: str, size: Any) -> int:
    if not isinstance(size, int) or (size != -1 and size <= 0):
        raise refused(where, key, size, "a positive integer, or -1 for whole columns")
    return size
