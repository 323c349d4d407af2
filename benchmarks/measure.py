"""Compares a case with its rivals, then times it beside them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pallas_rival
import xla_rival
from cases import Case

from jax_tcgemm import Tunings, _extension
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.tools.benchmarking import Timing, time_chains
from jax_tcgemm.tools.chain import Chain, compile_chain
from jax_tcgemm.transforms.numbers import Numbers
from jax_tcgemm.tuning.tunings import untuned

# The largest norm of the difference between two results, relative to the norm of one. Each result
# is rounded once or twice more than the other. TF32 drops 13 bits of float32 operands, which XLA
# may avoid. 8-bit results sometimes differ by a step; sums of 8-bit floats keep 14 bits.
TOLERANCES = {
    "bf16": 2**-6,
    "f16": 2**-9,
    "f32": 2**-9,
    "c64": 2**-9,
    "e4m3": 2**-6,
    "e5m2": 2**-6,
    "s8": 2**-6,
}
# XLA computes this derivative in 16 bits with a rounding after each operation, which causes most of
# this difference.
_STEP_TOLERANCE = 2

_SUSTAINED_ABOVE_US = 100.0
_SUSTAINED_BLOCK_SECONDS = 0.05
_CONFIG_REPS = 6
# Above this limit, a simt kernel takes longer than all others together.
_SIMT_FLOPS = 2e9

_CHOICE = re.compile(r"^jax_tcgemm: m=.* -> (\S+)$", re.MULTILINE)
# Lowering chooses the kernel for a packed weight.
_PACKED_CHOICE = re.compile(r"^jax_tcgemm: tcgemm_(?:un)?packed [^:]*: (.+)$", re.MULTILINE)

Row = dict[str, Any]

_NUMBERS = Numbers(time.time_ns() % 2**31)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a measurement.

    Attributes:
        against: the rivals, of ``"xla"`` and ``"pallas"``.
        reps: the least number of samples of each competitor.
        seconds: the length of the sustained measurement; 0 for none.
        configs: a glob over further kernel configurations to time, or None.
        tunings: the active tunings for ours; the untuned choice is then a rival as well.
    """

    against: tuple[str, ...] = ("xla",)
    reps: int = 20
    seconds: float = 1.5
    configs: str | None = None
    tunings: Tunings | None = None


def measure_case(case: Case, options: Options) -> Row:
    """Returns the row of a case; see ``benchmarks/README.md`` for its keys."""
    row: Row = {"suite": case.suite, "case": case.label, "config": None}
    row |= dict.fromkeys(("us", "xla_us", "pallas_us", "ratio", "tflops"))
    if case.unsupported:
        return row | {"note": case.unsupported}
    try:
        return row | _measure(case, options)
    except Exception as error:  # One failing case must not cost the others.
        return row | {"error": describe(error)}


def _measure(case: Case, options: Options) -> Row:
    sets = case.argument_sets(_NUMBERS)
    with options.tunings or contextlib.nullcontext():
        ours, config = compile_ours(case, sets)
    row: Row = {"config": config}
    xla, form = _best_xla(case, sets)
    if form:
        row["xla_form"] = form
    expected = xla()
    wrong = disagreement(case, ours(), expected)
    if wrong:
        return row | {"error": f"differs from XLA's result: {wrong}"}
    chains = {"us": ours}
    if options.tunings is not None:
        with untuned():
            chains["untuned_us"], row["untuned_config"] = compile_ours(case, sets)
        wrong = disagreement(case, chains["untuned_us"](), expected)
        if wrong:
            return row | {"error": f"untuned, differs from XLA's result: {wrong}"}
    if "xla" in options.against:
        chains["xla_us"] = xla
    if "pallas" in options.against:
        try:
            chains["pallas_us"], row["pallas_config"] = _best_pallas(case, sets, expected)
        except Exception as error:  # Most cases are beyond that kernel, in many ways.
            row["pallas_note"] = describe(error)
    del expected
    timings = time_chains(chains, reps=options.reps)
    row |= {name: microseconds(timing) for name, timing in timings.items()}
    rivals = [row[name] for name in timings if name not in ("us", "untuned_us")]
    row["ratio"] = min(rivals) / row["us"] if rivals else None
    row["tflops"] = case.flops / row["us"] * 1e-6
    for prefix, name, chain in (("", "us", ours), ("xla_", "xla_us", xla)):
        if name in timings:
            row[f"{prefix}kernels"] = timings[name].kernels or hlo_kernels(chain)
    row["method"] = timings["us"].method
    row["spread"] = timings["us"].spread
    if options.seconds and row["us"] > _SUSTAINED_ABOVE_US:
        row |= _sustained(chains, row["us"], options.seconds)
    if options.configs is not None:
        row |= _all_configs(case, sets, ours, config, options.configs)
    return row


def untuned_row(row: Row, flops: float) -> Row | None:
    """Returns the untuned choice's row from a tuned case's row; None if it has no such data."""
    if row.get("untuned_us") is None:
        return None
    us, rivals = row["untuned_us"], [row[x] for x in ("xla_us", "pallas_us") if row[x]]
    ratio = min(rivals) / us if rivals else None
    same = {x: row[x] for x in ("case", "xla_us", "pallas_us", "xla_kernels", "method") if x in row}
    own = {"us": us, "ratio": ratio, "tflops": flops / us * 1e-6, "config": row["untuned_config"]}
    return {"suite": row["suite"], **same, **own}


def compile_ours(
    case: Case, sets: list[tuple[Any, ...]], config: str | None = None
) -> tuple[Chain, str | None]:
    """Compiles this package's product; returns it and the kernel configuration that runs.

    The configuration comes from the dispatch's log. The dispatch logs each choice once in each
    thread, so a new thread asks; an earlier log line may come from a measurement.
    """
    chain, lowering = with_stderr(lambda: compile_chain(case.ours(config), sets))
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        run = lambda: executor.submit(lambda: jax.block_until_ready(chain())).result()  # noqa: E731
        _, log = with_stderr(run)
    found = _PACKED_CHOICE.findall(lowering) if case.is_packed else _CHOICE.findall(log)
    chosen = list(dict.fromkeys(found))
    return chain, " ".join(chosen) if case.step else chosen[-1] if chosen else None


def with_stderr(function: Callable[[], Any]) -> tuple[Any, str]:
    """Calls a function; returns its result and its output on file descriptor 2.

    Output that is not from this package is passed on.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            result = function()
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            text = file.read().decode(errors="replace")
            for line in text.splitlines():
                if not line.startswith("jax_tcgemm: "):
                    print(line, file=sys.stderr)
    return result, text


@jax.jit
def _difference(x: jax.Array, y: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())


def disagreement(case: Case, actual: Any, expected: Any) -> str | None:
    """Says how far results differ from the expected ones, or None if they are close enough."""
    tolerance = TOLERANCES[case.dtype] * (_STEP_TOLERANCE if case.step else 1)
    return disagreement_of(actual, expected, tolerance)


def disagreement_of(actual: Any, expected: Any, tolerance: float) -> str | None:
    """Does the same for any results; ``tolerance`` limits the norm of each difference."""
    got, wanted = ([(x.shape, x.dtype) for x in jax.tree.leaves(y)] for y in (actual, expected))
    if got != wanted:
        return f"{got} instead of {wanted}"
    differences = jax.tree.leaves(jax.tree.map(_difference, actual, expected))
    # Takes the largest of several numbers, one of which may be NaN.
    largest = float(jnp.max(jnp.stack(differences)))
    return None if largest <= tolerance else f"by {largest:.1e} of its norm, over {tolerance:.1e}"


# Instructions in XLA's compiled programs that run no kernel.
_NO_KERNEL = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
_INSTRUCTION = re.compile(r"^  .* = .*? ([a-z][a-z0-9-]*)\(", re.MULTILINE)


def hlo_kernels(chain: Chain) -> float:
    """Counts a call's instructions that run something, for use without kernel counts."""
    _, entry = chain.compiled.as_text().split("\nENTRY ", 1)
    names = _INSTRUCTION.findall(entry[: entry.index("\n}")])
    return sum(name not in _NO_KERNEL for name in names) / len(chain.argument_sets)


def _best_xla(case: Case, sets: list[tuple[Any, ...]]) -> tuple[Chain, str]:
    """Compiles the natural JAX expressions of a case; returns the fastest and its name."""
    forms = xla_rival.forms(case)
    chains = {name: compile_chain(form, sets) for name, form in forms.items()}
    best = next(iter(chains))
    if len(chains) > 1:
        timings = time_chains(chains, reps=_CONFIG_REPS, block=2)
        best = min(timings, key=lambda name: timings[name].median)
    return chains[best], best


def _best_pallas(case: Case, sets: list[tuple[Any, ...]], expected: Any) -> tuple[Chain, str]:
    """Compiles JAX's Pallas kernel in several configurations; returns the fastest and its name."""
    chains, problems = {}, []
    for name, function in pallas_rival.candidates(case).items():
        try:
            chain = compile_chain(function, sets)
        except Exception as error:  # Too much shared memory, for instance.
            problems.append(f"{name}: {describe(error)}")
            continue
        wrong = disagreement(case, chain(), expected)
        if wrong:
            problems.append(f"{name}: differs from XLA's result {wrong}")
        else:
            chains[name] = chain
    if not chains:
        raise ValueError("; ".join(problems)[:500])
    timings = time_chains(chains, reps=_CONFIG_REPS, block=2)
    best = min(timings, key=lambda name: timings[name].median)
    return chains[best], best


def _sustained(chains: dict[str, Chain], us: float, seconds: float) -> Row:
    """Times ours and XLA's at the clock's power limit, from the second half of the samples."""
    chains = {name: chain for name, chain in chains.items() if name in ("us", "xla_us")}
    run_seconds = us * 1e-6 * len(chains["us"].argument_sets)
    block = max(1, round(_SUSTAINED_BLOCK_SECONDS / run_seconds))
    timings = time_chains(chains, block=block, reps=2 * block, seconds=seconds)
    medians = {
        name: statistics.median(timing.seconds[len(timing.seconds) // 2 :]) * 1e6
        for name, timing in timings.items()
    }
    xla = medians.get("xla_us")
    return {
        "sustained_us": medians["us"],
        "sustained_xla_us": xla,
        "sustained_ratio": xla / medians["us"] if xla else None,
    }


def config_names(case: Case, glob: str) -> list[str]:
    """Returns the kernel configurations that may compute a case."""
    if case.step or case.is_packed:  # several gemms; kernels without names
        return []
    return [
        row.name
        for row in kernel_names.for_algorithm(
            case.algorithm or "", "m" if case.group_sizes else "none"
        )
        if row.name in _extension.KERNEL_NAMES
        and fnmatch.fnmatchcase(row.name, glob)
        and row.gated == case.is_gated
        and (row.arch != "simt" or case.flops <= _SIMT_FLOPS)
    ]


def _all_configs(
    case: Case, sets: list[tuple[Any, ...]], ours: Chain, chosen: str | None, glob: str
) -> Row:
    """Times every configuration beside the choice, which may pad operands if none of them does."""
    chains = {"": ours}
    for name in config_names(case, glob):
        try:
            chain, used = compile_ours(case, sets, name)
        except Exception:  # A configuration that cannot compute the case.
            continue
        # If the named row cannot compute it, the dispatch takes another row.
        if used in (None, name):
            chains[name] = chain
    timings = time_chains(chains, reps=_CONFIG_REPS, block=2)
    us = {name: microseconds(timing) for name, timing in timings.items()}
    choice_us = us.pop("")
    best = min(us, key=us.__getitem__, default=None)
    if best is None or choice_us <= us[best]:
        best, best_us = chosen, choice_us
    else:
        best_us = us[best]
    return {
        "configs": us,
        "best_config": best,
        "best_us": best_us,
        "choice_loss": choice_us / best_us,
    }


def microseconds(timing: Timing) -> float:
    return timing.median * 1e6


def describe(error: Exception) -> str:
    """Returns the first lines of an error."""
    return f"{type(error).__name__}: {error}"[:300]
