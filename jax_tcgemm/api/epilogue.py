"""``epilogue=`` of the public functions: traced, checked, and the primitive applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_tcgemm.api import arguments
from jax_tcgemm.epilogue import draws
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.primitives import compiled
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.ragged import RaggedSpec
from jax_tcgemm.problem.spec import GemmSpec


def check_alone(name: str, **others: Any) -> None:
    """Checks that nothing else is to become of the product.

    Args:
        name: of the public function.
        **others: its other arguments that say what becomes of the product, ``None`` where they do
            not.

    Raises:
        ValueError: one of them does.
    """
    given = [key for key, value in others.items() if value is not None]
    if given:
        raise ValueError(
            f"{name}: epilogue= is all that becomes of the product, got {', '.join(given)} "
            "beside it; accepted: the same within the function"
        )


def check_function(epilogue: Any) -> None:
    """Checks that an epilogue can be called.

    Raises:
        TypeError: it cannot.
    """
    if not callable(epilogue):
        raise TypeError(f"epilogue={epilogue!r} must be a function of jax.numpy, or None")


def applied(
    own: Sequence[jax.Array],
    spec: GemmSpec | RaggedSpec,
    shape: tuple[int, ...],
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    preferred_element_type: DTypeLike | None,
) -> Any:
    """Computes a product with a function as its epilogue.

    Args:
        own: the operands of the product.
        spec: the products, without an epilogue.
        shape: of the product.
        epilogue: of the accumulators and ``operands``; returns a pytree of arrays.
        operands: pytrees of arrays.
        preferred_element_type: of the results that are floating-point numbers.

    Returns:
        What the function returns.

    Raises:
        TypeError: ``epilogue`` is no function, or an operand no array.
        ValueError: a result is neither of the product's shape nor a reduction of it.
    """
    every, compiled_spec, out_tree = traced(
        own, spec, shape, epilogue, operands, preferred_element_type
    )
    return jax.tree.unflatten(out_tree, compiled.bind(every, compiled_spec))


def traced(
    own: Sequence[jax.Array],
    spec: GemmSpec | RaggedSpec,
    shape: tuple[int, ...],
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    preferred_element_type: DTypeLike | None,
) -> tuple[list[jax.Array], CompiledSpec, Any]:
    """Returns the operands and the static parameters of the primitive; see ``applied``.

    The last is the structure of what the function returns.
    """
    count = spec.epilogue.row.accumulators
    listed, flat, out_trees = as_listed(epilogue, operands, count, shape, preferred_element_type)
    dtype = accumulator_dtype(own[0].dtype, own[1].dtype, spec.out_dtype)
    product = jax.ShapeDtypeStruct(shape, dtype)
    types = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in flat]
    function, held = functions.trace(listed, [*[product] * count, *types], count)
    every = [*own, *draws.words(flat), *held]
    return every, CompiledSpec(spec, function), out_trees[0]


def as_listed(
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    count: int,
    shape: tuple[int, ...],
    preferred_element_type: DTypeLike | None,
) -> tuple[Callable[..., list[jax.Array]], list[jax.Array], list[Any]]:
    """Returns an epilogue as a function of arrays alone that returns a list.

    Args:
        epilogue: of ``count`` accumulators and ``operands``; returns a pytree of arrays.
        operands: pytrees of arrays.
        count: how many accumulators there are.
        shape: of the product.
        preferred_element_type: of the results that are floating-point numbers.

    Returns:
        The function, the operands as a list, and where the structure of the results will be once it
        has been traced.

    Raises:
        TypeError: ``epilogue`` is no function, or an operand no array.
    """
    check_function(epilogue)
    flat, tree = jax.tree.flatten(tuple(operands))
    flat = [arguments.array("epilogue_operands", value) for value in flat]
    out_trees: list[Any] = []

    def listed(*values: Any) -> list[jax.Array]:
        result = epilogue(*values[:count], *jax.tree.unflatten(tree, values[count:]))
        results, out_tree = jax.tree.flatten(result)
        out_trees.append(out_tree)
        return [_result(each, shape, preferred_element_type) for each in results]

    return listed, flat, out_trees


def _result(value: Any, shape: tuple[int, ...], preferred: DTypeLike | None) -> jax.Array:
    result = jnp.asarray(value)
    rest = iter(shape)
    if not all(extent == 1 or extent in rest for extent in result.shape):
        raise ValueError(
            f"epilogue returned an array of shape {result.shape}; accepted: {shape}, the "
            "product's, or what is left of it where some dimensions are reduced"
        )
    if preferred is not None and jnp.issubdtype(result.dtype, jnp.floating):
        result = result.astype(preferred)
    return result
