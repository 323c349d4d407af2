"""Epilogues of one product on the GPU, including those of derivatives, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import EVERY_ACTIVATION, accumulation_slack, some
from kernel_rows import by_config, rank_rows

from jax_tcgemm import _compat, _core, _extension, gemm
from jax_tcgemm.kernels.names import by_name
from jax_tcgemm.kernels.table import CONFIGS
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

pytestmark = pytest.mark.gpu


@by_config(epilogues=("any",))
def test_residuals_and_scales(compare, normal, rng, config):
    for activation in some(rng, [None, *EVERY_ACTIVATION]):
        check_residual_and_scales(compare, normal, rng, config, activation)


def check_residual_and_scales(compare, normal, rng, config, activation):
    m, n, k = config.tile_m + 8, config.tile_n + 8, 4 * config.tile_k
    algorithm = config.algorithm
    dtype = INPUT_DTYPES[algorithm]
    out_dtype = jnp.dtype(rng.choice([dtype, jnp.float32]))
    addend = jnp.dtype(rng.choice([out_dtype, jnp.float32]))
    residual_shape = [(m, n), (n,), (m, 1)][rng.integers(3)]
    args = (
        normal(m, k, dtype=dtype),
        normal(k, n, dtype=dtype),
        normal(n, dtype=addend),
        normal(*residual_shape, dtype=addend),
        jnp.asarray(rng.uniform(0.5, 1, m), jnp.float32),
        jnp.asarray(rng.uniform(0.5, 1, n), jnp.float32),
    )
    alpha = 2.0 ** -int(np.log2(k) / 2)

    def ours(a, b, bias, residual, row_scale, column_scale):
        result = gemm(
            a,
            b,
            alpha=alpha,
            bias=bias,
            residual=residual,
            row_scale=row_scale,
            column_scale=column_scale,
            activation=activation,
            precision=algorithm,
            preferred_element_type=out_dtype,
            config=config.name,
        )
        return [result]

    def formula(matmul, a, b, bias, residual, row_scale, column_scale):
        z = alpha * row_scale[:, None] * column_scale * matmul(a, b) + bias
        return [resolve(activation).reference(z) + residual]

    slack = 8 * accumulation_slack(config, out_dtype, k, alpha * 5 * k**0.5)
    compare(ours, formula, args, out_dtype, algorithm, slack)


@pytest.mark.sm90
@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize(
    "row", [row.name for row in CONFIGS if _core.row_facts(row.name).adds_parts]
)
def test_after_parts_of_k(compare, normal, rng, row, splits):
    """The kernel applies the epilogue if the row has it; extents are not multiples of a tile."""
    if row not in _extension.KERNEL_NAMES:
        pytest.skip("not in this build")
    algorithm, config = by_name(row).algorithm, f"{row}/splits={splits}"
    dtype = INPUT_DTYPES[algorithm]
    # The GPU must hold all parts of all clusters' tiles at once.
    m, n, k = (8 * int(x) for x in rng.integers((1, 1, 64), (48, 48, 400)))
    device = _core.device_properties(0)
    sizes = {name: device[name] for name in ("sm_count", "shared_memory_per_block")}
    works = {"sum": ("none", "sum"), "any": ("none", "sum", "any")}
    for work in works[by_name(row).epilogue]:
        ranked = rank_rows(
            *(algorithm, m, n, k, 1, True),
            **sizes,
            compute_capability=90,
            workspace_bytes=2**28,
            epilogue=work,
            dense_splits=True,
        )
        assert config in {name for name, _, in_kernel in ranked if in_kernel}
    args = (
        normal(m, k, dtype=dtype) / 8,
        normal(k, n, dtype=dtype) / 8,
        normal(n, dtype=jnp.dtype(rng.choice([dtype, jnp.float32]))),
        normal(m, dtype=dtype),
    )
    for activation in (None, *some(rng, EVERY_ACTIVATION)):
        alpha = float(rng.choice([1, 0.5]))
        saves = activation is not None and bool(rng.integers(2))
        has_scale = activation is not None and bool(rng.integers(2))
        spec = GemmSpec(
            Operands((0, 1), (0, 1), bias=(0,), row_scale=(0,) if has_scale else None),
            jnp.dtype(dtype),
            _compat.canonicalize_precision(algorithm),
            Epilogue("add", activation, alpha=alpha, results=(True, saves)),
            config=config,
        )

        def ours(a, b, bias, scale, spec=spec):
            scale = scale if spec.axes.row_scale else None
            return gemm_primitive.bind(Operands(a, b, bias=bias, row_scale=scale), spec)

        def formula(matmul, a, b, bias, scale, spec=spec):
            z = spec.alpha * matmul(a, b)
            z = (z * scale[:, None] if spec.axes.row_scale else z) + bias
            d = resolve(spec.activation).reference(z)
            return [d, z] if spec.epilogue.results[1] else [d]

        compare(ours, formula, args, dtype, algorithm)


@pytest.mark.sm90
@pytest.mark.parametrize("row", [row.name for row in CONFIGS if row.swap_ab])
def test_bias_of_a_batch_where_operands_are_swapped(compare, normal, rng, row):
    """A block computes several tiles, each with its own bias."""
    if row not in _extension.KERNEL_NAMES:
        pytest.skip("not in this build")
    config = by_name(row)
    dtype = INPUT_DTYPES[config.algorithm]
    m, n, k = 12 * config.tile_n - 8, 9 * config.tile_m - 8, 2 * config.tile_k + 8
    args = (
        normal(3, m, k, dtype=dtype) / 8,
        normal(3, k, n, dtype=dtype) / 8,
        normal(3, n, dtype=jnp.dtype(rng.choice([dtype, jnp.float32]))),
        jnp.asarray(rng.uniform(0.5, 1, 3), jnp.float32),
    )

    def ours(*args):
        one = lambda a, b, bias, alpha: gemm(a, b, bias=bias, alpha=alpha, config=row)  # noqa: E731
        return [jax.vmap(one)(*args)]

    def formula(matmul, a, b, bias, alpha):
        return [alpha[:, None, None] * matmul(a, b) + bias[:, None]]

    compare(ours, formula, args, dtype, config.algorithm)


@by_config(epilogues=("any",))
def test_scales_alone(compare, normal, rng, config):
    """The epilogue has scales only; it must not count as an empty epilogue."""
    m, n, k = config.tile_m + 8, config.tile_n + 8, 2 * config.tile_k
    dtype = INPUT_DTYPES[config.algorithm]
    names = [["row_scale"], ["column_scale"], ["row_scale", "column_scale"]][rng.integers(3)]
    extents = {"row_scale": m, "column_scale": n}
    scales = [jnp.asarray(rng.uniform(0.5, 1, extents[name]), jnp.float32) for name in names]

    def ours(a, b, *scales):
        options = dict(zip(names, scales, strict=True))
        return [gemm(a, b, precision=config.algorithm, config=config.name, **options)]

    def formula(matmul, a, b, *scales):
        z = matmul(a, b)
        for name, scale in zip(names, scales, strict=True):
            z = z * (scale[:, None] if name == "row_scale" else scale)
        return [z]

    args = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype), *scales
    slack = accumulation_slack(config, jnp.dtype(dtype), k, 5 * k**0.5)
    compare(ours, formula, args, dtype, config.algorithm, slack)


@by_config(epilogues=("any",))
def test_activations_of_odd_rows(compare, normal, rng, config):
    """TMA cannot address D, and nothing else in the epilogue needs the general loop."""
    algorithm = config.algorithm
    dtype = INPUT_DTYPES[algorithm]
    out_dtype = jnp.dtype(rng.choice([dtype, jnp.float32]))
    m, n, k = config.tile_m + 8, config.tile_n + 7, 2 * config.tile_k
    args = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype), normal(n, dtype=out_dtype)
    alpha = 2.0 ** -int(np.log2(k) / 2)
    for activation in some(rng, EVERY_ACTIVATION):

        def ours(a, b, bias, activation=activation):
            options = {"preferred_element_type": out_dtype, "config": config.name}
            z = {"alpha": alpha, "bias": bias, "activation": activation}
            return [gemm(a, b, transpose_b=True, precision=algorithm, **z, **options)]

        def formula(matmul, a, b, bias, activation=activation):
            return [resolve(activation).reference(alpha * matmul(a, b.T) + bias)]

        slack = 8 * accumulation_slack(config, out_dtype, k, alpha * 5 * k**0.5)
        compare(ours, formula, args, out_dtype, algorithm, slack)


@pytest.mark.parametrize("form", ["derivative", "gated_derivative"])
@by_config(epilogues=("any",))
def test_derivatives_of_activations(compare, normal, rng, config, form):
    algorithm = config.algorithm
    dtype = INPUT_DTYPES[algorithm]
    is_gated = form == "gated_derivative"
    for activation in some(rng, EVERY_ACTIVATION, 1):
        f = resolve(activation)
        m, n, k = config.tile_m + 8, 2 * config.tile_n - 8, 3 * config.tile_k
        addend = jnp.dtype(rng.choice([dtype, jnp.float32]))
        args = (
            normal(m, k, dtype=dtype) / 8,
            normal(k, n, dtype=dtype) / 8,
            *(normal(m, n, dtype=addend) for _ in range(1 + is_gated)),
        )
        axes = Operands((0, 1), (0, 1), c=(0, 1), c2=(0, 1) if is_gated else None)
        spec = GemmSpec(
            axes,
            jnp.dtype(dtype),
            _compat.canonicalize_precision(algorithm),
            Epilogue(form, activation),
            config=config.name,
        )

        def ours(a, b, c, c2=None, spec=spec):
            return gemm_primitive.bind(Operands(a, b, c=c, c2=c2), spec)

        def formula(matmul, a, b, c, c2=None, f=f):
            z = matmul(a, b)
            if c2 is None:
                return [z * f.derivative(c)]
            return [z * c2 * f.derivative(c), z * f.reference(c)]

        slack = 40 * accumulation_slack(config, dtype, k, 5 / 64 * k**0.5)
        compare(ours, formula, args, dtype, algorithm, slack)


@pytest.mark.sm90
@pytest.mark.parametrize("has_c", [False, True])
@by_config(epilogues=("none", "sum"))
def test_rows_without_the_epilogue(compare, normal, rng, config, has_c):
    """The named row computes the product, or a plain sum; a separate pass applies the rest."""
    m, n, k = config.tile_m + 8, config.tile_n + 8, 4 * config.tile_k
    dtype = INPUT_DTYPES[config.algorithm]
    (activation,) = some(rng, [None, *EVERY_ACTIVATION], 1)
    args = (
        normal(m, k, dtype=dtype) / 8,
        normal(k, n, dtype=dtype) / 8,
        normal(n, dtype=dtype),
        normal(m, n, dtype=jnp.dtype(rng.choice([dtype, jnp.float32]))),
    )

    def formula(matmul, a, b, bias, addend):
        z = matmul(a, b) + bias
        d = resolve(activation).reference(z + addend if has_c else z)
        return [d if has_c else d + addend]

    def ours(a, b, bias, addend):
        options = {"c" if has_c else "residual": addend, "activation": activation}
        return [gemm(a, b, bias=bias, precision=config.algorithm, config=config.name, **options)]

    slack = 8 * accumulation_slack(config, dtype, k, 5 / 64 * k**0.5)
    compare(ours, formula, args, dtype, config.algorithm, slack)


@pytest.mark.sm90
@by_config(epilogues=("none", "sum"))
def test_derivatives_of_rows_without_the_epilogue(compare, normal, config):
    """The pre-activation is a second result, or the only result."""
    m, n, k = config.tile_m + 8, config.tile_n + 8, 2 * config.tile_k
    dtype = INPUT_DTYPES[config.algorithm]
    args = normal(m, k, dtype=dtype) / 8, normal(k, n, dtype=dtype) / 8, normal(n, dtype=dtype)

    def ours(a, b, bias):
        def row(bias):
            options = {"precision": config.algorithm, "config": config.name}
            return gemm(a, b, bias=bias, activation="tanh", **options)

        tangent = jnp.ones_like(bias)
        return [jax.jvp(row, (bias,), (tangent,))[1]]

    def formula(matmul, a, b, bias):
        return [1 - jnp.tanh(matmul(a, b) + bias) ** 2]

    # The pre-activation is rounded before the derivative.
    slack = 4 * float(jnp.finfo(dtype).eps)
    slack += 8 * accumulation_slack(config, dtype, k, 5 / 64 * k**0.5)
    compare(ours, formula, args, dtype, config.algorithm, slack)
