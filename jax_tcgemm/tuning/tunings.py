"""``Tunings``: measured choices that can be activated, joined, saved, loaded and printed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import threading
import uuid
from collections.abc import Mapping
from typing import Any

import jax

from jax_tcgemm.tuning.entry import Entry, problem_key

_FORMAT = 1

# ``jax.jit`` includes this context in its cache key, so other active tunings cause a new trace.
_ACTIVE = jax.make_user_context(None)


class _Contexts(threading.local):
    """The contexts that this thread has entered, in order."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


_CONTEXTS = _Contexts()

# The tunings with which programs were lowered. XLA's partitioner needs them in its own threads.
_BY_DIGEST: dict[str, Tunings] = {}


class Tunings:
    """The fastest measured choices for products, for each kind of device.

    As a context manager (``with tunings:``), it is active for the programs compiled inside. Nested
    tunings are joined; the entries of the inner ones take precedence. Tunings with equal choices
    are equal. ``first | second`` has the entries of both; if both have an entry for a problem, the
    one of ``second`` counts.

    Args:
        entries: the entries by kind of device (``jax.Device.device_kind``) and problem.

    Example:
        >>> tune(train_step, state, batch).save(path)
        >>> with Tunings.load(path):
        ...     state, loss = jax.jit(train_step)(state, batch)
    """

    def __init__(self, entries: Mapping[tuple[str, str], Entry] | None = None) -> None:
        self._entries = dict(sorted((entries or {}).items()))

    @property
    def entries(self) -> dict[tuple[str, str], Entry]:
        """The entries by kind of device and problem."""
        return dict(self._entries)

    @functools.cached_property
    def digest(self) -> str:
        """A text that is equal for tunings with equal choices; the times do not matter."""
        choices = [(*key, entry.config, entry.rows) for key, entry in self._entries.items()]
        return hashlib.sha256(json.dumps(choices).encode()).hexdigest()

    def find(self, device_kind: str | None, problem: str) -> Entry | None:
        """Returns the entry of a problem; ``None`` if it is missing or its rows have changed.

        Args:
            device_kind: the kind of device. ``None`` if it is not known, as in a program that is
                lowered for another machine; then all entries must be of one kind, which is used.
            problem: the result of ``problem_key``.
        """
        if device_kind is None:
            kinds = {kind for kind, _ in self._entries}
            device_kind = kinds.pop() if len(kinds) == 1 else ""
        entry = self._entries.get((device_kind, problem))
        return entry if entry is not None and entry.is_current else None

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tunings) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __or__(self, other: Tunings) -> Tunings:
        if not isinstance(other, Tunings):
            return NotImplemented
        return Tunings(self._entries | other._entries)

    def __enter__(self) -> Tunings:
        if jax.distributed.is_initialized() and not self.is_final:
            _check_equal_everywhere(self.digest)
        outer = active()
        context = _ACTIVE(self if outer is None else outer.around(self))
        context.__enter__()
        _CONTEXTS.stack.append(context)
        return self

    def __exit__(self, *exception: Any) -> None:
        _CONTEXTS.stack.pop().__exit__(*exception)

    # True if no other source is searched, not even tunings that are entered inside.
    is_final = False

    def around(self, inner: Tunings) -> Tunings:
        """Returns the tunings that are active if ``inner`` is entered inside these tunings."""
        if inner.is_final or self.is_final:
            return inner if inner.is_final else self
        return self | inner

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file atomically.

        Raises:
            OSError: the file cannot be written.
        """
        write_atomically(pathlib.Path(path), self._to_text())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tunings:
        """Returns the tunings of a file that ``save`` wrote.

        Entries have no effect if their rows have changed since.

        Raises:
            OSError: the file cannot be read.
            ValueError: ``save`` did not write the file.
        """
        try:
            text = pathlib.Path(path).read_text()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} holds no tunings: {error}") from error
        return cls.from_text(text, str(path))

    @classmethod
    def from_text(cls, text: str, source: str) -> Tunings:
        """Returns the tunings of a text that ``save`` wrote; an error message names ``source``."""
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']!r} is not {_FORMAT}")
            entries = {}
            for kind, problems in content["devices"].items():
                for each in problems:
                    if not isinstance(each["problem"], dict):
                        raise ValueError(f"{each['problem']!r} is no problem")
                    key = problem_key(**each["problem"])
                    entries[kind, key] = Entry.from_json(each["entry"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{source} holds no tunings: {error}") from error
        return cls(entries)

    def _to_text(self) -> str:
        """Returns JSON with one line for each product."""
        devices: dict[str, list[str]] = {}
        for (kind, problem), entry in self._entries.items():
            each = {"problem": json.loads(problem), "entry": entry.to_json()}
            devices.setdefault(kind, []).append(json.dumps(each))
        parts = [
            f"{json.dumps(kind)}: [\n" + ",\n".join(each) + "\n]" for kind, each in devices.items()
        ]
        return f'{{"format": {_FORMAT}, "devices": {{\n' + ",\n".join(parts) + "\n}}\n"

    def __str__(self) -> str:
        lines = [f"{'problem':<58}{'us':>9}{'untuned':>9}{'XLA':>9}{'XLA/us':>8}  config"]
        for (_, problem), entry in self._entries.items():
            us = [1e6 * t for t in (entry.seconds, entry.untuned_seconds)]
            times = "".join(f"{each:>9.1f}" for each in us)
            if entry.xla_seconds is None:
                times += f"{'-':>9}{'-':>8}"
            else:
                times += f"{1e6 * entry.xla_seconds:>9.1f}{entry.xla_seconds / entry.seconds:>8.2f}"
            config = entry.config or "as untuned"
            lines.append(f"{described(problem):<58}{times}  {config}")
        if self._entries:
            before, after = self.speedups()
            lines.append(f"XLA's time over ours: {before:.3f} untuned, {after:.3f} tuned")
        return "\n".join(lines)

    def __repr__(self) -> str:
        kinds = sorted({kind for kind, _ in self._entries})
        return f"<Tunings of {len(self)} products, for {', '.join(kinds) or 'no device'}>"

    def speedups(self) -> tuple[float, float]:
        """Returns the geometric means of XLA's time over ours, untuned and tuned.

        Products without a time of XLA do not count.
        """
        means = []
        for own in ("untuned_seconds", "seconds"):
            logs = [
                math.log(entry.xla_seconds / getattr(entry, own))
                for entry in self._entries.values()
                if entry.xla_seconds is not None
            ]
            means.append(math.exp(sum(logs) / max(1, len(logs))))
        return means[0], means[1]

    def plot(self, axes: Any = None) -> Any:
        """Draws XLA's time over ours, untuned and tuned, one line per product with a time of XLA.

        Args:
            axes: matplotlib axes; by default new ones.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if axes is None:
            import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

            _, axes = plt.subplots(figsize=(8, 1 + 0.25 * len(self)), layout="constrained")
        names, untuned, tuned = [], [], []
        for (_, problem), entry in self._entries.items():
            if entry.xla_seconds is not None:
                names.append(described(problem))
                untuned.append(entry.xla_seconds / entry.untuned_seconds)
                tuned.append(entry.xla_seconds / entry.seconds)
        places = range(len(names))
        axes.hlines(places, untuned, tuned, color="0.7")
        axes.plot(untuned, places, "o", color="0.6", label="untuned")
        axes.plot(tuned, places, "o", color="C0", label="tuned")
        axes.axvline(1.0, color="0.3", linewidth=0.8)
        axes.set_yticks(places, names, fontsize=7)
        axes.set_xlabel("XLA's time over ours")
        axes.legend()
        return axes


class _Untuned(Tunings):
    """Tunings that disable every lookup."""

    is_final = True

    @functools.cached_property
    def digest(self) -> str:
        return "untuned"


def untuned() -> Tunings:
    """Returns tunings under which all products are computed as without any tuning."""
    return _Untuned()


def active() -> Tunings | None:
    """Returns the tunings that are active in this thread."""
    return _ACTIVE.value


def remembered(tunings: Tunings | None) -> str:
    """Stores tunings and returns the text by which ``recalled`` finds them in this process."""
    if tunings is None:
        return ""
    _BY_DIGEST[tunings.digest] = tunings
    return tunings.digest


def forget(tunings: Tunings) -> None:
    """Removes tunings that ``remembered`` stored."""
    _BY_DIGEST.pop(tunings.digest, None)


def recalled(digest: str) -> Any:
    """Returns a context in which the tunings of a digest are active; none if it is not known."""
    return _ACTIVE(_BY_DIGEST.get(digest))


# The names of partially written files begin with this.
PARTIAL = ".writing-"


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically: others see the whole file or no file.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f"{PARTIAL}{uuid.uuid4()}")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def described(problem: str) -> str:
    """Returns a short description of a problem; returns an unknown format unchanged."""
    try:
        return _described(json.loads(problem))
    except (KeyError, TypeError, AttributeError):
        return problem


def _described(fields: dict[str, Any]) -> str:
    batch = "".join(f"{extent}x" for extent in fields.get("batch", []))
    parts = [fields["op"], fields["algorithm"].split("_")[0].lower(), fields.get("layout", "")]
    parts += [f"{batch}{fields['m']}x{fields['n']}x{fields['k']}"]
    if "scale_group" in fields:
        parts.append(f"scales of {fields['scale_group']}")
    if fields.get("groups"):
        parts.append(f"{fields['groups']} groups")
    parts += [part for part in fields.get("epilogue", {}).get("has", []) if part]
    return " ".join(part for part in parts if part)


def _check_equal_everywhere(digest: str) -> None:
    """Checks that all processes make the same choices; otherwise their programs would differ.

    Raises:
        AssertionError: the choices differ.
    """
    from jax.experimental import multihost_utils

    numbers = [int(digest[i : i + 8], 16) for i in range(0, 64, 8)]
    what = "the tunings that are made active differ between processes"
    multihost_utils.assert_equal(jax.numpy.asarray(numbers, jax.numpy.uint32), what)
