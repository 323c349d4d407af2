"""The MPS daemon that tests/mps.py starts for a test run, with a fake of NVIDIA's program."""

import os
import pathlib
import signal
import subprocess
import sys
from types import SimpleNamespace

import mps
import pytest

pytestmark = pytest.mark.any_jax

# The fake records its commands. A file beside its pipes stands for a running daemon.
_FAKE = """\
#!/bin/sh
state="${CUDA_MPS_PIPE_DIRECTORY:-$FAKE_HOME}/running"
if [ "$1" = -d ]; then
  echo start >> "$FAKE_HOME/said"
  [ -n "$FAKE_FAILS" ] && { echo; echo "An instance cannot be started"; exit 1; }
  touch "$state"
  exit 0
fi
read words
echo "$words" >> "$FAKE_HOME/said"
[ -e "$state" ] || { echo "Cannot find MPS control daemon process"; exit 1; }
[ "$words" = get_server_list ] || rm "$state"
"""


def options(*tx, collectonly=False):
    return SimpleNamespace(option=SimpleNamespace(tx=list(tx), collectonly=collectonly))


@pytest.fixture
def said(monkeypatch, tmp_path):
    """Returns the fake's commands, on a machine with a GPU whose clients are served."""
    program = tmp_path / mps.CONTROL
    program.write_text(_FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("FAKE_HOME", str(tmp_path))
    for name in ("FAKE_FAILS", "JAX_PLATFORMS", mps.SWITCH, *mps.DIRECTORIES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mps, "_has_gpu", lambda: True)
    served = subprocess.CompletedProcess(["python"], 0, "")
    monkeypatch.setattr(mps, "_first_client", lambda: served)

    def read():
        path = tmp_path / "said"
        return path.read_text().splitlines() if path.exists() else []

    return read


@pytest.mark.parametrize("tx", [["popen"] * 2, ["3*popen"]])
def test_several_processes_want_a_daemon(said, tx):
    assert mps.is_wanted(options(*tx))
    assert said() == ["get_server_list"]


@pytest.mark.parametrize(
    "why", ["one", "none", "worker", "collect", "off", "CPU", "named", "no GPU"]
)
def test_others_want_none(said, monkeypatch, why):
    config = options("popen", "popen", collectonly=why == "collect")
    if why in ("one", "none"):
        config = options(*["popen"] * (why == "one"))
    elif why == "worker":
        config.workerinput = {}
    elif why == "off":
        monkeypatch.setenv(mps.SWITCH, "0")
    elif why == "CPU":
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    elif why == "named":
        monkeypatch.setenv(mps.DIRECTORIES[0], "/somewhere")
    elif why == "no GPU":
        monkeypatch.setattr(mps, "_has_gpu", lambda: False)
    assert not mps.is_wanted(config)
    assert said() == []


def test_a_daemon_that_runs_is_enough(said, tmp_path):
    (tmp_path / "running").touch()
    assert not mps.is_wanted(options("popen", "popen"))
    assert said() == ["get_server_list"]


def test_without_the_program(monkeypatch, said, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert not mps.is_wanted(options("popen", "popen"))


def test_it_lasts_from_start_to_stop(said):
    before = dict(os.environ)
    daemon = mps.Daemon()
    folders = [pathlib.Path(os.environ[name]) for name in mps.DIRECTORIES]
    assert all(folder.is_dir() for folder in folders)
    assert mps.outer_environment() == before
    daemon.stop()
    daemon.stop()
    assert said() == ["start", "quit -t 10"]
    assert dict(os.environ) == before
    assert not any(folder.parent.exists() for folder in folders)


def test_directories_of_others_are_passed_on(monkeypatch, said):
    monkeypatch.setenv(mps.DIRECTORIES[0], "/somewhere")
    assert mps.outer_environment() == dict(os.environ)


@pytest.mark.parametrize("what", ["daemon", "client"])
def test_what_does_not_work_is_ended(said, monkeypatch, what):
    before = dict(os.environ)
    if what == "daemon":
        monkeypatch.setenv("FAKE_FAILS", "1")
    else:
        refused = subprocess.CompletedProcess(["python"], 1, "CUDA error 805\n")
        monkeypatch.setattr(mps, "_first_client", lambda: refused)
    reason = "An instance cannot be started" if what == "daemon" else "CUDA error 805"
    with pytest.raises(mps.MpsError, match=reason):
        mps.Daemon()
    assert said() == ["start", "quit -t 10"]
    assert not set(os.environ) - set(before) - {"FAKE_FAILS"}


def test_a_program_that_hangs_is_given_up(said, monkeypatch, tmp_path):
    (tmp_path / mps.CONTROL).write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(mps, "_TIMEOUT", 0.1)
    with pytest.raises(mps.MpsError, match="timed out"):
        mps.is_wanted(options("popen", "popen"))


def test_a_daemon_that_does_not_answer_is_killed(said, monkeypatch, tmp_path):
    daemon = mps.Daemon()
    program = "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program]) as hanging:
        pipes = pathlib.Path(os.environ[mps.DIRECTORIES[0]])
        (pipes / f"{mps.CONTROL}.pid").write_text(f"{hanging.pid}\n")
        (tmp_path / mps.CONTROL).write_text("#!/bin/sh\nexec sleep 30\n")
        monkeypatch.setattr(mps, "_TIMEOUT", 0.1)
        daemon.stop()
        assert hanging.wait(timeout=30) == -signal.SIGTERM
    assert not pipes.exists()


_CONFTEST = """\
import subprocess
import mps
from mps import pytest_configure, pytest_report_header, pytest_unconfigure
mps._has_gpu = lambda: True
mps._first_client = lambda: subprocess.CompletedProcess(["python"], 0, "")
"""
_TEST = """\
import os, pathlib
import pytest

@pytest.mark.parametrize("i", range(4))
def test_is_a_client(i):
    assert (pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]) / "running").exists()
"""


@pytest.mark.parametrize(
    ("fails", "passed", "header"),
    [
        ("", True, "MPS: the tests share the GPU (JAX_TCGEMM_TEST_MPS=0: without)"),
        ("1", False, f"MPS: the tests go without: {mps.CONTROL}: An instance cannot be"),
    ],
)
def test_a_run(said, tmp_path, fails, passed, header):
    """Workers are clients of a daemon that starts and ends once; they also run without it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "test_clients.py").write_text(_TEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "."]
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment |= {"FAKE_FAILS": fails, "PYTHONPATH": str(pathlib.Path(mps.__file__).parent)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert header in done.stdout, done.stdout + done.stderr
    assert ("4 passed" if passed else "4 failed") in done.stdout
    assert said() == ["get_server_list", "start", "quit -t 10"]
