"""Where products are measured without a request, and where they are not."""

from __future__ import annotations

import types

import jax
import pytest
from tuned_calls import ARRAYS, KIND, ROW, configs, entry, f

import jax_tcgemm
from jax_tcgemm import _compat, gemm
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.lookup import Measured

pytestmark = pytest.mark.usefixtures("all_kernels", "on_an_h200", "unprepared")

RUNS_HERE = _compat.runs_here


@pytest.fixture
def unprepared(monkeypatch):
    """Removes settings, profiles and packaged tunings; measuring finds ROW."""
    for name in (lookup.SETTING, "CI", "XLA_FLAGS", "PYTEST_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(lookup, "_PYTEST", ("PYTEST_VERSION",))  # pytest resets the other
    monkeypatch.setattr(
        lookup, "measure", lambda product, patience: Measured(entry(ROW), is_certain=True)
    )
    # Arrays of these tests are on a CPU, which does not run programs lowered for CUDA.
    monkeypatch.setattr(_compat, "runs_here", lambda context: True)
    monkeypatch.setattr(lookup, "packaged", lambda kind: lookup.Tunings())


def test_products_are_measured():
    assert lookup.mode() == "tune"
    assert configs(f, *ARRAYS) == [ROW]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("CI", "true", "CI is set"),
        ("CI", "0", None),
        ("PYTEST_VERSION", "9", "pytest runs"),
        ("XLA_FLAGS", "--xla_gpu_deterministic_ops", "XLA_FLAGS has --xla_gpu_deterministic_ops"),
        ("XLA_FLAGS", "--a=1 --xla_gpu_deterministic_ops=1", "XLA_FLAGS has"),
        ("XLA_FLAGS", "--xla_gpu_exclude_nondeterministic_ops=true", "XLA_FLAGS has"),
        ("XLA_FLAGS", "--xla_gpu_deterministic_ops=false", None),
        ("XLA_FLAGS", "--xla_gpu_autotune_level=0", "XLA_FLAGS has --xla_gpu_autotune_level=0"),
        ("XLA_FLAGS", "--xla_gpu_autotune_level=4", None),
    ],
)
def test_not_in_such_an_environment(monkeypatch, name, value, why):
    monkeypatch.setenv(name, value)
    reason = lookup.why_not_measured()
    assert (reason is None) == (why is None)
    assert why is None or (reason is not None and reason.startswith(why))
    assert configs(f, *ARRAYS) == [ROW if why is None else ""]
    monkeypatch.setenv(lookup.SETTING, "tune")
    assert configs(f, *ARRAYS) == [ROW]


@pytest.mark.parametrize("guard", ["log", "disallow"])
def test_not_where_transfers_are_guarded(guard):
    with jax.transfer_guard(guard):
        assert lookup.why_not_measured() == f"jax_transfer_guard_host_to_device is {guard!r}"
        assert configs(f, *ARRAYS) == [""]
    with jax.transfer_guard_device_to_host(guard):
        assert lookup.mode() == "read"
    with jax.transfer_guard("allow"):
        assert lookup.mode() == "tune"


def test_not_while_a_profile_is_taken(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        assert lookup.why_not_measured() == "jax.profiler records"
        assert lookup.mode() == "read"
    assert lookup.mode() == "tune"


def export():
    checks = jax_tcgemm.export_disabled_checks()
    jitted = jax.jit(lambda a, b: gemm(a, b))
    return jax.export.export(jitted, platforms=("cuda",), disabled_checks=checks)(*ARRAYS)


def test_not_for_another_machine(monkeypatch):
    monkeypatch.setattr(_compat, "runs_here", RUNS_HERE)
    assert configs(f, *ARRAYS) == [""]
    assert ROW not in export().mlir_module()
    monkeypatch.setenv(lookup.SETTING, "tune")
    assert configs(f, *ARRAYS) == [ROW]
    assert ROW in export().mlir_module()


@pytest.mark.parametrize("is_exported", [True, False])
def test_where_a_program_runs(monkeypatch, is_exported):
    seen = []
    monkeypatch.setattr(_compat, "runs_here", lambda context: seen.append(RUNS_HERE(context)))
    (cpu,) = jax.devices("cpu")[:1]
    alike = types.SimpleNamespace(client=cpu.client, compute_capability="9.0", device_kind=KIND)
    for devices in ([], [alike]):
        monkeypatch.setattr(_compat, "initialized_cuda_devices", lambda devices=devices: devices)
        export() if is_exported else configs(f, *ARRAYS)
    # The program's devices must be among those of the process.
    assert seen == [False, not is_exported]
