"""Starts NVIDIA's MPS for a run of the tests, whose processes share a GPU; hooks for conftest.py.

Without MPS the GPU gives its time to one process after the other, which is slow. On a machine with
a GPU, a run with several processes starts a daemon. It starts none if a daemon runs already, if the
environment names one, or if JAX_TCGEMM_TEST_MPS=0. If MPS doesn't work, the tests run without it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

CONTROL = "nvidia-cuda-mps-control"
SWITCH = "JAX_TCGEMM_TEST_MPS"
DIRECTORIES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_PREFIX = "jax_tcgemm-mps-"  # of the folder that holds both directories

# The daemon tells a server to end even if its clients don't end. The command gives them 10 seconds;
# we wait for _TIMEOUT seconds.
_QUIT = "quit -t 10\n"
_TIMEOUT = 60

_FIRST_CLIENT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
status = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
sys.exit(f"CUDA error {status}" if status else 0)
"""


class MpsError(Exception):
    """The reason why there is no MPS; one line."""


class Daemon:
    """An MPS control daemon for this run; processes started from here on find it."""

    def __init__(self):
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX))
        for name in DIRECTORIES:
            folder = self._folder / name.split("_")[2].lower()
            folder.mkdir()
            os.environ[name] = str(folder)
        atexit.register(self.stop)
        try:
            _check(_run([CONTROL, "-d"]))
            # In some containers clients get no device; then every GPU test would be skipped.
            _check(_first_client())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the daemon; may be called repeatedly, and never raises."""
        atexit.unregister(self.stop)
        if not self._folder.exists():
            return
        try:
            _run([CONTROL], _QUIT)
        except MpsError:
            self._kill()
        for name in DIRECTORIES:
            if os.environ.get(name, "").startswith(str(self._folder)):
                del os.environ[name]
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            pid = int((self._folder / "pipe" / f"{CONTROL}.pid").read_text())
            os.kill(pid, signal.SIGTERM)


def outer_environment() -> dict[str, str]:
    """Returns the environment as it was before this module started a daemon, in any process."""
    ours = [name for name in DIRECTORIES if _PREFIX in os.environ.get(name, "")]
    return {name: value for name, value in os.environ.items() if name not in ours}


def _run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        # Output goes to files: a daemon keeps its ends of pipes open, so reading a pipe would wait
        # for it.
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            done = subprocess.run(
                command,
                input=text,
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
            said.seek(0)
            done.stdout = said.read()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MpsError(f"{command[0]}: {error}".splitlines()[0]) from error
    return done


def _check(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode != 0:
        lines = done.stdout.split("\n")
        reason = next((line for line in reversed(lines) if line), f"status {done.returncode}")
        raise MpsError(f"{pathlib.Path(done.args[0]).name}: {reason}")


def _first_client() -> subprocess.CompletedProcess[str]:
    """Starts the server by a first client, and reports whether that client got a GPU."""
    return _run([sys.executable, "-c", _FIRST_CLIENT])


def _has_gpu() -> bool:
    if any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    return _run(["nvidia-smi"]).returncode == 0


def _processes(config: pytest.Config) -> int:
    """Returns how many workers pytest-xdist will start; it has resolved `-n auto` by now."""
    if hasattr(config, "workerinput") or config.option.collectonly:
        return 0
    counts = (spec.split("*")[0] for spec in getattr(config.option, "tx", None) or ())
    return sum(int(count) if count.isdigit() else 1 for count in counts)


def is_wanted(config: pytest.Config) -> bool:
    """Checks if the tests need a daemon that isn't running."""
    if _processes(config) < 2 or os.environ.get(SWITCH) == "0":
        return False
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    if any(name in os.environ for name in DIRECTORIES) or shutil.which(CONTROL) is None:
        return False
    return _has_gpu() and _run([CONTROL], "get_server_list\n").returncode != 0


_DAEMON = pytest.StashKey[Daemon]()
_HEADER = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    try:
        if is_wanted(config):
            config.stash[_DAEMON] = Daemon()
            config.stash[_HEADER] = f"MPS: the tests share the GPU ({SWITCH}=0: without)"
    except Exception as error:  # after any error the tests still run, only slower
        config.stash[_HEADER] = f"MPS: the tests go without: {error}"


def pytest_report_header(config: pytest.Config) -> str | None:
    return config.stash.get(_HEADER, None)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _DAEMON in config.stash:
        config.stash[_DAEMON].stop()
