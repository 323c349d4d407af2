"""Runs a CUDA compiler and keeps what it reports of each kernel: registers, spills, lost speed.

Usage: compile_with_report.py DIRECTORY COMPILER [ARGUMENTS...]. CMake calls it as a compiler
launcher; the kernels' line in DIRECTORY/<object>.txt is `<mangled name> <registers> <spill bytes>`.
Where ptxas serialises wgmma or ignores setmaxnreg, there is a line `warning <code> <mangled name>`,
with the object in place of the name where ptxas gives none.
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

# "Potential Performance Loss", which ptxas calls an info. It says so before or after what else it
# says of the kernel, which only the name in the line tells.
_LOSS = re.compile(r"^ptxas (?:info|warning)\s*: \((?P<code>C75\d\d)\)(?P<text>.*)$", re.MULTILINE)
_FUNCTION = re.compile(r"function '(?P<name>[^']+)'")


def report(compiler_output: str, target: str) -> str:
    """The lines for the kernels of `ptxas -v`'s output, of an object file of this name."""
    kernels = (
        f"{kernel['name']} {kernel['registers']} {int(kernel['stores']) + int(kernel['loads'])}\n"
        for kernel in _KERNEL.finditer(compiler_output)
    )
    losses = (
        f"warning {loss['code']} {function['name'] if function else target}\n"
        for loss in _LOSS.finditer(compiler_output)
        for function in [_FUNCTION.search(loss["text"])]
    )
    return "".join((*kernels, *losses))


def main() -> int:
    directory, *command = sys.argv[1:]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    if done.returncode == 0 and "-o" in command:
        target = pathlib.Path(command[command.index("-o") + 1])
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        lines = report(done.stdout + done.stderr, target.name)
        (pathlib.Path(directory) / f"{target.name}.txt").write_text(lines)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
