"""Lets a clone of the repository use the compiled extension of the installed package.

``python -m pytest`` and ``python -m jax_tcgemm`` put the current folder before the installed
packages. In a clone, that folder holds these sources. They hide the package that ``pip install .``
has built from them.
"""

from __future__ import annotations

import pathlib
import sys
import types
from importlib.machinery import ModuleSpec, PathFinder


def hand_over(package: types.ModuleType) -> None:
    """Replaces a package without an extension by the installed one, if there is one.

    All modules except the package's own ``__init__`` then come from the installed package, so both
    ``__init__`` files must be equal.

    Args:
        package: the package; its ``__init__`` calls this before it imports any other module of it.

    Raises:
        ImportError: the installed package has a different ``__init__``.
    """
    extension = f"{package.__name__}._core"
    # PathFinder alone is not enough: another finder locates the extension of an editable install.
    if any(finder.find_spec(extension, package.__path__) for finder in sys.meta_path):
        return
    found = _with_extension(package.__name__, extension)
    own = package.__spec__
    if found is None or own is None or found.origin is None or own.origin is None:
        return
    if pathlib.Path(found.origin).read_bytes() != pathlib.Path(own.origin).read_bytes():
        raise ImportError(
            f"{own.origin}, of a clone without a compiled extension, differs from the installed "
            f"{found.origin}: run `pip install .` in the clone, or start Python elsewhere or with "
            "`python -P`"
        )
    package.__path__[:] = found.submodule_search_locations or ()  # its spec shares this list
    package.__file__ = own.origin = found.origin
    package.__loader__ = own.loader = found.loader


def _with_extension(name: str, extension: str) -> ModuleSpec | None:
    """Returns the first package of this name on ``sys.path`` that has the extension."""
    for entry in sys.path:
        found = PathFinder.find_spec(name, [entry])
        # A spec without a loader is a folder with nothing but the extension of an editable install.
        if found is None or found.loader is None or found.submodule_search_locations is None:
            continue
        if PathFinder.find_spec(extension, found.submodule_search_locations) is not None:
            return found
    return None
