"""Named epilogues of few rows or columns that become functions; no kernel runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import bf16
from jax.extend.core import jaxpr_as_fun

from jax_tcgemm import gated_gemm, gemm
from jax_tcgemm.lowering import devices, few_results, jit_epilogue
from jax_tcgemm.lowering.fallback import FallbackError

M, K, N = 16, 512, 256


@pytest.fixture
def here(monkeypatch):
    """Lowers for this process's GPUs of compute capability 9.0."""
    monkeypatch.setattr(devices, "are_all", lambda capability: capability == (9, 0))
    monkeypatch.setattr(devices, "is_program_here", lambda: True)


def lowered(f, *x):
    text = jax.jit(f).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    names = ("compiled_gemm", "tcgemm_gemm", "dot_general")
    return {name: text.count(name) for name in names if name in text}


BY_FUNCTION = {"compiled_gemm": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "gelu"},
        {"bias": bf16(N), "activation": "silu", "alpha": 0.5},
        {"c": bf16(M, N)},
        {"c": bf16(M, N), "beta": 2.0, "bias": bf16(N)},
        {"residual": bf16(M, N), "activation": "gelu"},
        {"row_scale": jnp.ones(M), "column_scale": jnp.ones(N)},
        {"activation": "relu", "preferred_element_type": "float32"},
    ],
)
def test_every_epilogue_becomes_a_function(here, options):
    x = bf16(M, K), bf16(K, N)
    assert lowered(lambda a, b: gemm(a, b, **options), *x) == BY_FUNCTION


def test_few_columns_and_gradients(here):
    f = lambda a, b: gemm(a, b, activation="gelu")  # noqa: E731
    assert lowered(f, bf16(512, K), bf16(K, 16)) == BY_FUNCTION
    loss = lambda a, b: f(a, b).astype(jnp.float32).sum()  # noqa: E731
    found = lowered(jax.value_and_grad(loss, (0, 1)), bf16(M, K), bf16(K, N))
    assert found == {"compiled_gemm": 1, "tcgemm_gemm": 2}


def test_what_stays_built(here, monkeypatch):
    """A product, a bias, many rows, float32, another program's row, another GPU's program."""
    few, many = (bf16(M, K), bf16(K, N)), (bf16(128, K), bf16(K, N))
    built = {"tcgemm_gemm": 1}
    gelu = lambda a, b: gemm(a, b, activation="gelu")  # noqa: E731
    assert lowered(lambda a, b: gemm(a, b), *few) == built
    assert lowered(lambda a, b: gemm(a, b, bias=bf16(N)), *few) == built
    assert lowered(gelu, *many) == built
    wide = [x.astype(jnp.float32) for x in (bf16(64, K), bf16(K, N))]
    assert lowered(gelu, *wide) == built
    row = "sm90_bf16_64x64x64_s6_c1x1_cooperative"
    assert lowered(lambda a, b: gemm(a, b, activation="gelu", config=row), *few) == built
    monkeypatch.setattr(devices, "is_program_here", lambda: False)
    assert lowered(gelu, *few) == built


def test_a_named_row_for_few_rows(here):
    row = "sm90_bf16_128x16x64_s4_c1x1_k4_skinny"
    f = lambda a, b: gemm(a, b, activation="gelu", config=row)  # noqa: E731
    assert lowered(f, bf16(M, K), bf16(K, N)) == BY_FUNCTION


def test_a_gated_product_of_few_rows(here):
    f = lambda x, w, v: gated_gemm(x, w, v)  # noqa: E731
    found = lowered(f, bf16(M, K), bf16(K, N), bf16(K, N))
    assert found == {"compiled_gemm": 1, "tcgemm_gemm": 1}


@pytest.mark.parametrize("config", [None, "kernel"])
def test_a_kernel_that_is_not_compiled(here, monkeypatch, config):
    """The built epilogue takes its place, also if a fallback is an error."""
    monkeypatch.setattr(jit_epilogue, "_call_or_reason", lambda *_: "NVRTC refused it")
    f = lambda a, b: gemm(a, b, activation="gelu", config=config)  # noqa: E731
    if config is None:
        assert lowered(f, bf16(M, K), bf16(K, N)) == {"tcgemm_gemm": 1}
    else:
        with pytest.raises(FallbackError, match="NVRTC"):
            lowered(f, bf16(M, K), bf16(K, N))


@pytest.mark.parametrize("activation", [None, "gelu", "silu", "relu", "tanh"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_function_has_the_values_of_the_reference(here, normal, monkeypatch, activation, batch):
    """Evaluates the functions on the exact products."""
    made = []

    def keep(x, spec, algorithm, _inner=few_results.as_function):
        made.append((spec, _inner(x, spec, algorithm)))
        return made[-1][1]

    monkeypatch.setattr(few_results, "as_function", keep)
    options = {
        "bias": normal(N),
        "residual": normal(*batch, M, N),
        "row_scale": normal(M),
        "alpha": normal(),
    }
    a, b = normal(*batch, M, K, dtype=jnp.bfloat16), normal(K, N, dtype=jnp.bfloat16)

    def f(a, b, options):
        types = {"preferred_element_type": jnp.float32}
        return gemm(a, b, activation=activation, **options, **types)

    lowered(f, a, b, options)
    ((spec, compiled),) = made
    given = {**options, "c": options["residual"]}
    others = [given[name] for name in spec.operand_names[2:]]
    product = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    (got,) = jaxpr_as_fun(compiled.function.jaxpr)(product, *others)
    np.testing.assert_allclose(got, f(a, b, options), rtol=1e-4, atol=1e-4)
