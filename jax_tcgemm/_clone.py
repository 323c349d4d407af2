"""What a clone of the repository does for its lack of a compiled extension.

``python -m pytest`` and ``python -m jax_tcgemm`` put the current folder before the installed
packages. In a clone that is the folder of these sources, which hide the package that
``pip install .`` has built of them.
"""

from __future__ import annotations

import pathlib
import sys
import types
from importlib.machinery import ModuleSpec, PathFinder


def hand_over(package: types.ModuleType) -> None:
    """Makes a package without an extension the installed one, if there is one.

    All modules but the package's own ``__init__`` are then the installed package's, so that file
    has to be the same.

    Args:
        package: the package, whose ``__init__`` calls this before it imports anything else of it.

    Raises:
        ImportError: the installed package has another ``__init__``.
    """
    extension = f"{package.__name__}._core"
    # Not by PathFinder alone: of an editable install another finder knows where the extension is.
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
    package.__path__[:] = found.submodule_search_locations or ()  # the list of its spec, too
    package.__file__ = own.origin = found.origin
    package.__loader__ = own.loader = found.loader


def _with_extension(name: str, extension: str) -> ModuleSpec | None:
    """Returns the first package of the name on ``sys.path`` that has the extension."""
    for entry in sys.path:
        found = PathFinder.find_spec(name, [entry])
        # Without a loader it is a folder that holds the extension of an editable install alone.
        if found is None or found.loader is None or found.submodule_search_locations is None:
            continue
        if PathFinder.find_spec(extension, found.submodule_search_locations) is not None:
            return found
    return None
