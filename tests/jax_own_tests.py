"""Runs JAX's own tests with every program rewritten by `fuse`, and without.

The exit status is 1 if a test fails with `fuse` and passes without. Two kinds of failures are
listed separately:

- rounding: JAX's tolerances for 16-bit results expect that intermediate results are rounded, too;
- counts of traces: `fuse` traces the programs that it rewrites.

    python tests/jax_own_tests.py CHECKOUT_OF_JAX --every 20 --jobs 8
    python tests/jax_own_tests.py CHECKOUT_OF_JAX --fuse-float32 -k "dot or matmul or grad"

Other arguments go to pytest. The checkout must have the tag of the installed JAX (`jax-v0.10.2`).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from fuse_plugin import described

FILES = (
    *("lax_test", "lax_autodiff_test", "lax_vmap_test", "lax_control_flow_test", "nn_test"),
    "api_test",
)
# Tests that count how often JAX traces a function.
_OF_TRACES = ("test_eval_shape_trace_cache_share", "test_user_trace_context_hooks")
_ROUNDING = ("Not equal to tolerance", "Mismatched elements")
_LINES = 4


def _run(files: Sequence[pathlib.Path], outcomes: pathlib.Path, options: Sequence[str]) -> Any:
    """Runs pytest; returns the plugin's output."""
    paths = [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", "-p", "fuse_plugin"]
    command += ["-p", "no:cacheprovider", "--fuse-outcomes", str(outcomes), *options]
    with outcomes.with_suffix(".log").open("w") as log:
        subprocess.run([*command, *map(str, files)], env=environment, stdout=log, stderr=log)
    if not outcomes.exists():
        raise SystemExit(outcomes.with_suffix(".log").read_text())
    return json.loads(outcomes.read_text())


def failures(plain: dict[str, Any], fused: dict[str, Any]) -> dict[str, str]:
    """Returns the messages of tests that fail with `fuse` and pass without."""
    return {
        test: found["message"]
        for test, found in fused["outcomes"].items()
        if found["outcome"] == "failed"
        and plain["outcomes"].get(test, {"outcome": "passed"})["outcome"] == "passed"
    }


def is_rounding(message: str) -> bool:
    """Checks if a test failed by a numerical difference that involves 16-bit numbers."""
    return any(each in message for each in _ROUNDING) and "float16" in message


def kind_of(test: str, message: str) -> str:
    """Returns the kind of this failure."""
    if test.rpartition("::")[2] in _OF_TRACES:
        return "counts of traces"
    return "rounding" if is_rounding(message) else "failures that fuse causes"


def _report(plain: dict[str, Any], fused: dict[str, Any]) -> int:
    for name, found in (("without", plain), ("with fuse", fused)):
        outcomes = [each["outcome"] for each in found["outcomes"].values()]
        text = ", ".join(f"{outcomes.count(each)} {each}" for each in sorted({*outcomes}))
        print(f"{name}: {text}")
    print(described(fused["counts"]))
    failed = failures(plain, fused)
    for test, error in fused["raised"].items():
        if test not in failed:
            print(f"raised in a test that does not fail: {test}: {error}")
    titles = ("rounding", "counts of traces", "failures that fuse causes")
    for title in titles:
        own = {test: each for test, each in failed.items() if kind_of(test, each) == title}
        print(f"\n{title}: {len(own)}")
        for test, message in own.items():
            print(f"  {test}")
            for line in message.splitlines()[:_LINES]:
                print(f"      {line[:200]}")
    return int(any(kind_of(*each) == titles[-1] for each in failed.items()))


def main() -> int:
    """Runs both; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--files", default=",".join(FILES), help="names, without .py")
    parser.add_argument("--every", type=int, default=1, help="every N-th test of each file")
    parser.add_argument("--offset", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 for none beside pytest's")
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for outcomes and logs")
    args, others = parser.parse_known_args()
    names = args.files.split(",")
    files = [args.checkout.resolve() / "tests" / f"{name}.py" for name in names]
    options = ["--fuse-every", str(args.every), "--fuse-offset", str(args.offset)]
    options += ["-n", str(args.jobs), *others]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        plain = _run(files, folder / "plain.json", ["--fuse-off", *options])
        fused = _run(files, folder / "fused.json", options)
    return _report(plain, fused)


if __name__ == "__main__":
    sys.exit(main())
