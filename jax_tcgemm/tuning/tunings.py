"""``Tunings``: measured choices as a value that can be active, joined, saved, loaded and read."""

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

from jax_tcgemm.tuning.entry import Entry

_FORMAT = 1

# What ``jax.jit`` keys on: programs are traced anew where other tunings are active.
_ACTIVE = jax.make_user_context(None)


class _Contexts(threading.local):
    """Those that this thread has entered, the last one last."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


_CONTEXTS = _Contexts()

# Those that programs were lowered with, for XLA's partitioner, which asks from threads of its own.
_BY_DIGEST: dict[str, Tunings] = {}


class Tunings:
    """How measured products are computed fastest, for each kind of device.

    As a context manager it is active for the programs that are compiled within: ``with tunings:``.
    Within others that are active, its own entries go first. Those of equal choices are equal.
    ``first | second`` has the entries of both, those of ``second`` where both have one.

    Args:
        entries: by kind of device (``jax.Device.device_kind``) and problem.
    """

    def __init__(self, entries: Mapping[tuple[str, str], Entry] | None = None) -> None:
        self._entries = dict(sorted((entries or {}).items()))

    @property
    def entries(self) -> dict[tuple[str, str], Entry]:
        """What there is, by kind of device and problem."""
        return dict(self._entries)

    @functools.cached_property
    def digest(self) -> str:
        """A text that tunings of equal choices have alike, whatever the times."""
        choices = [(*key, entry.config, entry.rows) for key, entry in self._entries.items()]
        return hashlib.sha256(json.dumps(choices).encode()).hexdigest()

    def find(self, device_kind: str | None, problem: str) -> Entry | None:
        """Returns what is known of a problem, unless its rows have changed since.

        Args:
            device_kind: ``None`` where no device is known, as in a program that is lowered for
                another machine: what the only kind has that there are entries of.
            problem: as of ``problem_key``.
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

    # Whether nothing else is looked for, neither elsewhere nor within.
    is_final = False

    def around(self, inner: Tunings) -> Tunings:
        """Returns what is active where ``inner`` is entered while this is."""
        if inner.is_final or self.is_final:
            return inner if inner.is_final else self
        return self | inner

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, as a whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        write_atomically(pathlib.Path(path), self._to_text())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tunings:
        """Reads what ``save`` wrote. Entries whose rows have changed since are without effect.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not such a file.
        """
        return cls.from_text(pathlib.Path(path).read_text(), str(path))

    @classmethod
    def from_text(cls, text: str, source: str) -> Tunings:
        """Reads the text that ``save`` wrote; ``source`` is named by the error."""
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']!r} is not {_FORMAT}")
            entries = {}
            for kind, problems in content["devices"].items():
                for each in problems:
                    if not isinstance(each["problem"], dict):
                        raise ValueError(f"{each['problem']!r} is no problem")
                    key = json.dumps(each["problem"], sort_keys=True, separators=(",", ":"))
                    entries[kind, key] = Entry.from_json(each["entry"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{source} holds no tunings: {error}") from error
        return cls(entries)

    def _to_text(self) -> str:
        """JSON, a line for each product."""
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

        Products for which XLA was not timed do not count.
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
        """Draws XLA's time over ours, untuned and tuned, a line for each product XLA was timed for.

        Args:
            axes: of matplotlib; by default new ones.

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
    """Active where nothing is to be looked for at all."""

    is_final = True

    @functools.cached_property
    def digest(self) -> str:
        return "untuned"


def untuned() -> Tunings:
    """Returns what is active where products are to be computed as without any tuning."""
    return _Untuned()


def active() -> Tunings | None:
    """Returns the tunings that are active in this thread."""
    return _ACTIVE.value


def remembered(tunings: Tunings | None) -> str:
    """Returns a text by which ``recalled`` finds the tunings in this process."""
    if tunings is None:
        return ""
    _BY_DIGEST[tunings.digest] = tunings
    return tunings.digest


def forget(tunings: Tunings) -> None:
    """Ends what ``remembered`` began."""
    _BY_DIGEST.pop(tunings.digest, None)


def recalled(digest: str) -> Any:
    """Makes active what ``remembered`` returned the text of: nothing, if it is not known here."""
    return _ACTIVE(_BY_DIGEST.get(digest))


# How the names of files begin that are being written.
PARTIAL = ".writing-"


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file that others see whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{PARTIAL}{uuid.uuid4()}")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def described(problem: str) -> str:
    """Returns a problem in a few words; what another version wrote as it is."""
    try:
        return _described(json.loads(problem))
    except (KeyError, TypeError, AttributeError):
        return problem


def _described(fields: dict[str, Any]) -> str:
    batch = "".join(f"{extent}x" for extent in fields.get("batch", []))
    parts = [fields["op"], fields["algorithm"].split("_")[0].lower(), fields.get("layout", "")]
    parts += [f"{batch}{fields['m']}x{fields['n']}x{fields['k']}"]
    if fields.get("groups"):
        parts.append(f"{fields['groups']} groups")
    parts += [part for part in fields.get("epilogue", {}).get("has", []) if part]
    return " ".join(part for part in parts if part)


def _check_equal_everywhere(digest: str) -> None:
    """Checks that all processes of a program make the same choices, or their programs differ.

    Raises:
        AssertionError: they do not.
    """
    from jax.experimental import multihost_utils

    numbers = [int(digest[i : i + 8], 16) for i in range(0, 64, 8)]
    what = "the tunings that are made active differ between processes"
    multihost_utils.assert_equal(jax.numpy.asarray(numbers, jax.numpy.uint32), what)
