"""Reports facts of the CUDA compiler: registers, local memory, lost speed.

Usage: report_kernels.py REPORT LOG...; compile_with_log.sh keeps the logs. A kernel's line is
`<mangled name> <registers> <bytes of local memory>`. Local memory holds spilled registers and
arrays that are indexed at run time. If ptxas serialises wgmma or ignores setmaxnreg, there
is a line `warning <code> <mangled name>`. If ptxas gives no name, the line has the object instead.
"""

from __future__ import annotations

import pathlib
import re
import sys

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)'"
    r".*?(?P<local>\d+) bytes stack frame"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)

# "Potential Performance Loss", which ptxas calls an info. ptxas prints it before or after its other
# lines about the kernel, so only the name in the line identifies the kernel.
_LOSS = re.compile(r"^ptxas (?:info|warning)\s*: \((?P<code>C75\d\d)\)(?P<text>.*)$", re.MULTILINE)
_FUNCTION = re.compile(r"function '(?P<name>[^']+)'")


def report(compiler_output: str, target: str) -> str:
    """Returns the report's lines for the output of `ptxas -v`; `target` names the object file."""
    kernels = (
        f"{kernel['name']} {kernel['registers']} {kernel['local']}\n"
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
