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
        ValueError: the file is no JSON.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    file = (path if path.is_dir() else path.parent) / "config.json"
    return str(file), _json(file)


def _json(file: pathlib.Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None


def _files(path: pathlib.Path) -> tuple[list[pathlib.Path], Mapping[str, str]]:
    """Returns the files of a checkpoint, and the file of each tensor that an index lists.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the index is damaged.
    """
    if not path.is_dir():
        return [path], {}
    index = path / _INDEX
    if index.exists():
        content = _json(index)
        listed = content.get("weight_map") if isinstance(content, Mapping) else None
        if not isinstance(listed, Mapping) or not listed:
            raise ValueError(f"{index}: weight_map={listed!r} does not list the tensors")
        return [path / name for name in sorted({*listed.values()})], listed
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"{path} has no *.safetensors")
    return found, {}


class Tensors(Mapping[str, np.ndarray]):
    """The tensors by name; each access reads one of them.

    Args:
        path: a file, or a folder with one or several files.

    Raises:
        ImportError: ``safetensors`` is not installed.
        FileNotFoundError: there is no such file.
        ValueError: two files have a tensor of the same name, a file lacks one that the index lists,
            or a file is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        safe_open = _safe_open()
        self._open = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}
        with self._open:
            files, listed = _files(pathlib.Path(path))
            for file in files:
                try:
                    opened = self._open.enter_context(safe_open(str(file), framework="np"))
                except OSError:
                    raise
                except Exception as error:  # SafetensorError is no ValueError
                    raise ValueError(f"{file} is no safetensors file: {error}") from None
                names = set(opened.keys())
                if both := sorted(names & self._file_of.keys()):
                    raise ValueError(f"{file} repeats the tensor {both[0]!r} of another file")
                self._file_of |= dict.fromkeys(names, opened)
            if lost := sorted(listed.keys() - self._file_of.keys()):
                raise ValueError(f"{_INDEX} lists {lost[0]!r}, which {listed[lost[0]]} lacks")
            self._open = self._open.pop_all()

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            return self._file_of[name].get_tensor(name)
        except (AttributeError, TypeError) as error:  # a dtype that NumPy lacks
            raise ValueError(f"the tensor {name!r} cannot be read: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._file_of))

    def __len__(self) -> int:
        return len(self._file_of)
