"""The PEP 517 build backend: scikit-build-core, plus the search for a CUDA compiler.

The backend looks for a compiler in ``$CUDACXX``, ``$CUDA_HOME/bin``, ``$CUDA_PATH/bin``, ``PATH``
and ``/usr/local/cuda/bin``, and takes the first one that is recent enough. If there is none, it
adds NVIDIA's compiler wheels to the build requirements, and the build uses those;
``compiler_wheels.txt`` pins them. The oldest accepted CUDA release is in ``pyproject.toml``,
``[tool.jax-tcgemm]``.

``JAX_TCGEMM_CUDA=OFF``, as environment variable or as the config setting
``cmake.define.JAX_TCGEMM_CUDA=OFF``, builds without kernels. This is the default where JAX has no
CUDA support.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from scikit_build_core import build as _skbuild
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ConfigSettings = Mapping[str, Any] | None

_CUDA_SETTING = "cmake.define.JAX_TCGEMM_CUDA"
_DEFAULT_NVCC = "/usr/local/cuda/bin/nvcc"


def _project() -> dict[str, Any]:
    """Returns ``[tool.jax-tcgemm]`` of pyproject.toml; hooks run in the source root (PEP 517)."""
    return tomllib.loads(pathlib.Path("pyproject.toml").read_text())["tool"]["jax-tcgemm"]


def _compiler_wheels() -> list[str]:
    """Returns the names and versions of the compiler wheels."""
    lines = pathlib.Path(__file__).with_name("compiler_wheels.txt").read_text().splitlines()
    return [line.split()[0] for line in lines if line[:1].isalpha()]


def _log(message: str) -> None:
    print(f"jax_tcgemm: {message}", file=sys.stderr, flush=True)


# --- Settings --------------------------------------------------------------------------------


def _wants_cuda(config_settings: ConfigSettings) -> bool:
    default = "ON" if sys.platform == "linux" else "OFF"
    value = (config_settings or {}).get(_CUDA_SETTING)
    value = value or os.environ.get("JAX_TCGEMM_CUDA") or default
    if str(value).upper() in ("ON", "1", "TRUE", "YES"):
        return True
    if str(value).upper() in ("OFF", "0", "FALSE", "NO"):
        return False
    raise SystemExit(f"jax_tcgemm: JAX_TCGEMM_CUDA={value!r} is neither ON nor OFF.")


def _with_cuda_setting(config_settings: ConfigSettings, cuda: bool) -> dict[str, Any]:
    return {**(config_settings or {}), _CUDA_SETTING: "ON" if cuda else "OFF"}


# --- Compilers -------------------------------------------------------------------------------


def _require_cxx_compiler() -> None:
    """Raises SystemExit if a C++ compiler or Python's headers are missing."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    # CXX may carry arguments or a launcher ("ccache g++"); its first word must be a program.
    if not any(shutil.which(name.split()[0]) for name in names):
        raise SystemExit(
            f"jax_tcgemm: no C++ compiler found (looked for {', '.join(names)}). Install one, for "
            "example 'apt install g++' on Debian and Ubuntu or 'dnf install gcc-c++' on Fedora, or "
            "set the environment variable CXX to one."
        )
    header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise SystemExit(
            f"jax_tcgemm: Python's headers are not installed (no {header}). Install them, for "
            "example 'apt install python3-dev' on Debian and Ubuntu or 'dnf install python3-devel' "
            "on Fedora."
        )


def _nvcc_version(nvcc: str) -> tuple[int, int] | None:
    """Returns a compiler's CUDA release, or None if it does not run."""
    try:
        text = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _nvcc_candidates() -> Iterator[str]:
    """Yields paths of compilers in order of preference."""
    if cudacxx := os.environ.get("CUDACXX"):
        yield shutil.which(cudacxx) or cudacxx
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield str(pathlib.Path(root, "bin", "nvcc"))
    if on_path := shutil.which("nvcc"):
        yield on_path
    yield _DEFAULT_NVCC


def _find_installed_nvcc() -> tuple[str | None, list[str]]:
    """Returns the first compiler recent enough, and why each one before it was refused."""
    minimum = _project()["minimum-cuda"]
    refused = []
    for nvcc in dict.fromkeys(_nvcc_candidates()):
        if not os.access(nvcc, os.X_OK):
            continue
        version = _nvcc_version(nvcc)
        if version is None:
            refused.append(f"{nvcc} does not run")
        elif version < tuple(int(part) for part in minimum.split(".")):
            refused.append(f"{nvcc} is CUDA {version[0]}.{version[1]}")
        else:
            return nvcc, refused
    return None, refused


def _find_wheel_toolkit() -> pathlib.Path | None:
    """Returns the root of the compiler wheels' toolkit, or None if they are not installed."""
    for entry in sys.path:
        root = pathlib.Path(entry or ".", "nvidia", "cu13")
        # JAX's GPU plugin brings parts of the same folder; all four are needed to compile.
        parts = ("bin/nvcc", "nvvm/bin/cicc", "include/crt/host_config.h", "include/cuda_runtime.h")
        if all((root / part).is_file() for part in parts):
            return root.resolve()
    return None


def _use_cuda_compiler() -> None:
    """Points CMake at the CUDA compiler, by environment variables.

    Raises:
        SystemExit: there is no usable compiler.
    """
    nvcc, refused = _find_installed_nvcc()
    for reason in refused:
        _log(f"{reason}: not used")
    if nvcc is not None:
        _log(f"CUDA compiler {nvcc}")
        os.environ["CUDACXX"] = nvcc
        return
    toolkit = _find_wheel_toolkit()
    if toolkit is None:
        minimum = _project()["minimum-cuda"]
        wheels = " ".join(f"'{wheel}'" for wheel in _compiler_wheels())
        found = f" ({'; '.join(refused)})" if refused else ""
        raise SystemExit(
            f"jax_tcgemm: no CUDA compiler {minimum} or later found{found}. Do one of these:\n"
            "  - build without --no-build-isolation: pip then fetches the compiler by itself;\n"
            f"  - pip install {wheels}\n"
            f"  - install the CUDA toolkit {minimum} or later and put nvcc in PATH, or set "
            "CUDACXX to it;\n"
            "  - build without kernels: JAX_TCGEMM_CUDA=OFF pip install ."
        )
    _log(f"CUDA compiler of the wheels in {toolkit}")
    os.environ["CUDACXX"] = str(toolkit / "bin" / "nvcc")
    # nvcc looks for its libraries in lib64; the wheels have lib.
    flags = os.environ.get("NVCC_APPEND_FLAGS", "")
    os.environ["NVCC_APPEND_FLAGS"] = f'{flags} -L"{toolkit / "lib"}"'.strip()


# --- Hooks -----------------------------------------------------------------------------------


def _cuda_requires(config_settings: ConfigSettings) -> list[str]:
    _require_cxx_compiler()
    if not _wants_cuda(config_settings):
        return []
    nvcc, refused = _find_installed_nvcc()
    if nvcc is not None:
        return []
    for reason in refused:
        _log(f"{reason}: not used")
    _log("no recent CUDA compiler found: adding the compiler wheels to the build requirements")
    return _compiler_wheels()


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    """PEP 517 hook: returns scikit-build-core's requirements and any CUDA compiler wheels."""
    cuda = _cuda_requires(config_settings)
    settings = dict(config_settings or {})
    return [*_skbuild.get_requires_for_build_wheel(settings), *cuda]


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    """PEP 660 hook: returns the same as for a wheel."""
    cuda = _cuda_requires(config_settings)
    settings = dict(config_settings or {})
    return [*_skbuild.get_requires_for_build_editable(settings), *cuda]


def _prepare(config_settings: ConfigSettings) -> dict[str, Any]:
    """Checks the compilers, points CMake at them, and returns the settings for scikit-build."""
    _require_cxx_compiler()
    cuda = _wants_cuda(config_settings)
    if cuda:
        _use_cuda_compiler()
    else:
        _log("building WITHOUT CUDA kernels (JAX_TCGEMM_CUDA=OFF)")
    return _with_cuda_setting(config_settings, cuda)


def build_wheel(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 517 hook: builds a wheel."""
    return _skbuild.build_wheel(wheel_directory, _prepare(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 660 hook: builds an editable wheel."""
    return _skbuild.build_editable(wheel_directory, _prepare(config_settings), metadata_directory)
