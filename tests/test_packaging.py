"""The build backend's search for compilers, and facts stated in more than one place."""

import importlib.metadata
import importlib.util
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tomllib

import pytest

import jax_tcgemm

pytestmark = pytest.mark.any_jax

ROOT = pathlib.Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEELS = (ROOT / "cuda" / "build" / "compiler_wheels.txt").read_text()
PINS = re.findall(r"^[\w-]+==[\d.]+", WHEELS, re.MULTILINE)
MINIMUM = tuple(map(int, PYPROJECT["tool"]["jax-tcgemm"]["minimum-cuda"].split(".")))


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """Returns the build backend on a machine with a C++ compiler and no trace of CUDA."""
    spec = importlib.util.spec_from_file_location(
        "backend", ROOT / "cuda" / "build" / "build_backend.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for variable in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "CXX", "JAX_TCGEMM_CUDA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "")
    monkeypatch.setattr(module, "_DEFAULT_NVCC", str(tmp_path / "no-such-nvcc"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "path", [])
    for hook in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
        monkeypatch.setattr(module._skbuild, hook, lambda settings: ["cmake"])
    monkeypatch.chdir(ROOT)
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "Python.h").touch()
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(headers))
    make_program(tmp_path / "cxx" / "g++", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'cxx'}")
    return module


def make_program(path: pathlib.Path, script: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_nvcc(folder: pathlib.Path, version: tuple[int, int]) -> pathlib.Path:
    release = f"{version[0]}.{version[1]}"
    return make_program(
        folder / "nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.1'"
    )


def cuda_requires(backend, settings=None):
    return [r for r in backend.get_requires_for_build_wheel(settings) if r in PINS]


def test_without_a_compiler_the_wheels_are_required(backend, capsys):
    assert backend.get_requires_for_build_wheel(None) == ["cmake", *PINS]
    assert "adding the compiler wheels" in capsys.readouterr().err
    assert backend.get_requires_for_build_editable(None) == ["cmake", *PINS]


@pytest.mark.parametrize("where", ["CUDACXX", "CUDA_HOME", "CUDA_PATH", "PATH", "default"])
def test_a_recent_compiler_is_used_wherever_it_is(backend, where, monkeypatch, tmp_path):
    nvcc = make_nvcc(tmp_path / "cuda" / "bin", MINIMUM)
    if where == "CUDACXX":
        monkeypatch.setenv("CUDACXX", str(nvcc))
    elif where in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(where, str(nvcc.parent.parent))
    elif where == "PATH":
        monkeypatch.setenv("PATH", str(nvcc.parent), prepend=":")
    else:
        monkeypatch.setattr(backend, "_DEFAULT_NVCC", str(nvcc))
    assert cuda_requires(backend) == []
    settings = backend._prepare(None)
    assert settings["cmake.define.JAX_TCGEMM_CUDA"] == "ON"
    assert backend.os.environ["CUDACXX"] == str(nvcc)


def test_an_old_compiler_is_passed_over(backend, monkeypatch, tmp_path, capsys):
    old = make_nvcc(tmp_path / "old", (MINIMUM[0] - 1, 8))
    monkeypatch.setenv("CUDACXX", str(old))
    assert cuda_requires(backend) == PINS
    assert f"{old} is CUDA {MINIMUM[0] - 1}.8" in capsys.readouterr().err
    new = make_nvcc(tmp_path / "home" / "bin", (MINIMUM[0] + 1, 0))
    monkeypatch.setenv("CUDA_HOME", str(new.parent.parent))
    assert cuda_requires(backend) == []
    backend._prepare(None)
    assert backend.os.environ["CUDACXX"] == str(new)


def test_a_broken_compiler_is_passed_over(backend, monkeypatch, tmp_path, capsys):
    broken = make_program(tmp_path / "nvcc", "exit 1")
    monkeypatch.setenv("CUDACXX", str(broken))
    assert cuda_requires(backend) == PINS
    assert f"{broken} does not run" in capsys.readouterr().err


def test_wheels_serve_where_nothing_is_installed(backend, monkeypatch, tmp_path):
    site = tmp_path / "site packages"
    root = site / "nvidia" / "cu13"
    for part in ("nvvm/bin/cicc", "include/crt/host_config.h", "include/cuda_runtime.h"):
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        (root / part).touch()
    monkeypatch.setattr(sys, "path", [str(site)])
    # JAX's GPU plugin has the headers but no compiler, which is not enough.
    with pytest.raises(SystemExit):
        backend._prepare(None)
    nvcc = make_nvcc(root / "bin", (13, 0))
    backend._prepare(None)
    assert backend.os.environ["CUDACXX"] == str(nvcc)
    assert backend.os.environ["NVCC_APPEND_FLAGS"] == f'-L"{root / "lib"}"'


def test_no_cuda_compiler_without_isolation_says_what_to_do(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDACXX", str(make_nvcc(tmp_path / "old", (11, 8))))
    with pytest.raises(SystemExit) as raised:
        backend._prepare(None)
    message = str(raised.value)
    assert "is CUDA 11.8" in message
    assert all(pin in message for pin in PINS)
    assert "JAX_TCGEMM_CUDA=OFF" in message


@pytest.mark.parametrize("how", ["environment", "config setting", "platform"])
def test_cuda_off(backend, how, monkeypatch, capsys):
    settings = None
    if how == "environment":
        monkeypatch.setenv("JAX_TCGEMM_CUDA", "OFF")
    elif how == "config setting":
        settings = {"cmake.define.JAX_TCGEMM_CUDA": "OFF"}
    else:
        monkeypatch.setattr(sys, "platform", "darwin")
    assert cuda_requires(backend, settings) == []
    assert backend._prepare(settings)["cmake.define.JAX_TCGEMM_CUDA"] == "OFF"
    assert "WITHOUT CUDA kernels" in capsys.readouterr().err


def test_config_setting_overrides_environment(backend, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CUDA", "OFF")
    assert cuda_requires(backend, {"cmake.define.JAX_TCGEMM_CUDA": "ON"}) == PINS


def test_a_misspelt_setting_is_refused(backend, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CUDA", "offf")
    with pytest.raises(SystemExit, match="neither ON nor OFF"):
        cuda_requires(backend)


def test_no_cxx_compiler_says_what_to_install(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for hook in (backend.get_requires_for_build_wheel, backend._prepare):
        with pytest.raises(SystemExit, match=r"no C\+\+ compiler found.*apt install g\+\+"):
            hook(None)


def test_no_python_headers_says_what_to_install(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(SystemExit, match="apt install python3-dev"):
        backend.get_requires_for_build_wheel(None)


def test_each_compiler_wheel_has_a_hash_for_each_processor():
    hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}\b", WHEELS)
    assert len(hashes) == len(set(hashes)) == 2 * len(PINS) > 0


def test_headers_are_pinned_to_the_oldest_supported_jax():
    (supported,) = [d for d in PYPROJECT["project"]["dependencies"] if d.startswith("jax")]
    (pinned,) = [r for r in PYPROJECT["build-system"]["requires"] if r.startswith("jaxlib")]
    assert pinned == supported.replace("jax>=", "jaxlib==") + ".0"


def test_the_tests_run_what_was_built_from_this_tree():
    assert importlib.metadata.version("jax_tcgemm") == PYPROJECT["project"]["version"]


def test_oldest_cuda_compiler_has_what_the_sources_use():
    driver = (ROOT / "cuda" / "common" / "driver.h").read_text()
    assert "cudaGetDriverEntryPointByVersion" in driver
    assert MINIMUM >= (12, 5)  # the first release that has it


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_errors_name_the_file_without_gcc_12(tmp_path):
    """GCC 11 of Ubuntu 22.04 has no __FILE_NAME__."""
    source = tmp_path / "where.cc"
    source.write_text(
        '#include "common/status.h"\n'
        "jax_tcgemm::Status refuse(int x) {\n"
        '  JAX_TCGEMM_REQUIRE(x > 2, "x=", x);\n'
        "  return {};\n"
        "}\n"
        "int main() { std::puts(refuse(1).message().c_str()); }\n"
    )
    program = tmp_path / "where"
    command = ["g++", "-std=c++20", "-U__FILE_NAME__", "-I", ROOT / "cuda", source, "-o", program]
    subprocess.run(command, check=True)
    said = subprocess.run([program], check=True, text=True, capture_output=True).stdout
    assert said == "jax_tcgemm: where.cc:3: x > 2: x=1\n"


def test_readme_states_the_same_ranges():
    readme = (ROOT / "README.md").read_text()
    project = PYPROJECT["project"]
    (supported,) = [d for d in project["dependencies"] if d.startswith("jax")]
    assert re.search(r"\| JAX \| ([0-9.]+) and later", readme)[1] == supported.removeprefix("jax>=")
    python = project["requires-python"].removeprefix(">=")
    assert re.search(r"\| Python \| ([0-9.]+) and later", readme)[1] == python
    assert f"CUDA compiler, {'.'.join(map(str, MINIMUM))} or later" in readme


def test_the_package_shows_public_names_alone():
    assert set(dir(jax_tcgemm)) == set(jax_tcgemm.__all__)
    assert all(hasattr(jax_tcgemm, name) for name in jax_tcgemm.__all__)


def test_the_version_has_one_place():
    version = PYPROJECT["project"]["version"]
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first[1] == version
    assert jax_tcgemm.__version__ == importlib.metadata.version("jax_tcgemm")
    places = (*ROOT.glob("jax_tcgemm/*.py"), ROOT / "CMakeLists.txt", ROOT / "docs" / "conf.py")
    assert not [path for path in places if f'"{version}"' in path.read_text()]
