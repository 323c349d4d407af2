"""Measures times on a GPU with CUDA events, for measurements in a user's process.

``benchmarking`` uses CUPTI, which only one user per process can hold. A profiler that records holds
it, and JAX's two users of CUPTI abort the process if both are active. Events have no such conflict.

Event times include a gap of about 1 us after each kernel, as in a program. This module subtracts
the gap of 5 us between two programs. A gate holds the GPU back until a turn is queued, so the
host's launch time does not count.
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

# At most this many programs of a turn are queued. JAX queues the 33rd only when one has ended, and
# none ends behind a closed gate.
_MOST_QUEUED = 28
# This many programs measure the gap between programs. ``_SMALLEST_KERNEL`` is the time that each
# one's kernel would take inside another program.
_CALIBRATING = 16
_SMALLEST_KERNEL = 2e-6


@dataclasses.dataclass
class _Device:
    """Compiled programs that mark the stream of a device.

    Attributes:
        ordinal: the extension's number of the device.
        gate: enqueues a gate and a mark after it.
        mark: enqueues a mark.
        gates: the number of gates so far.
        gap: seconds between two programs, minus the seconds between two kernels of one program.
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
    for _ in range(2):  # the first turn loads kernels
        _turn(made, nothing, 1)
    seconds = [turn[0] / _CALIBRATING for turn in _core.stopwatch_seconds(made.ordinal)]
    made.gap = max(0.0, seconds[-1] - _SMALLEST_KERNEL)
    return made


def _turn(device: _Device, chain: Chain, block: int) -> Any:
    """Enqueues ``block`` runs, each between two marks, and opens the gate; returns the last run."""
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
    """Runs a chain once with its configuration, so that it loads its kernels or fails here."""
    marked = _marked(device)
    _pass_gate(marked, chain.config)
    _core.open_gates(marked.ordinal, marked.gates)
    jax.block_until_ready(chain())


def time_chains(
    chains: Mapping[str, Chain], device: Any, *, reps: int, block: int
) -> dict[str, Timing]:
    """Times compiled chains against each other in turns, like ``benchmarking.time_chains``.

    Args:
        chains: the competitors by name; their programs run on the device.
        device: a CUDA device of this process.
        reps: the minimum number of samples of each competitor.
        block: the maximum number of samples of one competitor before the next has its turn.

    Returns:
        One ``Timing`` per name.

    Raises:
        RuntimeError: some marks were not recorded.
    """
    most = max(len(chain.argument_sets) for chain in chains.values())
    block = max(1, min(block, _MOST_QUEUED // most))
    marked = _marked(device)
    _core.stopwatch_seconds(marked.ordinal)  # discards marks of an interrupted measurement
    order: list[str] = []
    running: list[Any] = []
    for name in turns(list(chains), reps, block):
        order.append(name)
        running.append(_turn(marked, chains[name], block))
        # Only the next turn is queued while this one runs.
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
