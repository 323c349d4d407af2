"""Shows the time of a step by kind of kernel, by instruction of XLA's program, and by source.

The times come from JAX's own profiler. ``str(profile(step, state, batch))`` is a table.
``comparison`` puts variants of a step side by side, for example with ``jax.jit`` alone and under
``fuse``.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tcgemm.tools.collectives import computations_of

# Launches each instruction separately; a CUDA graph would hide the instructions.
_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}

_INSTRUCTION = re.compile(
    r"^  (?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][a-z0-9-]*)\((.*)$", re.MULTILINE
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SOURCE = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"\bcalls=%?([\w.-]+)")
_LAYOUT = re.compile(r"\{[^{}]*\}")
_MOVING = {
    *("copy", "copy-start", "copy-done", "transpose", "bitcast", "reshape", "convert", "slice"),
    *("concatenate", "pad", "parameter", "tuple", "get-tuple-element"),
}

# Kinds of custom calls by the prefix of their target; the first match counts.
_KINDS_OF_CALLS = {
    "jax_tcgemm_compiled": "products with functions, ours",
    "jax_tcgemm_transpose": "copies and transposes",
    "jax_tcgemm_pack_v": "copies and transposes",
    "jax_tcgemm": "products, ours",
    "__cublas": "products, XLA's",
    "__cudnn$fmha": "attention, XLA's",
    "__cudnn$conv": "convolutions, XLA's",
}
_COLLECTIVES = ("all-", "ragged-all-", "reduce-scatter", "collective-", "send", "recv")
# These run other instructions, which have their own events.
_CONTROL = frozenset({"while", "call", "conditional"})


class Instruction(NamedTuple):
    """An instruction of a compiled program.

    Attributes:
        kind: the kind of its kernels, such as ``"products, ours"``.
        shape: the shape of its result, in XLA's notation.
        source: JAX's name stack of its original operation.
    """

    kind: str
    shape: str
    source: str


class Entry(NamedTuple):
    """The time of an instruction.

    Attributes:
        name: the name of the instruction.
        what: the instruction.
        us: mean microseconds per step and device.
        kernels: mean number of kernels per step and device.
    """

    name: str
    what: Instruction
    us: float
    kernels: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """The time of a step, by instruction.

    Attributes:
        entries: the instructions, the slowest first.
    """

    entries: tuple[Entry, ...]

    @property
    def us(self) -> float:
        """The microseconds that a step spends in kernels."""
        return sum(entry.us for entry in self.entries)

    def by_kind(self) -> dict[str, float]:
        """Returns the microseconds of each kind of instruction, the slowest first."""
        sums: dict[str, float] = collections.defaultdict(float)
        for entry in self.entries:
            sums[entry.what.kind] += entry.us
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        return comparison({"us": self}) + "\n\n" + self.table()

    def table(self, count: int = 20) -> str:
        """Returns a table of the slowest instructions, one per line."""
        lines = [f"{'us':>9}{'kernels':>9}  instruction, its result and source"]
        lines += [
            f"{entry.us:>9.1f}{entry.kernels:>9.1f}  {entry.name} {entry.what.shape}"
            f" [{entry.what.kind}] {entry.what.source}"
            for entry in self.entries[:count]
        ]
        return "\n".join(lines)


def comparison(profiles: Mapping[str, Profile]) -> str:
    """Returns a table of the microseconds by kind, with a column for each profile."""
    sums = {name: profile.by_kind() for name, profile in profiles.items()}
    kinds = sorted(
        {kind for each in sums.values() for kind in each},
        key=lambda kind: -max(each.get(kind, 0.0) for each in sums.values()),
    )
    lines = [f"{'':<32}" + "".join(f"{name:>12}" for name in profiles)]
    for kind in kinds:
        lines.append(f"{kind:<32}" + "".join(f"{sums[x].get(kind, 0.0):>12.1f}" for x in profiles))
    lines.append(f"{'all':<32}" + "".join(f"{profile.us:>12.1f}" for profile in profiles.values()))
    return "\n".join(lines)


def profile(function: Any, *args: Any, steps: int = 5) -> Profile:
    """Runs a function several times and returns the times of its kernels.

    Args:
        function: a function that ``jax.jit`` accepts or returned. Donated arguments are copied
            before each step; the copies do not count. Bind static arguments to the function first.
        *args: its arguments.
        steps: how many runs are measured, at least 1. One run before them does not count.

    Returns:
        The means of these runs. Kernels run one after the other, not from a CUDA graph, so that
        each has its instruction's name. Gaps between kernels, caused by the host, do not count.

    Raises:
        ValueError: the function has static arguments, or ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    lowered = jitted.lower(*args)
    compiled = lowered.compile(_OPTIONS if jax.default_backend() == "gpu" else None)
    donated = [info.donated for info in jax.tree.leaves(lowered.args_info)]
    if len(donated) != len(jax.tree.leaves(args)):
        raise ValueError("static arguments have to be bound to the function, by functools.partial")

    def run() -> None:
        leaves, structure = jax.tree.flatten(args)
        own = [
            jnp.copy(x) if is_donated else x for x, is_donated in zip(leaves, donated, strict=True)
        ]
        jax.block_until_ready(compiled(*jax.tree.unflatten(structure, own)))

    run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        return account(compiled.as_text() or "", events(data), steps)


class Event(NamedTuple):
    """One run of an instruction, as the profiler recorded it.

    Attributes:
        device: the device that ran it.
        module: the program.
        instruction: the name of the instruction.
        ns: its duration in nanoseconds.
    """

    device: str
    module: str
    instruction: str
    ns: float


def events(data: Any) -> list[Event]:
    """Returns the kernel events of a ``jax.profiler.ProfileData``; without a GPU, the CPU's."""
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    found = []
    with warnings.catch_warnings():
        # The stats' type warns that it names no module; jaxlib aborts if warnings are errors.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in devices or planes:
            for line in plane.lines:
                if devices and not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    stats: dict[str, Any] = dict(event.stats)
                    if "hlo_op" in stats:
                        module = stats.get("hlo_module", "")
                        found.append(Event(plane.name, module, stats["hlo_op"], event.duration_ns))
    return found


def account(text: str, seen: Iterable[Event], steps: int) -> Profile:
    """Returns the mean time of each instruction of a program per step and device.

    Args:
        text: the text of the compiled program.
        seen: the recorded events, also of other programs.
        steps: how often the program ran.
    """
    module = re.match(r"HloModule ([\w.-]+)", text)
    known = instructions(text)
    ns: dict[str, float] = collections.defaultdict(float)
    kernels: dict[str, int] = collections.defaultdict(int)
    devices = set()
    unknown = Instruction("other", "", "")
    for event in seen:
        is_own = module is None or event.module == module[1]
        if is_own and known.get(event.instruction, unknown).kind != "control":
            devices.add(event.device)
            ns[event.instruction] += event.ns
            kernels[event.instruction] += 1
    runs = steps * max(1, len(devices))
    entries = [
        Entry(name, known.get(name, unknown), 1e-3 * ns[name] / runs, kernels[name] / runs)
        for name in sorted(ns, key=lambda name: -ns[name])
    ]
    return Profile(tuple(entries))


def instructions(text: str) -> dict[str, Instruction]:
    """Returns the instructions of a compiled program by name."""
    bodies: dict[str, str] = collections.defaultdict(str)
    for computation, lines in computations_of(text):
        bodies[computation] += "\n".join(lines) + "\n"
    found = {}
    for body in [*bodies.values()]:
        for name, shape, opcode, rest in _INSTRUCTION.findall(body):
            source = _SOURCE.search(rest)
            called = _CALLED.search(rest)
            kind = _kind(name, opcode, rest, bodies[called[1]] if called else "")
            shape = _LAYOUT.sub("", shape)
            found[name] = Instruction(kind, shape, source[1] if source else "")
    return found


def _kind(name: str, opcode: str, rest: str, body: str) -> str:
    target = _TARGET.search(rest)
    if opcode == "custom-call" and target:
        for prefix, kind in _KINDS_OF_CALLS.items():
            if target[1].startswith(prefix):
                return kind
        return "other calls"
    if opcode in _CONTROL:
        return "control"
    opcodes = {inner for _, _, inner, _ in _INSTRUCTION.findall(body)} or {opcode}
    if any(each.startswith(_COLLECTIVES) for each in (opcode, *opcodes)):
        return "collectives"
    if "dot" in opcodes or "gemm" in name:
        return "products, XLA's"
    if "convolution" in opcodes:
        return "convolutions, XLA's"
    if opcodes <= _MOVING:
        return "copies and transposes"
    return "reductions" if "reduce" in opcodes else "elementwise"
