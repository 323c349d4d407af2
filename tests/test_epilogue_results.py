"""Every epilogue form with each subset of its results, requested or unused."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import picked
from fused_call import assert_trees_close

from jax_tcgemm import _compat
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.epilogue import FORMS, Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

pytestmark = pytest.mark.any_jax

SILU = resolve("silu").reference
SLOPE = resolve("silu").derivative

# All results of each form, from its operands (a, b, c, c2 or bias).
FORMULAS = {
    "add": lambda a, b, c, bias: (SILU(a @ b + c + bias), a @ b + c + bias),
    "residual": lambda a, b, c, bias: (SILU(a @ b + bias) + c, a @ b + bias),
    "factor": lambda a, b, c, bias: (SILU(a @ b + bias) * c, a @ b + bias),
    "gated": lambda a, b, b2, bias: (SILU(a @ b + bias) * (a @ b2), a @ b + bias, a @ b2),
    "derivative": lambda a, b, c: ((a @ b) * SLOPE(c),),
    "gated_derivative": lambda a, b, c, c2: ((a @ b) * c2 * SLOPE(c), (a @ b) * SILU(c)),
}
NAMES = {
    **dict.fromkeys(("add", "residual", "factor"), ("a", "b", "c", "bias")),
    "gated": ("a", "b", "b2", "bias"),
    "derivative": ("a", "b", "c"),
    "gated_derivative": ("a", "b", "c", "c2"),
}
SHAPES = {"a": (4, 6), "b": (6, 5), "b2": (6, 5), "c": (4, 5), "c2": (4, 5), "bias": (5,)}
MASKS = [
    pytest.param(form, mask, id=f"{form}-{''.join('01'[x] for x in mask)}")
    for form, row in FORMS.items()
    for mask in itertools.product((False, True), repeat=len(row.results))
    if any(mask)
]


def bound(form, mask, dtype=jnp.float32):
    """Returns the primitive that computes these results."""
    nothing = Operands(None, None)
    axes = {name: tuple(range(len(SHAPES[name]))) for name in NAMES[form]}
    precision = _compat.canonicalize_precision(None)
    epilogue = Epilogue(form, "silu", results=mask)
    spec = GemmSpec(nothing._replace(**axes), jnp.dtype(dtype), precision, epilogue)

    def apply(*args):
        x = nothing._replace(**dict(zip(NAMES[form], args, strict=True)))
        return gemm_primitive.bind(x, spec)

    return apply


def left_unread(form, mask):
    """Returns the primitive that computes all results and drops the others."""
    apply = bound(form, (True,) * len(mask))

    def some(*args):
        return [x for x, wanted in zip(apply(*args), mask, strict=True) if wanted]

    return jax.jit(some)


def formula(form, mask):
    def some(*args):
        return [x for x, wanted in zip(FORMULAS[form](*args), mask, strict=True) if wanted]

    return some


def test_every_form_has_a_formula():
    assert FORMULAS.keys() == NAMES.keys() == FORMS.keys()


@pytest.mark.parametrize("made", [bound, left_unread])
@pytest.mark.parametrize(("form", "mask"), MASKS)
def test_values_and_derivatives(normal, made, form, mask):
    f, expected = made(form, mask), formula(form, mask)
    args, tangents = ([normal(*SHAPES[name]) for name in NAMES[form]] for _ in range(2))
    assert_trees_close(f(*args), expected(*args))
    assert_trees_close(jax.jvp(f, args, tangents), jax.jvp(expected, args, tangents))
    cotangents = [normal(4, 5) for _ in range(sum(mask))]
    pulled = jax.vjp(f, *args)[1](cotangents)
    assert_trees_close(pulled, jax.vjp(expected, *args)[1](cotangents))
    # Differentiates by one operand at a time, with the others constant.
    for i in range(len(args) if made is bound else 0):
        own = jax.jvp(lambda x, i=i: f(*args[:i], x, *args[i + 1 :]), [args[i]], [tangents[i]])
        wanted = jax.jvp(
            lambda x, i=i: expected(*args[:i], x, *args[i + 1 :]), [args[i]], [tangents[i]]
        )
        assert_trees_close(own, wanted)


@pytest.mark.parametrize(("form", "mask"), MASKS)
def test_vmap(normal, form, mask):
    f, expected = bound(form, mask), formula(form, mask)
    for mapped in ((0,), (2,), (0, 1, 2)):  # a, the epilogue's operands, all operands
        axes = tuple(0 if i in mapped else None for i in range(len(NAMES[form])))
        args = [
            normal(*SHAPES[name]) if axis is None else normal(3, *SHAPES[name])
            for name, axis in zip(NAMES[form], axes, strict=True)
        ]
        assert_trees_close(jax.vmap(f, axes)(*args), jax.vmap(expected, axes)(*args))


@pytest.mark.parametrize(("form", "mask"), MASKS)
def test_one_call_that_a_kernel_has(cuda_module, form, mask):
    """Kernels write certain sets of results; the lowering requests the smallest that suffices."""
    shapes = SHAPES | {"a": (80, 64), "b": (64, 48), "b2": (64, 48), "c": (80, 48), "bias": (48,)}
    shapes["c2"] = shapes["c"]
    args = [jnp.zeros(shapes[name], jnp.bfloat16) for name in NAMES[form]]
    _, calls = cuda_module(bound(form, mask, jnp.bfloat16), *args)
    if form == "gated" and not mask[0]:  # ordinary products
        assert [call["gated"] for call in calls] == [False] * sum(mask)
        return
    (call,) = calls
    if FORMS[form].results[0] == "d" and not mask[0]:  # only the pre-activation
        assert picked(call, "activation", "has_c") == ("", form == "add")
        mask = (True, False)
    written = next(w for w in FORMS[form].written if np.all(np.asarray(w) >= mask))
    assert call["results"].count("80x48xbf16") == sum(written)
    assert call["has_aux"] == (sum(written) > 1)
