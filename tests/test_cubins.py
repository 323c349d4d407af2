"""Kernels compiled at run time: NVRTC is found, and what it made is kept and checked."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jax_tcgemm.epilogue import cubins, nvrtc

pytestmark = pytest.mark.any_jax

SOURCE = 'extern "C" __global__ void f(int* x) { *x = 1; }'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    base = tmp_path / "cache"
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(base))
    cubins.clear_memory()
    cubins._warn.cache_clear()
    yield base / cubins._VERSION
    cubins.clear_memory()


def _refuse(*arguments):
    raise AssertionError("compiled again")


def test_compiler_is_found():
    found = nvrtc.find()
    assert isinstance(found, nvrtc.Nvrtc), found
    assert found.version >= (12, 5)
    assert (found.headers / "cuda_bf16.h").exists()


def test_errors_carry_the_log():
    found = nvrtc.find()
    assert isinstance(found, nvrtc.Nvrtc)
    with pytest.raises(nvrtc.CompileError, match="nothing_of_this_name"):
        found.compile("int x = nothing_of_this_name;", "sm_90a")


def test_memory_then_disk(folder, monkeypatch):
    made = cubins.cubin(SOURCE, "sm_90a")
    assert made.startswith(b"\x7fELF")
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", _refuse)
    assert cubins.cubin(SOURCE, "sm_90a") == made
    cubins.clear_memory()
    assert cubins.cubin(SOURCE, "sm_90a") == made
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-7],
        lambda content: content[:20],
        lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        lambda content: b"another program's" + content[17:],
    ],
)
def test_broken_entries_are_misses(folder, damage):
    made = cubins.cubin(SOURCE, "sm_90a")
    (entry,) = folder.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    cubins.clear_memory()
    assert cubins.cubin(SOURCE, "sm_90a") == made
    assert len(list(folder.iterdir())) == 1
    cubins.clear_memory()
    assert cubins._read(entry) == made


def test_folder_that_others_write_to_is_not_used(folder):
    folder.parent.mkdir()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="others can write to it"):
        assert cubins.cubin(SOURCE, "sm_90a")
    assert not list(folder.iterdir())


def test_full_disk_keeps_nothing(folder, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cubins.os, "fdopen", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert cubins.cubin(SOURCE, "sm_90a")
    assert not list(folder.iterdir())


def test_least_recently_used_go_first(folder, monkeypatch):
    sources = [SOURCE.replace("= 1", f"= {i}") for i in range(3)]
    size = 0
    for i, source in enumerate(sources[:2]):
        size = len(cubins.cubin(source, "sm_90a")) + 100
        entry = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(entry, (1000 - i, 1000 - i))
    monkeypatch.setattr(cubins, "_MOST_BYTES", 2 * size)
    cubins.cubin(sources[2], "sm_90a")
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", _refuse)
    cubins.clear_memory()
    assert cubins.cubin(sources[0], "sm_90a")
    assert cubins.cubin(sources[2], "sm_90a")
    with pytest.raises(AssertionError):
        cubins.cubin(sources[1], "sm_90a")


def test_no_folder_no_files(folder, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", "")
    assert cubins.cubin(SOURCE, "sm_90a")
    assert not folder.exists()


@pytest.mark.slow
def test_eight_processes_at_once(folder):
    program = (
        "import hashlib; from jax_tcgemm.epilogue import cubins; "
        f"print(hashlib.sha256(cubins.cubin({SOURCE!r}, 'sm_90a')).hexdigest())"
    )
    command = [sys.executable, "-P", "-c", program]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    printed = {process.communicate(timeout=240)[0] for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(printed) == 1
    assert len(list(folder.iterdir())) == 1
