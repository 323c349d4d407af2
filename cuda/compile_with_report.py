"""Runs a CUDA compiler and keeps what it reports of each kernel: registers and spills.

Usage: compile_with_report.py DIRECTORY COMPILER [ARGUMENTS...]. CMake calls it as a compiler
launcher; the kernels' line in DIRECTORY/<object>.txt is `<mangled name> <registers> <spill bytes>`.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)'"
    r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def report(compiler_output: str) -> str:
    """One line for each kernel of `ptxas -v`'s output."""
    return "".join(
        f"{kernel['name']} {kernel['registers']} {int(kernel['stores']) + int(kernel['loads'])}\n"
        for kernel in _KERNEL.finditer(compiler_output)
    )


def main() -> int:
    directory, *command = sys.argv[1:]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    if done.returncode == 0 and "-o" in command:
        target = pathlib.Path(command[command.index("-o") + 1])
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        lines = report(done.stdout + done.stderr)
        (pathlib.Path(directory) / f"{target.name}.txt").write_text(lines)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
