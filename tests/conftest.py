"""Fixtures that several test files share, and which tests this machine can run."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import Gpu
from gpu_accuracy import baseline_precision, in_float64, poison
from kernel_rows import first_of, rank_rows
from mps import pytest_configure, pytest_report_header, pytest_unconfigure  # noqa: F401 (hooks)

from jax_tcgemm import Tunings, _compat, _core, _extension
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.lowering import devices, fallback, jit_epilogue, jit_pass, unpacked
from jax_tcgemm.lowering import gemm as gemm_lowering
from jax_tcgemm.partitioning import overlap, rules
from jax_tcgemm.problem.alignment import split_bytes
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES
from jax_tcgemm.problem.strides import Operands, StridedGemm
from jax_tcgemm.transforms import race
from jax_tcgemm.tuning import cache, lookup

# XLA reads these flags when a backend starts. The shard_map tests need more than one device.
# Programs run once, so most of the time would go into autotuning the baseline's products and into
# generating machine code. On a CPU, code generation takes a fifth of its time if it is not split
# and if it uses the older of two emitters. JAX 0.11 no longer has the older emitter, and the older
# emitter of JAX 0.8 rounds to 8 bits wrongly.
_XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_gpu_autotune_level=0",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    *(("--xla_cpu_use_fusion_emitters=false",) if jax.__version_info__[:2] == (0, 10) else ()),
)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the GPU
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # and the cores: one each
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_XLA_FLAGS])
# Tests cover the untuned choice, whatever tuning files exist.
os.environ["JAX_TCGEMM_TUNING"] = "off"


def _compute_capability() -> float | None:
    """Returns the GPU's compute capability, or None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    return float(jax.devices()[0].compute_capability)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also run tests marked nightly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--nightly"):
        nightly = [item for item in items if "nightly" in item.keywords]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if "nightly" not in item.keywords]
    capability = _compute_capability()
    for item in items:
        if "gpu" in item.keywords and capability is None:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
        elif "gpu" in item.keywords and not _extension.KERNEL_NAMES:
            item.add_marker(pytest.mark.skip(reason="built without kernels"))
        elif "sm90" in item.keywords and capability != 9.0:
            item.add_marker(pytest.mark.skip(reason="no GPU of compute capability 9.0"))


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs tests not marked `gpu` as if without a GPU, so that they behave the same everywhere."""
    if "gpu" in request.keywords:
        yield
        # Otherwise slower kernels of the build would have replaced the kernels under test.
        assert _core.may_compile_rows(), "a kernel could not be compiled: see JAX_TCGEMM_LOG=1"
    else:
        monkeypatch.setattr(_compat, "initialized_cuda_devices", list)
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture
def divided_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes our rules partition products of sharded programs on CPU devices as well."""
    monkeypatch.setenv(rules.SETTING, "everywhere")


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets transfers between devices run beside products."""
    monkeypatch.setenv(overlap.SETTING, "auto")


@pytest.fixture
def small_products(overlapped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets transfers run beside small products, which does not pay, but shows the results."""
    monkeypatch.setattr(overlap, "FEWEST_ROWS", 256)
    monkeypatch.setattr(overlap, "FEWEST_ROWS_OF_A_PART", 128)
    monkeypatch.setattr(overlap, "_LONGEST", float("inf"))


@pytest.fixture
def rng() -> np.random.Generator:
    """Returns a generator with a new seed; JAX_TCGEMM_TEST_SEED repeats a run."""
    seed = int(os.environ.get("JAX_TCGEMM_TEST_SEED", secrets.randbits(32)))
    print(f"JAX_TCGEMM_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def normal(rng: np.random.Generator) -> Callable[..., jax.Array]:
    """Draws normally distributed arrays: `normal(2, 3, dtype=jnp.bfloat16)`."""

    def draw(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 2 if dtype == jnp.bool_ else 10, shape), dtype)
        values = rng.standard_normal(shape)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            values = values + 1j * rng.standard_normal(shape)
        return jnp.asarray(values.astype(jnp.dtype(dtype)))  # each shape would compile a program

    return draw


@pytest.fixture
def operands(normal: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
    """Operands of `fused_call.fused`."""
    return normal(2, 5, 7), normal(7, 3), normal(5, 1), normal(3), normal(), normal()


def _exact(x: Any) -> np.ndarray:
    x = np.asarray(x)
    is_complex = np.issubdtype(x.dtype, np.complexfloating)
    return x.astype(np.complex128 if is_complex else np.float64)


@pytest.fixture
def exact() -> Callable[[Any], np.ndarray]:
    """Converts an array to float64 (complex128)."""
    return _exact


@pytest.fixture
def assert_accurate() -> Callable[..., None]:
    """Checks that the error against `exact` is at most 2x `baseline`'s plus one output rounding."""

    def check(actual: Any, baseline: Any, exact: Any, slack: float = 0.0) -> None:
        exact = _exact(exact)
        assert actual.shape == exact.shape
        if not exact.size:
            return
        error = np.abs(_exact(actual) - exact).max()
        baseline_error = np.abs(_exact(baseline) - exact).max()
        rounding = float(jnp.finfo(actual.dtype).eps) * np.abs(exact).max()
        allowed = 2 * baseline_error + rounding + slack
        assert error <= allowed, f"error {error:.3e}, baseline's {baseline_error:.3e}"

    return check


@pytest.fixture
def compare(assert_accurate):
    """Compares a function's results with a formula's, in float64 and computed by XLA.

    The formula takes `matmul` as its first argument; all its arrays have one type.
    """

    def run(ours, formula, args, dtype, algorithm=None, slack=0.0):
        precision = baseline_precision(algorithm) if algorithm else None
        factors = INPUT_DTYPES[algorithm] if algorithm else None

        def matmul(a, b):
            # The arrays are float32; the products convert them back to the operands' type.
            a, b = (x if factors is None else x.astype(factors) for x in (a, b))
            return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)

        def by_xla(*args):
            results = formula(matmul, *(x.astype(jnp.float32) for x in args))
            return [x.astype(dtype) for x in results]

        baselines = jax.jit(by_xla)(*args)
        for shape in {x.shape for x in baselines}:
            poison(shape, dtype)
        got = jax.jit(ours)(*args)
        expected = in_float64(functools.partial(formula, jnp.matmul), *args)
        for x, baseline, wanted in zip(got, baselines, expected, strict=True):
            assert x.dtype == dtype
            assert_accurate(x, baseline, wanted, slack)

    return run


@pytest.fixture
def rank_on_h200() -> Callable[..., list[tuple[str, float, bool]]]:
    """Ranks the candidates of an H200 for a product in its workspace."""
    if _core.build_info()["kernels_glob"] != "*":
        pytest.skip("needs every kernel of the table")

    def rank(algorithm: str, m: int, n: int, k: int, *, sms: int = 132, **options: Any):
        room = split_bytes(StridedGemm(m, n, k, (), Operands((k, 1), (n, 1))))
        options = {"compute_capability": 90, "workspace_bytes": room} | options
        return rank_rows(algorithm, m, n, k, 1, True, sms, 227 * 1024, **options)

    return rank


@pytest.fixture
def choose_on_h200(rank_on_h200: Callable[..., Any]) -> Callable[..., str]:
    """Names the kernel, and the split of k, that an H200 takes: see `kernel_rows.first_of`."""
    return lambda *arguments, **options: first_of(rank_on_h200(*arguments, **options))


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Lowers as on a machine with an H200, reads tunings from files, and finds no tuning files."""
    monkeypatch.setattr(devices, "local_kind", lambda: "NVIDIA H200")
    monkeypatch.setenv(cache.SETTING, str(tmp_path / "cache"))
    monkeypatch.setenv(lookup.SETTING, "read")
    monkeypatch.setattr(lookup, "packaged", lambda kind: Tunings())
    monkeypatch.setattr(lookup, "_MEASURED", {})
    monkeypatch.setattr(lookup, "_SPENT", [0.0])
    monkeypatch.setattr(lookup, "_AGREED", {})
    monkeypatch.setattr(race, "_FASTEST", {})


@pytest.fixture
def all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends, for lowering alone, that the build has every kernel of the table."""
    names = frozenset(config.name for config in kernel_table.CONFIGS)
    monkeypatch.setattr(_extension, "KERNEL_NAMES", names)
    monkeypatch.setattr(_extension, "BUILT_TARGETS", frozenset(_extension.TARGETS))


def _attribute(text: str, type_name: str) -> Any:
    if text.startswith('"'):
        return text.strip('"')
    if text in ("true", "false"):
        return text == "true"
    if text.startswith("dense"):
        values = [int(value) for value in re.findall(r"-?\d+", text)]
        size = int(type_name.removeprefix("tensor<").split("x")[0])
        return values * size if len(values) != size else values
    return float(text) if type_name == "f32" else int(text)


_CALL = re.compile(
    r"custom_call @jax_tcgemm_gemm_v1\(.*?mhlo\.backend_config = \{(.*?)\}, operand_layouts.*?"
    r" : \((.*)\) -> (.*)"
)
_ATTRIBUTE = re.compile(r'(\w+) = ("[^"]*"|dense<[^>]*>|[^\s,]+)(?: : ([\w<>]+))?')


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers for a GPU of compute capability 9.0."""
    monkeypatch.setattr(_compat, "initialized_cuda_devices", lambda: [Gpu("9.0")])


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects one log line for each lowered product."""
    lines: list[str] = []
    for module in (gemm_lowering, unpacked, fallback.strict):
        monkeypatch.setattr(module, "log", lines.append)
    return lines


@pytest.fixture
def cuda_module(all_kernels: None) -> Callable[..., tuple[str, list[dict[str, Any]]]]:
    """Lowers a function for CUDA, with or without a GPU; returns module text and custom calls."""

    def lower(function: Callable, *args: Any, **jit_options: Any):
        traced = jax.jit(function, **jit_options).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        calls = []
        for attributes, operands, results in _CALL.findall(text):
            call: dict[str, Any] = {
                name: _attribute(value, type_name)
                for name, value, type_name in _ATTRIBUTE.findall(attributes)
            }
            tensors = [re.findall(r"tensor<([\w<>]+)>", said) for said in (operands, results)]
            calls.append(call | dict(zip(("operands", "results"), tensors, strict=True)))
        assert len(calls) == text.count("custom_call @jax_tcgemm_gemm"), text
        return text, calls

    return lower


@pytest.fixture
def small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets programs pack weights of any size."""
    monkeypatch.setattr(unpacked, "LEAST_VALUES", 1)


@pytest.fixture
def never_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a function, or its cotangent, gets no compiled kernel."""
    for lowering in (jit_epilogue, jit_pass):

        def made(*arguments: Any, _inner: Any = lowering._call_or_reason) -> Any:
            call = _inner(*arguments)
            assert not isinstance(call, str), call
            return call

        monkeypatch.setattr(lowering, "_call_or_reason", made)
    monkeypatch.setattr(fallback.functions, "_FEW_DRAWN", 0)
    monkeypatch.setattr(jit_pass, "LARGE_MATRIX", 0)
    monkeypatch.setattr(jit_pass, "_slower", lambda *_: None)


@pytest.fixture
def count_gemms() -> Callable[..., int]:
    """Counts a program's gemms that remain after dead code elimination."""

    def count(function: Callable, *args: Any) -> int:
        return jax.jit(function).lower(*args).as_text().count("stablehlo.dot_general")

    return count


@pytest.fixture
def no_gpu() -> None:
    """Skips if there is a GPU: it would run handlers that are called with invalid addresses."""
    if not _extension.BUILT_TARGETS:
        pytest.skip("no kernels were built")
    with contextlib.suppress(RuntimeError):
        _core.device_properties(0)
        pytest.skip("a GPU would run what is accepted")
