"""Writes what a CUDA compiler said of each kernel: registers, spills, lost speed.

Usage: report_kernels.py REPORT LOG...; compile_with_log.sh keeps the logs. A kernel's line is
`<mangled name> <registers> <spill bytes>`. Where ptxas serialises wgmma or ignores setmaxnreg,
there is a line `warning <code> <mangled name>`, with the object in place of the name where ptxas
gives none.
"""

from __future__ import annotations

import pathlib
import re
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


def main() -> None:
    where, *logs = map(pathlib.Path, sys.argv[1:])
    where.write_text("".join(report(log.read_text(), log.stem) for log in logs))


if __name__ == "__main__":
    main()
