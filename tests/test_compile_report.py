"""The build keeps and reads ptxas's output: compile_with_log.sh and report_kernels.py."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.any_jax

SCRIPT = pathlib.Path(__file__).parent.parent / "cuda" / "build" / "report_kernels.py"

KERNEL = """\
ptxas info    : Compiling entry function '{name}' for 'sm_90a'
ptxas info    : Function properties for {name}
    {local} bytes stack frame, {spilt} bytes spill stores, {spilt} bytes spill loads
ptxas info    : Used {registers} registers, used 4 barriers, 1936 bytes cmem[0]
ptxas info    : Compile time = 551.576 ms
"""
TWO = KERNEL.format(name="_Z3onev", local=0, spilt=0, registers=168) + KERNEL.format(
    name="_Z3twov", local=20, spilt=0, registers=255
)
SERIALISED = (
    "ptxas {kind} : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline in the function "
    "'{name}'\n"
)
IGNORED = (
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine "
    "register count at entry.\n"
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("report_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_registers_and_local_memory(script):
    others = "ptxas info    : 0 bytes gmem\nptxas warning : Unresolved extern variable 'x'\n"
    lines = "_Z3onev 168 0\n_Z3twov 255 20\n"
    assert script.report(others + TWO, "row.cu.o") == lines
    assert script.report(others, "row.cu.o") == ""


@pytest.mark.parametrize("kind", ["info   ", "warning"])
@pytest.mark.parametrize("first", [True, False])
def test_serialised_wgmma(script, kind, first):
    """The report names the kernel, wherever ptxas warns: before, among or after all kernels."""
    loss = SERIALISED.format(kind=kind, name="_Z3twov")
    text = loss + TWO if first else TWO + loss
    lines = "_Z3onev 168 0\n_Z3twov 255 20\nwarning C7510 _Z3twov\n"
    assert script.report(text, "row.cu.o") == lines
    at = TWO.index("ptxas info    : Function properties for _Z3twov")
    assert script.report(TWO[:at] + loss + TWO[at:], "row.cu.o") == lines


def test_a_warning_that_names_no_kernel_names_the_object(script):
    assert script.report(IGNORED + TWO, "row.cu.o").endswith("\nwarning C7508 row.cu.o\n")


@pytest.mark.parametrize("status", [0, 3])
def test_the_log_is_kept_and_passed_on(script, status, tmp_path, monkeypatch):
    compiler = f"import sys; sys.stderr.write({IGNORED + TWO!r}); sys.exit({status})"
    launcher = ["sh", SCRIPT.with_name("compile_with_log.sh"), tmp_path / "logs"]
    command = [sys.executable, "-c", compiler, "-o", tmp_path / "row.cu.o"]
    done = subprocess.run([*launcher, *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, IGNORED + TWO)
    log, where = tmp_path / "logs" / "row.cu.o.txt", tmp_path / "kernels.txt"
    assert log.read_text() == IGNORED + TWO
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(where), str(log), str(log)])
    script.main()
    assert where.read_text() == 2 * script.report(IGNORED + TWO, "row.cu.o")
