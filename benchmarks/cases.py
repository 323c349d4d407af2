"""The cases of ``suite.json`` and their operands."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ours
import quantized
import weight_only
from functions import FUNCTIONS
from ours import FACTORS
from steps import STEPS, Arrays

from jax_tcgemm import _compat
from jax_tcgemm.problem.activations import ACTIVATIONS
from jax_tcgemm.problem.arithmetic import resolve_algorithm, resolve_run_time
from jax_tcgemm.tools.chain import argument_set_count
from jax_tcgemm.transforms.numbers import Numbers

SUITE_FILE = pathlib.Path(__file__).parent / "suite.json"

DTYPES = {
    "bf16": jnp.dtype(jnp.bfloat16),
    "f16": jnp.dtype(jnp.float16),
    "f32": jnp.dtype(jnp.float32),
    "c64": jnp.dtype(jnp.complex64),
    **quantized.DTYPES,
    **weight_only.DTYPES,
}

# The parts of an epilogue, besides the names of activations.
_EPILOGUE_PARTS = {"none", "bias", "c", "aux", "alpha", "beta_c", "silu_glu", "amax"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One product of the suite; benchmarks/README.md says what the fields mean."""

    suite: str
    m: int
    n: int
    k: int
    dtype: str
    layout: str
    batch: int = 1
    broadcast: str = ""
    epilogue: str = "none"
    out: str | None = None
    group_sizes: tuple[int, ...] = ()
    step: str = ""
    precision: str | None = None
    function: str = ""
    dtype_b: str | None = None
    scale: str = ""
    sums: str = ""
    conjugate: str = ""

    def __post_init__(self) -> None:
        unknown = set(self.parts) - _EPILOGUE_PARTS - set(ACTIVATIONS)
        if unknown:
            raise ValueError(f"epilogue={self.epilogue!r}: unknown parts {sorted(unknown)}")
        if self.layout not in ("nn", "nt", "tn", "tt"):
            raise ValueError(f"layout={self.layout!r} must be two letters n or t")
        if self.broadcast not in ("", "a", "b"):
            raise ValueError(f"broadcast={self.broadcast!r} must be a or b")
        if self.function not in ("", *FUNCTIONS):
            raise ValueError(f"function={self.function!r} must be one of {list(FUNCTIONS)}")
        scales = ("", *quantized.SCALES, *weight_only.GROUPS)
        if self.scale not in scales or self.sums not in ("", *quantized.SUMS):
            raise ValueError(f"scale={self.scale!r}, sums={self.sums!r} are not known")
        if self.step not in ("", *STEPS):
            raise ValueError(f"step={self.step!r} must be one of {list(STEPS)}")

    @property
    def parts(self) -> list[str]:
        return self.epilogue.split("+")

    @property
    def activation(self) -> str | None:
        return next((part for part in self.parts if part in ACTIVATIONS), None)

    @property
    def is_gated(self) -> bool:
        return "silu_glu" in self.parts or self.function.startswith("gated")

    @property
    def is_packed(self) -> bool:
        """True if B is a packed weight."""
        return self.scale in weight_only.GROUPS

    @property
    def has_c(self) -> bool:
        return "c" in self.parts or "beta_c" in self.parts

    @property
    def out_dtype(self) -> np.dtype:
        return DTYPES[self.out or self.dtype]

    @property
    def label(self) -> str:
        """A short description of the case, which identifies it in result files."""
        words = [f"{self.dtype} {self.layout} {self.m}x{self.n}x{self.k}"]
        if self.batch > 1:
            words.append(f"batch {self.batch}")
        if self.broadcast:
            words.append(f"one {self.broadcast}")
        if self.epilogue != "none":
            words.append(self.epilogue)
        if self.function:
            words.append(self.function)
        if self.step:
            words.append(f"{self.step} gradients")
        if self.dtype_b:
            words.append(f"by {self.dtype_b}")
        if self.scale:
            words.append(self.scale)
        if self.sums:
            words.append(self.sums)
        if self.conjugate:
            words.append(f"conjugate {self.conjugate}")
        if self.out and not (self.scale and self.out == "bf16"):
            words.append(f"to {self.out}")
        if self.precision:
            words.append(self.precision)
        if self.group_sizes:
            kind = "even" if len(set(self.group_sizes)) == 1 else "uneven"
            words.append(f"{len(self.group_sizes)} {kind} groups")
        return " ".join(words)

    @property
    def flops(self) -> float:
        """Floating-point operations of the products alone."""
        products = 2 if self.is_gated else STEPS[self.step].products if self.step else 1
        products *= 4 if self.dtype == "c64" else 1
        return 2.0 * self.m * self.n * self.k * self.batch * products

    @property
    def bytes(self) -> int:
        """Bytes of the operands and results, each read or written once."""
        if self.is_packed:
            return weight_only.size(self)
        elements = {name: math.prod(shape) for name, shape in self.shapes.items()}
        if self.step:  # a gradient for each operand; the cotangent is as large as the result
            return 2 * sum(elements.values()) * self.out_dtype.itemsize
        outputs = self.batch * self.m * self.n * (2 if "aux" in self.parts else 1)
        inputs = sum(elements.pop(name) for name in FACTORS if name in elements)
        return inputs * DTYPES[self.dtype].itemsize + self.out_dtype.itemsize * (
            outputs + sum(elements.values())
        )

    @property
    def unsupported(self) -> str | None:
        """The reason why there is nothing to compare yet, or None."""
        beside = {"c", "beta_c", "alpha", "aux", "silu_glu"}.intersection(self.parts)
        if self.group_sizes and (beside or self.layout[0] == "t"):
            return "not supported yet: groups with more than a bias and an activation"
        return None

    @property
    def algorithm(self) -> str | None:
        """The kernel algorithm that computes the case; None for packed weights."""
        if self.is_packed:
            return None
        dtype = DTYPES[self.dtype]
        if self.scale:
            sums = jnp.dtype(jnp.int32 if self.dtype == "s8" else jnp.float32)
            asked = _compat.canonicalize_precision("highest" if self.sums == "promoted" else None)
            return resolve_run_time(dtype, DTYPES[self.dtype_b or self.dtype], sums, asked)
        precision = _compat.canonicalize_precision(self.precision)
        return resolve_algorithm(dtype, dtype, self.out_dtype, precision)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the operands by name."""
        if self.step:
            return STEPS[self.step].shapes(self.m, self.n, self.k)
        batch = (self.batch,) if self.batch > 1 else ()
        a = (self.k, self.m) if self.layout[0] == "t" else (self.m, self.k)
        b = (self.n, self.k) if self.layout[1] == "t" else (self.k, self.n)
        groups = (len(self.group_sizes),) if self.group_sizes else ()
        shapes = {"a": a, "b": (*groups, *b)}
        if self.is_gated:
            shapes["b2"] = shapes["b"]
        shapes = {
            name: shape if name == self.broadcast else (*batch, *shape)
            for name, shape in shapes.items()
        }
        if "bias" in self.parts:
            shapes["bias"] = (*groups, self.n)
        if self.has_c:
            shapes["c"] = (*batch, self.m, self.n)
        if self.is_packed:
            shapes["b_scale"] = weight_only.scale_shape(self)
        elif self.scale:
            shapes |= quantized.scale_shapes(self)
        if self.function:
            extents = {"m": self.m, "n": self.n, "1": 1, "g": len(self.group_sizes)}
            for name, letters in FUNCTIONS[self.function].operands.items():
                shapes[name] = tuple(extents[letter] for letter in letters)
        return shapes

    def argument_sets(self, numbers: Numbers | None = None) -> list[tuple[Arrays]]:
        """Returns normal operands, in so many sets that no cache holds all of them.

        Weights are scaled so that the product's elements are about 1: a wrong bias or activation
        then shows.

        Args:
            numbers: the source of the numbers; by default a new one.
        """
        numbers = numbers or Numbers(time.time_ns() % 2**31)

        def drawn(name: str, x: jax.ShapeDtypeStruct) -> jax.Array:
            if self.scale:
                values = numbers.take(jax.ShapeDtypeStruct(x.shape, jnp.float32))
                if name.endswith("scale"):
                    return quantized.scales(values, self.k, DTYPES[self.dtype])
                return quantized.drawn(values, x.dtype)
            summed = self.k if name in ("b", "b2") else x.shape[0] if name.startswith("w") else 1
            values = numbers.take(x)
            return values if summed == 1 else values * x.dtype.type(summed**-0.5)

        sets = range(argument_set_count(self.bytes))
        if self.is_packed:
            return [(weight_only.drawn(self, numbers),) for _ in sets]
        return [({name: drawn(name, x) for name, x in self.types.items()},) for _ in sets]

    @property
    def types(self) -> dict[str, Any]:
        """Types of the operands by name."""
        if self.is_packed:
            return weight_only.types(self, DTYPES)

        def dtype(name: str) -> np.dtype:
            if name in FACTORS:
                return DTYPES[(self.dtype_b if name != "a" else None) or self.dtype]
            return jnp.dtype(jnp.float32) if self.scale else self.out_dtype

        return {name: jax.ShapeDtypeStruct(x, dtype(name)) for name, x in self.shapes.items()}

    def ours(self, config: str | None = None) -> Callable[[Arrays], Any]:
        """Returns the case computed by this package.

        Args:
            config: name of the kernel configuration; None lets the heuristic choose.
        """
        return ours.ours(self, config)

    def function_operands(self, arrays: Arrays) -> list[jax.Array]:
        """Returns the operands of the function; group operands are expanded to rows."""

        def over_rows(name: str, letters: str) -> jax.Array:
            if letters != "g":
                return arrays[name]
            sizes = jnp.asarray(self.group_sizes, jnp.int32)
            return jnp.repeat(arrays[name], sizes, total_repeat_length=self.m)[:, None]

        return [over_rows(*item) for item in FUNCTIONS[self.function].operands.items()]


def load_cases(path: pathlib.Path = SUITE_FILE) -> list[Case]:
    """Reads the cases, in the order of the file."""
    return [
        Case(suite, **{**fields, "group_sizes": tuple(fields.get("group_sizes", ()))})
        for suite, rows in json.loads(path.read_text()).items()
        for fields in rows
    ]
