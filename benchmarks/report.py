"""The output of a run: the header, the result file, and the tables."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
from collections.abc import Iterable
from typing import Any

import jax_tcgemm
from jax_tcgemm import _core
from jax_tcgemm.tools.chain import default_device

Row = dict[str, Any]

_ROOT = pathlib.Path(__file__).parent.parent
_SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit")
# A choice of kernel is good if no other kernel is faster by more than this.
GOOD_CHOICE = 1.03


def header(commit: str | None = None) -> Row:
    """Describes the machine and the software.

    Args:
        commit: hash of the measured sources; by default that of the checkout, if there is one.
    """
    device = default_device()
    return {
        "device": device.device_kind,
        "gpu": _query_gpu() if device.platform == "gpu" else None,
        "versions": {
            "jax": importlib.metadata.version("jax"),
            "jaxlib": importlib.metadata.version("jaxlib"),
            "jax_tcgemm": jax_tcgemm.__version__,
            "cuda": _core.build_info()["cuda"] or None,
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _checked_out_commit(),
    }


def _output(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None if result.returncode == 0 else None


def _query_gpu() -> dict[str, str] | None:
    output = _output(
        ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    )
    if output is None:
        return None
    values = output.splitlines()[0].split(", ")
    return dict(zip(_SMI_FIELDS, values, strict=False))


def _checked_out_commit() -> str | None:
    # --exclude: otherwise tags would replace the hash.
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return _output(["git", "-C", str(_ROOT), *describe])


class Results:
    """The rows so far, in a file that is complete after each row.

    Attributes:
        header: the value of ``header``.
        rows: a row for each case.
        chains: rows of ``run.py --chain``.
    """

    def __init__(self, path: pathlib.Path | None, header: Row) -> None:
        self._path = path
        self.header = header
        self.rows: list[Row] = []
        self.chains: list[Row] = []

    @classmethod
    def resume(cls, path: pathlib.Path, header: Row) -> Results:
        """Continues a file; it drops failed cases, so that they are tried again.

        Raises:
            ValueError: the file was measured with another device, software or commit.
        """
        results = cls(path, header)
        if not path.exists():
            return results
        before = load(path)
        for key in ("device", "versions", "commit"):
            if before["header"][key] != header[key]:
                raise ValueError(
                    f"{path} has {key} {before['header'][key]}, this run has {header[key]}"
                )
        results.header = before["header"]
        results.rows = [row for row in before["rows"] if "error" not in row]
        results.chains = before["chains"]
        return results

    @property
    def done(self) -> set[tuple[str, str]]:
        """Suite and case of every row."""
        return {(row["suite"], row["case"]) for row in self.rows}

    def add(self, row: Row) -> None:
        self.rows.append(_rounded(row))
        self.save()

    def save(self) -> None:
        """Writes the file atomically; does nothing without a path."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {"header": self.header, "rows": self.rows, "chains": self.chains}
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(partial, self._path)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def load(path: pathlib.Path) -> dict[str, Any]:
    """Reads a result file: its header, rows and chains."""
    return json.loads(path.read_text())


def by_suite(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Groups rows, in their order."""
    suites: dict[str, list[Row]] = {}
    for row in rows:
        suites.setdefault(row["suite"], []).append(row)
    return suites


_COLUMNS = {
    "case": "case",
    "config": "config",
    "us": "us",
    "xla_us": "XLA us",
    "pallas_us": "Pallas us",
    "kernels": "kernels",
    "xla_kernels": "XLA kernels",
    "tflops": "TFLOP/s",
    "ratio": "ratio",
    "sustained_us": "sustained us",
    "sustained_xla_us": "XLA sustained us",
    "sustained_ratio": "sustained ratio",
}


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    digits = {"tflops": 0, "kernels": 0, "xla_kernels": 0, "ratio": 3, "sustained_ratio": 3}.get(
        column, 1
    )
    return f"{value:.{digits}f}"


def tables(rows: list[Row]) -> str:
    """Returns a Markdown table of each suite, with a summary of its ratios.

    A ratio is the time of the best rival divided by ours: above 1, ours is faster than all rivals.
    """
    columns = {
        name: title
        for name, title in _COLUMNS.items()
        if name in ("case", "us") or any(row.get(name) is not None for row in rows)
    }
    lines = []
    for suite, members in by_suite(rows).items():
        lines += ["", f"### {suite}", "", _line(columns.values()), _line("---" for _ in columns)]
        for row in members:
            if row["us"] is None:
                reason = row.get("error") or row.get("note")
                lines.append(_line([row["case"], f"{reason}", *[""] * (len(columns) - 2)]))
            else:
                lines.append(_line(_cell(name, row.get(name)) for name in columns))
        for key in ("ratio", "sustained_ratio"):
            lines += _summary(members, key)
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _summary(rows: list[Row], key: str) -> list[str]:
    rated = [row for row in rows if row.get(key) is not None]
    if not rated:
        return []
    worst = min(rated, key=lambda row: row[key])
    mean = statistics.geometric_mean(row[key] for row in rated)
    name = key.replace("_", " ")
    text = f"geometric mean {mean:.3f} of {len(rated)}, worst {worst[key]:.3f} ({worst['case']})"
    return ["", f"{name}: {text}"]


def choices(rows: list[Row]) -> str:
    """Says how often the heuristic's choice is as good as the best kernel, and lists the others."""
    rated = [row for row in rows if row.get("choice_loss") is not None]
    bad = [row for row in rated if row["choice_loss"] > GOOD_CHOICE]
    good = f"{len(rated) - len(bad)} of {len(rated)}"
    lines = [f"The choice is within {GOOD_CHOICE - 1:.0%} of the best kernel in {good} cases."]
    lines += [
        f"{row['suite']}: {row['case']}: {row['config']} takes {row['choice_loss']:.3f} times as "
        f"long as {row['best_config']} ({row['best_us']:.1f} us)"
        for row in sorted(bad, key=lambda row: -row["choice_loss"])
    ]
    return "\n".join(lines)
