"""Trains an ensemble of classifiers on scikit-learn's handwritten digits, twice.

One ensemble computes every dense layer by ``jax_tcgemm.gemm`` (bias and gelu fused into the
kernel); the other has the same model in plain ``jnp``. Both start from the same weights and see the
same batches. The script prints both losses side by side, epoch by epoch, and the test accuracy of
both. It fails if the two curves part or if the accuracy is not over 96 %.

Run it with ``python examples/train_digits.py``; ``--help`` lists the arguments.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from jax_tcgemm import gemm

LAYERS = (64, 128, 64, 10)
BATCH = 128
TEST_IMAGES = 360
LEARNING_RATE = 2e-3
# The largest relative difference accepted between the two losses of an epoch: rounding differs
# between the two models (order of summation, and where the 16-bit rounding happens), and training
# amplifies it.
LOSS_TOLERANCE = {"float32": 0.02, "bfloat16": 0.1, "float16": 0.05}

Params = list[tuple[jax.Array, jax.Array]]
Dense = Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]


def dense_gemm(x: jax.Array, w: jax.Array, bias: jax.Array, last: bool) -> jax.Array:
    """Computes a layer by one kernel: bias, and gelu except in the last layer, are its epilogue."""
    if last:
        return gemm(x, w, bias=bias, preferred_element_type=jnp.float32)
    return gemm(x, w, bias=bias, activation="gelu")


def dense_jnp(x: jax.Array, w: jax.Array, bias: jax.Array, last: bool) -> jax.Array:
    """Computes the same layer by XLA, with the same accumulator and output types."""
    y = jnp.matmul(x, w, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)
    return y if last else jax.nn.gelu(y).astype(x.dtype)


def apply(dense: Dense, params: Params, x: jax.Array) -> jax.Array:
    """Returns the logits, ``(batch, 10)`` in float32."""
    for index, (w, bias) in enumerate(params):
        x = dense(x, w.astype(x.dtype), bias.astype(x.dtype), index == len(params) - 1)
    return x


def init(key: jax.Array) -> Params:
    """Returns float32 master weights of one member."""
    keys = jax.random.split(key, len(LAYERS) - 1)
    return [
        (jax.random.normal(k, (n_in, n_out)) * (2 / n_in) ** 0.5, jnp.zeros(n_out))
        for k, n_in, n_out in zip(keys, LAYERS[:-1], LAYERS[1:], strict=True)
    ]


def make_epoch(dense: Dense, dtype: jnp.dtype) -> Callable:
    """Returns a jitted function that runs one epoch of Adam for the whole ensemble."""

    def loss_fn(params, x, labels):
        log_p = jax.nn.log_softmax(apply(dense, params, x.astype(dtype)))
        return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()

    def step(state, batch):
        params, mean, square, count = state
        # One gradient per member; all members share the batch, which is not copied.
        losses, grads = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(0, None, None))(
            params, *batch
        )
        count = count + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, grads)
        rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        params = jax.tree.map(
            lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, mean, square
        )
        return (params, mean, square, count), losses

    @jax.jit
    def epoch(state, images, labels):
        state, losses = jax.lax.scan(step, state, (images, labels))
        return state, losses.mean()

    return epoch


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
        description="Trains classifiers of handwritten digits by jax_tcgemm and by jnp."
    )
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--members", type=int, default=4, help="size of the ensemble")
    parser.add_argument("--dtype", choices=sorted(LOSS_TOLERANCE), default="float32")
    parser.add_argument("--accuracy", type=float, default=0.96, help="test accuracy to exceed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)

    rng = np.random.default_rng(args.seed)
    images, labels, test_images, test_labels = load(rng)
    dtype = jnp.dtype(args.dtype)
    params = jax.vmap(init)(jax.random.split(jax.random.key(args.seed), args.members))
    zeros = jax.tree.map(jnp.zeros_like, params)
    models = {"jax_tcgemm": dense_gemm, "jnp": dense_jnp}
    states = dict.fromkeys(models, (params, zeros, zeros, jnp.zeros((), jnp.int32)))
    epochs = {name: make_epoch(dense, dtype) for name, dense in models.items()}

    (device,) = jnp.zeros(()).devices()
    print(f"{args.members} members, {args.dtype}, on {device.device_kind} ({device.platform})")
    print(f"{'epoch':>5}  {'jax_tcgemm':>10}  {'jnp':>10}")
    batches = len(labels) // BATCH
    start = time.perf_counter()
    for number in range(1, args.epochs + 1):
        order = rng.permutation(len(labels))[: batches * BATCH]
        batch_images = jnp.asarray(images[order].reshape(batches, BATCH, -1))
        batch_labels = jnp.asarray(labels[order].reshape(batches, BATCH))
        losses = {}
        for name, epoch in epochs.items():
            states[name], loss = epoch(states[name], batch_images, batch_labels)
            losses[name] = float(loss)
        print(f"{number:5d}  {losses['jax_tcgemm']:10.6f}  {losses['jnp']:10.6f}")
        difference = abs(losses["jax_tcgemm"] - losses["jnp"])
        if not difference <= LOSS_TOLERANCE[args.dtype] * losses["jnp"] + 5e-4:
            raise SystemExit(f"FAILED: the losses of epoch {number} differ by {difference:.2e}")
    print(f"{time.perf_counter() - start:.1f} s")

    accuracy = {}
    for name, dense in models.items():
        predict = jax.jit(jax.vmap(lambda p, x, dense=dense: apply(dense, p, x), (0, None)))
        logits = predict(states[name][0], jnp.asarray(test_images, dtype))
        members = (np.asarray(logits).argmax(-1) == test_labels).mean(-1)
        votes = np.asarray(jax.nn.softmax(logits)).mean(0).argmax(-1)
        accuracy[name] = float((votes == test_labels).mean())
        print(
            f"{name:>10}: test accuracy {accuracy[name]:.2%} of the ensemble, "
            f"{members.min():.2%} to {members.max():.2%} of its members"
        )
        if not accuracy[name] > args.accuracy:
            raise SystemExit(f"FAILED: {name}'s test accuracy is not over {args.accuracy:.0%}")
    print(f"OK: equal within rounding, test accuracy {accuracy['jax_tcgemm']:.2%}")


if __name__ == "__main__":
    main()
