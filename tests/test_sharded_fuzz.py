"""Random products, random meshes, random shardings: the result is that of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, square_sum
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from nightly import slow
from sharded_program import TARGET, mesh_of

from jax_tcgemm import gated_gemm, gemm, mlp, ragged_dot

pytestmark = [pytest.mark.any_jax, pytest.mark.usefixtures("divided_everywhere")]

MESHES = [(8,), (4, 2), (2, 4), (2, 2, 2), (3, 2), (6,), (2, 1)]
DRAWS = [*range(3), *map(slow, range(3, 6))]


def random_spec(rng, mesh, ndim):
    """Draws up to two mesh axes for each dimension; each axis is used once.

    Two only if their order may change: XLA of JAX 0.11 aborts on some other meshes.
    """
    axes = list(rng.permutation(mesh.axis_names))
    most = 2 if mesh.size & (mesh.size - 1) == 0 else 1
    dims = []
    for _ in range(ndim):
        own = [str(axes.pop()) for _ in range(rng.integers(0, most + 1)) if axes]
        dims.append(tuple(own) or None)
    return P(*rng.permutation(np.array([*dims, 0], dtype=object)[:-1]))


def laid_out(rng, mesh, operands):
    """Returns padded operands, randomly sharded, and a function that removes the padding."""
    padded, shapes = [], [x.shape for x in operands]
    for x in operands:
        spec = random_spec(rng, mesh, x.ndim)
        sizes = [
            int(np.prod([mesh.shape[name] for name in axes or ()], dtype=int)) for axes in spec
        ]
        widths = [(0, -extent % size) for extent, size in zip(x.shape, sizes, strict=True)]
        padded.append(jax.device_put(jnp.pad(x, widths), NamedSharding(mesh, spec)))

    def cut(*values):
        return [
            jax.lax.slice(value, (0,) * value.ndim, shape)
            for value, shape in zip(values, shapes, strict=True)
        ]

    return cut, padded


def fused(rng, normal):
    """Draws a call of ``gemm`` with some of its operands."""
    m, n, k = (int(x) for x in rng.integers(1, 40, 3))
    batch = tuple(int(x) for x in rng.integers(1, 9, rng.integers(0, 3)))
    dtype = [jnp.float32, jnp.bfloat16, jnp.float16][rng.integers(3)]
    draw = lambda *shape: (normal(*shape) / 4).astype(dtype)  # noqa: E731
    transpose_a, transpose_b = (bool(x) for x in rng.integers(0, 2, 2))
    a = draw(*batch, *((k, m) if transpose_a else (m, k)))
    b = draw(*batch[: 0 if rng.integers(2) else None], *((n, k) if transpose_b else (k, n)))
    others = {
        "c": draw(*batch, m, n),
        "bias": draw(n),
        "residual": draw(*batch, m, n),
        "row_scale": draw(m),
        "column_scale": draw(n),
    }
    chosen = [name for name in others if rng.integers(3) == 0 and name != "residual"]
    chosen += ["residual"] if "c" not in chosen and rng.integers(3) == 0 else []
    activation = [None, "gelu", "tanh"][rng.integers(3)]

    def call(a, b, *rest):
        named = dict(zip(chosen, rest, strict=True))
        flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        return gemm(a, b, activation=activation, alpha=0.5, **flags, **named)

    return call, [a, b, *(others[name] for name in chosen)]


def gated(rng, normal):
    m, n, k = (int(x) for x in rng.integers(1, 40, 3))
    packed = bool(rng.integers(2))
    x, *weights = (
        normal(*shape) / 4 for shape in ((m, k), *([(k, 2 * n)] if packed else [(k, n)] * 2))
    )
    return lambda x, *w: gated_gemm(x, *w), [x, *weights]


def function(rng, normal):
    """Draws a function as an epilogue, with operands of every kind and reductions."""
    m, n, k = (int(x) for x in rng.integers(1, 40, 3))
    batch = tuple(int(x) for x in rng.integers(1, 9, rng.integers(0, 3)))
    shapes = [(1,), (n,), (m, 1), (m, n), (*batch, m, n), (*batch, 1, 1), (*batch, 1, n)]
    chosen = [shapes[i] for i in rng.permutation(len(shapes))[: rng.integers(0, 4)]]
    axis = [-1, -2, (-2, -1), None][rng.integers(4)]
    first = bool(rng.integers(2))

    def epilogue(product, *others):
        y = product + lax.broadcasted_iota(jnp.float32, product.shape, product.ndim - 2) / 64
        for i, x in enumerate(others):
            y = jnp.tanh(y) * x if i % 2 else y + x
        if axis is None:
            return (y,)
        share = jnp.sum(y, axis, keepdims=True) / n
        return (share, y) if first else (y, share)

    def call(a, b, *rest):
        results = gemm(a, b, epilogue=epilogue, epilogue_operands=rest)
        return results[0] if axis is None else results[0] + results[1]

    drawn = (*batch, m, k), (k, n), *chosen
    return call, [normal(*shape) / 4 for shape in drawn]


def layers(rng, normal):
    m, f, k = (int(x) for x in rng.integers(1, 40, 3))
    shapes = ((m, k), (k, f), (f,), (f, k))
    return lambda x, w, b, v: mlp(x, w, b, v, residual=x), [normal(*s) / 4 for s in shapes]


def groups(rng, normal):
    # With one row, padded to 24, XLA's partitioner fails in the gradient of jnp's program as well.
    m, n, k, g = (int(x) for x in rng.integers((2, 1, 1, 1), 40))
    sizes = jnp.asarray(rng.multinomial(int(rng.integers(0, m + 1)), np.ones(g) / g), jnp.int32)
    activation = [None, "relu"][rng.integers(2)]

    def call(x, w, bias):
        return ragged_dot(x, w, sizes, bias=bias, activation=activation)

    return call, [normal(*shape) / 4 for shape in ((m, k), (g, k, n), (g, n))]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind", [fused, function, gated, layers, groups])
def test_divided_as_on_one_device(kind, draw, rng, normal):
    mesh = mesh_of(MESHES[(draw + rng.integers(2)) % len(MESHES)])
    call, operands = kind(rng, normal)
    cut, padded = laid_out(rng, mesh, operands)
    out = random_spec(rng, mesh, jax.eval_shape(call, *operands).ndim)

    def program(*values):
        d = call(*cut(*values))
        width = [-(-extent // 24) * 24 for extent in d.shape]
        d = jnp.pad(d, [(0, w - extent) for w, extent in zip(width, d.shape, strict=True)])
        return jax.lax.with_sharding_constraint(d, NamedSharding(mesh, out))

    def expected(*values):
        d = call(*values)
        return jnp.pad(d, [(0, -extent % 24) for extent in d.shape])

    jitted = jax.jit(program)
    if mesh.size > 1:
        assert TARGET in jitted.lower(*padded).as_text()
    tolerance = 1e-4 if operands[0].dtype == jnp.float32 else 3e-2
    assert_trees_close(jitted(*padded), expected(*operands), tolerance)
    if draw % 3 == 0:
        every = tuple(range(len(operands)))
        # With an extent of 1, padded to 24, XLA's partitioner fails in its own programs as well.
        is_padded = 1 not in jax.eval_shape(call, *operands).shape
        divided = program if is_padded else lambda *values: call(*cut(*values))
        actual = cut(*jax.jit(jax.grad(square_sum(divided), every))(*padded))
        wanted = jax.grad(square_sum(expected), every)(*operands)
        scale = 1 + max(float(jnp.abs(x.astype(jnp.float32)).max()) for x in wanted)
        shrunk = [[x / scale for x in each] for each in (actual, wanted)]
        assert_trees_close(*shrunk, 2 * tolerance)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind", [fused, function, gated, layers, groups])
def test_divided_in_parts_of_a_mesh_that_is_divided_by_hand(kind, draw, rng, normal):
    """``shard_map`` covers some axes; XLA partitions the others and numbers a part's devices."""
    mesh = mesh_of((2, 2, 2))
    call, operands = kind(rng, normal)
    by_hand = {str(name) for name in rng.permutation(mesh.axis_names)[: rng.integers(1, 3)]}
    parts = int(np.prod([mesh.shape[name] for name in by_hand]))
    cut, padded = laid_out(rng, mesh, operands)
    out = random_spec(rng, mesh, jax.eval_shape(call, *operands).ndim)
    left = P(*(tuple(a for a in axes or () if a not in by_hand) or None for axes in out))

    def part(index, *values):
        d = call(
            *(x * (1 + index[0]).astype(x.dtype) if i == 0 else x for i, x in enumerate(values))
        )
        width = [-(-extent // 24) * 24 for extent in d.shape]
        d = jnp.pad(d, [(0, w - extent) for w, extent in zip(width, d.shape, strict=True)])
        return jax.lax.with_sharding_constraint(d, left)[None]

    axes = tuple(sorted(by_hand))
    mapped = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(P(axes), *(P() for _ in operands)),
        out_specs=P(axes),
        axis_names=by_hand,
        check_vma=False,
    )

    def program(index, *values):
        return mapped(index, *cut(*values))

    with jax.set_mesh(mesh):
        actual = jax.jit(program)(jnp.arange(parts), *padded)
    tolerance = 1e-3 if operands[0].dtype == jnp.float32 else 6e-2
    for i in range(parts):
        d = call(operands[0] * jnp.asarray(1 + i, operands[0].dtype), *operands[1:])
        expected = jnp.pad(d, [(0, -extent % 24) for extent in d.shape])
        assert_trees_close(actual[i], expected, tolerance * (1 + i))
