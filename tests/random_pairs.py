"""Random pairs of functions that differ in one thing only: do their cache keys differ?

    python tests/random_pairs.py --count 3000               # some of the pairs are computed, too
    python tests/random_pairs.py --count 300 --computed 1   # all are; on a GPU by its kernels

A function is a list of steps: operations with numbers, arrays and parameters, calls of all kinds
around other steps, names and contexts. The other function of a pair has the same steps, except for
one thing: a number (in its last bit, its sign or its type), an element of an array, a parameter, a
name, a context or a derivative rule. Their traces must not be equal, and tracing one function again
must give the same trace. Computed pairs differ by more, and each function must give its own
results.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from function_pairs import SHAPE, Function, simplified_constants
from paired_calls import PRODUCT, WAYS, WRAPPERS, computed
from random_steps import Step, changed, draw, every, run, sites

from jax_tcgemm.epilogue import function as functions


@dataclasses.dataclass
class Drawn:
    """A pair of functions.

    Attributes:
        one: the steps of the first function.
        other: the steps of the second function.
        path: the place where they differ.
    """

    one: tuple[Step, ...]
    other: tuple[Step, ...]
    path: tuple[int, ...]

    @property
    def functions(self) -> tuple[Function, Function]:
        """Returns both functions, created anew."""
        return (lambda z: run(self.one, z)), (lambda z: run(self.other, z))

    @property
    def has_rules(self) -> bool:
        """Checks if tracing a function again creates other objects."""
        kinds = [step.kind for step in every(self.one)]
        return bool({"forward rule", "backward rule"} & set(kinds)) or any(
            step.name == "relu" for step in every(self.one)
        )


def draw_pair(seed: int, by_much: bool = False) -> Drawn:
    """Draws two functions that differ in one thing."""
    rng = np.random.default_rng(seed)
    while True:
        steps = draw(rng)
        places = [*sites(steps)]
        if places:
            path = places[int(rng.integers(len(places)))]
            return Drawn(steps, changed(steps, path, rng, by_much), path)


def _traced(function: Function) -> tuple[Any, list[Any]]:
    product = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    made, held = functions.trace(lambda z: [function(z)], [product], 1)
    return made, [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in held]


def wrong_key(pair: Drawn) -> str | None:
    """Describes what is wrong with the cache keys of two functions, if anything is."""
    one, other = map(_traced, pair.functions)
    if one == other:
        return "they are equal"
    again = _traced(pair.functions[0])
    if one[1] != again[1] or (not pair.has_rules and one != again):
        return "one is not equal to itself, traced again"
    if one == again and hash(one[0]) != hash(again[0]):
        return "equal functions have two hashes"
    return None


def wrong_results(pair: Drawn, wrapper: str, way: str) -> str | None:
    """Describes what is wrong with the results of two functions, if anything is."""
    bounded = [lambda z, f=f: jnp.tanh(f(jnp.tanh(z / 4))) for f in pair.functions]
    found = computed(wrapper, way, bounded)
    # Each operation by itself: in one program, XLA may leave out a conversion to fewer bits.
    wanted = [np.asarray(f(jnp.asarray(PRODUCT))) for f in bounded]
    for i, (mine, own) in enumerate(zip(found, wanted, strict=True)):
        # If intermediate values are rounded, some elements fall on the other side of a step.
        near, nearer = _share(mine, own), _share(mine, wanted[1 - i])
        if near < 0.97 or nearer > near:
            return f"of the {('first', 'second')[i]} {near:.0%} are right, {nearer:.0%} the other's"
    return None


def _share(x: Any, y: np.ndarray) -> float:
    return float(
        np.isclose(np.asarray(x, np.float32), y, rtol=1e-2, atol=1e-3, equal_nan=True).mean()
    )


def check(seed: int, is_computed: bool) -> str | None:
    """Draws a pair, and describes what is wrong with it, if anything is."""
    rng = np.random.default_rng(seed + 1)
    pair = draw_pair(seed, is_computed)
    how = {"precision": int(rng.integers(1, 9)), "suppress": bool(rng.random() < 0.5)}
    with np.printoptions(**how):
        if rng.random() < 0.2:
            with simplified_constants():
                what = wrong_key(pair)
        else:
            what = wrong_key(pair)
        if what is None and is_computed:
            wrapper, way = str(rng.choice(list(WRAPPERS))), str(rng.choice(list(WAYS)))
            way = "in one program" if (wrapper, way) == ("ragged_dot", "batched") else way
            what = wrong_results(pair, wrapper, way)
            what = what and f"{wrapper} {way}: {what}"
    with np.printoptions(precision=9, threshold=4):
        return what and f"pair {seed}: {what}; {pair}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    parser.add_argument("--computed", type=float, default=0.02, help="the share that is computed")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    rng = np.random.default_rng(options.seed)
    wrong, computed_count = 0, 0
    for i in range(options.count):
        seed, is_computed = int(rng.integers(2**31)), bool(rng.random() < options.computed)
        what = check(seed, is_computed)
        computed_count += is_computed
        if what is not None:
            wrong += 1
            print(what, flush=True)
        if i % 200 == 199:
            jax.clear_caches()  # they hold every earlier function
    print(f"{options.count} pairs, {computed_count} of them computed: {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
