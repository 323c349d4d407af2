"""``fuse``: computes a function's products by this package's kernels, epilogues included."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar

import jax

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.transforms import pure_call
from jax_tcgemm.transforms.report import Report
from jax_tcgemm.transforms.rewriting import Rewriting

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)


def fuse(f: Callable[_Parameters, _Result]) -> FusedFunction[_Parameters, _Result]:
    """Returns a function that computes its matrix products by this package's kernels.

    ``f`` is any JAX function; it need not be written for this package. ``fuse`` replaces each
    ``lax.dot_general`` (from ``@``, ``jnp.einsum`` or a library's layer) by
    ``jax_tcgemm.dot_general``, and each ``lax.ragged_dot`` by this package's version.

    XLA still computes the products that it fuses with neighbouring operations:

    - batches of products, as in attention. Exception: few rows times a stored cache of keys or
      values, as in a decode step. Heads of the queries that share one of the cache become rows.
    - few rows times a weight that the program computes on the way. Exception: the program packs
      large weights that it dequantizes from 4 bits, before a loop that reads them in each turn.

    The element-wise operations after a product of 16-bit operands become its epilogue, if that
    moves fewer bytes: a bias, an activation, dropout, a residual, the derivative of an activation,
    sums for the gradient of a bias. The epilogue is compiled into the kernel (see ``epilogue=`` of
    ``gemm``). Two products that share an operand and meet in such an epilogue, as in a gated layer,
    become one kernel.

    ``fuse`` also rewrites the bodies of ``jit``, ``scan``, ``while_loop``, ``cond``,
    ``jax.checkpoint`` and ``shard_map``, but not those of ``custom_jvp`` and ``custom_vjp``.

    Apply ``fuse`` to a whole training step, after ``jax.grad`` and before ``jax.jit``. Like
    ``jit``, it traces ``f``, but at each call: ``jax.jit(fuse(f))`` traces once. The result can be
    differentiated and batched, but then ``fuse`` sees only the forward pass.

    Leaves that are not arrays pass into ``f`` and out of it unchanged. If ``f`` changes dicts,
    lists or objects of Flax NNX in place, the caller's objects change, too.

    Results equal those of ``f`` up to rounding. Values that are bfloat16 in ``f`` are float32
    between a product and the next value that is written, as in an XLA fusion.
    ``JAX_TCGEMM_LOG=1`` prints how each product is computed.

    Args:
        f: a function of pytrees, or of objects of Flax NNX.

    Returns:
        A function with the same arguments and results. It raises ``TypeError`` if ``f`` changes an
        argument in place that is no dict, list or object of Flax NNX.

        The function has a method ``report``, which takes the same arguments (or
        ``jax.ShapeDtypeStruct`` in place of arrays). ``report`` runs nothing and returns a table
        that shows how each product is computed: ``print(fuse(f).report(*args))``. If ``f`` is a
        method, ``report`` also takes the object.

    Raises:
        TypeError: ``f`` is no function, but for example its result.

    Example:
        >>> def layer(x, w, b):
        ...     return jax.nn.gelu(x @ w + b)
        >>> y = jax.jit(fuse(layer))(x, w, b)  # one kernel
        >>> report = fuse(layer).report(x, w, b)  # print(report) shows each product
    """
    if not callable(f):
        raise TypeError(f"fuse takes a function, got f={f!r}; accepted: fuse(step)(x)")
    name = getattr(f, "__name__", type(f).__name__)

    def evaluate(function: Callable[..., list[Any]], arrays: list[Any]) -> list[Any]:
        closed = jax.make_jaxpr(function)(*arrays)
        with _no_collection():
            jaxpr, consts = Rewriting().rewritten(closed.jaxpr, closed.consts)
        return jaxprs.call(jaxpr, consts, arrays, name)

    @functools.wraps(f)
    def fused(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return pure_call.call(f, args, kwargs, evaluate)

    def report(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Report:
        def evaluate(function: Callable[..., list[Any]], arrays: list[Any]) -> list[Any]:
            closed = jax.make_jaxpr(function)(*arrays)
            rewriting = Rewriting()
            rewriting.rewritten(closed.jaxpr, closed.consts)
            # Raised here, so that nothing has been changed in place yet.
            raise _ReportedError(Report(rewriting.decisions))

        def traced(leaves: list[Any]) -> Any:
            given = iter(leaves)
            filled = [next(given) if x is None else x for x in others]
            own, named = jax.tree.unflatten(tree, filled)
            return pure_call.call(f, own, named, evaluate)

        every, tree = jax.tree.flatten((args, kwargs))
        types = [x for x in every if isinstance(x, jax.ShapeDtypeStruct)]
        others = [None if isinstance(x, jax.ShapeDtypeStruct) else x for x in every]
        try:
            if types:
                jax.eval_shape(traced, types)
            else:
                pure_call.call(f, args, kwargs, evaluate)
        except _ReportedError as reported:
            return reported.report
        raise AssertionError("a call has to be evaluated")

    result: Any = fused
    result.report = report
    return result


class FusedFunction(Protocol[_Parameters, _Result_co]):
    """The type of the functions that ``fuse`` returns."""

    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., _Result_co]:
        """Binds a method."""
        ...

    def __call__(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result_co:
        """Calls the function, with its products computed by this package's kernels."""
        ...

    def report(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Report:
        """Returns how each product is computed, without running anything."""
        ...


class _ReportedError(Exception):
    """Ends a call as soon as the decisions for all products are known."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pauses Python's garbage collector, which would take a third of the rewriting time.

    The objects of a rewritten program live until the rewriting ends, and each full collection
    traverses all objects of JAX.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
