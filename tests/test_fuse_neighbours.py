"""Operations around a product under ``fuse``: transposes, and operations that XLA fuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusions import check, operations, with_epilogues
from jax.experimental.xla_metadata import set_xla_metadata

from jax_tcgemm import fuse
from jax_tcgemm.transforms import neighbours
from jax_tcgemm.transforms import transposes as absorbing

M, K, N = 128, 96, 160


@pytest.fixture
def arrays(normal):
    """Returns ``x``, a transposed weight, the same in float32, and a bias."""
    x, w = normal(M, K, dtype=jnp.bfloat16), normal(N, K, dtype=jnp.bfloat16) / 8
    return {"x": x, "w": w, "master": w.astype(jnp.float32), "b": normal(N, dtype=jnp.bfloat16)}


def transposes(f, *args):
    return operations(fuse(f), *args)["transpose"]


@pytest.mark.parametrize("name", ["w", "master"])
def test_weights_that_are_kept_transposed_are_read_as_they_lie(arrays, name):
    def f(x, w, b):
        return jax.nn.relu(x @ w.T.astype(x.dtype) + b)

    args = arrays["x"], arrays[name], arrays["b"]
    assert transposes(f, *args) == 0
    assert len(with_epilogues(f, *args)) == 1
    check(f, *args)


@pytest.mark.parametrize("name", ["w", "master"])
def test_their_gradients_are_written_as_they_lie(arrays, name):
    def loss(x, w, b):
        return jnp.sin((x @ w.T.astype(x.dtype) + b).astype(jnp.float32)).mean()

    step = jax.grad(loss, argnums=(0, 1, 2))
    args = arrays["x"], arrays[name], arrays["b"]
    assert operations(step, *args)["transpose"] >= 2
    assert transposes(step, *args) == 0
    check(step, *args, slack=4)


def sines(w, x):
    return jnp.sin((x @ w.T.astype(x.dtype)).astype(jnp.float32)).sum()


def test_an_update_follows_the_gradient_of_such_a_weight(arrays):
    """GPT-2 of transformers stores its weights like this: transposed, in float32."""

    def step(x, w):
        return w - 0.01 * jax.grad(sines)(w, x)

    args = arrays["x"], arrays["master"]
    assert transposes(step, *args) == 0
    assert len(with_epilogues(step, *args)) == 2  # the cosine of the product, and the update
    check(step, *args, slack=4)


def test_an_optimizer_with_a_state_is_xlas(arrays):
    """If a step donates its state, XLA would copy each matrix that a kernel writes."""

    def step(x, w, mean):
        mean = 0.9 * mean + 0.1 * jax.grad(sines)(w, x)
        return w - 0.01 * mean, mean

    args = arrays["x"], arrays["master"], jnp.ones_like(arrays["master"])
    assert transposes(step, *args) == 0
    assert len(with_epilogues(step, *args)) == 1
    check(step, *args, slack=4)


def test_an_update_of_what_is_no_argument_stays_an_epilogue(arrays):
    def step(x, w, mean):
        w, mean = jnp.sort(w), jnp.sort(mean)
        mean = 0.9 * mean + 0.1 * jax.grad(sines)(w, x)
        return w - 0.01 * mean, mean

    args = arrays["x"], arrays["master"], jnp.ones_like(arrays["master"])
    assert len(with_epilogues(step, *args)) == 2


def test_a_conversion_that_others_read_stays_where_it_is(arrays):
    def f(x, w):
        y = w.T.astype(x.dtype)
        return x @ y, jnp.sort(y, axis=0)

    args = arrays["x"], arrays["master"]
    assert transposes(f, *args) == 1
    check(f, *args)


def test_one_conversion_serves_several_products(arrays):
    def f(x, w):
        y = w.T.astype(x.dtype)
        return x @ y, jnp.tanh(x) @ y

    args = arrays["x"], arrays["master"]
    assert transposes(f, *args) == 0
    assert operations(fuse(f), *args)["convert_element_type"] == 1
    check(f, *args)


def test_dimensions_in_another_order_stay(normal):
    """The result's free dimensions would be in another order."""
    x, w = normal(64, 3, K, dtype=jnp.bfloat16), normal(K, N, dtype=jnp.bfloat16) / 8

    def f(x, w):
        return jax.lax.dot_general(x.transpose(1, 0, 2), w, (((2,), (0,)), ((), ())))

    assert transposes(f, x, w) == 1
    check(f, x, w)


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def test_attention_is_left_to_xla(normal):
    args = [normal(2, 80, 3, 32, dtype=jnp.bfloat16) for _ in range(3)]
    assert operations(fuse(attention), *args) == operations(attention, *args)
    step = jax.grad(lambda *args: attention(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    found = operations(fuse(step), *args)
    assert found["dot_general"]
    assert not any("tcgemm" in name for name in found)
    ours, theirs = jax.jit(fuse(attention))(*args), jax.jit(attention)(*args)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize(
    ("weight", "rows", "is_left"),
    [
        (lambda w, s: w, 16, False),
        (lambda w, s: w.reshape(4, -1, w.shape[1]).reshape(w.shape), 16, False),
        (lambda w, s: jax.lax.sort(w), 16, False),  # XLA writes it in any case
        (lambda w, s: w.T, 16, False),  # read without a copy
        (lambda w, s: w.astype(jnp.int8).astype(w.dtype) * s, 16, True),
        (lambda w, s: w.astype(jnp.int8).astype(w.dtype) * s, 65, False),
        (lambda w, s: jax.lax.slice_in_dim(w, 0, K, 2), 16, True),
    ],
)
def test_few_rows_by_a_weight_made_on_the_way(normal, capfd, monkeypatch, weight, rows, is_left):
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    monkeypatch.setattr(neighbours, "_SMALL_BYTES", 0)
    w, s = normal(K, K, dtype=jnp.bfloat16), normal(1, K, dtype=jnp.bfloat16)
    x = normal(rows, weight(w, s).shape[0], dtype=jnp.bfloat16)

    def f(x, w, s):
        return x @ weight(w, s)

    assert operations(fuse(f), x, w, s)["dot_general"] == is_left
    assert (": XLA: few rows" in capfd.readouterr().err) == is_left
    check(f, x, w, s)


@pytest.mark.parametrize(
    ("rows", "k", "n", "is_left"),
    [(1, 128, 256, 0), (2, 128, 256, 1), (64, 128, 256, 1), (65, 128, 256, 0), (16, 96, 256, 0)],
)
def test_few_rows_by_a_matrix_of_whole_tiles(normal, monkeypatch, rows, k, n, is_left):
    """XLA reads such a matrix as fast, and adds up parts of k in the kernel that follows."""
    monkeypatch.setattr(neighbours, "_SMALL_BYTES", 0)
    x, w = normal(rows, k, dtype=jnp.bfloat16), normal(k, n, dtype=jnp.bfloat16)
    assert operations(fuse(jnp.matmul), x, w)["dot_general"] == is_left
    wide = [v.astype(jnp.float32) for v in (x, w)]
    assert operations(fuse(jnp.matmul), *wide)["dot_general"] == 0
    check(jnp.matmul, x, w)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    ("body", "of_xla"),
    [
        (jnp.matmul, 0),
        (jax.checkpoint(jnp.matmul), 0),
        (lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: x @ w, x), 1),
    ],
    ids=["body", "checkpoint", "loop"],
)
def test_few_rows_by_weights_that_a_loop_slices(normal, monkeypatch, rows, body, of_xla):
    """XLA copies a layer's slice of the weights for its own kernels, not for a custom call."""
    x, kept = normal(rows, 128, dtype=jnp.bfloat16), normal(128, 128, dtype=jnp.bfloat16) / 8
    w = normal(3, 128, 1, 128, dtype=jnp.bfloat16) / 8

    def layers(x, w, kept):
        return jax.lax.scan(lambda x, w: (body(x, w.squeeze(1)) @ kept, None), x, w)[0]

    def by_xla():
        return sum(each.way == "XLA" for each in fuse(layers).report(x, w, kept))

    assert by_xla() == 2  # a launch takes as long
    monkeypatch.setattr(neighbours, "_SMALL_BYTES", 0)
    assert by_xla() == (1 + of_xla if rows > 1 else 0)
    check(layers, x, w, kept, slack=4)


def test_a_branch_that_reads_a_slice(normal, monkeypatch):
    """XLA copies the slice for the branch in any case."""
    monkeypatch.setattr(neighbours, "_SMALL_BYTES", 0)
    x, w = normal(16, 128, dtype=jnp.bfloat16), normal(3, 128, 128, dtype=jnp.bfloat16) / 8

    def f(x, w):
        def body(x, w):
            return jax.lax.cond(x[0, 0] > 0, lambda x, w: x @ w, lambda x, w: w[:16], x, w), None

        return jax.lax.scan(body, x, w)[0]

    assert [each.way for each in fuse(f).report(x, w)] == ["XLA"]
    check(f, x, w, slack=4)


def test_many_rows_by_a_narrow_matrix(normal, monkeypatch):
    """The rows of LoRA's first factor are many, and its columns few."""
    monkeypatch.setattr(neighbours, "_SMALL_BYTES", 0)
    x, w = normal(256, 128, dtype=jnp.bfloat16), normal(128, 16, dtype=jnp.bfloat16)
    wide = normal(128, 128, dtype=jnp.bfloat16) / 8

    def f(x, wide, w):
        return (x @ wide) @ w

    assert operations(fuse(f), x, wide, w)["dot_general"] == 0


def test_a_loop_that_reads_a_token(normal):
    """A token has no shape."""
    q, k = normal(4, 16, dtype=jnp.bfloat16), normal(2, 16, 16, dtype=jnp.bfloat16)

    def f(q, k):
        token = jax.lax.create_token()

        def body(c, k):
            return c + (q @ k).sum() + 0 * jax.lax.optimization_barrier((token, c))[1], None

        return jax.lax.scan(body, jnp.zeros((), q.dtype), k)[0]

    assert jnp.isfinite(jax.jit(fuse(f))(q, k))


@pytest.mark.parametrize(("rows", "is_left"), [(1, True), (64, True), (65, False)])
def test_few_rows_by_a_small_matrix(normal, rows, is_left):
    x, w = normal(rows, K, dtype=jnp.bfloat16), normal(K, N, dtype=jnp.bfloat16)
    assert operations(fuse(jnp.matmul), x, w)["dot_general"] == is_left
    check(jnp.matmul, x, w)


@pytest.mark.parametrize(
    ("rows", "joined_bytes", "left"),
    [(1, 2**20, 0), (2, 2**20, 2), (64, 2**20, 2), (65, 2**20, 0), (16, 2**10, 0)],
)
def test_few_rows_by_several_matrices(normal, monkeypatch, rows, joined_bytes, left):
    """XLA reads several weights, such as those of q, k and v, in one kernel."""
    monkeypatch.setattr(neighbours, "_SMALL_BYTES", 0)
    monkeypatch.setattr(neighbours, "_JOINED_BYTES", joined_bytes)
    x = normal(rows, K, dtype=jnp.bfloat16)
    q, k, out = (normal(*shape, dtype=jnp.bfloat16) for shape in ((K, N), (K, K), (N, K)))

    def f(x, q, k, out):
        return (x @ q) @ out + x @ k

    assert operations(fuse(f), x, q, k, out)["dot_general"] == left
    check(f, x, q, k, out)


@pytest.mark.parametrize(("small_bytes", "left"), [(0, 0), (2**20, 2)])
def test_many_rows_by_several_small_matrices(normal, monkeypatch, small_bytes, left):
    """The gates of a recurrent network are such products; one with an epilogue stays."""
    monkeypatch.setattr(neighbours, "_SMALL_BYTES", small_bytes)
    x = normal(128, K, dtype=jnp.bfloat16)
    gate, reset, new = (normal(K, N, dtype=jnp.bfloat16) for _ in range(3))

    def f(x, gate, reset, new):
        return x @ gate, x @ reset, jnp.tanh(x @ new)

    assert operations(fuse(f), x, gate, reset, new)["dot_general"] == left
    check(f, x, gate, reset, new)


@pytest.mark.parametrize(("rows", "k", "columns"), [(64, 1, 64), (1, 512, 1)])
def test_what_is_hardly_a_product_is_left_to_xla(normal, rows, k, columns):
    x, w = normal(rows, k, dtype=jnp.bfloat16), normal(k, columns, dtype=jnp.bfloat16)
    assert operations(fuse(jnp.matmul), x, w)["dot_general"] == 1


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.einsum("ij,->ij", x, 2.0),
        lambda x: jnp.einsum(",ij->ij", 2.0, x),
        lambda x: jnp.einsum("ij,kj,->ik", x, x, 0.5),
        lambda x: jnp.tensordot(2.0, x, axes=0),
    ],
)
def test_products_by_a_literal(normal, f):
    x = normal(8, 4)
    np.testing.assert_allclose(jax.jit(fuse(f))(x), f(x), rtol=1e-6)


def test_a_chain_of_transposes_and_a_conversion(arrays):
    def f(x, w):
        return (x @ w.T).T.astype(jnp.float32).T, (x @ w.T).T.T

    assert transposes(f, arrays["x"], arrays["w"]) == 0
    check(f, arrays["x"], arrays["w"])


def test_transposes_in_another_context_stay(arrays):
    def f(x, w):
        with set_xla_metadata(tag="1"):
            transposed = w.T
        return x @ transposed

    assert transposes(f, arrays["x"], arrays["w"]) == 1


def test_many_products_by_a_weight_that_others_read_as_well(arrays, monkeypatch):
    """``fuse`` looks at each product once, however many there are."""
    looked_at = []
    untransposed = absorbing._untransposed

    def counted(*arguments):
        looked_at.append(1)
        return untransposed(*arguments)

    monkeypatch.setattr(absorbing, "_untransposed", counted)

    def f(x, w):
        y = w.T.astype(x.dtype)
        for _ in range(40):
            x = jnp.tanh(x @ y)[:, :K]
        return x, jnp.sort(y)

    jax.make_jaxpr(fuse(f))(arrays["x"], arrays["master"])
    assert len(looked_at) <= 80
