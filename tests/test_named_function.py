"""Named epilogues that become functions; no kernel runs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import bf16
from jax.extend.core import jaxpr_as_fun

from jax_tcgemm import gated_gemm, gemm, mlp
from jax_tcgemm.epilogue import compiler, nvrtc
from jax_tcgemm.kernels import table
from jax_tcgemm.lowering import devices, jit_rows, named_function
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.tunings import Tunings

M, K, N = 256, 1024, 512
ROW = "sm90_bf16_64x128x64_s6_c2x1_pingpong"
BUILT, FUNCTION = {"tcgemm_gemm": 1}, {"compiled_gemm": 1}


@pytest.fixture
def here(monkeypatch):
    """Lowers for this process's GPUs of compute capability 9.0."""
    monkeypatch.setattr(devices, "are_all", lambda capability: capability == (9, 0))
    monkeypatch.setattr(devices, "is_program_here", lambda: True)
    monkeypatch.setattr(jit_rows, "first_row", lambda call, spec: ROW)
    monkeypatch.setattr(named_function, "_OUTCOMES", [True])


def lowered(f, *x):
    text = jax.jit(lambda *x: f(*x)).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    names = ("compiled_gemm", "tcgemm_gemm", "dot_general")
    return {name: text.count(name) for name in names if name in text}


def gelu(a, b, **options):
    return gemm(a, b, activation="gelu", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "gelu"},
        {"bias": bf16(N), "activation": "silu"},
        {"c": bf16(M, N)},
        {"c": bf16(M, N), "beta": jnp.float32(2), "bias": bf16(N)},
        {"residual": bf16(M, N), "activation": "gelu"},
        {"row_scale": jnp.ones(M), "column_scale": jnp.ones(N), "alpha": jnp.float32(2)},
        {"activation": "relu", "preferred_element_type": "float32"},
    ],
)
def test_every_epilogue_becomes_a_function(here, options):
    assert lowered(lambda a, b: gemm(a, b, **options), bf16(M, K), bf16(K, N)) == FUNCTION


@pytest.mark.parametrize("how", ["config", "environment"])
def test_a_strict_call_takes_a_kernel(here, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("JAX_TCGEMM_STRICT", "1")
    config = "kernel" if how == "config" else None
    assert lowered(lambda a, b: gelu(a, b, config=config), bf16(M, K), bf16(K, N)) == FUNCTION


def test_gated_products_and_layers(here, monkeypatch):
    x, w = bf16(M, K), bf16(K, N)
    assert lowered(gated_gemm, x, w, w) == FUNCTION
    few = lowered(gated_gemm, bf16(16, 4 * K), bf16(4 * K, N), bf16(4 * K, N))
    assert few == FUNCTION
    loss = lambda x, w, v: mlp(x, w, None, v).astype(jnp.float32).sum()  # noqa: E731
    found = lowered(jax.grad(loss, (0, 1, 2)), x, w, bf16(N, K))
    assert found == {"compiled_gemm": 2, "tcgemm_gemm": 3}  # the hidden layer and its derivative
    monkeypatch.setattr(devices, "is_program_here", lambda: False)
    few = lowered(gated_gemm, bf16(16, 4 * K), bf16(4 * K, N), bf16(4 * K, N))
    assert few == {"tcgemm_gemm": 2}  # the product, then the other times it


def test_what_stays_built(here, monkeypatch):
    x = bf16(M, K), bf16(K, N)
    assert lowered(lambda a, b: gemm(a, b), *x) == BUILT
    assert lowered(lambda a, b: gemm(a, b, bias=bf16(N)), *x) == BUILT
    assert lowered(lambda a, b: gelu(a, b, alpha=0.5), *x) == BUILT
    assert lowered(lambda a, b: gemm(a, b, bf16(M, N), beta=0.5), *x) == BUILT
    assert lowered(gelu, bf16(16384, K), bf16(K, 2048)) == BUILT
    assert lowered(gelu, bf16(M, 64), bf16(64, N)) == BUILT
    wide = [each.astype(jnp.float32) for each in x]
    assert lowered(gelu, *wide) == BUILT
    assert lowered(lambda a, b: gelu(a, b, config=ROW), *x) == BUILT
    monkeypatch.setattr(jit_rows, "first_row", lambda call, spec: f"{ROW}/splits=2")
    assert lowered(gelu, *x) == BUILT
    monkeypatch.setattr(jit_rows, "first_row", lambda call, spec: ROW)
    assert lowered(gelu, *x) == FUNCTION
    monkeypatch.setattr(devices, "is_program_here", lambda: False)
    assert lowered(gelu, *x) == BUILT


def test_one_kernel_that_does_not_compile_is_the_last_one(here, monkeypatch):
    tried = []

    def refused(*arguments, **_):
        tried.append(arguments)
        raise nvrtc.CompileError("no headers")

    monkeypatch.setattr(named_function, "_OUTCOMES", [])
    monkeypatch.setattr(compiler, "compile_kernel", refused)
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    monkeypatch.setattr(jit_rows, "expected_row", lambda call, spec: (ROW, "nn"))
    for _ in range(2):
        assert lowered(gelu, bf16(M, K), bf16(K, N)) == BUILT
    assert len(tried) == 1


def test_gradients_of_weights_beside_collectives_stay_built(here, monkeypatch):
    x, y, c = bf16(K, M), bf16(K, N), bf16(M, N)
    f = lambda x, y, c: gemm(x, y, c, transpose_a=True)  # noqa: E731
    assert lowered(f, x, y, c) == FUNCTION
    monkeypatch.setattr(devices, "is_one_of_several", lambda: True)
    assert lowered(f, x, y, c) == BUILT


def test_a_measured_row_is_taken(here, monkeypatch):
    monkeypatch.setattr(devices, "local_kind", lambda: "a GPU")
    monkeypatch.setattr(
        Tunings, "find", lambda *_: Entry.measured(ROW, 1e-5, 1.1e-5, None), raising=True
    )
    with Tunings():
        assert lowered(gelu, bf16(M, K), bf16(K, N)) == BUILT


@pytest.mark.parametrize("form", ["add", "residual", "scales", "gated"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_function_has_the_values_of_the_epilogue(here, normal, monkeypatch, form, batch):
    """Evaluates the function on the exact products."""
    made = []

    def keep(x, spec, algorithm, _inner=named_function.as_function):
        made.append((spec, _inner(x, spec, algorithm)))
        return made[-1][1]

    monkeypatch.setattr(named_function, "as_function", keep)
    options = {
        "add": {"c": normal(*batch, M, N), "beta": normal(), "bias": normal(N)},
        "residual": {"residual": normal(*batch, M, N), "bias": normal(N)},
        "scales": {"row_scale": normal(M), "column_scale": normal(N), "alpha": normal()},
        "gated": {"bias_gate": normal(N)},
    }[form]
    a, b = normal(*batch, M, K, dtype=jnp.bfloat16), normal(K, N, dtype=jnp.bfloat16)
    a = a / 32  # so that sums in another order differ by 1e-6 only

    def f(a, b, options):
        types = {"preferred_element_type": jnp.float32, "activation": "silu"}
        if form == "gated":
            return gated_gemm(a, b, b[:, ::-1], **options, **types)
        return gemm(a, b, **options, **types)

    lowered(f, a, b, options)
    ((spec, found),) = made
    names = [name for name in spec.operand_names if name not in ("a", "b", "b2")]
    given = {**options, "c": options.get("c", options.get("residual"))}
    given["bias"] = options.get("bias", options.get("bias_gate"))
    assert (len(found.own), len(found.others)) == (2 + spec.is_gated, len(names))
    weights = [b, b[:, ::-1]][: 1 + spec.is_gated]
    products = [jnp.matmul(a, w, preferred_element_type=jnp.float32) for w in weights]
    (got,) = jaxpr_as_fun(found.spec.function.jaxpr)(*products, *(given[name] for name in names))
    np.testing.assert_allclose(got, f(a, b, options), rtol=1e-4, atol=1e-4)


FUNCTIONS_ALONE = [row.name for row in table.CONFIGS if row.gated and row.epilogue == "none"]


@pytest.mark.parametrize("m", [16, 64, 256])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS_ALONE if "bf16" in name])
def test_a_row_for_functions_alone_may_be_named(here, name, m):
    """With fewer columns than rows, another row takes its place."""
    named = functools.partial(gated_gemm, config=name)
    written = functools.partial(named, epilogue=lambda gate, up: gate * up)
    x, w = bf16(m, 1024), bf16(1024, 2048)
    assert lowered(named, x, w, w) == lowered(written, x, w, w) == FUNCTION
    assert lowered(named, x, bf16(1024, 8), bf16(1024, 8)) == BUILT


def test_such_a_row_elsewhere(here, monkeypatch):
    monkeypatch.setattr(devices, "is_program_here", lambda: False)
    named = functools.partial(gated_gemm, config=FUNCTIONS_ALONE[0])
    assert lowered(named, bf16(16, 1024), bf16(1024, 2048), bf16(1024, 2048)) == BUILT
