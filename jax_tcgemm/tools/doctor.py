"""Reports on this machine: the installation, a check of all kernels, and a table of speeds."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import jax_tcgemm
from jax_tcgemm import _core
from jax_tcgemm.epilogue import compiler, nvrtc
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.kernels.built import built_epilogue
from jax_tcgemm.tools import benchmarking, selftest
from jax_tcgemm.tools.chain import argument_set_count, default_device
from jax_tcgemm.tuning import cache, lookup

_FAILURES_SHOWN = 10

_Item = TypeVar("_Item")


# --- Installation ----------------------------------------------------------------------------


def _driver_version() -> str | None:
    """Returns the version of NVIDIA's kernel driver, or None if there is none."""
    smi = shutil.which("nvidia-smi")
    if smi:
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, check=False)
        if result.returncode == 0 and result.stdout.strip():
            return result.stdout.split()[0]
    version_file = pathlib.Path("/proc/driver/nvidia/version")
    return version_file.read_text().splitlines()[0] if version_file.exists() else None


def _tuned_products(device: Any) -> str:
    """Returns a line about the tuned products of this device and their files."""
    packaged = len(lookup.packaged(device.device_kind))
    reason = None if os.environ.get(lookup.SETTING) else lookup.why_not_measured()
    why = "" if reason is None else f", because {reason}"
    files = cache.describe(device.device_kind)
    return f"{packaged} in the package, {files} ({lookup.SETTING}={lookup.mode()}{why})"


def _kernels_built(architectures: str) -> str:
    """Returns a line about the rows of the kernel table."""
    built = [name for name in _core.kernel_names() if built_epilogue(kernel_names.by_name(name))]
    text = f"{len(built)} of {len(kernel_table.CONFIGS)} in the table"
    if not built:
        return text
    found = nvrtc.find()
    others = found if isinstance(found, str) else "the others are compiled when first needed"
    return f"{text}, for architectures {architectures}; {others}"


def print_installation(device: Any) -> None:
    """Prints versions, the device, the kernels and the measured choices."""
    build = _core.build_info()
    driver = _driver_version()
    rows = {
        "jax_tcgemm": jax_tcgemm.__version__,
        "location": str(pathlib.Path(jax_tcgemm.__file__).parent),
        "jax, jaxlib": f"{jax.__version__}, {importlib.metadata.version('jaxlib')}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "CUDA of the build": build["cuda"] or "none (built without CUDA kernels)",
        "NVIDIA driver": driver or "none found",
        "device": f"{device.device_kind} ({device.platform})",
    }
    if device.platform == "gpu":
        properties = _core.device_properties(device.local_hardware_id or 0)
        rows["device"] += (
            f", compute capability {properties['compute_capability'] / 10:.1f}, "
            f"{properties['sm_count']} SMs"
        )
    rows["kernels built"] = _kernels_built(build["architectures"])
    rows["custom calls"] = ", ".join(_core.registrations()) or "none"
    if _core.registrations():
        rows["custom calls"] += f" (registered, XLA FFI {build['xla_ffi_api']})"
    rows["tuned products"] = _tuned_products(device)
    for name, value in rows.items():
        print(f"{name + ':':<19}{value}")
    if driver and device.platform == "cpu":
        print(
            "note: there is an NVIDIA driver, but JAX has no GPU plugin that works: "
            'pip install "jax-tcgemm[cuda13]"'
        )


# --- Correctness -----------------------------------------------------------------------------


def _progress(items: Iterable[_Item], count: int) -> Iterator[_Item]:
    """Yields the items and shows progress on stderr: a bar, or a few lines without a terminal."""
    bar_width, lines = 40, 5
    start = time.perf_counter()
    for index, item in enumerate(items, start=1):
        yield item
        seconds = time.perf_counter() - start
        text = f"{index}/{count} problems, {seconds:.0f} s"
        if sys.stderr.isatty():
            bar = "#" * (bar_width * index // count)
            end = "\n" if index == count else ""
            print(f"\r[{bar:<{bar_width}}] {text}", end=end, file=sys.stderr, flush=True)
        elif lines * index // count > lines * (index - 1) // count:
            print(text, file=sys.stderr, flush=True)


def run_checks(on_gpu: bool, seed: int, jobs: int) -> int:
    """Runs every kernel configuration and returns the number of wrong problems."""
    built = set(_core.kernel_names())
    use_config = on_gpu and bool(built)
    configs = [c for c in kernel_table.CONFIGS if c.name in built or not use_config]
    configs = [c for c in configs if c.goes_by_name]
    if use_config and not compiler.may_compile_rows():
        configs = [c for c in configs if built_epilogue(c) == c.epilogue]
    what = f"{len(configs)} kernels" if use_config else "the path without kernels (XLA's own)"
    print(f"\nChecking {what} against float64, seed {seed}")
    rng = np.random.default_rng(seed)
    problems = selftest.draw_problems(configs, rng, use_config=use_config)
    device = default_device()

    def wrong(problem: selftest.Problem) -> str | None:
        try:
            with jax.default_device(device):  # other threads do not inherit it
                return selftest.check(problem, use_config=use_config)
        except Exception as error:  # A failed launch is a wrong problem; the rest still runs.
            return f"{type(error).__name__}: {error}"

    # Compiling takes most of the time, so several threads do it at once.
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = list(_progress(pool.map(wrong, problems), len(problems)))
    failures = [(problem, text) for problem, text in zip(problems, results, strict=True) if text]
    for problem, text in failures[:_FAILURES_SHOWN]:
        print(f"WRONG: {problem.describe()}: {text}")
    if len(failures) > _FAILURES_SHOWN:
        print(f"and {len(failures) - _FAILURES_SHOWN} more")
    if use_config and len(configs) > 1 and not _core.may_compile_rows():
        print("note: a kernel could not be compiled, and others took the place of some")
    print(f"{len(problems) - len(failures)} of {len(problems)} problems right")
    return len(failures)


# --- Speed -----------------------------------------------------------------------------------

_SPEED_PROBLEMS = (
    # m, n, k, dtype, with bias and gelu
    (512, 512, 512, jnp.bfloat16, False),
    (4096, 4096, 4096, jnp.bfloat16, False),
    (4096, 4096, 4096, jnp.bfloat16, True),
    (4097, 4097, 4097, jnp.bfloat16, False),
    (4096, 4096, 4096, jnp.float16, False),
    (4096, 4096, 4096, jnp.float32, False),
)


def print_speed() -> None:
    """Prints kernel times beside those of ``jnp.matmul``."""
    print("\nSpeed, kernel time beside jnp.matmul; float32 by TF32")
    print(f"{'m':>6}{'n':>6}{'k':>6}  {'dtype':<9}{'epilogue':<11}", end="")
    print(f"{'gemm us':>10}{'jnp us':>10}{'TFLOP/s':>9}{'jnp/gemm':>10}")
    methods = set()
    for m, n, k, dtype, fused in _SPEED_PROBLEMS:
        if fused:
            competitors = {
                "gemm": lambda a, b, bias: jax_tcgemm.gemm(a, b, bias=bias, activation="gelu"),
                "jnp": lambda a, b, bias: jax.nn.gelu(jnp.matmul(a, b) + bias),
            }
        else:
            competitors = {
                "gemm": lambda a, b, _: jax_tcgemm.gemm(a, b),
                "jnp": lambda a, b, _: jnp.matmul(a, b),
            }
        bytes_per_call = (m * k + k * n + m * n) * jnp.dtype(dtype).itemsize
        keys = jax.random.split(jax.random.key(0), (argument_set_count(bytes_per_call), 3))
        sets = [
            (
                jax.random.normal(key[0], (m, k), dtype),
                jax.random.normal(key[1], (k, n), dtype),
                jax.random.normal(key[2], (n,), dtype),
            )
            for key in keys
        ]
        timings = benchmarking.time_interleaved(competitors, sets, reps=12)
        ours, theirs = timings["gemm"].median, timings["jnp"].median
        methods.add(timings["gemm"].method)
        print(
            f"{m:>6}{n:>6}{k:>6}  {jnp.dtype(dtype).name:<9}"
            f"{'bias, gelu' if fused else '':<11}{ours * 1e6:>10.1f}{theirs * 1e6:>10.1f}"
            f"{2e-12 * m * n * k / ours:>9.0f}{theirs / ours:>9.2f}x"
        )
    if "wall" in methods:
        print("(CUPTI could not be used: these are wall times, launch gaps included)")
