"""A process of test_gpu_mps.py: products of every kind, with the SMs that MPS leaves it."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _core, gated_gemm, gemm, ragged_dot
from jax_tcgemm.kernels.table import CONFIGS

# Exit status if the MPS server gives its client no GPU.
NO_DEVICE = 77

ROWS = {
    row.cluster_size: row.name
    for row in CONFIGS
    if row.arch == "sm90" and row.algorithm == "BF16_BF16_F32" and row.name in _core.kernel_names()
    if row.grouped == "none"
    and not (row.gated or not row.goes_by_name or (row.promote and not row.skinny))
}
GROUPS = np.asarray([200, 0, 312], np.int32)
ENDS = np.cumsum(GROUPS)


def by_groups(x: jax.Array, w: jax.Array) -> jax.Array:
    bounds = zip(ENDS - GROUPS, ENDS, strict=True)
    return jnp.concatenate([x[b:e] @ w[i] for i, (b, e) in enumerate(bounds)])


def check(name: str, ours, formula, *shapes: tuple[int, ...]) -> None:
    """Compares results with float32; the tolerance is XLA's error in the same types."""
    keys = jax.random.split(jax.random.key(len(name)), len(shapes))
    args = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    got, baseline = (jax.tree.leaves(jax.jit(f)(*args)) for f in (ours, formula))
    with jax.default_matmul_precision("highest"):
        wide = jax.jit(formula)(*(x.astype(jnp.float32) for x in args))
    for d, theirs, exact in zip(got, baseline, jax.tree.leaves(wide), strict=True):
        d, theirs, exact = (np.asarray(x.astype(jnp.float32)) for x in (d, theirs, exact))
        scale = np.abs(exact).max()
        allowed = 2 * np.abs(theirs - exact).max() + float(jnp.finfo(jnp.bfloat16).eps) * scale
        error = np.abs(d - exact).max()
        assert error <= allowed, f"{name}: error {error}, at most {allowed}"
    print(f"{name}: right", flush=True)


def main() -> int:
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        print(error)
        return NO_DEVICE
    print(device, _core.device_properties(0)["sm_count"], "SMs", flush=True)
    for size, config in sorted(ROWS.items()):
        check(
            f"clusters of {size}, {config}",
            lambda a, b, config=config: gemm(a, b, config=config),
            jnp.matmul,
            *((512, 1024), (1024, 1152)),
        )
    # Few columns, k split through the workspace, and k split among blocks; sizes for the heuristic.
    for m, n, k in ((4096, 16, 4096), (128, 128, 65536), (1024, 1024, 16384), (2048, 2048, 2048)):
        check(f"{m} x {n} x {k}", gemm, jnp.matmul, (m, k), (k, n))
    check("unaligned", gemm, jnp.matmul, (333, 1111), (1111, 777))
    check(
        "gated",
        gated_gemm,
        lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up),
        *((256, 512), (512, 768), (512, 768)),
    )

    def with_gradient(product):
        def both(x, w, g):
            d, pullback = jax.vjp(product, x, w)
            return d, pullback(g)

        return both

    check(
        "ragged",
        with_gradient(lambda x, w: ragged_dot(x, w, GROUPS)),
        with_gradient(by_groups),
        *((512, 256), (3, 256, 384), (512, 384)),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
