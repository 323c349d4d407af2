"""Wall times of programs sharded over several GPUs, alternating with the same in jnp.

The suite ``overlap`` has tensor-parallel layers, also with transfers left to XLA.

Usage: python -P benchmarks/sharded.py --out results.json
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

# With -P, a script's folder is not on the path.
sys.path.append(str(pathlib.Path(__file__).parent))

import jax
import jax.numpy as jnp
import report
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import TOLERANCES, describe, disagreement_of
from steps import STEPS

from jax_tcgemm import gemm
from jax_tcgemm._extension import OVERLAPPED_TARGET
from jax_tcgemm.partitioning.overlap import SETTING
from jax_tcgemm.tools.collectives import collectives

# m, n, k, batch.
_EXTENTS = (8192, 14336, 4096)
_BATCH = (16, 1024, 1792, 512)
_SHARD = P("x")
_COLUMNS = P(None, "x")


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        ours: the program by this package.
        xla: the program in natural JAX.
        shapes: the operands' shapes by name, in the letters ``m``, ``n``, ``k`` and ``b``, the
            batch.
        specs: the operands' shardings; operands without a spec are replicated.
        gradients: whether the gradients of all weights are computed as well, each sharded like its
            weight.
        extents: the values of the letters.
        out: the sharding of the result, if it is requested.
        wrt_x: whether the gradient of ``x`` is computed, too.
        hidden: the sharding of the hidden layer, if it is requested.
    """

    ours: Callable[..., jax.Array]
    xla: Callable[..., jax.Array]
    shapes: Mapping[str, str]
    specs: Mapping[str, P]
    gradients: bool = False
    extents: tuple[int, ...] = _EXTENTS
    out: P | None = None
    wrt_x: bool = False
    hidden: P | None = None

    def shape(self, letters: str, scale: int) -> tuple[int, ...]:
        """Returns an operand's shape, with each extent except the batch's divided by ``scale``."""
        names = "bmnk" if len(self.extents) == 4 else "mnk"
        sizes = dict(zip(names, self.extents, strict=True))
        return tuple(sizes[name] if name == "b" else sizes[name] // scale for name in letters)


def _gemm(x: jax.Array, w: jax.Array) -> jax.Array:
    return gemm(x, w)


def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w)


def _mish(product: jax.Array) -> jax.Array:
    return jax.nn.mish(product).astype(jnp.bfloat16)


def _function(x: jax.Array, w: jax.Array) -> jax.Array:
    return gemm(x, w, epilogue=_mish)


def _matmul_mish(x: jax.Array, w: jax.Array) -> jax.Array:
    return _mish(jnp.matmul(x, w, preferred_element_type=jnp.float32))


def _drop(product: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(jax.random.key(7), 0.9, product.shape)
    return jnp.where(kept, product / 0.9, 0.0).astype(jnp.bfloat16)


def _dropout(x: jax.Array, w: jax.Array) -> jax.Array:
    return gemm(x, w, epilogue=_drop)


def _matmul_dropout(x: jax.Array, w: jax.Array) -> jax.Array:
    return _drop(jnp.matmul(x, w, preferred_element_type=jnp.float32))


_PRODUCT = {"x": "mk", "w": "kn"}
_MLP, _GATED = STEPS["mlp"], STEPS["gated mlp"]
_MEGATRON = {"w1": _COLUMNS, "b1": _SHARD, "w2": _SHARD}
_MEGATRON_GATED = {"w_gate": _COLUMNS, "w_up": _COLUMNS, "w_down": _SHARD}
_FSDP = {"x": _SHARD, "w_gate": _SHARD, "w_up": _SHARD, "w_down": _SHARD}


def _layers(step: Any, specs: Mapping[str, P], gradients: bool = False, **more: Any) -> Program:
    return Program(step.ours, step.xla, {"x": "mk", **step.weights}, specs, gradients, **more)


_SHARDED = {
    "rows of x": Program(_gemm, _matmul, _PRODUCT, {"x": _SHARD}),
    "columns of w": Program(_gemm, _matmul, _PRODUCT, {"w": _COLUMNS}),
    "k": Program(_gemm, _matmul, _PRODUCT, {"x": _COLUMNS, "w": _SHARD}),
    "FSDP": Program(_gemm, _matmul, _PRODUCT, {"x": _SHARD, "w": _SHARD}),
    "batch": Program(
        _gemm, _matmul, {"x": "bmk", "w": "bkn"}, {"x": _SHARD, "w": _SHARD}, extents=_BATCH
    ),
    "function by rows": Program(_function, _matmul_mish, _PRODUCT, {"x": _SHARD}),
    "function by columns": Program(_function, _matmul_mish, _PRODUCT, {"w": _COLUMNS}),
    "dropout by rows": Program(_dropout, _matmul_dropout, _PRODUCT, {"x": _SHARD}),
    "Megatron mlp": _layers(_MLP, _MEGATRON),
    "Megatron gated mlp": _layers(_GATED, _MEGATRON_GATED),
    "data-parallel gated mlp gradients": _layers(_GATED, {"x": _SHARD}, True),
    "FSDP gated mlp gradients": _layers(_GATED, _FSDP, True),
}

_LARGE = ((8192, 14336, 4096), (2048, 28672, 8192), (16384, 14336, 4096))
_SEQUENCE = {"x": _SHARD}


def _tensor_parallel() -> dict[str, Program]:
    programs = {}
    for extents in _LARGE:
        m, n, k = extents
        for layer, step, specs in (
            ("mlp", _MLP, _MEGATRON),
            ("gated mlp", _GATED, _MEGATRON_GATED),
        ):
            name = f"{layer} {m}x{k}x{n}"
            given: dict[str, Any] = {"extents": extents, "out": _SHARD}
            # If the rows take more memory than a weight, the partitioner gathers the weights.
            hidden = {f"{name} hidden by columns": _COLUMNS} if m * k > k * n else {}
            for each, columns in ({name: None} | hidden).items():
                given["hidden"] = columns
                programs[each] = _layers(step, _SEQUENCE | specs, **given)
                programs[f"{each} gradients"] = _layers(
                    step, _SEQUENCE | specs, True, wrt_x=True, **given
                )
            programs[f"{name} all-reduce"] = _layers(step, specs, extents=extents, out=P())
    programs["FSDP gated mlp gradients"] = _layers(_GATED, _FSDP, True)
    return programs


SUITES = {"sharded": _SHARDED, "overlap": _tensor_parallel()}


def _operands(program: Program, mesh: Mesh, scale: int) -> dict[str, jax.Array]:
    arrays = {}
    for i, (name, letters) in enumerate(program.shapes.items()):
        shape = program.shape(letters, scale)
        sharding = NamedSharding(mesh, program.specs.get(name, P()))
        drawn = jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        summed = shape[-2] if name.startswith("w") else 1
        arrays[name] = jax.device_put(drawn * jnp.bfloat16(summed**-0.5), sharding)
    return arrays


def _compiled(
    function: Callable, program: Program, operands: Mapping[str, jax.Array], mesh: Mesh
) -> Any:
    out = None if program.out is None else NamedSharding(mesh, program.out)
    if program.hidden is not None:
        hidden = NamedSharding(mesh, program.hidden)
        function = functools.partial(function, hidden_sharding=hidden)
    if not program.gradients:
        return (
            jax.jit(lambda arrays: function(**arrays), out_shardings=out).lower(operands).compile()
        )
    names = [name for name in operands if name != "x" or program.wrt_x]

    def gradients(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def loss(some: dict[str, jax.Array]) -> jax.Array:
            y = function(**{**arrays, **some})
            y = y if out is None else jax.lax.with_sharding_constraint(y, out)
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.grad(loss)({name: arrays[name] for name in names})

    shardings = {name: operands[name].sharding for name in names}
    return jax.jit(gradients, out_shardings=shardings).lower(operands).compile()


def _seconds(run: Any, operands: Any, calls: int) -> float:
    start = time.perf_counter()
    results = [run(operands) for _ in range(calls)]
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / calls


def _runs(
    suite: str, program: Program, operands: Mapping[str, jax.Array], mesh: Mesh
) -> dict[str, Any]:
    """Returns the compiled programs by the prefix of their values in a row."""
    runs = {
        "": _compiled(program.ours, program, operands, mesh),
        "xla_": _compiled(program.xla, program, operands, mesh),
    }
    if suite == "overlap":
        before = os.environ.get(SETTING)
        os.environ[SETTING] = "off"
        runs["off_"] = _compiled(program.ours, program, operands, mesh)
        del os.environ[SETTING]
        if before is not None:
            os.environ[SETTING] = before
    return runs


def measure(suite: str, name: str, mesh: Mesh, scale: int, rounds: int, calls: int) -> report.Row:
    """Returns a program's row: median wall times, bytes moved, and temporary memory."""
    program = SUITES[suite][name]
    operands = _operands(program, mesh, scale)
    runs = _runs(suite, program, operands, mesh)
    row: report.Row = {"suite": suite, "case": name, "method": "wall"}
    ours, theirs = (runs[prefix](operands) for prefix in ("", "xla_"))
    wrong = disagreement_of(ours, theirs, 2 * TOLERANCES["bf16"])
    if wrong:
        return row | {"us": None, "error": f"differs from XLA's result: {wrong}"}
    samples: dict[str, list[float]] = {prefix: [] for prefix in runs}
    for turn in range(rounds + 1):
        for prefix in list(runs)[:: 1 if turn % 2 else -1]:
            seconds = _seconds(runs[prefix], operands, calls)
            if turn:  # the first warms up
                samples[prefix].append(seconds * 1e6)
    for prefix, run in runs.items():
        found = collections.Counter(each.kind for each in collectives(run.as_text(), mesh.size))
        row[f"{prefix}us"] = statistics.median(samples[prefix])
        row[f"{prefix}collectives"] = dict(sorted(found.items()))
        row[f"{prefix}temporary_mib"] = run.memory_analysis().temp_size_in_bytes / 2**20
    if suite == "overlap":
        row["overlapped"] = runs[""].as_text().count(f'custom_call_target="{OVERLAPPED_TARGET}"')
    return row | {"ratio": row["xla_us"] / row["us"]}


def main(arguments: list[str] | None = None) -> int:
    """Runs the suite.

    Returns:
        The exit status: 0, or 1 if a program failed.
    """
    parser = argparse.ArgumentParser(prog="python -P benchmarks/sharded.py", description=__doc__)
    add = parser.add_argument
    add("--suite", default=",".join(SUITES), help="suites, joined by commas; by default all")
    add("--case", default="", metavar="SUBSTRING", help="only programs whose name contains this")
    add("--out", type=pathlib.Path, metavar="FILE", help="JSON file, written after each program")
    add("--devices", type=int, default=2, help="how many; default 2")
    add("--rounds", type=int, default=20, help="samples of each; default 20")
    add("--calls", type=int, default=5, help="calls of a sample; default 5")
    add("--scale", type=int, default=1, help="divides m, n and k, to try it out")
    add("--commit", metavar="HASH", help="of the sources, where this is not a checkout")
    args = parser.parse_args(arguments)
    devices = jax.devices()[: args.devices]
    mesh = jax.make_mesh((len(devices),), ("x",), (AxisType.Auto,), devices=devices)
    results = report.Results(args.out, report.header(args.commit) | {"devices": len(devices)})
    cases = [(suite, name) for suite in args.suite.split(",") for name in SUITES[suite]]
    for suite, name in cases:
        if args.case in name:
            try:
                row = measure(suite, name, mesh, args.scale, args.rounds, args.calls)
            except Exception as error:  # One failing program must not cost the others.
                row = {"suite": suite, "case": name, "us": None, "error": describe(error)}
            results.add(row)
    print(report.tables(results.rows))
    return 1 if any("error" in row for row in results.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
