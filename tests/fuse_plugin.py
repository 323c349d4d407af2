"""A pytest plugin that rewrites every program that JAX compiles by `fuse`.

It is for tests that know nothing of this package, such as JAX's own: `jax_own_tests.py` runs those
with the plugin and without it. The plugin rewrites programs when JAX lowers them. So it covers
inner jits, eager operations, `jit(f).lower()` and exports, and JAX checks arguments and raises
errors as it does without the plugin.

    PYTHONPATH=tests python -P -m pytest -p fuse_plugin CHECKOUT/tests/lax_test.py --fuse-every 20
"""

from __future__ import annotations

import collections
import json
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from jax._src import config as jax_config
from jax._src.interpreters import pxla

import jax_tcgemm
from jax_tcgemm._compat.jaxprs import jaxpr_of
from jax_tcgemm.transforms import products, rewriting
from jax_tcgemm.transforms.fused import Fused

_PRODUCTS = {"dot_general", "ragged_dot_general"}

counts: collections.Counter[str] = collections.Counter()
# The errors that `fuse` raised, by test: a test that expects an error may hide them.
raised: dict[str, str] = {}
_outcomes: dict[str, dict[str, str]] = {}
_state = threading.local()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuse")
    group.addoption("--fuse-off", action="store_true", help="rewrite nothing, for comparison")
    group.addoption("--fuse-every", type=int, default=1, help="run every N-th test of each file")
    group.addoption("--fuse-offset", type=int, default=0, help="the first of them")
    group.addoption("--fuse-float32", action="store_true", help="regions of float32 products, too")
    group.addoption("--fuse-outcomes", help="a JSON file for what became of each test")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--fuse-off"):
        _install()
    if config.getoption("--fuse-float32"):
        # This changes the choice of regions; JAX's tests have few 16-bit products. Without a
        # kernel, XLA computes what follows the product after it.
        products.HALF_TYPES = (*products.HALF_TYPES, *map(jnp.dtype, ("float32", "float64")))


@pytest.hookimpl(trylast=True)  # takes every N-th of the tests that other options leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_file: dict[pathlib.Path, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        by_file[item.path].append(item)
    every, first = config.getoption("--fuse-every"), config.getoption("--fuse-offset")
    items[:] = [item for own in by_file.values() for item in own[first::every]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _state.test = item.nodeid


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else str(report.longrepr or "")
        own = {"outcome": report.outcome, "message": message if report.failed else ""}
        if _outcomes.get(report.nodeid, {}).get("outcome") != "failed":  # in a subtest
            _outcomes[report.nodeid] = own


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # an xdist worker
        output["fuse"] = {"counts": dict(counts), "raised": raised}
        return
    file = session.config.getoption("--fuse-outcomes")
    if file:
        found = {"outcomes": _outcomes, "counts": dict(counts), "raised": raised}
        pathlib.Path(file).write_text(json.dumps(found, indent=1))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    of_worker = getattr(node, "workeroutput", {}).get("fuse", {"counts": {}, "raised": {}})
    counts.update(of_worker["counts"])
    raised.update(of_worker["raised"])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("fuse")
    terminalreporter.line(described(counts))
    for test, error in raised.items():
        terminalreporter.line(f"raised in {test}: {error}")


def described(counts: dict[str, int]) -> str:
    """Describes what was rewritten."""
    known = ("programs", "products", "regions", "fused")
    programs, products, regions, fused = (counts.get(name, 0) for name in known)
    others = [f"{name} {count}" for name, count in sorted(counts.items()) if name not in known]
    return (
        f"{programs} programs rewritten, {products} of them with products, {regions} with regions "
        f"({fused} in all); {', '.join(others) or 'no others'}"
    )


def _install() -> None:
    lower, with_regions = pxla.lower_sharding_computation, rewriting.with_regions

    def counted(*args: Any, **kwargs: Any) -> Any:
        graph = with_regions(*args, **kwargs)
        _state.fused = getattr(_state, "fused", 0) + sum(isinstance(x, Fused) for x in graph.items)
        return graph

    def lowered(closed: Any, *args: Any, **kwargs: Any) -> Any:
        return lower(_rewritten(closed), *args, **kwargs)

    rewriting.with_regions = counted
    pxla.lower_sharding_computation = lowered


def _rewritten(closed: Any) -> Any:
    """Returns a program rewritten by `fuse`."""
    if getattr(_state, "busy", False):  # `fuse` itself computes an operation
        return closed
    if not all(isinstance(x, jax.core.ShapedArray) for x in (*closed.in_avals, *closed.out_avals)):
        counts["left alone: other arguments than arrays"] += 1
        return closed
    _state.busy, _state.fused = True, 0
    try:
        function = jax_tcgemm.fuse(jax.extend.core.jaxpr_as_fun(closed))
        with jax_config.explain_cache_misses(False):  # tests compare its log
            made = jax.make_jaxpr(function)(*closed.in_avals)
    except Exception as error:
        raised[getattr(_state, "test", "")] = f"{type(error).__name__}: {error}".split("\n")[0]
        raise
    finally:
        _state.busy = False
    types, own = ([(x.shape, x.dtype) for x in each.out_avals] for each in (made, closed))
    if types != own:
        raised[getattr(_state, "test", "")] = f"results of {types} for {own}"
        raise TypeError(f"fuse returns {types} for {own}")
    counts["programs"] += 1
    counts["products"] += any(name in _PRODUCTS for name in _names(closed.jaxpr))
    counts["regions"] += _state.fused > 0
    counts["fused"] += _state.fused
    # Keeps the names of arguments and results in errors.
    return made.replace(jaxpr=made.jaxpr.replace(debug_info=closed.jaxpr.debug_info))


def _names(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner = jaxpr_of(value)
            if inner is not None:
                yield from _names(inner)
