"""Trains a mixture-of-experts classifier of scikit-learn's handwritten digits, twice.

A router sends every image to its two preferred experts; an expert is a perceptron with one hidden
layer. The images, sorted by expert, are the rows of two products over groups. One model uses
``jax_tcgemm.ragged_dot``, with bias and activation in the kernel. The other model uses
``jax.lax.ragged_dot``, with bias and activation by JAX. Both start from the same weights and see
the same batches. The script prints both losses side by side, epoch by epoch, the time of a training
step and the test accuracy of both. It fails if the two curves part or if the accuracy is not over
95 %.

Run it with ``python examples/moe.py``; ``--help`` lists the arguments.
"""

import argparse
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import jax_tcgemm

BATCH = 128
TEST_IMAGES = 360
PIXELS = 64
CLASSES = 10
CHOSEN = 2
# The largest relative difference accepted between the two losses of an epoch: rounding differs
# between the two models, and training amplifies it.
LOSS_TOLERANCE = {"float32": 0.05, "bfloat16": 0.15}

Parameters = dict[str, jax.Array]


def initial(key: jax.Array, experts: int, hidden: int) -> Parameters:
    """Returns the weights, in float32."""
    router, up, down = jax.random.split(key, 3)
    return {
        "router": jax.random.normal(router, (PIXELS, experts)) * PIXELS**-0.5,
        "up": jax.random.normal(up, (experts, PIXELS, hidden)) * PIXELS**-0.5,
        "up_bias": jnp.zeros((experts, hidden)),
        "down": jax.random.normal(down, (experts, hidden, CLASSES)) * hidden**-0.5,
        "down_bias": jnp.zeros((experts, CLASSES)),
    }


def fused_expert_layer(x, weights, sizes, bias, activation):
    """Computes one layer of all experts by one kernel."""
    return jax_tcgemm.ragged_dot(x, weights, sizes, bias=bias, activation=activation)


def plain_expert_layer(x, weights, sizes, bias, activation):
    """Computes the same layer by JAX's own product over groups."""
    z = jax.lax.ragged_dot(x, weights, sizes)
    z = z + jnp.repeat(bias, sizes, axis=0, total_repeat_length=len(x))
    return jax.nn.gelu(z) if activation == "gelu" else z


LAYERS = {"jax_tcgemm": fused_expert_layer, "jax.lax": plain_expert_layer}


def logits(
    parameters: Parameters, images: jax.Array, dtype: jnp.dtype, expert_layer: Callable
) -> tuple[jax.Array, jax.Array]:
    """Returns the logits, ``(batch, 10)`` in float32, and the share of images of each expert."""
    scores = images @ parameters["router"]
    preferred, expert = jax.lax.top_k(scores, CHOSEN)  # (batch, chosen)
    share = jax.nn.softmax(preferred)
    # Each image has a row for each of its experts; rows of one expert are consecutive.
    order = jnp.argsort(expert.reshape(-1))
    sizes = jnp.bincount(expert.reshape(-1), length=scores.shape[1]).astype(jnp.int32)
    x = images[order // CHOSEN].astype(dtype)
    up, up_bias, down, down_bias = (
        parameters[name].astype(dtype) for name in ("up", "up_bias", "down", "down_bias")
    )
    hidden = expert_layer(x, up, sizes, up_bias, "gelu")
    rows = expert_layer(hidden, down, sizes, down_bias, None)
    back = rows[jnp.argsort(order)].reshape(*share.shape, CLASSES)
    mixed = (back.astype(jnp.float32) * share[..., None]).sum(1)
    return mixed, jax.nn.softmax(scores).mean(0) * sizes / sizes.sum()


@functools.partial(jax.jit, static_argnames=("dtype", "name"))
def train_step(parameters, moments, images, labels, dtype, name):
    """Takes one step of Adam; returns parameters, moments and the loss before the step."""

    def loss_fn(parameters):
        z, balance = logits(parameters, images, dtype, LAYERS[name])
        entropy = -jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], 1).mean()
        # Keeps the experts equally busy (Fedus et al., 2021, "Switch Transformers").
        return entropy + 0.01 * len(balance) * balance.sum(), entropy

    grads, loss = jax.grad(loss_fn, has_aux=True)(parameters)
    first, second, step = moments
    step = step + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, grads)
    rate = 3e-3 * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    parameters = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), parameters, first, second
    )
    return parameters, (first, second, step), loss


def load(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns training images and labels, then test images and labels."""
    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    images = (images[order] / 16 - 0.3).astype(np.float32)
    labels = labels[order].astype(np.int32)
    n = TEST_IMAGES
    return images[n:], labels[n:], images[:n], labels[:n]


def main(arguments: list[str] | None = None) -> None:
    """Trains both models and compares them.

    Raises:
        SystemExit: the curves part, or the accuracy is too low.
    """
    parser = argparse.ArgumentParser(
        description="Trains a mixture of experts on handwritten digits by jax_tcgemm and by XLA."
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dtype", choices=sorted(LOSS_TOLERANCE), default="float32")
    parser.add_argument("--accuracy", type=float, default=0.95, help="test accuracy to exceed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)

    rng = np.random.default_rng(args.seed)
    images, labels, test_images, test_labels = load(rng)
    parameters = initial(jax.random.key(args.seed), args.experts, args.hidden)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    states = dict.fromkeys(LAYERS, (parameters, (zeros, zeros, 0)))
    dtype = jnp.dtype(args.dtype)

    (device,) = jnp.zeros(()).devices()
    print(f"{args.dtype}, {args.experts} experts, on {device.device_kind} ({device.platform})")
    print(f"{'epoch':>5}  " + "  ".join(f"{name:>10}" for name in LAYERS))
    seconds = dict.fromkeys(LAYERS, float("inf"))  # the fastest epoch, since others compile
    steps = len(labels) // BATCH
    for number in range(1, args.epochs + 1):
        order = rng.permutation(len(labels))[: steps * BATCH].reshape(steps, BATCH)
        losses = {}
        for name, (parameters, moments) in states.items():
            start = time.perf_counter()
            total = []
            for own in order:
                parameters, moments, loss = train_step(
                    parameters, moments, images[own], labels[own], dtype, name
                )
                total.append(loss)
            losses[name] = float(jnp.stack(total).mean())
            seconds[name] = min(seconds[name], time.perf_counter() - start)
            states[name] = parameters, moments
        print(f"{number:5d}  " + "  ".join(f"{loss:10.6f}" for loss in losses.values()))
        ours, theirs = losses.values()
        if not abs(ours - theirs) <= LOSS_TOLERANCE[args.dtype] * theirs + 2e-3:
            raise SystemExit(f"FAILED: the losses of epoch {number} differ by {ours - theirs:.2e}")

    for name, (parameters, _) in states.items():
        z, _ = logits(parameters, jnp.asarray(test_images), dtype, LAYERS[name])
        accuracy = float((np.asarray(z).argmax(-1) == test_labels).mean())
        step = seconds[name] / steps * 1e3
        print(f"{name:>10}: {step:.2f} ms a training step, test accuracy {accuracy:.2%}")
        if not accuracy > args.accuracy:
            raise SystemExit(f"FAILED: {name}'s test accuracy is not over {args.accuracy:.0%}")
    print("OK: equal within rounding")


if __name__ == "__main__":
    main()
