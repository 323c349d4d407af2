"""``epilogue=`` of the public functions: checks and traces it, applies the primitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_tcgemm.api import arguments
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue import rng
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.primitives import jit_epilogue
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.spec import GemmSpec


def check_alone(name: str, **others: Any) -> None:
    """Checks that ``epilogue=`` is the only argument that modifies the product.

    Args:
        name: name of the public function.
        **others: its other arguments that modify the product, ``None`` if they do not.

    Raises:
        ValueError: one of them is not ``None``.
    """
    given = [key for key, value in others.items() if value is not None]
    if given:
        raise ValueError(
            f"{name}: epilogue= replaces the other arguments that change the product, got "
            f"{', '.join(given)} as well; accepted: the same operations within the function"
        )


def check_operands(epilogue: Any, operands: Any) -> None:
    """Checks that there are operands only for a function, and as a sequence.

    Raises:
        TypeError: the operands of a function are no sequence.
        ValueError: there are operands and no function.
    """
    if epilogue is not None and not isinstance(operands, Sequence):
        raise TypeError(
            f"epilogue_operands= must be a tuple of the function's further arguments, got "
            f"{type(operands)}; accepted for one array: epilogue_operands=(array,)"
        )
    if epilogue is None and jax.tree.leaves(operands):
        raise ValueError(
            "epilogue_operands= has no effect without epilogue=; accepted: both, or neither"
        )


def check_function(epilogue: Any) -> None:
    """Checks that an epilogue can be called.

    Raises:
        TypeError: it cannot be called.
    """
    if not callable(epilogue):
        raise TypeError(f"epilogue={epilogue!r} must be a function of jax.numpy, or None")


def applied(
    own: Sequence[jax.Array],
    spec: GemmSpec,
    shape: tuple[int, ...],
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    preferred_element_type: DTypeLike | None,
) -> Any:
    """Computes a product with a function as its epilogue.

    Args:
        own: operands of the product.
        spec: parameters of the product, without an epilogue.
        shape: shape of the product.
        epilogue: function of the accumulators and ``operands``; returns a pytree of arrays.
        operands: pytrees of arrays.
        preferred_element_type: dtype of the floating-point results.

    Returns:
        The results of ``epilogue``.

    Raises:
        TypeError: ``epilogue`` is not a function, or an operand is not an array.
        ValueError: a result is neither of the product's shape nor a reduction of it.
    """
    spec = spec.replace(out_dtype=_product_dtype(own, spec.out_dtype, preferred_element_type))
    every, compiled_spec, out_tree = traced(
        own, spec, shape, epilogue, operands, preferred_element_type
    )
    return jax.tree.unflatten(out_tree, jit_epilogue.bind(every, compiled_spec))


def _product_dtype(
    own: Sequence[jax.Array], out: np.dtype, preferred: DTypeLike | None
) -> np.dtype:
    """Returns the dtype of a product that a function takes; float32 stands for narrower floats.

    Integers have at least 32 bits unless the user asks for fewer. Sums of int8 are exact, also if
    the user asks for floating-point results.
    """
    is_asked = preferred is not None and not jnp.issubdtype(preferred, jnp.inexact)
    if not is_asked and all(x.dtype == jnp.int8 for x in own[:2]):
        return jnp.dtype(jnp.int32)
    if preferred is not None or not jnp.issubdtype(out, jnp.integer) or out.itemsize >= 4:
        return out
    return jnp.dtype(jnp.uint32 if jnp.issubdtype(out, jnp.unsignedinteger) else jnp.int32)


def type_of(operand: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the type of an operand; that of a Python number is weak, as in ``jnp``."""
    weak = jax.typeof(operand).weak_type
    return jax.ShapeDtypeStruct(operand.shape, operand.dtype, weak_type=weak)


def traced(
    own: Sequence[jax.Array],
    spec: GemmSpec,
    shape: tuple[int, ...],
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    preferred_element_type: DTypeLike | None,
) -> tuple[list[jax.Array], CompiledSpec, Any]:
    """Returns the operands and the static parameters of the primitive; see ``applied``.

    The third value is the tree structure of the epilogue's results.
    """
    count = spec.epilogue.row.accumulators
    listed, flat, out_trees = as_listed(epilogue, operands, count, shape, preferred_element_type)
    dtype = accumulator_dtype(own[0].dtype, own[1].dtype, spec.out_dtype)
    product = jax.ShapeDtypeStruct(shape, dtype)
    types = [*map(type_of, flat)]
    function, held = functions.trace(listed, [*[product] * count, *types], count)
    every = [*own, *rng.words(flat), *held]
    return every, CompiledSpec(spec, function), out_trees[0]


def as_listed(
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    count: int,
    shape: tuple[int, ...],
    preferred_element_type: DTypeLike | None,
) -> tuple[Callable[..., list[jax.Array]], list[jax.Array], list[Any]]:
    """Returns an epilogue as a function of arrays that returns a list of arrays.

    Args:
        epilogue: function of ``count`` accumulators and ``operands``; returns a pytree of arrays.
        operands: pytrees of arrays.
        count: number of accumulators.
        shape: shape of the product.
        preferred_element_type: dtype of the floating-point results.

    Returns:
        The function, the operands as a list, and a list. Tracing the function appends the tree
        structure of the results to that list.

    Raises:
        TypeError: ``epilogue`` is not a function, or an operand is not an array.
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
