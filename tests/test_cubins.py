"""The cache of kernels compiled at run time: memory, disk, permissions, processes."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import stat
import struct
import subprocess
import sys
import threading
import time
import warnings

import pytest

from jax_tcgemm.epilogue import cubins, nvrtc
from jax_tcgemm.tuning import cache
from jax_tcgemm.tuning.entry import Entry

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


@pytest.fixture
def umask():
    """Returns a function that sets the umask: umask(0o002)."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077], ids=oct)
@pytest.mark.parametrize("first", ["tuning", "cubin"])
def test_kept_under_every_umask(folder, monkeypatch, umask, mask, first):
    umask(mask)
    if first == "tuning":  # creates the folder above
        assert cache.write("a device", "{}", Entry("xla", 1.0, 2.0, 1.0)) is None
    made = cubins.cubin(SOURCE, "sm_90a")
    assert (_mode(folder.parent), _mode(folder)) == (0o700, 0o700)
    cubins.clear_memory()
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", _refuse)
    assert cubins.cubin(SOURCE, "sm_90a") == made


def test_a_folder_above_that_others_write_to_stays_as_it_is(folder, monkeypatch):
    folder.parent.mkdir()
    folder.parent.chmod(0o775)
    made = cubins.cubin(SOURCE, "sm_90a")
    assert (_mode(folder.parent), _mode(folder)) == (0o775, 0o700)
    cubins.clear_memory()
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", _refuse)
    assert cubins.cubin(SOURCE, "sm_90a") == made


@pytest.mark.parametrize("mode", [0o775, 0o777], ids=oct)
def test_own_folder_that_others_write_to_is_mended(folder, mode):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert cubins.cubin(SOURCE, "sm_90a")
    assert _mode(folder) == 0o700
    assert len(list(folder.iterdir())) == 1


def test_a_mode_that_does_not_change_is_refused(folder, monkeypatch):
    """Some file systems have no modes."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setattr(pathlib.Path, "chmod", lambda *_: None)
    with pytest.warns(UserWarning, match="others can write to it"):
        assert cubins.cubin(SOURCE, "sm_90a")
    assert not list(folder.iterdir())


def _with_owner(status, owner):
    fields = list(status)
    fields[stat.ST_UID] = owner
    return os.stat_result(fields)


def test_another_users_folder_is_not_used(folder, monkeypatch):
    real, other = pathlib.Path.stat, os.geteuid() + 1

    def stat_of(path, **options):
        status = real(path, **options)
        return _with_owner(status, other) if path == folder else status

    monkeypatch.setattr(pathlib.Path, "stat", stat_of)
    with pytest.warns(UserWarning, match="is another user's"):
        assert cubins.cubin(SOURCE, "sm_90a")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("whose", ["another user's", "writable", "another key's"])
def test_entries_that_others_may_have_made_are_misses(folder, monkeypatch, whose):
    cubins.cubin(SOURCE, "sm_90a")
    (entry,) = folder.iterdir()
    assert cubins._read(entry) is not None
    if whose == "another user's":
        real, other = os.fstat, os.geteuid() + 1
        monkeypatch.setattr(cubins.os, "fstat", lambda file: _with_owner(real(file), other))
    elif whose == "writable":
        entry.chmod(0o660)
    else:
        entry = entry.rename(folder / ("0" * 64))
    assert cubins._read(entry) is None


def _full(*arguments, **options):
    raise OSError(28, "No space left on device", f"/{time.perf_counter_ns()}")


def _read_only(*arguments, **options):
    raise OSError(30, "Read-only file system", f"/{time.perf_counter_ns()}")


@pytest.mark.parametrize(
    ("where", "name", "fails"),
    [
        (cubins.os, "fdopen", _full),
        (cubins.os, "replace", _full),
        (cubins.tempfile, "mkstemp", _read_only),
        (cubins.pathlib.Path, "mkdir", _read_only),
        (cubins.pathlib.Path, "stat", _read_only),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("filtered", ["default", "error"])
def test_what_cannot_be_kept_is_said_once_and_ends_nothing(
    folder, monkeypatch, where, name, fails, filtered
):
    cubins._headers_digest()  # reads files of the package
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always" if filtered == "default" else "error")
        patch.setattr(where, name, fails)
        for i in range(2):
            assert cubins.cubin(SOURCE.replace("= 1", f"= {i}"), "sm_90a")
    message = fails.__name__.strip("_").split("_")[0]
    said = [str(each.message).lower() for each in said]
    assert len(said) == (filtered == "default")
    assert all({"full": "no space left", "read": "read-only"}[message] in each for each in said)
    assert not folder.exists() or not list(folder.iterdir())


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


def test_the_compiler_is_part_of_the_key(folder, monkeypatch):
    """Another release of NVRTC, other options or other CUDA headers make other machine code."""
    found = nvrtc.find()
    assert isinstance(found, nvrtc.Nvrtc)
    keys = {cubins._key(SOURCE, "sm_90a", ())}
    for change in (
        lambda patch: patch.setattr(nvrtc, "OPTIONS", ("--std=c++20",)),
        lambda patch: patch.setattr(nvrtc, "_ends", lambda path: b"another build"),
        lambda patch: patch.setattr(found, "headers", cubins.include_folders()[0]),
        lambda patch: patch.setattr(found, "version", (99, 0)),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            patch.setattr(found, "digest", found._digest())
            keys.add(cubins._key(SOURCE, "sm_90a", ()))
    assert len(keys) == 5


def test_the_build_identifier_is_part_of_the_key():
    found = nvrtc.find()
    assert isinstance(found, nvrtc.Nvrtc)
    path = nvrtc._file_of(found._library.nvrtcVersion)
    assert path is not None
    content = pathlib.Path(path).read_bytes()
    note = struct.pack("III4s", 4, 20, 3, b"GNU")  # 20 bytes, NT_GNU_BUILD_ID
    at = content.index(note) + len(note)
    assert content[at : at + 20] in nvrtc._ends(path)


def test_memory_is_bounded(folder, monkeypatch):
    size = len(cubins.cubin(SOURCE, "sm_90a"))
    monkeypatch.setattr(cubins, "_MOST_KEPT_BYTES", 2 * size + 100)
    for i in range(5):
        cubins.cubin(SOURCE.replace("= 1", f"= {i + 2}"), "sm_90a")
    assert len(cubins._memory) == 2
    assert not cubins._underway


def test_threads_wait_for_one_compilation(folder, monkeypatch):
    inner, made = nvrtc.Nvrtc.compile, []

    def once(self, *arguments):
        made.append(threading.get_ident())
        time.sleep(0.2)
        if len(made) == 1:
            raise KeyboardInterrupt  # the next thread compiles
        return inner(self, *arguments)

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", once)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(cubins.cubin, SOURCE, "sm_90a") for _ in range(8)]
        errors = [future.exception() for future in futures]
    assert [type(error) for error in errors if error is not None] == [KeyboardInterrupt]
    assert len({future.result() for future in futures if future.exception() is None}) == 1
    assert len(made) == 2


def test_a_forked_process_compiles(folder):
    """Other threads of its parent may compile and hold the lock."""
    program = f"""
import concurrent.futures, os, threading, warnings
from jax_tcgemm.epilogue import compiler, cubins, nvrtc
warnings.simplefilter("ignore")
nvrtc.find()
cubins._underway[cubins._key({SOURCE!r}, "sm_90a", ())] = concurrent.futures.Future()
parents = compiler._compilations()
held = threading.Event()
def hold():
    with cubins._lock:
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    failed = not cubins.cubin({SOURCE!r}, "sm_90a") or compiler._compilations() is parents
    os._exit(failed)
os._exit(os.waitpid(child, 0)[1] != 0)
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)


def test_a_process_forked_while_nvrtc_works_is_told(folder):
    """If another thread held one of NVRTC's locks, the child would wait forever."""
    program = f"""
import os, threading, warnings
from jax_tcgemm.epilogue import cubins, nvrtc
warnings.simplefilter("ignore")
inside, leave = threading.Event(), threading.Event()
compiled = nvrtc.Nvrtc._compiled
def held(self, *arguments):
    inside.set()
    leave.wait()
    return compiled(self, *arguments)
nvrtc.Nvrtc._compiled = held
thread = threading.Thread(target=cubins.cubin, args=({SOURCE!r}, "sm_90a"))
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    leave.set()
    try:
        cubins.cubin({SOURCE!r} + " ", "sm_90a")
    except nvrtc.CompileError as error:
        os._exit("forked" not in str(error))
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
leave.set()
thread.join()
assert cubins.cubin({SOURCE!r}, "sm_90a")
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)


def test_no_folder_no_files(folder, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", "")
    assert cubins.cubin(SOURCE, "sm_90a")
    assert not folder.exists()


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
