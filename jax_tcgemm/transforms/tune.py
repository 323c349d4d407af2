"""``tune``: measures how each product of a function is computed fastest on this machine's GPU."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jax_tcgemm import _compat, _core
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels.names import XLA
from jax_tcgemm.partitioning import partitioner
from jax_tcgemm.primitives.compiled import compiled_p, compiled_ragged_p
from jax_tcgemm.primitives.gemm import gemm_p
from jax_tcgemm.primitives.ragged import ragged_contraction_p, ragged_dot_p
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.tools.benchmarking import (
    Chain,
    Timing,
    argument_set_count,
    compile_chain,
    default_device,
    time_chains,
)
from jax_tcgemm.transforms.candidates import candidates
from jax_tcgemm.transforms.numbers import Numbers
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.lookup import Product, Recorder
from jax_tcgemm.tuning.tunings import Tunings, described, forget, untuned

_PRIMITIVES: dict[str, Primitive] = {
    "compiled": compiled_p,
    "compiled_ragged": compiled_ragged_p,
    "gemm": gemm_p,
    "ragged_dot": ragged_dot_p,
    "ragged_contraction": ragged_contraction_p,
}

# What is faster by less is noise.
_NOISE = 0.02
# All candidates first, with few samples; then the fastest, what is taken untuned and XLA's own.
_FIRST_REPS, _FINAL_REPS, _BLOCK = 4, 16, 2
_FINALISTS = 3

_UNTUNED = "untuned"


def tune(
    f: Callable[..., Any],
    *args: Any,
    budget: float | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Tunings:
    """Measures how each product in a function is computed fastest on this machine's GPU.

    Products are found where ``f`` is lowered for CUDA: those of every function of this package,
    through ``jit``, ``grad``, ``scan``, ``cond``, ``remat`` and ``shard_map``, and the parts that
    one device has of those that XLA divides among devices (for which ``f`` is compiled). For each,
    the kernels are timed that the time model puts within a factor of the best, splits of k among
    them, and XLA's own composition with the same epilogue: kernel times by turns, on normal
    operands that the L2 cache does not hold. Groups of ``ragged_dot`` are taken to be of one size.
    The untuned choice stays unless another is faster by 2 %, and by more than the medians scatter.

    Another choice may add in another order: the low bits of results may change with tunings.

    Args:
        f: a function of arrays, which is not run; it may be a result of ``jax.jit``.
        *args: its arguments; ``jax.ShapeDtypeStruct`` serves as well as an array.
        budget: seconds after which no further product is begun; by default there is no limit. The
            products that multiply most go first.
        progress: whether to show how far it is on ``stderr``.
        **kwargs: its arguments by name.

    Warns:
        UserWarning: a product could not be measured; the others are.

    Returns:
        What was found, to be used as ``with tunings:``, joined by ``|``, saved and printed.

    Raises:
        RuntimeError: JAX's default device is no GPU, or the package was built without kernels.
    """
    device = default_device()
    if device.platform != "gpu" or not _core.kernel_names():
        raise RuntimeError(
            f"tune measures kernels on a GPU; the default device is {device.device_kind} "
            f"({device.platform}), and this build has {len(_core.kernel_names())} kernels"
        )
    products = find_products(f, *args, **kwargs)
    products.sort(key=_products_of, reverse=True)
    entries: dict[tuple[str, str], Entry] = {}
    numbers = Numbers()
    start = time.perf_counter()
    for index, product in enumerate(products):
        seconds = time.perf_counter() - start
        if budget is not None and seconds > budget:
            log(f"tune: {len(products) - index} of {len(products)} products left out at {budget} s")
            break
        if progress:
            _show(index, len(products), seconds, described(product.problem))
        try:
            entries[device.device_kind, product.problem] = _in_a_thread(measure, product, numbers)
        except Exception as error:  # Out of memory, say: others are still to be measured.
            what = f"{type(error).__name__}: {error}"
            warnings.warn(f"{described(product.problem)} was not measured: {what}", stacklevel=2)
    if progress:
        _show(len(entries), len(products), time.perf_counter() - start, "done\n")
    return Tunings(entries)


def find_products(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Product]:
    """Returns the products of a function that a kernel could compute, each problem once.

    Args:
        f: as of ``tune``.
        *args: its arguments.
        **kwargs: those by name.
    """
    jitted: Any = f if hasattr(f, "trace") else jax.jit(f)
    recorder = Recorder()
    with recorder:
        lowered = jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
        if partitioner.TARGET in lowered.as_text():
            lowered.compile()  # XLA's partitioner asks for the parts
    forget(recorder)
    return list(recorder.products.values())


def measure(product: Product, numbers: Numbers | None = None) -> Entry:
    """Times what may compute a product, by turns.

    Args:
        product: as lowering has it.
        numbers: what operands are made of; by default new ones.
    """
    device = _core.device_properties(default_device().local_hardware_id or 0)
    sets = _draw(product, numbers or Numbers())
    configs = {_UNTUNED: None, XLA: XLA} | {name: name for name in candidates(product, device)}
    chains = _compiled(product, configs, sets)
    timings = time_chains(chains, reps=_FIRST_REPS, block=_BLOCK)
    rows = [name for name in timings if name not in (_UNTUNED, XLA)]
    rows.sort(key=lambda name: timings[name].median)
    final = [_UNTUNED, XLA, *rows[:_FINALISTS]]
    chains = {name: chains[name] for name in final}
    timings = time_chains(chains, reps=_FINAL_REPS, block=_BLOCK)
    best = _fastest(timings)
    times = {name: timing.median for name, timing in timings.items()}
    entry = Entry.measured(configs[best], times[best], times[_UNTUNED], times[XLA])
    us = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in times.items())
    log(f"tune: {described(product.problem)}: {best}; {us}")
    return entry


def _fastest(timings: Mapping[str, Timing]) -> str:
    """Names the fastest: what is taken untuned, unless another is faster by more than noise.

    Where the power limit moves the clock, samples of one kernel differ by up to a tenth.
    """
    best = min(timings, key=lambda name: timings[name].median)
    usual = timings[_UNTUNED]
    # About twice the standard error of the difference of two medians of 16 samples.
    noise = max(_NOISE, (timings[best].spread + usual.spread) / 3)
    return best if timings[best].median < (1 - noise) * usual.median else _UNTUNED


def measure_while_lowering(product: Product) -> Entry:
    """The same, where a program is being traced."""
    return _in_a_thread(measure, product)


def _in_a_thread(function: Callable[..., Entry], *arguments: Any) -> Entry:
    """Calls a function where nothing is traced, and no mesh or option is set by a context."""
    device = next(iter(_compat.initialized_cuda_devices()), None)

    def run() -> Entry:
        with jax.default_device(device):
            return function(*arguments)

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


def _compiled(
    product: Product, configs: dict[str, str | None], sets: Sequence[tuple[Any, ...]]
) -> dict[str, Chain]:
    """Compiles the competitors, several at a time: XLA's own first, whose autotuning measures."""
    device = default_device()

    def chain(config: str | None) -> Chain:
        with untuned(), jax.default_device(device):
            return compile_chain(functools.partial(_apply, product, config), sets)

    done = {XLA: chain(XLA)}
    done[_UNTUNED] = chain(None)  # which may be XLA's own as well
    others = [name for name in configs if name not in done]

    def chain_or_none(name: str) -> Chain | None:
        try:
            return chain(configs[name])
        except Exception as error:  # Of those that remain one is chosen.
            log(f"tune: {name} left out: {type(error).__name__}: {error}")
            return None

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        compiled = zip(others, pool.map(chain_or_none, others), strict=True)
        return done | {name: each for name, each in compiled if each is not None}


def _apply(product: Product, config: str | None, *operands: jax.Array) -> Any:
    spec = product.spec
    is_compiled = isinstance(spec, CompiledSpec)
    spec = spec.with_config(config) if is_compiled else dataclasses.replace(spec, config=config)
    if isinstance(spec, GemmSpec):
        spec = spec.replace(overwrite_c=False)  # without donation that would copy c
    return _PRIMITIVES[product.primitive].bind(*operands, spec=spec)


def _products_of(product: Product) -> int:
    """Returns how many pairs of elements are multiplied."""
    fields = json.loads(product.problem)
    return fields["m"] * fields["n"] * fields["k"] * math.prod(fields.get("batch", []))


def _draw(product: Product, numbers: Numbers) -> list[tuple[jax.Array, ...]]:
    """Returns operands, as many sets as no cache holds together.

    The second factor is scaled so that sums stay finite in every type.
    """
    types = product.types
    sizes_at = 2 if "ragged" in product.primitive else None
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in types)
    scale = max(types[1].shape) ** -0.5

    def operand(i: int, x: jax.ShapeDtypeStruct) -> jax.Array:
        if i == sizes_at:
            return _even_sizes(x, rows=types[0].shape[0])
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            keys = jax.random.key(0, impl="threefry2x32")  # functions with others are not compiled
            return jax.random.split(keys, math.prod(x.shape)).reshape(x.shape)
        if x.dtype.itemsize == 1 or not jnp.issubdtype(x.dtype, jnp.floating):
            return _few_bits(numbers.take(jax.ShapeDtypeStruct(x.shape, jnp.float32)), x.dtype)
        values = numbers.take(x)
        return values * x.dtype.type(scale) if i == 1 else values

    sets = range(argument_set_count(2 * size))
    return [tuple(operand(i, x) for i, x in enumerate(types)) for _ in sets]


def _few_bits(normal: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns normal numbers in a type of 8 bits, of integers, or of truths."""
    if dtype == jnp.bool_:
        return normal > 0
    if jnp.issubdtype(dtype, jnp.integer):
        normal = jnp.round(jnp.abs(normal) if dtype.kind == "u" else normal * 30)
    return normal.astype(dtype)


def _even_sizes(sizes: jax.ShapeDtypeStruct, rows: int) -> jax.Array:
    bounds = np.linspace(0, rows, sizes.shape[0] + 1).astype(int)
    return jnp.asarray(np.diff(bounds), sizes.dtype)


def _show(index: int, count: int, seconds: float, text: str) -> None:
    """Shows a bar, or a line where stderr is no terminal."""
    line = f"tune: {index}/{count}, {seconds:.0f} s: {text}"
    if sys.stderr.isatty():
        print(f"\r\033[K{line}"[:120], end="", file=sys.stderr, flush=True)
    else:
        print(line.rstrip(), file=sys.stderr, flush=True)


lookup.measure = measure_while_lowering
