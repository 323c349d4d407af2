"""Trains a Flax classifier of scikit-learn's handwritten digits, twice.

One model has ``dot_general=jax_tcgemm.dot_general``, the one argument that makes a Flax layer use
this package's products; the other model lacks it. Both start from the same weights and see the same
batches. The script prints both losses side by side, epoch by epoch, and the test accuracy of both.
It fails if the two curves part or if the accuracy is not over 96 %.

Run it with ``python examples/flax_dense.py``; ``--help`` lists the arguments. It needs Flax.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jax_tcgemm

BATCH = 128
TEST_IMAGES = 360
# The largest relative difference accepted between the two losses of an epoch: rounding differs
# between the two models, and training amplifies it.
LOSS_TOLERANCE = {"float32": 0.02, "bfloat16": 0.1, "float16": 0.05}


class Classifier(nnx.Module):
    """Two hidden layers over the 64 pixels of an image."""

    def __init__(self, dot_general: Callable, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.layers = nnx.List(
            nnx.Linear(n_in, n_out, dot_general=dot_general, dtype=dtype, rngs=rngs)
            for n_in, n_out in ((64, 128), (128, 64), (64, 10))
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits, ``(batch, 10)`` in float32."""
        x = images
        for layer in self.layers[:-1]:
            x = nnx.gelu(layer(x))
        return self.layers[-1](x).astype(jnp.float32)


@nnx.jit
def train_step(
    model: Classifier, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    """Updates the model by one batch and returns the loss before."""

    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


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
        description="Trains a Flax classifier of handwritten digits by jax_tcgemm and by XLA."
    )
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--dtype", choices=sorted(LOSS_TOLERANCE), default="float32")
    parser.add_argument("--accuracy", type=float, default=0.96, help="test accuracy to exceed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)

    rng = np.random.default_rng(args.seed)
    images, labels, test_images, test_labels = load(rng)
    products = {"jax_tcgemm": jax_tcgemm.dot_general, "XLA": jax.lax.dot_general}
    models = {
        name: Classifier(dot_general, jnp.dtype(args.dtype), nnx.Rngs(args.seed))
        for name, dot_general in products.items()
    }
    optimizers = {
        name: nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
        for name, model in models.items()
    }

    (device,) = jnp.zeros(()).devices()
    print(f"{args.dtype}, on {device.device_kind} ({device.platform})")
    print(f"{'epoch':>5}  {'jax_tcgemm':>10}  {'XLA':>10}")
    start = time.perf_counter()
    for number in range(1, args.epochs + 1):
        order = rng.permutation(len(labels))
        batches = [
            (jnp.asarray(images[order[i : i + BATCH]]), jnp.asarray(labels[order[i : i + BATCH]]))
            for i in range(0, len(order) - BATCH + 1, BATCH)
        ]
        losses = {}
        for name, model in models.items():
            steps = [train_step(model, optimizers[name], *batch) for batch in batches]
            losses[name] = float(jnp.stack(steps).mean())
        print(f"{number:5d}  {losses['jax_tcgemm']:10.6f}  {losses['XLA']:10.6f}")
        difference = abs(losses["jax_tcgemm"] - losses["XLA"])
        if not difference <= LOSS_TOLERANCE[args.dtype] * losses["XLA"] + 5e-4:
            raise SystemExit(f"FAILED: the losses of epoch {number} differ by {difference:.2e}")
    print(f"{time.perf_counter() - start:.1f} s")

    for name, model in models.items():
        accuracy = float(
            (np.asarray(model(jnp.asarray(test_images))).argmax(-1) == test_labels).mean()
        )
        print(f"{name:>10}: test accuracy {accuracy:.2%}")
        if not accuracy > args.accuracy:
            raise SystemExit(f"FAILED: {name}'s test accuracy is not over {args.accuracy:.0%}")
    print("OK: equal within rounding")


if __name__ == "__main__":
    main()
