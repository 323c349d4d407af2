"""The tensors of one or several ``safetensors`` files, read one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_INDEX = "model.safetensors.index.json"


def _safe_open() -> Any:
    """Returns ``safetensors.safe_open``.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        from safetensors import safe_open  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "jax_tcgemm.checkpoints needs safetensors: pip install 'safetensors>=0.4.5'"
        ) from error
    return safe_open


def config_of(path: str | os.PathLike[str]) -> tuple[str, Mapping[str, Any]]:
    """Returns the path and the content of the ``config.json`` of a checkpoint.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    file = (path if path.is_dir() else path.parent) / "config.json"
    return str(file), json.loads(file.read_text())


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    if not path.is_dir():
        return [path]
    index = path / _INDEX
    if index.exists():
        names = json.loads(index.read_text())["weight_map"].values()
        return [path / name for name in sorted(set(names))]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"{path} has no *.safetensors")
    return found


class Tensors(Mapping[str, np.ndarray]):
    """The tensors by name; each access reads one of them.

    Args:
        path: a file, or a folder with one or several files.

    Raises:
        ImportError: ``safetensors`` is not installed.
        FileNotFoundError: there is no such file.
        ValueError: two files have a tensor of the same name.
    """

    def __init__(self, path: str | os.PathLike[str]):
        safe_open = _safe_open()
        self._open = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}
        with self._open:
            for file in _files(pathlib.Path(path)):
                opened = self._open.enter_context(safe_open(str(file), framework="np"))
                names = set(opened.keys())
                if both := sorted(names & self._file_of.keys()):
                    raise ValueError(f"{file} repeats the tensor {both[0]!r} of another file")
                self._file_of |= dict.fromkeys(names, opened)
            self._open = self._open.pop_all()

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._file_of))

    def __len__(self) -> int:
        return len(self._file_of)
