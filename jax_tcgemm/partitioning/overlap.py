"""Transfers that run beside the product: which plans have them, and when they pay.

If devices have different rows of A and different columns of B, each needs all rows of A. If they
have different parts of k, each needs its rows of the sum, or all of it. These transfers can run
beside the product in parts (``lowering/overlapped.py``), if all devices belong to this process and
reach each other's memory.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax

from jax_tcgemm import _compat, _extension
from jax_tcgemm.partitioning.cost import moves, overlapped_share
from jax_tcgemm.partitioning.mesh import Digits, Tiling
from jax_tcgemm.partitioning.work import GATHER, GATHER_A, GATHER_B, SCATTER, SUM, Plan, Work

# "auto", the default, lets the cost decide. "off" leaves the transfers to XLA.
SETTING = "JAX_TCGEMM_OVERLAP"

# Fewer rows are not worth the meeting of the devices, nor the smaller products.
FEWEST_ROWS = 2048
FEWEST_ROWS_OF_A_PART = 256
# The rows of a part are a multiple of this, so that parts are whole tiles.
ROWS_OF_A_TILE = 128

# An overlapped plan has to take less than this share of the time of the other.
_LONGEST = 0.95


def is_wanted() -> bool:
    """Checks if the environment allows overlapped transfers.

    Raises:
        ValueError: the environment variable has a value that is not accepted.
    """
    setting = os.environ.get(SETTING) or "auto"
    if setting not in ("auto", "off"):
        raise ValueError(f"{SETTING}={setting!r}; accepted: auto, off")
    return setting == "auto"


def _has_rows(work: Work) -> bool:
    """Checks if a product may be worth it, whatever the devices."""
    along_k = max((work.extents[name] for name in work.summed), default=0)
    return max(along_k, math.prod(work.extents[name] for name in work.rows)) >= FEWEST_ROWS


def obstacle(context: Any, work: Work, platform: str) -> str:
    """Returns why a program's devices cannot exchange rows by themselves; empty if they can.

    It is empty, too, if the product is too small to ask.

    Args:
        context: the context of a lowering rule.
        work: the product.
        platform: the platform for which the program is lowered.
    """
    if not (work.overlaps and _has_rows(work)):
        return ""
    if not is_wanted():
        return f"{SETTING}=off"
    if _compat.is_exported(context):
        return "the program is exported"
    if jax.process_count() > 1:
        return "there are several processes"
    if platform != "cuda":
        return ""
    # JAX does not say on which devices the program will run. It may be any of this process.
    devices = _compat.initialized_cuda_devices()
    if not (devices and _compat.runs_here(context)):
        return "the devices are not of this process"
    link = _extension.link_of(tuple(int(device.local_hardware_id) for device in devices))
    if link == _extension.NO_LINK:
        return "the devices cannot reach each other's memory"
    return "" if link == _extension.NVLINK else "the devices are not linked by NVLink"


def overlapped(
    plan: Plan, operands: Sequence[Tiling], results: Sequence[Tiling] | None, against: str
) -> Plan:
    """Returns the plan with a transfer beside the product if that is possible and takes less time.

    Args:
        plan: a plan without such transfers.
        operands: the tilings of the operands before.
        results: the requested tilings of the results, ``None`` if they do not matter.
        against: why the devices cannot exchange data; empty if they can.

    Returns:
        The plan. If it stays as it is although a transfer could run beside the product, it gets a
        note that says why.
    """
    found = _candidate(plan, operands)
    if found is None:
        return plan
    reason = against or _obstacle(found)
    if not reason and overlapped_share(found) > _LONGEST:
        reason = "it would take longer"
    if reason:
        return dataclasses.replace(plan, note=f"{found.overlap} not overlapped: {reason}")
    return dataclasses.replace(found, moved=moves(found, operands, results))


def _candidate(plan: Plan, operands: Sequence[Tiling]) -> Plan | None:
    work, summed, scattered = plan.work, plan.summed_digits(), dict(plan.scattered)
    if summed:
        (name,) = scattered if len(scattered) == 1 else ("",)
        if SCATTER in work.overlaps and name in work.rows and set(scattered[name]) == set(summed):
            return dataclasses.replace(plan, overlap=SCATTER, rows=name)
        return None if scattered or SUM not in work.overlaps else _all_reduced(plan)
    for kind, index, names in (
        (GATHER_A, 0, work.summed),
        (GATHER_B, 1, work.summed),
        (GATHER, 0, work.rows),
    ):
        for name in names if kind in work.overlaps else ():
            gathered = _gathered(plan, index, operands[index], name)
            if gathered:
                return dataclasses.replace(plan, overlap=kind, rows=name, gathered=gathered)
    return None


def _all_reduced(plan: Plan) -> Plan | None:
    """Returns the plan in which devices add up rows of a sum, and send them to one another."""
    rows = [name for name in plan.work.rows if plan.part(name) > 1]
    are_alike = all(array.dims == plan.work.product.dims for array in plan.work.results)
    if not rows or not are_alike:
        return None
    return dataclasses.replace(plan, overlap=SUM, rows=rows[0])


def _gathered(plan: Plan, index: int, source: Tiling, rows: str) -> Digits:
    """Returns the digits that divide a name of an operand before, beyond the plan's.

    Args:
        plan: the plan.
        index: the index of the operand.
        source: the tiling of the operand.
        rows: the name. If another name is divided otherwise than in the plan, there are no digits.
    """
    found: Digits = ()
    for name, digits in zip(plan.work.operands[index].dims, source, strict=True):
        own = () if name is None else plan.layout[name]
        if name == rows and digits[: len(own)] == own:
            found = digits[len(own) :]
        elif digits != own:
            return ()
    return found


def _obstacle(plan: Plan) -> str:
    """Returns why the rows cannot be exchanged in parts; empty if they can."""
    work, name = plan.work, plan.rows
    digits = plan.layout[name] + plan.exchanged
    if plan.peers > _extension.MOST_PEERS:
        return f"more than {_extension.MOST_PEERS} devices"
    if work.extents[name] % plan.devices.parts(digits):
        return "the parts have different sizes"
    rows = plan.part(name) // plan.peers
    for other in work.rows if name in work.rows else ():
        rows *= plan.part(other) if other != name else 1
    if rows % ROWS_OF_A_TILE:
        return f"{rows} rows of a part, which is no multiple of {ROWS_OF_A_TILE}"
    if rows < FEWEST_ROWS_OF_A_PART or rows * plan.peers < FEWEST_ROWS:
        return f"only {rows * plan.peers} rows"
    return ""
