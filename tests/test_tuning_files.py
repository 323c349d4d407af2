"""Measured choices in files: processes share them, and failures must not break them."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import subprocess
import sys
import time

import pytest
from tuned_calls import (
    KIND,
    OTHER,
    ROW,
    entry,
)

from jax_tcgemm.tuning import cache
from jax_tcgemm.tuning.entry import problem_key

pytestmark = [pytest.mark.any_jax, pytest.mark.usefixtures("all_kernels", "on_an_h200")]


PROBLEM = problem_key(op="gemm", m=1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\udcff",
        "[" * 200_000,
        json.dumps({"device": [1], "problem": PROBLEM, "entry": entry(ROW).to_json()}),
        json.dumps({"device": None, "problem": PROBLEM, "entry": entry(ROW).to_json()}),
        json.dumps({"device": KIND, "problem": "no JSON", "entry": entry(ROW).to_json()}),
        json.dumps({"device": KIND, "problem": "[]", "entry": entry(ROW).to_json()}),
        json.dumps({"device": KIND, "problem": PROBLEM}),
        json.dumps({"device": KIND, "problem": "another", "entry": entry(ROW).to_json()}),
        json.dumps({"device": KIND, "problem": PROBLEM, "entry": entry(ROW).to_json()})[:-5],
        json.dumps(
            {
                "device": KIND,
                "problem": PROBLEM,
                "entry": entry(ROW).to_json() | {"rows": {ROW: "old"}},
            }
        ),
    ],
)
def test_a_broken_file_is_none(text):
    assert cache.write(KIND, PROBLEM, entry(ROW)) is None
    assert cache.read(KIND, PROBLEM) == entry(ROW)
    (path,) = cache.folder().iterdir()
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert cache.read(KIND, PROBLEM) is None
    str(cache.everything())
    assert cache.write(KIND, PROBLEM, entry("xla")) is None
    assert cache.read(KIND, PROBLEM) == entry("xla")


def test_what_cannot_be_read_or_written(monkeypatch, tmp_path):
    cache.write(KIND, PROBLEM, entry(ROW))
    (path,) = cache.folder().iterdir()
    path.unlink()
    path.mkdir()  # a folder in its place
    assert cache.read(KIND, PROBLEM) is None
    assert cache.write(KIND, PROBLEM, entry(ROW))
    assert list(cache.folder().iterdir()) == [path]
    path.rmdir()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert "No space left" in cache.write(KIND, PROBLEM, entry(ROW))
        assert list(cache.folder().iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.SETTING, str(tmp_path / "file"))
    assert cache.write(KIND, PROBLEM, entry(ROW))
    assert cache.read(KIND, PROBLEM) is None
    assert len(cache.everything()) == 0


@pytest.mark.parametrize(("owner", "is_read"), [(1000, True), (0, True), (54321, False)])
def test_files_of_other_users_are_none(monkeypatch, owner, is_read):
    cache.write(KIND, PROBLEM, entry(ROW))
    status = os.fstat

    def owned(descriptor):
        found = list(status(descriptor))
        found[stat.ST_UID] = owner
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cache.read(KIND, PROBLEM) == (entry(ROW) if is_read else None)
    assert len(cache.everything()) == is_read


def test_what_killed_processes_left_is_removed():
    cache.write(KIND, PROBLEM, entry(ROW))
    old, fresh = (cache.folder() / f".writing-{name}" for name in ("old", "fresh"))
    for path in (old, fresh):
        path.touch()
    os.utime(old, (0, time.time() - 4000))
    cache._remove_leftovers.cache_clear()
    cache.write(KIND, PROBLEM, entry(ROW))
    assert not old.exists()
    assert fresh.exists()


def test_what_is_kept_is_described():
    assert cache.describe(KIND) == f"0 in {cache.folder()}"
    cache.write(KIND, "{}", entry(ROW), 0.5)
    cache.write(KIND, '{"m":1}', entry(OTHER), 0.75)
    cache.write("another", "{}", entry(ROW), 7.0)
    time = r"20\d\d-\d\d-\d\d \d\d:\d\d"
    expected = rf"2 in .*, measured from {time} to {time} in 1\.2 s"
    assert re.fullmatch(expected, cache.describe(KIND))


_WRITE_FOR_EVER = """
import sys
import numpy as np
from test_tuning_files import CONFIGS, KIND, cache, numbered
from jax_tcgemm.tuning.entry import Entry
rng = np.random.default_rng(int(sys.argv[1]))
while True:
    config = CONFIGS[rng.integers(4)]
    us = 1e-6 * (1 + CONFIGS.index(config))
    cache.write(KIND, numbered(int(rng.integers(3))), Entry(config, us, us, us, ROWS[config]))
"""
CONFIGS = (ROW, OTHER, "xla", None)


def numbered(m):
    return problem_key(op="gemm", m=m)


def test_processes_that_write_at_once_and_are_killed():
    rows = {config: entry(config).rows for config in CONFIGS}
    program = f"ROWS = {rows!r}\n{_WRITE_FOR_EVER}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-P", "-c", program, str(seed)], env=environment)
        for seed in range(8)
    ]
    found, killed, end = 0, 0, time.monotonic() + 120
    while found < 3000 and time.monotonic() < end:
        for m in range(3):
            got = cache.read(KIND, numbered(m))
            if got is not None:  # the entry is whole, whichever process wrote it
                assert got.seconds == 1e-6 * (1 + CONFIGS.index(got.config))
                found += 1
        if found % 1000 < 3 and killed < 6:
            processes[killed].kill()
            killed += bool(found)
    codes = [process.poll() for process in processes[killed:]]
    for process in processes:
        process.kill()
        process.wait()
    assert codes == [None] * len(codes)
    assert found >= 3000
    for m in range(3):
        assert cache.write(KIND, numbered(m), entry(ROW)) is None
    assert set(cache.everything().entries.values()) == {entry(ROW)}
