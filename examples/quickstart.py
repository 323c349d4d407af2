"""A tour of jax_tcgemm.gemm: epilogue, gradient, vmap, precision. Runs on a GPU or a CPU."""

import jax
import jax.numpy as jnp

from jax_tcgemm import gemm


def main() -> None:
    """Runs the tour."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (256, 512), jnp.bfloat16)
    w = jax.random.normal(keys[1], (512, 128), jnp.bfloat16) / 16
    bias = jax.random.normal(keys[2], (128,), jnp.bfloat16)

    # 1. A matrix product. The accumulator is float32, rounded once to bfloat16.
    y = gemm(x, w)
    print("gemm                ", y.shape, y.dtype)

    # 2. gelu(x @ w + bias) in the same kernel; nothing is rounded in between.
    y = gemm(x, w, bias=bias, activation="gelu")
    print("bias and gelu       ", y.shape, y.dtype)

    # 3. alpha * x @ w + beta * c, with float32 output from bfloat16 inputs.
    y32 = gemm(x, w, y, alpha=0.5, beta=2.0, preferred_element_type=jnp.float32)
    print("alpha, beta, float32", y32.shape, y32.dtype)

    # 4. Transposed operands are read in place; nothing is copied.
    y = gemm(x, w.T, transpose_b=True)
    print("transpose_b         ", y.shape, y.dtype)

    # 5. Gradients, under jit.
    @jax.jit
    def loss(w, bias):
        return gemm(x, w, bias=bias, activation="gelu", preferred_element_type=jnp.float32).mean()

    value, (w_bar, bias_bar) = jax.value_and_grad(loss, argnums=(0, 1))(w, bias)
    print(f"value_and_grad       {value:.4f}", w_bar.shape, bias_bar.shape)

    # 6. vmap over a stack of weights: one batched kernel, and x is read in place, not repeated.
    stack = jax.random.normal(keys[3], (8, 512, 128), jnp.bfloat16) / 16
    ys = jax.vmap(lambda w: gemm(x, w, activation="relu"))(stack)
    print("vmap                ", ys.shape, ys.dtype)

    # 7. float32 inputs: TF32 tensor cores, or full float32 on request.
    a, b = x.astype(jnp.float32), w.astype(jnp.float32)
    fast = gemm(a, b, precision="default")
    full = gemm(a, b, precision="highest")
    print(f"default and highest  differ by at most {jnp.abs(fast - full).max():.1e}")


if __name__ == "__main__":
    main()
