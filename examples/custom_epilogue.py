"""Trains a layer with a custom epilogue: a learned gate, dropout and a residual.

``silu(x @ w * gate + bias)``, with dropout and added to ``x``, is a function of ``jax.numpy``. As
``epilogue=``, the function is compiled into the product's kernel (on GPUs of compute capability
9.0; on those from 8.0 on if autotuning chose that).
JAX differentiates the function, and dropout draws the same numbers as ``jax.random``. The script
trains the layer twice: by ``jax_tcgemm.gemm``, and by ``jnp.matmul`` followed by the same function.
It prints both losses, then the time of a step. It fails if the curves part, or if the loss does not
fall.

Run it with ``python examples/custom_epilogue.py``; ``--help`` lists the arguments. The defaults are
small on a CPU.
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_tcgemm import gemm
from jax_tcgemm.tools.benchmarking import time_chains
from jax_tcgemm.tools.chain import compile_chain, default_device

Parameters = list[dict[str, jax.Array]]
Layer = Callable[[jax.Array, dict[str, jax.Array], jax.Array], jax.Array]

KEPT = 0.9


def epilogue(
    product: jax.Array, gate: jax.Array, bias: jax.Array, residual: jax.Array, key: jax.Array
) -> jax.Array:
    """Maps the product, ``(rows, features)`` in float32, to the layer's output."""
    hidden = jax.nn.silu(product * gate + bias)
    is_kept = jax.random.bernoulli(key, KEPT, product.shape)
    return (jnp.where(is_kept, hidden / KEPT, 0) + residual).astype(residual.dtype)


def ours(x: jax.Array, layer: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    """Computes the layer by one kernel."""
    operands = (layer["gate"], layer["bias"], x, key)
    return gemm(x, layer["w"].astype(x.dtype), epilogue=epilogue, epilogue_operands=operands)


def plain(x: jax.Array, layer: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    """Computes the layer by XLA."""
    product = jnp.matmul(x, layer["w"].astype(x.dtype), preferred_element_type=jnp.float32)
    return epilogue(product, layer["gate"], layer["bias"], x, key)


def initial(key: jax.Array, layers: int, features: int) -> Parameters:
    """Returns the parameters, in float32."""
    return [
        {
            "w": jax.random.normal(each, (features, features)) * features**-0.5,
            "gate": jnp.ones(features),
            "bias": jnp.zeros(features),
        }
        for each in jax.random.split(key, layers)
    ]


def loss(layer: Layer, parameters: Parameters, x: jax.Array, y: jax.Array, key: jax.Array):
    """Returns the mean squared error of the last layer's output."""
    for each, own in zip(parameters, jax.random.split(key, len(parameters)), strict=True):
        x = layer(x, each, own)
    return jnp.mean((x.astype(jnp.float32) - y) ** 2)


def step(layer: Layer, rate: float, parameters: Parameters, x: jax.Array, y: jax.Array, key):
    """Returns the parameters after one step of gradient descent, and the loss before it."""
    value, slopes = jax.value_and_grad(functools.partial(loss, layer))(parameters, x, y, key)
    return jax.tree.map(lambda p, g: p - rate * g, parameters, slopes), value


def main(arguments: list[str] | None = None) -> None:
    """Trains both, and compares them."""
    parser = argparse.ArgumentParser(description="train a layer with an epilogue of one's own")
    is_gpu = default_device().platform == "gpu"
    parser.add_argument("--rows", type=int, default=8192 if is_gpu else 128)
    parser.add_argument("--features", type=int, default=4096 if is_gpu else 64)
    parser.add_argument("--layers", type=int, default=4 if is_gpu else 2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float, default=0.2, help="of the error of a row")
    options = parser.parse_args(arguments)
    keys = jax.random.split(jax.random.key(0), 3 + options.steps)
    x = jax.random.normal(keys[0], (options.rows, options.features)).astype(jnp.bfloat16)
    teacher = initial(keys[1], 1, options.features)[0]
    y = jnp.tanh(x.astype(jnp.float32) @ teacher["w"])

    steps = {
        name: jax.jit(functools.partial(step, layer, options.rate * options.features))
        for name, layer in (("ours", ours), ("jnp", plain))
    }
    start = initial(keys[2], options.layers, options.features)
    states, curves = dict.fromkeys(steps, start), {name: [] for name in steps}
    for i, key in enumerate(keys[3:]):
        for name, run in steps.items():
            states[name], value = run(states[name], x, y, key)
            curves[name].append(float(value))
        if i % 10 == 0 or i == options.steps - 1:
            print(f"step {i:3}: loss {curves['ours'][i]:.4f}, by jnp {curves['jnp'][i]:.4f}")
    for i, (mine, other) in enumerate(zip(curves["ours"], curves["jnp"], strict=True)):
        if abs(mine - other) > 0.01 * other:
            raise SystemExit(f"losses of step {i} differ: {mine}, by jnp {other}")
    if curves["ours"][-1] >= curves["ours"][0]:
        raise SystemExit(f"the loss did not fall: {curves['ours'][0]} to {curves['ours'][-1]}")

    sets = [(start, x, y, keys[0])]
    times = time_chains({name: compile_chain(run, sets) for name, run in steps.items()}, reps=10)
    mine, other = (times[name].median * 1e3 for name in ("ours", "jnp"))
    print(f"a step: {mine:.2f} ms, by jnp {other:.2f} ms ({times['ours'].method} time)")


if __name__ == "__main__":
    main()
