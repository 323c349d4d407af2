"""``fuse``: a function whose products are this package's, each with what becomes of it."""

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

    ``f`` is any function of JAX; it does not have to be written for this package. Each
    ``lax.dot_general`` (of ``@``, ``jnp.einsum`` or a library's layer) becomes
    ``jax_tcgemm.dot_general``, and ``lax.ragged_dot`` this package's. Products stay XLA's where it
    computes them together with what surrounds them: batches of products, as in attention, and few
    rows by a weight that is made on the way, for example dequantised. What follows a product of
    16-bit operands element by element (a bias, an activation, dropout, a residual, the derivative
    of an activation, sums for the gradient of a bias) becomes its epilogue, compiled into the
    kernel (see ``epilogue=`` of ``gemm``), if that moves fewer bytes. Two products of one operand
    that are joined in this way, as in a gated layer, become one kernel. Bodies of ``jit``,
    ``scan``, ``while_loop``, ``cond``, ``jax.checkpoint`` and ``shard_map`` are rewritten as well;
    bodies of ``custom_jvp`` and ``custom_vjp`` are not.

    Apply it to a whole training step, after ``jax.grad`` and before ``jax.jit``. Like ``jit`` it
    traces ``f``, but at each call: ``jax.jit(fuse(f))`` traces once. The result can be
    differentiated and batched, but then ``fuse`` sees the forward pass alone.

    Leaves that are not arrays pass into ``f`` and out of it as they are. Changes that ``f`` makes
    in place to dicts, lists and objects of Flax NNX reach the caller's objects.

    Results are those of ``f`` up to rounding: values that are bfloat16 in ``f`` are float32 between
    a product and the next value that is written, as in a fusion of XLA's. ``JAX_TCGEMM_LOG=1``
    prints what became of each product.

    Args:
        f: a function of pytrees, or of objects of Flax NNX.

    Returns:
        A function of the same arguments and results. It raises ``TypeError`` if ``f`` changes an
        argument in place that is no dict, list or object of Flax NNX. Its ``report``, called with
        the same arguments (or ``jax.ShapeDtypeStruct`` in place of arrays), runs nothing and
        returns a table of what becomes of each product: ``print(fuse(f).report(*args))``. That of
        a method takes the object as well.
    """
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
            raise _ReportedError(Report(rewriting.decisions))  # before anything is changed in place

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
        """Computes what the function does, by this package's kernels."""
        ...

    def report(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Report:
        """Returns what becomes of each product; nothing is run."""
        ...


class _ReportedError(Exception):
    """Ends a call whose products are known."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Holds back Python's collection of cycles: it would take a third of the time to rewrite.

    The objects of a rewritten program live until it is done, and each full collection goes through
    all of JAX's.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
