"""Random functions as epilogues, and their results in float64.

    python tests/random_epilogues.py --count 300          # on a GPU: right?
    python tests/random_epilogues.py --count 300 --compile-only

A function is a list of steps on values. It runs twice: by the package (or by XLA) in its own types,
and on a CPU with every float32 widened to float64. Discontinuous steps (rounding, comparison,
conversion to integers) take exact values only, for which both runs agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_accuracy import in_float64
from jax import lax

from jax_tcgemm import gemm
from jax_tcgemm.epilogue import compiler, cubins, function, translation
from jax_tcgemm.lowering import jit_epilogue as lowering

# Smooth functions of one value; some bound their argument first, so that they are defined.
_SMOOTH: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "mish": jax.nn.mish,
    "softplus": jax.nn.softplus,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "exp": lambda x: jnp.exp(jnp.minimum(x, 20.0)),
    "exp2": lambda x: jnp.exp2(jnp.minimum(x, 20.0)),
    "expm1": lambda x: jnp.expm1(jnp.minimum(x, 20.0)),
    "log": lambda x: jnp.log(jnp.abs(x) + 0.5),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.25),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 0.25),
    "cbrt": lambda x: jnp.cbrt(jnp.abs(x) + 0.25),
    "sin": lambda x: jnp.sin(jnp.clip(x, -9, 9)),
    "cos": lambda x: jnp.cos(jnp.clip(x, -9, 9)),
    "atan": jnp.arctan,
    "tan": lambda x: jnp.tan(jnp.clip(x, -1.2, 1.2)),
    "asin": lambda x: jnp.arcsin(jnp.clip(x, -0.9, 0.9)),
    "acos": lambda x: jnp.arccos(jnp.clip(x, -0.9, 0.9)),
    "sinh": lambda x: jnp.sinh(jnp.clip(x, -9, 9)),
    "cosh": lambda x: jnp.cosh(jnp.clip(x, -9, 9)),
    "asinh": jnp.arcsinh,
    "acosh": lambda x: jnp.arccosh(jnp.abs(x) + 1.5),
    "atanh": lambda x: jnp.arctanh(jnp.clip(x, -0.9, 0.9)),
    "erf_inv": lambda x: lax.erf_inv(jnp.clip(x, -0.9, 0.9)),
    "tanh_slope": lambda x: jax.jvp(jnp.tanh, (x,), (jnp.ones_like(x),))[1],
    "square": jnp.square,
    "cube": lambda x: lax.integer_pow(jnp.clip(x, -9, 9), 3),
    "gelu_exact_slope": lambda x: jax.grad(lambda y: jax.nn.gelu(y, approximate=False).sum())(x),
    "fifth": lambda x: lax.integer_pow(jnp.clip(x, -3, 3), 5),
    "reciprocal": lambda x: lax.integer_pow(jnp.abs(x) + 0.5, -1),
    "inverse_square": lambda x: lax.integer_pow(jnp.abs(x) + 0.5, -2),
    "third": lambda x: x / 3,
    "pow": lambda x: lax.pow(jnp.abs(x) + 0.5, jnp.full_like(x, 1.5)),
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "relu": jax.nn.relu,
    "hard_swish": jax.nn.hard_swish,
    "clip": lambda x: jnp.clip(x, -1.5, 2.5),
    "clamp": lambda x: lax.clamp(jnp.asarray(-1.5, x.dtype), x, jnp.asarray(2.5, x.dtype)),
    "softcap": lambda x: 3 * jnp.tanh(x / 3),
}

_JOINING: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (jnp.abs(y) + 0.5),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "atan2": lambda x, y: jnp.arctan2(x, jnp.abs(y) + 0.5),
    "power": lambda x, y: (jnp.abs(x) + 0.5) ** jnp.clip(y, -2, 2),
    "lerp": lambda x, y: x + jax.nn.sigmoid(y) * (y - x),
}


def _integers(x: Any) -> Any:
    i = jnp.clip(jnp.round(x * 8), -1000, 1000).astype(jnp.int32)
    return (((i << 1) ^ (i >> 2)) & 255) - lax.rem(i, jnp.int32(7))


def _counted(x: Any) -> Any:
    i = jnp.clip(jnp.round(x * 8), -1000, 1000).astype(jnp.int16)
    shifted = lax.shift_right_logical(~i, jnp.full_like(i, 3)) | jnp.int16(5)
    return lax.population_count(shifted) + i // jnp.int16(3)


def _masked(x: Any) -> Any:
    """Drops the lowest bits of a float32 number."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & jnp.uint32(0xFFFFF000)
    kept = lax.bitcast_convert_type(bits, jnp.float32).astype(x.dtype)
    return jnp.where(x == x, kept, x)


# Discontinuous functions of exact values: float32 in, float32 out.
_JUMPING: dict[str, Callable[[Any], Any]] = {
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "sign": jnp.sign,
    "integers": lambda x: _integers(x).astype(x.dtype),
    "unsigned": lambda x: (jnp.clip(x * 4, 0, 900).astype(jnp.uint32) * 3 >> 1).astype(x.dtype),
    "where": lambda x: jnp.where(x > 0.25, x, 2.0),
    "counted": lambda x: _counted(x).astype(x.dtype),
    "masked": _masked,
    "rem": lambda x: lax.rem(x, jnp.full_like(x, 0.75)),
    "nextafter": lambda x: jnp.nextafter(x, jnp.full_like(x, 9.0)),
    "reduced": lambda x: lax.reduce_precision(x, 5, 10),
    "stepped": lambda x: jnp.nextafter(x.astype(jnp.bfloat16), jnp.bfloat16(9)).astype(x.dtype),
    "finite": lambda x: jnp.where(jnp.isfinite(x), x, 1.0),
    "bits": lambda x: jnp.where(jnp.logical_and(x == x, x != 0.5), x, -1.0),
    "truths": lambda x: jnp.where(~((x > 0) | (x < -2)) ^ (x <= 1.5), x, 0.5),
}

# Kinds of operand, by their shapes.
_SHAPES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "scalar": lambda m, n: (),
    "row": lambda m, n: (n,),
    "column": lambda m, n: (m, 1),
    "matrix": lambda m, n: (m, n),
    "one_row": lambda m, n: (1, n),
}

_RESULTS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int32")

_SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -3e-39, 1e30], np.float32)


@dataclasses.dataclass
class Epilogue:
    """One function.

    Attributes:
        seed: the seed it was drawn with.
        kinds: the kind and dtype of each operand.
        steps: name and operands of each step; each result follows the accumulator and the operands
            in the list of values.
        results: the numbers and dtypes of the results.
        special: whether the operands contain NaN, infinities and denormals.
    """

    seed: int
    kinds: list[tuple[str, str]]
    steps: list[tuple[str, list[int]]]
    results: list[tuple[int, str]]
    special: bool

    def run(self, wide: bool, *values: Any) -> list[Any]:
        """Computes the results; ``wide`` replaces float32 by float64."""
        real = jnp.float64 if wide else jnp.float32
        known = [x.astype(real) for x in values]
        for name, operands in self.steps:
            taken = [known[i] for i in operands]
            if name in _JOINING:
                known.append(_JOINING[name](*taken))
            else:
                known.append((_SMOOTH.get(name) or _JUMPING[name])(*taken))
        shape = values[0].shape
        results = []
        for i, dtype in self.results:
            x = jnp.broadcast_to(known[i], shape)
            if dtype.startswith("int"):
                results.append(x if wide else jnp.clip(jnp.round(x * 4), -100, 100).astype(dtype))
            elif dtype.startswith("float8"):
                # Larger values become NaN or infinity; smooth values cannot decide that.
                x = jnp.clip(x, -200, 200)
                results.append(x if wide else x.astype(dtype))
            else:
                results.append(x if wide else x.astype(dtype))
        return results


def draw(seed: int) -> Epilogue:
    """Draws a function."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 6))
    kinds = [
        (str(rng.choice(list(_SHAPES))), str(rng.choice(["float32", "bfloat16", "float16"])))
        for _ in range(count)
    ]
    exact = list(range(count + 1))
    total, steps = count + 1, []
    for _ in range(int(rng.integers(1, 9))):
        sort = rng.random()
        recent = total - 1
        if sort < 0.2:
            step = (str(rng.choice(list(_JUMPING))), [int(rng.choice(exact))])
        elif sort < 0.6:
            step = (str(rng.choice(list(_SMOOTH))), [recent])
        else:
            step = (str(rng.choice(list(_JOINING))), [recent, int(rng.integers(0, total))])
        steps.append(step)
        total += 1
    steps.append(("add", [total - 1, 0]))  # makes the result depend on the product
    results = [(total, str(rng.choice(_RESULTS)))]
    if rng.random() < 0.3:
        results.append((int(rng.integers(count + 1, total)), "float32"))
    return Epilogue(seed, kinds, steps, results, bool(rng.random() < 0.3))


def draw_smooth(seed: int) -> Epilogue:
    """Draws a differentiable function: one result and no discontinuous steps."""
    drawn = draw(seed)
    steps = [
        ("neg", operands) if name in _JUMPING else (name, operands)
        for name, operands in drawn.steps
    ]
    result = drawn.results[0][0]
    return dataclasses.replace(drawn, steps=steps, results=[(result, "float32")], special=False)


def operands_of(epilogue: Epilogue, m: int, n: int) -> list[np.ndarray]:
    """Draws the operands of a function."""
    rng = np.random.default_rng(epilogue.seed + 1)
    drawn = []
    for kind, dtype in epilogue.kinds:
        x = rng.normal(size=_SHAPES[kind](m, n)).astype(np.float32)
        if epilogue.special and x.ndim == 2 and min(x.shape) > 1:
            at = rng.integers(0, x.size, 40)
            x.reshape(-1)[at] = rng.choice(_SPECIAL, 40)
        drawn.append(np.asarray(jnp.asarray(x).astype(dtype)))
    return drawn


def wrong(epilogue: Epilogue, m: int, n: int, layout: str) -> str | None:
    """Describes wrong results of the package on this machine's GPU, if there are any."""
    rng = np.random.default_rng(epilogue.seed + 2)
    product = rng.normal(size=(m, n)).astype(jnp.bfloat16)
    others = operands_of(epilogue, m, n)
    # The second factor is the identity, so the accumulators are the numbers themselves.
    a, b = jnp.asarray(product), jnp.eye(n, dtype=jnp.bfloat16)
    ta, tb = layout[0] == "t", layout[1] == "t"
    a = a.T.copy() if ta else a
    f = lambda acc, *x: epilogue.run(False, acc, *x)  # noqa: E731
    ours = jax.jit(
        lambda a, b, *x: gemm(a, b, transpose_a=ta, transpose_b=tb, epilogue=f, epilogue_operands=x)
    )(a, b, *others)
    exactly = jnp.asarray(product).astype(jnp.float32)
    theirs = jax.jit(f)(exactly, *others)
    # The effect of rounding the product.
    moved = jax.jit(f)(exactly * np.float32(1 + 2**-23), *others)
    true = in_float64(lambda *x: epilogue.run(True, *x), product, *others)
    for i, (*found, exact) in enumerate(zip(ours, theirs, moved, true, strict=True)):
        what = _compare(*map(np.asarray, found), exact, epilogue.results[i][1])
        if what is not None:
            return f"result {i} of {epilogue}: {what}"
    return None


def _compare(
    mine: np.ndarray, other: np.ndarray, moved: np.ndarray, exact: np.ndarray, dtype: str
) -> str | None:
    if dtype.startswith("int"):
        exact = np.clip(np.round(exact * 4), -100, 100)
    x, y, z = (values.astype(np.float64) for values in (mine, other, moved))
    # No check where XLA itself differs from float64 (beyond float32's range).
    known = (np.isnan(exact) == np.isnan(y)) & (np.isinf(exact) == np.isinf(y))
    if dtype.startswith("int"):
        known &= ~np.isnan(exact)
    kinds = (np.isnan(x) == np.isnan(y)) & (np.isinf(x) == np.isinf(y))
    if not kinds[known].all():
        at = np.argwhere(known & ~kinds)[0]
        return f"{x[tuple(at)]} at {at}, XLA {y[tuple(at)]}"
    finite = known & np.isfinite(exact) & np.isfinite(x) & np.isfinite(y)
    if not finite.any():
        return None
    scale = np.abs(exact[finite]) + 1e-2
    step = {"bfloat16": 2**-8, "float16": 2**-11, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}
    allowed = 4e-6 + step.get(dtype, 0.0) + (0.3 if dtype.startswith("int") else 0)
    error = np.abs(x[finite] - exact[finite]) / scale
    reference = np.abs(y[finite] - exact[finite]) / scale
    known = np.isfinite(z[finite])
    steps = np.abs(z[finite] - y[finite])[known] / scale[known]
    reference = np.append(reference, steps)
    if dtype.startswith("int"):  # a smooth value half-way between two integers may round either way
        error, reference = np.abs(x - y)[finite] > 1, np.zeros(1)
    if error.max() > 2 * reference.max() + allowed:
        at = np.argwhere(finite)[error.argmax()]
        return f"error {error.max():.2e}, XLA's {reference.max():.2e}, {x[tuple(at)]} at {at}"
    return None


def compiles(epilogue: Epilogue, row: str, layout: str = "nn", capability: int = 90) -> str | None:
    """Says why a function does not translate or compile, if it does not."""
    m, n = 96, 64 + 8 * (epilogue.seed % 3)
    values = [jax.ShapeDtypeStruct((m, n), jnp.float32)]
    values += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands_of(epilogue, m, n)]
    made, _ = function.trace(lambda *x: epilogue.run(False, *x), values, 1)
    translated = translation.translate(made)
    if isinstance(translated, str):
        return translated
    strides = [leaf.strides(2) for leaf in translated.leaves]
    source = lowering.source_of(translated, strides, n, batched=False)
    compiler.compile_kernel(source, row, layout, capability=capability)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    rng = np.random.default_rng(options.seed)
    failures = []
    for i in range(options.count):
        epilogue = draw(int(rng.integers(2**31)))
        if options.compile_only:
            what = compiles(epilogue, "sm90_bf16_128x128x64_s6_c2x1_pingpong")
        else:
            m, n = int(rng.integers(65, 400)), 8 * int(rng.integers(9, 50))
            what = wrong(epilogue, m, n, str(rng.choice(["nn", "nt"])))
        if what is not None:
            failures.append(what)
            print(what, flush=True)
        cubins.clear_memory() if i % 100 == 99 else None
    print(f"{options.count} functions, {len(failures)} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
