"""``fuse``: a function whose products are this package's, each with what becomes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.transforms import pure_call
from jax_tcgemm.transforms.rewriting import Rewriting

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def fuse(f: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Makes a function compute its matrix products by this package's kernels.

    ``f`` is any function of JAX; nothing in it has to be written for this package. Each
    ``lax.dot_general`` in it, from ``@``, ``jnp.einsum``, or a layer of a library, becomes
    ``jax_tcgemm.dot_general``, and ``lax.ragged_dot`` this package's. What follows a product of
    16-bit operands element by element, say a bias, an activation, dropout, a residual, or on the
    way back the derivative of an activation and the sums for the gradient of a bias, becomes its
    epilogue, compiled into the kernel (see ``epilogue=`` of ``gemm``), where that moves fewer
    bytes. Two products of one operand that are joined so, as in a gated layer, become one kernel.
    This goes through ``jit``, ``scan``, ``while_loop``, ``cond``, ``jax.checkpoint`` and
    ``shard_map``; within ``custom_jvp`` and ``custom_vjp`` all stays as it is.

    Apply it last: to a whole training step, after ``jax.grad``, and before ``jax.jit``. Like
    ``jit`` it traces ``f``, at each call: ``jax.jit(fuse(f))`` does so once. What is no array is
    passed to ``f`` as it is. The result can be differentiated and batched, but then what ``fuse``
    sees is the forward pass alone.

    Results are those of ``f`` up to rounding: between a product and what is written, what is
    bfloat16 in ``f`` is float32, as in a fusion of XLA's. ``JAX_TCGEMM_LOG=1`` prints what became
    of each product.

    Args:
        f: a function of pytrees of arrays.

    Returns:
        A function of the same arguments and results.
    """

    name = getattr(f, "__name__", type(f).__name__)

    def evaluate(function: Callable[..., list[Any]], arrays: list[Any]) -> list[Any]:
        closed = jax.make_jaxpr(function)(*arrays)
        jaxpr, consts = Rewriting().rewritten(closed.jaxpr, closed.consts)
        return jaxprs.call(jaxpr, consts, arrays, name)

    @functools.wraps(f)
    def fused(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return pure_call.call(f, args, kwargs, evaluate)

    return fused
