"""Times on a GPU by CUDA's events, for measurements in a user's process.

CUPTI, by which ``benchmarking`` times kernels, is one for a process: whoever records a profile has
it, and JAX's two users of it end the process where they meet. Events disturb nobody. What they time
has a gap of about 1 us behind each kernel, as in a program; the gap of 5 us between two programs is
taken off. A gate holds the GPU back until a turn is queued, so that the host's time for launches is
not part of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tcgemm import _core, _extension
from jax_tcgemm.tools.benchmarking import Timing, turns
from jax_tcgemm.tools.chain import Chain, compile_chain

# Programs of a turn. JAX waits with the 33rd that is queued until one has ended, and none does
# behind a closed gate.
_MOST_QUEUED = 28
# Programs that show the gap between programs, and what the kernel of each takes in another program.
_CALIBRATING = 16
_SMALLEST_KERNEL = 2e-6


@dataclasses.dataclass
class _Device:
    """Compiled programs that mark the stream of a device.

    Attributes:
        ordinal: as the extension knows the device.
        gate: enqueues a gate, and a mark behind it.
        mark: enqueues a mark.
        gates: how many there were.
        gap: seconds between two programs, beyond those between two kernels of one.
    """

    ordinal: int
    gate: Callable[[], Any]
    mark: Callable[[], Any]
    gates: int = 0
    gap: float = 0.0


@functools.cache
def _marked(device: Any) -> _Device:
    with jax.default_device(device):
        operand = jnp.zeros(())

        def program(gate: bool) -> Callable[[], Any]:
            def marked(x: jax.Array) -> jax.Array:
                result = jax.ShapeDtypeStruct((), jnp.float32)
                return jax.ffi.ffi_call(_extension.MARK_TARGET, result)(x, gate=gate)

            return functools.partial(jax.jit(marked).lower(operand).compile(), operand)

        made = _Device(device.local_hardware_id or 0, program(True), program(False))
        nothing = compile_chain(jnp.negative, [(operand,)] * _CALIBRATING, one_by_one=True)
    for _ in range(2):  # the first loads kernels
        _turn(made, nothing, 1)
    seconds = [turn[0] / _CALIBRATING for turn in _core.stopwatch_seconds(made.ordinal)]
    made.gap = max(0.0, seconds[-1] - _SMALLEST_KERNEL)
    return made


def _turn(device: _Device, chain: Chain, block: int) -> Any:
    """Enqueues so many runs, each between two marks, and lets them go; returns what is running."""
    _pass_gate(device, chain.config)
    running = None
    for _ in range(block):
        running = chain(), device.mark()
    _core.open_gates(device.ordinal, device.gates)
    return running


def _pass_gate(device: _Device, config: str) -> None:
    device.gates += 1
    if config:
        _core.configure_gate(device.ordinal, device.gates, config)
    device.gate()


def run_once(chain: Chain, device: Any) -> None:
    """Runs a chain with its configuration: what it needs is loaded, or it fails here."""
    marked = _marked(device)
    _pass_gate(marked, chain.config)
    _core.open_gates(marked.ordinal, marked.gates)
    jax.block_until_ready(chain())


def time_chains(
    chains: Mapping[str, Chain], device: Any, *, reps: int, block: int
) -> dict[str, Timing]:
    """Times compiled chains against each other by turns, as ``benchmarking.time_chains``.

    Args:
        chains: the competitors by name; their programs run on the device.
        device: a CUDA device of this process.
        reps: samples of each, at least.
        block: samples of one before the next has its turn, at most.

    Returns:
        One ``Timing`` per name.

    Raises:
        RuntimeError: marks were lost.
    """
    most = max(len(chain.argument_sets) for chain in chains.values())
    block = max(1, min(block, _MOST_QUEUED // most))
    marked = _marked(device)
    _core.stopwatch_seconds(marked.ordinal)  # of a measurement that was interrupted
    order: list[str] = []
    running: list[Any] = []
    for name in turns(list(chains), reps, block):
        order.append(name)
        running.append(_turn(marked, chains[name], block))
        # The next turn is queued while this one runs, but no more than that.
        if len(running) > 1:
            jax.block_until_ready(running.pop(0))
    jax.block_until_ready(running)
    seconds = _core.stopwatch_seconds(marked.ordinal)
    if [len(turn) for turn in seconds] != [block] * len(order):
        raise RuntimeError(f"{len(seconds)} of {len(order)} turns were timed, or not all marks")
    samples: dict[str, list[float]] = {name: [] for name in chains}
    for name, turn in zip(order, seconds, strict=True):
        calls = len(chains[name].argument_sets)
        samples[name] += [max(time / calls - marked.gap, _SMALLEST_KERNEL) for time in turn]
    return {name: Timing(tuple(samples[name]), "events") for name in chains}
