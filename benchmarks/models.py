"""Times steps of public models under ``fuse`` beside ``jax.jit``: wall time, alternating.

Usage: python -P benchmarks/models.py --out results.json

Each program runs in a separate process, so that none reuses XLA's autotuning for another one. The
order of ``jax.jit`` and ``fuse`` alternates from program to program.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# With -P, a script's folder is not on the path.
sys.path.append(str(pathlib.Path(__file__).parent))

import jax
import jax.numpy as jnp
import report
from measure import disagreement_of
from model_step import FULL, TINY, Program
from programs import PROGRAMS

from jax_tcgemm import fuse

_SUITE = "models"
_ROUNDS = 8
_SECONDS_OF_A_SAMPLE = 0.05
# The largest difference relative to the norm: 16-bit models add in another order.
_TOLERANCE = 2**-4


def _norms(state: Any) -> list[jax.Array]:
    """Returns the norms of arrays, for parameters and for each moment of their gradients.

    Arrays are not compared one by one: the gradient of a key's bias, for example, is 0 except for
    rounding.
    """
    first = state[0] if isinstance(state, tuple) and state else state
    structure = jax.tree.structure(first)
    parts = jax.tree.leaves(state, is_leaf=lambda x: jax.tree.structure(x) == structure)
    arrays = [
        [x for x in jax.tree.leaves(part) if jnp.issubdtype(x.dtype, jnp.floating)]
        for part in parts
    ]
    return [
        jnp.stack([jnp.linalg.norm(x.astype(jnp.float32).ravel()) for x in each])
        for each in arrays
        if each
    ]


class Way:
    """A compiled step with its own state.

    Attributes:
        first: the results of the first step, and norms of its state, see ``_norms``.
        first_seconds: the time to the first result: tracing, compilation and execution.
        temporaries: the bytes that the step needs beside its arguments and results.
    """

    def __init__(self, program: Program, step: Callable[..., Any]) -> None:
        self._inputs = program.inputs
        self._state = jax.tree.map(lambda x: x.copy(), program.state)
        begun = time.perf_counter()
        jitted = jax.jit(step, donate_argnums=0)
        self._compiled = jitted.lower(self._state, *self._inputs).compile()
        first = self._run()
        jax.block_until_ready(first)
        self.first_seconds = time.perf_counter() - begun
        self.first = first, _norms(self._state)
        memory: Any = self._compiled.memory_analysis()
        self.temporaries = memory.temp_size_in_bytes

    def _run(self) -> Any:
        self._state, result = self._compiled(self._state, *self._inputs)
        return result

    def seconds(self, count: int) -> float:
        """Returns the wall time of a step, from this many consecutive steps."""
        begun = time.perf_counter()
        for _ in range(count):
            result = self._run()
        jax.block_until_ready((self._state, result))
        return (time.perf_counter() - begun) / count


def _start_libraries() -> None:
    """Starts cuBLAS and XLA's autotuner, which takes seconds once in a process."""
    x = jnp.ones((512, 512), jnp.bfloat16)
    jax.block_until_ready(jax.jit(jnp.matmul)(x, x))


def measure(name: str, *, fused_first: bool, tiny: bool = False, rounds: int = _ROUNDS) -> Any:
    """Returns the row of a program; see ``benchmarks/README.md`` for its keys."""
    row: dict[str, Any] = {"suite": _SUITE, "case": name}
    try:
        program = PROGRAMS[name](TINY if tiny else FULL)
    except ModuleNotFoundError as error:
        return row | {"note": f"not installed: {error.name}"}
    steps = {"jit": program.step, "fuse": fuse(program.step)}
    order = ["fuse", "jit"] if fused_first else ["jit", "fuse"]
    _start_libraries()
    ways = {each: Way(program, steps[each]) for each in order}
    results = [ways[each].first for each in ("fuse", "jit")]
    if "decode" in name:  # if two tokens are equally likely, either may result
        results = [norms for _, norms in results]
    wrong = disagreement_of(results[0], results[1], _TOLERANCE)
    if wrong:
        return row | {"error": f"differs from the result by jax.jit: {wrong}"}
    count = max(1, round(_SECONDS_OF_A_SAMPLE / max(ways["jit"].seconds(2), 1e-6)))
    samples: dict[str, list[float]] = {each: [] for each in order}
    for _ in range(rounds):
        for each in order:
            samples[each].append(ways[each].seconds(count))
        order = order[::-1]
    ms = {each: 1e3 * statistics.median(samples[each]) for each in ways}
    return row | {
        "jit_ms": ms["jit"],
        "fuse_ms": ms["fuse"],
        "ratio": ms["jit"] / ms["fuse"],
        "jit_first_s": ways["jit"].first_seconds,
        "fuse_first_s": ways["fuse"].first_seconds,
        "jit_temporaries": ways["jit"].temporaries,
        "fuse_temporaries": ways["fuse"].temporaries,
        "first": "fuse" if fused_first else "jit",
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the results in columns, and geometric means by the kind of step."""
    lines = [
        f"{'program':<20}{'jit ms':>9}{'fuse ms':>9}{'ratio':>7}{'first s':>16}{'temp MB':>16}"
    ]
    kinds: dict[str, list[float]] = {}
    for row in rows:
        if "ratio" not in row:
            lines.append(f"{row['case']:<20}{row.get('error') or row.get('note')}")
            continue
        first = f"{row['jit_first_s']:.1f} {row['fuse_first_s']:.1f}"
        bytes_ = f"{row['jit_temporaries'] * 1e-6:.0f} {row['fuse_temporaries'] * 1e-6:.0f}"
        lines.append(
            f"{row['case']:<20}{row['jit_ms']:>9.3f}{row['fuse_ms']:>9.3f}{row['ratio']:>7.3f}"
            f"{first:>16}{bytes_:>16}"
        )
        kind = next(x for x in ("train", "prefill", "decode") if x in row["case"])
        kinds.setdefault(kind, []).append(row["ratio"])
    for kind, ratios in kinds.items():
        mean = statistics.geometric_mean(ratios)
        lines.append(f"{kind}: geometric mean {mean:.3f} of {len(ratios)}, least {min(ratios):.3f}")
    return "\n".join(lines)


def _in_a_process(name: str, fused_first: bool, tiny: bool) -> dict[str, Any]:
    command = [sys.executable, "-P", __file__, "--one", name, "--tiny" * tiny]
    command += ["--fused-first" * fused_first]
    environment = os.environ | {"USE_TORCH": "0"}  # otherwise transformers imports PyTorch
    ran = subprocess.run(
        [word for word in command if word],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    lines = ran.stdout.splitlines()
    if ran.returncode or not lines:
        return {"suite": _SUITE, "case": name, "error": ran.stderr[-300:]}
    return json.loads(lines[-1])


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        arguments: command line; by default the process's.

    Returns:
        The exit status: 0, or 1 if a program failed.
    """
    parser = argparse.ArgumentParser(prog="python -P benchmarks/models.py", description=__doc__)
    parser.add_argument("--case", default="", metavar="SUBSTRING", help="only such programs")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="JSON, after each program")
    parser.add_argument("--commit", metavar="HASH", help="of the sources, if this is no checkout")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--one", metavar="PROGRAM", help="measure it here, print a line of JSON")
    parser.add_argument("--fused-first", action="store_true", help="with --one: begin with fuse")
    args = parser.parse_args(arguments)
    if args.one:
        print(json.dumps(measure(args.one, fused_first=args.fused_first, tiny=args.tiny)))
        return 0
    # This process uses the GPU, too, for the header.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results = report.Results(args.out, report.header(args.commit))
    for index, name in enumerate(x for x in PROGRAMS if args.case in x):
        row = _in_a_process(name, bool(index % 2), args.tiny)
        results.add(row)
        print(table([row]).splitlines()[1], file=sys.stderr)
    print(table(results.rows))
    return int(any("error" in row for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())
