"""When kernels of epilogues are released."""

import jax
import pytest

from jax_tcgemm import _compat
from jax_tcgemm.epilogue import unused


@pytest.fixture
def released(monkeypatch):
    calls = []
    monkeypatch.setattr(unused._core, "release_unused_programs", lambda *args: calls.append(args))
    return calls


def test_digests_of_all_executables_are_kept(monkeypatch, released):
    digests = "a" * 64, "0123456789abcdef" * 4
    texts = [f'custom-call(%x), backend_config={{digest = "{each}"}}' for each in digests]
    monkeypatch.setattr(_compat, "texts_of_executables", lambda: [*texts, "no custom call"])
    unused.release(5.0)
    assert released == [(set(digests), 5.0)]


def test_nothing_is_released_where_an_executable_does_not_say(monkeypatch, released):
    monkeypatch.setattr(_compat, "texts_of_executables", lambda: None)
    unused.release()
    assert not released


def test_executables_are_asked_now_and_then(monkeypatch, released):
    monkeypatch.setattr(_compat, "texts_of_executables", list)
    for _ in range(2 * unused._EVERY):
        unused.note_compilation()
    assert len(released) == 2


def test_texts_of_executables(monkeypatch):
    compiled = jax.jit(lambda x: x * 3).lower(1.0).compile()
    monkeypatch.setattr(_compat, "initialized_cuda_devices", jax.devices)
    assert any("multiply" in text for text in _compat.texts_of_executables())
    del compiled

    class Silent:
        def live_executables(self):
            raise RuntimeError("this client keeps no list")

    class Device:
        client = Silent()

    monkeypatch.setattr(_compat, "initialized_cuda_devices", lambda: [Device()])
    assert _compat.texts_of_executables() is None
