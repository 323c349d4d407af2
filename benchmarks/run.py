"""Times the cases of ``suite.json`` beside XLA, and optionally beside JAX's own Pallas kernel.

Usage: python -P benchmarks/run.py --suite large,tf32 --out results.json
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import time

# With -P, a script's folder is not on the path.
sys.path.append(str(pathlib.Path(__file__).parent))

import chains
import report
from cases import Case, load_cases
from measure import Options, measure_case, untuned_row, with_stderr

from jax_tcgemm import Tunings, tune
from jax_tcgemm.tuning import cache, lookup

_RIVALS = ("xla", "pallas")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line and chooses the cases that it asks for."""
    parser = argparse.ArgumentParser(prog="python -P benchmarks/run.py", description=__doc__)
    add = parser.add_argument
    add("--suite", type=_names, help="suites, joined by commas; by default all")
    add("--case", default="", metavar="SUBSTRING", help="only cases whose name contains this")
    add("--against", type=_names, default=("xla",), help="rivals: xla,pallas; default xla")
    add("--out", type=pathlib.Path, metavar="FILE", help="JSON file, written after each case")
    add("--resume", action="store_true", help="leave out the cases that FILE has")
    add("--reps", type=int, default=20, help="samples of each competitor, at least; default 20")
    add("--seconds", type=float, default=1.5, help="sustained measurement of a case; default 1.5")
    add("--no-sustained", action="store_true", help="leave the sustained measurement out")
    add("--configs", action="store_true", help="also time every kernel configuration")
    add("--configs-glob", metavar="GLOB", help="only configurations with such names")
    add("--chain", action="store_true", help="also wall times of chains of small products")
    add("--tuning", choices=lookup.MODES, default="read", help=f"as {lookup.SETTING}; default read")
    add("--no-packaged", action="store_true", help="without the tunings of the package")
    add("--tune", action="store_true", help="tune each case; rows of SUITE_untuned, SUITE_tuned")
    add("--tunings", type=pathlib.Path, metavar="FILE", help="what --tune found, added to FILE")
    add("--commit", metavar="HASH", help="of the sources, where this is not a checkout")
    args = parser.parse_args(arguments)
    cases = load_cases()
    suites = list(dict.fromkeys(case.suite for case in cases))
    unknown = set(args.suite or ()) - set(suites)
    if unknown:
        parser.error(f"unknown suites {sorted(unknown)}; there are {suites}")
    if set(args.against) - set(_RIVALS):
        parser.error(f"--against takes {_RIVALS}, joined by commas")
    if args.tunings and not args.tune:
        parser.error("--tunings needs --tune")
    if args.resume and args.out is None:
        parser.error("--resume needs --out")
    if args.reps < 1 or args.seconds < 0:
        parser.error("--reps must be at least 1 and --seconds at least 0")
    args.cases = [
        case
        for case in cases
        if (args.suite is None or case.suite in args.suite) and args.case in case.label
    ]
    return args


class Progress:
    """A bar on stderr, or one line for each case if stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._start = time.perf_counter()

    def show(self, index: int, label: str) -> None:
        """Shows that ``index`` cases are done and which one is next or, at the end, was last."""
        seconds = time.perf_counter() - self._start
        left = seconds / index * (self._total - index) if index else 0.0
        text = f"{index}/{self._total}, {seconds:.0f} s, {left:.0f} s to go: {label}"
        if sys.stderr.isatty():
            width = 30
            bar = "#" * (width * index // max(1, self._total))
            end = "\n" if index == self._total else ""
            print(f"\r\033[K[{bar:<{width}}] {text}"[:120], end=end, file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def _outcome(row: report.Row) -> str:
    if row["us"] is None:
        return f"{row['case']}: {row.get('error') or row.get('note')}"
    ratio = f", ratio {row['ratio']:.3f}" if row["ratio"] else ""
    return f"{row['case']}: {row['us']:.1f} us{ratio}, {row['config']}"


class Tuner:
    """Tunes cases, and keeps the results.

    Args:
        path: the file for the results, if any.
    """

    def __init__(self, path: pathlib.Path | None) -> None:
        self._path = path
        self._found = Tunings.load(path) if path is not None and path.exists() else Tunings()

    def tune(self, case: Case) -> Tunings:
        """Measures the products of a case."""
        found = tune(case.ours(), case.types, progress=False)
        self._found = self._found | found
        if self._path is not None:
            self._found.save(self._path)
        return found


_SUFFIXES = {"read": "", "tune": "_tuned", "off": "_untuned"}


def measure_all(
    cases: list[Case], options: Options, results: report.Results, tuner: Tuner | None = None
) -> None:
    """Measures the cases that the results lack, and adds each as soon as it is done.

    Rows have the suite SUITE for default choices, SUITE_untuned for the model's choices, and
    SUITE_tuned for measured choices.
    """
    suffix = _SUFFIXES["tune" if tuner is not None else lookup.mode()]
    left = [case for case in cases if (case.suite + suffix, case.label) not in results.done]
    progress = Progress(len(left))
    for index, case in enumerate(left):
        if sys.stderr.isatty():
            progress.show(index, case.label)
        if tuner is None or case.unsupported:
            row = measure_case(case, options)
        else:
            row = measure_case(case, dataclasses.replace(options, tunings=tuner.tune(case)))
            before = untuned_row(row, case.flops)
            if before is not None:
                before["suite"] += _SUFFIXES["off"]
                results.add(before)
        row["suite"] += suffix
        results.add(row)
        if not sys.stderr.isatty() or index + 1 == len(left):
            progress.show(index + 1, _outcome(row))


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        arguments: command line; by default the process's.

    Returns:
        The exit status: 0, or 1 if a case failed.
    """
    args = parse_arguments(arguments)
    # Makes the dispatch log its kernels; it reads this at first use.
    os.environ["JAX_TCGEMM_LOG"] = "1"
    # Ignores earlier measurements, and gives time for every product.
    os.environ[cache.SETTING] = ""
    os.environ[lookup.SETTING] = "off" if args.tune else args.tuning
    os.environ.setdefault(lookup.BUDGET_SETTING, "600")
    if args.no_packaged:
        lookup.packaged = lambda device_kind: Tunings()
    try:
        header = report.header(args.commit)
        results = (
            report.Results.resume(args.out, header)
            if args.resume
            else report.Results(args.out, header)
        )
    except ValueError as error:
        print(f"--resume: {error}", file=sys.stderr)
        return 2
    options = Options(
        args.against,
        args.reps,
        0.0 if args.no_sustained else args.seconds,
        args.configs_glob or ("*" if args.configs else None),
    )
    if args.chain:
        # Chains run before any profiling, which slows launches; the log would disturb the table.
        measured, _ = with_stderr(lambda: [chains.measure_chain(size) for size in chains.SIZES])
        results.chains = measured
        results.save()
    measure_all(args.cases, options, results, Tuner(args.tunings) if args.tune else None)
    print("; ".join(f"{name}: {value}" for name, value in results.header.items()))
    print(report.tables(results.rows))
    if results.chains:
        print(f"\n{chains.table(results.chains)}")
    if options.configs is not None:
        print(f"\n{report.choices(results.rows)}")
    failures = [row for row in results.rows if "error" in row]
    for row in failures:
        print(f"FAILED: {row['suite']}: {row['case']}: {row['error']}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
