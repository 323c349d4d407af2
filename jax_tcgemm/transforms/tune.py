"""``tune``: finds the fastest way to compute each product of a function on this machine's GPU."""

from __future__ import annotations

import functools
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax

from jax_tcgemm import _core
from jax_tcgemm.partitioning import partitioner
from jax_tcgemm.problem.log import log
from jax_tcgemm.tools.chain import default_device
from jax_tcgemm.transforms.measure import in_a_thread, measure
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.lookup import Product, Recorder
from jax_tcgemm.tuning.tunings import Tunings, described, forget


def tune(
    f: Callable[..., Any],
    *args: Any,
    budget: float | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Tunings:
    """Finds the fastest way to compute each product in a function on this machine's GPU.

    ``tune`` lowers ``f`` for CUDA and collects the products of all functions of this package,
    including those inside ``jit``, ``grad``, ``scan``, ``cond``, ``remat`` and ``shard_map``. If
    XLA divides a product among devices, ``tune`` compiles ``f`` and collects the part of one
    device.

    For each product, ``tune`` times:

    - the kernels that the time model puts within a factor of the best, including splits of k
    - XLA's own composition with the same epilogue

    It compares kernel times, taken in turns, on normally distributed operands that exceed the L2
    cache. It assumes that all groups of ``ragged_dot`` have the same size. The untuned choice stays
    unless another is faster by 1 %, and by more than the medians scatter.

    Another choice may add in another order, so tunings may change the low bits of results.

    Args:
        f: a function of arrays, which is not run; it may be a result of ``jax.jit``.
        *args: its arguments, as arrays or ``jax.ShapeDtypeStruct``.
        budget: after this many seconds, ``tune`` starts no further product; by default there is no
            limit. The products with the most multiplications go first.
        progress: whether to show the progress on ``stderr``.
        **kwargs: its arguments by name.

    Warns:
        UserWarning: a product could not be measured; ``tune`` goes on with the others.

    Returns:
        The choices. They can be used as ``with tunings:``, joined by ``|``, saved and printed.

    Raises:
        RuntimeError: JAX's default device is no GPU, or the package was built without kernels.

    Example:
        >>> tunings = tune(train_step, state, batch, budget=60)  # at most about a minute
        >>> with tunings:
        ...     state, loss = jax.jit(train_step)(state, batch)
    """
    device = default_device()
    if device.platform != "gpu" or not _core.kernel_names():
        raise RuntimeError(
            f"tune measures kernels on a GPU; the default device is {device.device_kind} "
            f"({device.platform})" + ("" if _core.kernel_names() else "; this build has no kernels")
        )
    products = find_products(f, *args, **kwargs)
    products.sort(key=_products_of, reverse=True)
    entries: dict[tuple[str, str], Entry] = {}
    start = time.perf_counter()
    for index, product in enumerate(products):
        seconds = time.perf_counter() - start
        if budget is not None and seconds > budget:
            log(f"tune: {len(products) - index} of {len(products)} products left out at {budget} s")
            break
        if progress:
            _show(index, len(products), seconds, described(product.problem))
        try:
            with lookup.MEASURING:
                measured = in_a_thread(functools.partial(measure, product))
            entries[device.device_kind, product.problem] = measured.entry
        except Exception as error:  # One failure (out of memory, say) must not stop the others.
            what = f"{type(error).__name__}: {error}"
            warnings.warn(f"{described(product.problem)} was not measured: {what}", stacklevel=2)
    if progress:
        _show(len(entries), len(products), time.perf_counter() - start, "done\n")
    return Tunings(entries)


def find_products(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Product]:
    """Returns the products of a function that a kernel could compute, each problem once.

    Args:
        f: the function, as for ``tune``.
        *args: its arguments.
        **kwargs: its arguments by name.
    """
    jitted: Any = f if hasattr(f, "trace") else jax.jit(f)
    recorder = Recorder()
    with recorder:
        lowered = jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
        if partitioner.TARGET in lowered.as_text():
            lowered.compile()  # the recorder sees each part when XLA's partitioner asks for it
    forget(recorder)
    return list(recorder.products.values())


def _products_of(product: Product) -> int:
    """Returns the number of multiplications in a product."""
    fields = json.loads(product.problem)
    return fields["m"] * fields["n"] * fields["k"] * math.prod(fields.get("batch", []))


def _show(index: int, count: int, seconds: float, text: str) -> None:
    """Updates a progress line on a terminal; elsewhere prints a new line."""
    line = f"tune: {index}/{count}, {seconds:.0f} s: {text}"
    if sys.stderr.isatty():
        print(f"\r\033[K{line}"[:120], end="", file=sys.stderr, flush=True)
    else:
        print(line.rstrip(), file=sys.stderr, flush=True)
