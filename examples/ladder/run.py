"""Climbs from three loops to wgmma. Checks, times and explains each rung's kernel.

    python examples/ladder/run.py                 # 4096 x 4096, float32 and bfloat16
    python examples/ladder/run.py --size 2048 --plot ladder.svg

Builds the rungs with CMake and nvcc, and calls them like any JAX function. Without a GPU the
script only builds them and lists the rungs.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import gemm
from jax_tcgemm.tools.benchmarking import Timing, time_interleaved
from jax_tcgemm.tools.chain import argument_set_count

FOLDER = pathlib.Path(__file__).parent
UNIT = 128  # extents are multiples of this


@dataclasses.dataclass(frozen=True)
class Rung:
    """A step of the ladder.

    Attributes:
        name: name of the rung's file.
        step: the new technique.
        ceiling: the limit of the rung's speed.
    """

    name: str
    step: str
    ceiling: str


# The order of LADDER_RUNGS in ladder.h. The last one is the package's own kernel.
RUNGS = (
    Rung("naive", "a thread an element, neighbours in a column", "lines between L2 and SM"),
    Rung("coalesced", "neighbours in a row", "two loads a multiplication"),
    Rung("shared_tile", "32 x 32 tiles in shared memory", "two shared reads a multiplication"),
    Rung("register_tile", "8 x 8 sums a thread", "instructions that do not multiply"),
    Rung("vectors", "128-bit accesses, two buffers", "bank conflicts"),
    Rung("swizzle", "XOR instead of conflicts", "FMA instructions"),
    Rung("mma_sync", "ldmatrix and mma.sync", "waiting for L2 and for all warps"),
    Rung("cp_async", "copies past the registers, 3 stages", "mma.sync"),
    Rung("tma_wgmma", "TMA, mbarrier, wgmma", "begin and end of each tile"),
    Rung("gemm", "persistent, pingpong, clusters: jax_tcgemm.gemm", "tensor cores, power"),
)
# The sums of these rungs are of float32 products. The others multiply float32 as TF32.
_FMA = {rung.name for rung in RUNGS[:6]}
_TOLERANCES = {"fma": 1e-5, "float32": 2e-3, "bfloat16": 4e-3}


def build(folder: pathlib.Path) -> pathlib.Path:
    """Builds the rungs unless they are up to date; returns the shared library.

    Raises:
        SystemExit: CMake is missing or failed. It fails without a CUDA compiler.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        raise SystemExit("the ladder is built by CMake: pip install cmake")
    options = [f"-DPython_EXECUTABLE={sys.executable}"]
    default = pathlib.Path("/usr/local/cuda/bin/nvcc")
    if "CUDACXX" not in os.environ and shutil.which("nvcc") is None and default.exists():
        options.append(f"-DCMAKE_CUDA_COMPILER={default}")
    jobs = str(os.cpu_count() or 1)
    for command in (
        [cmake, "-S", str(FOLDER), "-B", str(folder), *options],
        [cmake, "--build", str(folder), "--parallel", jobs],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return folder / "ladder.so"


def register(library: pathlib.Path) -> None:
    """Registers the handler with XLA."""
    handler = jax.ffi.pycapsule(ctypes.CDLL(str(library)).Ladder)
    jax.ffi.register_ffi_target("ladder", handler, platform="CUDA")


def climb(rung: Rung) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns a rung as a function of A (m, k), B (k, n) and B transposed."""
    if rung.name == "gemm":
        return lambda a, b, b_t: gemm(a, b)

    def multiply(a: jax.Array, b: jax.Array, b_t: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
        # wgmma takes float32 operands only in rows of k.
        right = b_t if rung.name == "tma_wgmma" and a.dtype == jnp.float32 else b
        return jax.ffi.ffi_call("ladder", result)(a, right, rung=np.int32(RUNGS.index(rung)))

    return multiply


def draw(m: int, n: int, k: int, dtype: Any, seed: int = 0) -> tuple[jax.Array, ...]:
    """Draws normal operands."""
    keys = jax.random.split(jax.random.key(seed))
    a, b = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, ((m, k), (k, n)), strict=True)
    )
    return a, b, b.T + 0  # a copy


def error_of(rung: Rung, m: int, n: int, k: int, dtype: Any) -> tuple[float, float]:
    """Returns a rung's relative error against float64, and the allowed error."""
    operands = draw(m, n, k, dtype)
    exact = np.asarray(operands[0], np.float64) @ np.asarray(operands[1], np.float64)
    actual = np.asarray(jax.jit(climb(rung))(*operands), np.float64)
    name = jnp.dtype(dtype).name
    kind = "fma" if name == "float32" and rung.name in _FMA else name
    return float(np.linalg.norm(actual - exact) / np.linalg.norm(exact)), _TOLERANCES[kind]


def runs_here(rung: Rung) -> bool:
    """Checks if the GPU has a rung's instructions."""
    capability = float(jax.devices()[0].compute_capability)
    return capability == 9.0 if rung.name == "tma_wgmma" else capability >= 8.0


def times(size: int, dtype: Any) -> dict[str, Timing]:
    """Times all rungs and XLA in turn."""
    itemsize = jnp.dtype(dtype).itemsize
    count = argument_set_count(4 * size * size * itemsize)
    sets = [draw(size, size, size, dtype, seed) for seed in range(count)]
    functions: dict[str, Any] = {rung.name: climb(rung) for rung in RUNGS if runs_here(rung)}
    functions["XLA"] = lambda a, b, b_t: a @ b
    return time_interleaved(functions, sets, reps=6, block=2)


def report(size: int, dtype: str, measured: dict[str, Timing]) -> dict[str, float]:
    """Prints a table; returns TFLOP/s by name."""
    flops = {name: 2e-12 * size**3 / timing.median for name, timing in measured.items()}
    print(f"\n{dtype}, {size} x {size} x {size}")
    print(f"{'':2} {'rung':<14}{'TFLOP/s':>8}{'step':>7}  {'what is new':<50}ceiling")
    before = None
    for number, rung in enumerate(RUNGS, start=1):
        value = flops.get(rung.name)
        step = f"x {value / before:.2f}" if value and before else ""
        text = f"{value:8.1f}" if value else f"{'-':>8}"
        print(f"{number:2} {rung.name:<14}{text}{step:>7}  {rung.step:<50}{rung.ceiling}")
        before = value or before
    if "XLA" in flops:
        print(f"   {'XLA':<14}{flops['XLA']:8.1f}")
    return flops


def plot(path: pathlib.Path, flops: dict[str, dict[str, float]]) -> None:
    """Plots TFLOP/s by rung."""
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    names = [rung.name for rung in RUNGS]
    for index, (dtype, values) in enumerate(flops.items()):
        places = [i + 0.4 * index - 0.2 for i in range(len(names))]
        axes.bar(places, [values.get(name, 0.0) for name in names], 0.4, label=dtype)
        axes.axhline(values["XLA"], color=f"C{index}", linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    axes.set_ylabel("TFLOP/s (dashed: XLA)")
    axes.set_xticks(range(len(names)), names, rotation=30)
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    """Runs the ladder.

    Raises:
        SystemExit: the build failed, or a rung computes a wrong result.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="of the matrices; default 4096")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="by default both")
    parser.add_argument("--build", type=pathlib.Path, default=FOLDER / "build", metavar="FOLDER")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw TFLOP/s by rung")
    options = parser.parse_args(arguments)
    if options.size < UNIT or options.size % UNIT:
        parser.error(f"--size must be a multiple of {UNIT}")
    dtypes = (options.dtype,) if options.dtype else ("float32", "bfloat16")
    library = build(options.build)
    print(f"built {library}")
    if jax.default_backend() != "gpu":
        for dtype in dtypes:
            report(options.size, dtype, {})
        print("\nno GPU: there each rung is checked against float64, timed, and held against XLA")
        return
    register(library)
    flops = {}
    for dtype in dtypes:
        for rung in filter(runs_here, RUNGS):
            error, allowed = error_of(rung, 2 * UNIT, 3 * UNIT, 5 * UNIT, dtype)
            if not error <= allowed:
                raise SystemExit(f"{rung.name}, {dtype}: error {error:.1e}, at most {allowed:.1e}")
        flops[dtype] = report(options.size, dtype, times(options.size, dtype))
    if options.plot:
        plot(options.plot, flops)


if __name__ == "__main__":
    main()
