"""Random problems for `gemm`, each compared with float64. A script, which pytest skips.

    python tests/fuzz.py --count 2000 --jobs 8
    python tests/fuzz.py --problems packed --count 1000 --jobs 8

Problem i of a seed is always the same for one build and choice of rows. A failure is printed with
the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import multiprocessing.pool
import os
import pathlib
import secrets
import shlex
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

import gemm_problems
import numpy as np
import packed_problems
from random_outcome import set_environment

# The kinds of problems: products of arrays, and products with packed weights.
PROBLEMS: dict[str, Any] = {"gemm": gemm_problems, "packed": packed_problems}
_MOST_FAILURES = 50
_PATIENCE = 120.0  # seconds for one problem, including the start of a process


class Result(NamedTuple):
    """The result of a problem; `outcome` is passed, skipped, failed or raised."""

    family: str
    outcome: str
    message: str = ""


def run_problem(kind: str, seed: int, kernels: str | None, index: int) -> Result:
    """Draws and checks one problem."""
    problems = PROBLEMS[kind]
    problem = problems.draw(seed, index, kernels)
    family = problem.family
    try:
        what = problems.failure(problem, np.random.default_rng([seed, index, 1]))
    except Exception as error:
        # A named row of the right algorithm is refused for this reason only.
        named = getattr(problem, "row", None)
        if named and isinstance(error, ValueError) and "copies 16 bytes at a time" in str(error):
            return Result(family, "skipped")
        return Result(family, "raised", f"{problem}\n{traceback.format_exc()}")
    return Result(family, "failed", f"{problem}\n{what}") if what else Result(family, "passed")


def _serve(connection: Any, kind: str, seed: int, kernels: str | None) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            connection.send(run_problem(kind, seed, kernels, connection.recv()))


def _in_process(
    local: threading.local, kind: str, seed: int, kernels: str | None, index: int
) -> Result:
    """Runs a problem in this thread's process, since a kernel may hang or end the process."""
    if getattr(local, "process", None) is None:
        context = multiprocessing.get_context("spawn")
        local.connection, other = context.Pipe()
        arguments = (other, kind, seed, kernels)
        local.process = context.Process(target=_serve, args=arguments, daemon=True)
        local.process.start()
        other.close()
    try:
        local.connection.send(index)
        if local.connection.poll(_PATIENCE):
            result = local.connection.recv()
        else:
            result = Result("lost", "raised", f"no answer within {_PATIENCE} s")
    except (EOFError, OSError):
        local.process.join()
        result = Result("lost", "raised", f"the process ended: {local.process.exitcode}")
    if result.family == "lost":
        problem = PROBLEMS[kind].draw(seed, index, kernels)
        result = result._replace(message=f"{problem}\n{result.message}")
    if result.outcome == "raised":  # a process is unusable after a CUDA error
        local.process.kill()
        local.process = None
    return result


class State:
    """The progress of a run, kept in a file if there is one."""

    def __init__(self, arguments: argparse.Namespace):
        self.path = arguments.state
        self.failures: dict[str, str] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.seed, self.kernels, self.kind = arguments.seed, arguments.kernels, arguments.problems
        self.start = self.next = arguments.start
        if self.path and self.path.exists():
            vars(self).update(json.loads(self.path.read_text()))
            asked = {"seed": self.seed, "kernels": self.kernels, "problems": self.kind}
            for name, value in asked.items():
                if getattr(arguments, name) not in (None, value):
                    sys.exit(f"{self.path} is of {name} {value}")
        self.kind = self.kind or "gemm"
        if self.seed is None:
            self.seed = secrets.randbits(32)

    def add(self, result: Result) -> None:
        """Records the result of the next problem."""
        counts = self.counts.setdefault(result.family, {})
        counts[result.outcome] = counts.get(result.outcome, 0) + 1
        if result.message:
            self.failures[str(self.next)] = result.message
            print(f"FAILED: {self.command(self.next)}\n{result.message}", flush=True)
        self.next += 1

    def command(self, index: int) -> str:
        """Returns the command that repeats a problem."""
        kernels = f" --kernels {shlex.quote(self.kernels)}" if self.kernels else ""
        kind = "" if self.kind == "gemm" else f" --problems {self.kind}"
        return f"python {__file__} --seed {self.seed} --start {index} --count 1{kernels}{kind}"

    def save(self) -> None:
        if self.path:
            new = self.path.with_name(self.path.name + ".new")
            new.write_text(json.dumps({k: v for k, v in vars(self).items() if k != "path"}))
            os.replace(new, self.path)

    def summary(self) -> str:
        lines = [f"{family}: {counts}" for family, counts in sorted(self.counts.items())]
        lines += [f"FAILED: {self.command(int(index))}" for index in self.failures]
        done = self.next - self.start
        return "\n".join(
            [*lines, f"{done} problems of seed {self.seed}, {len(self.failures)} failed"]
        )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random problems for gemm.")
    parser.add_argument("--count", type=int, default=2000, help="problems")
    parser.add_argument("--seed", type=int, help="by default a fresh one")
    parser.add_argument("--start", type=int, default=0, help="number of the first problem")
    parser.add_argument("--state", type=pathlib.Path, help="file by which to continue a run")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which to stop")
    parser.add_argument("--kernels", help="glob: name one of these rows in every call")
    parser.add_argument("--problems", choices=PROBLEMS, help="kind of problems; default gemm")
    parser.add_argument("--jobs", type=int, default=4, help="processes; 0: in this one")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the problems; returns 1 if any failed."""
    arguments = _arguments(argv)
    end_time = time.monotonic() + 60 * arguments.minutes
    state = State(arguments)
    print(f"seed {state.seed}", flush=True)
    indices = range(state.next, state.start + arguments.count)
    jobs = min(arguments.jobs, len(indices))
    set_environment(jobs)
    run = functools.partial(_in_process, threading.local()) if jobs else run_problem

    def attempt(index: int) -> Result | None:
        if time.monotonic() >= end_time:
            return None
        return run(state.kind, state.seed, state.kernels, index)

    with contextlib.ExitStack() as stack:
        stack.callback(state.save)
        pool = stack.enter_context(multiprocessing.pool.ThreadPool(jobs)) if jobs else None
        results = pool.imap(attempt, indices) if pool else map(attempt, indices)
        shown = time.monotonic()
        for result in results:
            if result is None or len(state.failures) >= _MOST_FAILURES:
                print(f"stopped before problem {state.next}")
                break
            state.add(result)
            if time.monotonic() > shown + 5:
                shown = time.monotonic()
                done = f"{state.next - state.start} of {arguments.count}"
                print(f"{done}, {len(state.failures)} failed", flush=True)
                state.save()
    print(state.summary())
    return 1 if state.failures else 0


if __name__ == "__main__":
    sys.exit(main())
