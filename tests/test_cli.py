"""The commands of ``jax-tcgemm``."""

import types

import jax.numpy as jnp
import pytest

from jax_tcgemm import PackedWeight, Tunings, cli
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.tuning import cache
from jax_tcgemm.tuning.entry import Entry

pytestmark = pytest.mark.any_jax


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.SETTING, str(tmp_path))
    return tmp_path


@pytest.fixture
def tuned(monkeypatch):
    """Products that ``tune`` was asked for, on a GPU that is not there."""
    asked = []

    def tune(function, a, b, *, progress):
        dtype = f"packed {b.qtype}" if isinstance(b, PackedWeight) else a.dtype
        asked.append((function.keywords, a.shape, b.shape, dtype))
        problem = f'{{"n": {len(asked)}}}'
        return Tunings({("a GPU", problem): Entry(None, 1e-6, 1e-6, 2e-6)})

    monkeypatch.setattr(cli, "tune", tune)
    monkeypatch.setattr(cli, "default_device", lambda: types.SimpleNamespace(platform="gpu"))
    return asked


def test_doctor(monkeypatch, capsys):
    monkeypatch.setattr(kernel_table, "CONFIGS", kernel_table.CONFIGS[:1])
    assert cli.main(["doctor", "--seed", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("jax_tcgemm:")
    assert lines[-1] == "OK"


def test_nothing_is_timed_without_a_kernel(monkeypatch, capsys):
    monkeypatch.setattr(cli, "default_device", lambda: types.SimpleNamespace(platform="cpu"))
    assert cli.main(["bench"]) == 0
    assert "No speed table: " in capsys.readouterr().out
    assert cli.main(["tune", "8x8x8"]) == 1
    assert "no GPU" in capsys.readouterr().out


def test_tune_keeps_choices_in_the_cache(tuned, folder, capsys):
    assert cli.main(["tune", "16x32x64", "8X8x8", "--dtype", "float16", "--transpose-b"]) == 0
    flags = {"transpose_a": False, "transpose_b": True}
    assert tuned == [
        (flags, (16, 64), (32, 64), jnp.float16),
        (flags, (8, 8), (8, 8), jnp.float16),
    ]
    assert len(cache.everything()) == 2
    assert "xla" in capsys.readouterr().out.lower()


def test_tune_writes_a_file(tuned, folder):
    path = folder / "tunings.json"
    assert cli.main(["tune", "16x32x64", "--transpose-a", "--out", str(path)]) == 0
    assert tuned[0][1:3] == ((64, 16), (64, 32))
    assert len(Tunings.load(path)) == 1
    assert not len(cache.everything())


def test_choices_that_cannot_be_kept_are_an_error(tuned, monkeypatch, capsys):
    monkeypatch.setenv(cache.SETTING, "")
    assert cli.main(["tune", "16x32x64"]) == 1
    assert "not kept" in capsys.readouterr().out
    assert cli.main(["cache"]) == 1
    assert "no cache folder" in capsys.readouterr().out


def test_tune_with_packed_weights(tuned, folder, capsys):
    assert cli.main(["tune", "16x32x256", "--weight", "int4", "--group", "128"]) == 0
    assert cli.main(["tune", "16x32x256", "--weight", "int8", "--dtype", "float16"]) == 0
    assert tuned == [({}, (16, 256), (256, 32), f"packed {q}") for q in ("int4", "int8")]
    assert cli.main(["tune", "16x32x256", "--weight", "int8", "--transpose-b"]) == 1
    assert "packed weights have no transpose" in capsys.readouterr().out


@pytest.mark.parametrize("product", ["16x32", "ax2x3", "0x1x1", "1x2x3x4"])
def test_what_is_no_product_is_refused(product, capsys):
    with pytest.raises(SystemExit):
        cli.main(["tune", product])
    assert f"MxNxK: '{product}' is " in capsys.readouterr().err


def test_unknown_dtype_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["tune", "8x8x8", "--dtype", "bf16"])
    assert "'bf16' is no dtype; accepted: " in capsys.readouterr().err


def test_cache(tuned, folder, capsys):
    assert cli.main(["tune", "16x32x64"]) == 0
    (folder / "cubins-3").mkdir()
    (folder / "cubins-3" / "kernel").write_bytes(b"x" * 1000)
    (folder / "of the user").write_text("stays")
    capsys.readouterr()
    saved = folder / "saved.json"
    assert cli.main(["cache", "--save", str(saved)]) == 0
    assert "measured choices: 1" in capsys.readouterr().out
    assert len(Tunings.load(saved)) == 1
    assert cli.main(["cache", "--clear"]) == 0
    assert "measured choices: 0" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"of the user", "saved.json"}


@pytest.mark.parametrize(
    "arguments",
    [["--seed", "7", "--jobs", "2", "doctor"], ["doctor", "--seed", "7", "--jobs", "2"]],
)
def test_options_may_stand_before_the_command(monkeypatch, arguments):
    seen = []
    monkeypatch.setattr(cli.doctor, "print_installation", lambda device: None)
    monkeypatch.setattr(cli.doctor, "run_checks", lambda *given: seen.append(given[1:]))
    assert cli.main(arguments) == 0
    assert seen == [(7, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--jobs", "0"], "0 is too small; accepted: 1 and more"),
        (["--seed", "-1"], "-1 is too small; accepted: 0 and more"),
        (["tune", "8x8x8", "--weight", "int4", "--group", "0"], "accepted: 1 and more or -1"),
        (["tune", "8x8x8", "--dtype", "str"], "'str' holds no numbers"),
        (["tune", "8x8x8", "--group", "x"], "invalid integer value"),
    ],
)
def test_refused_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_errors_are_lines(tuned, folder, monkeypatch, capsys):
    lost = folder / "lost" / "choices.json"
    assert cli.main(["tune", "8x8x8", "--out", str(lost)]) == 1
    assert not tuned
    assert f"no folder {lost.parent}" in capsys.readouterr().out
    assert cli.main(["cache", "--save", str(lost)]) == 1
    assert f"jax-tcgemm: [Errno 2] No such file or directory: '{lost}'" in capsys.readouterr().err
    monkeypatch.setenv("JAX_TCGEMM_TUNING", "foo")
    assert cli.main(["cache"]) == 1
    assert "jax-tcgemm: JAX_TCGEMM_TUNING" in capsys.readouterr().err


def test_clear_removes_whatever_has_such_a_name(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kept").touch()
    (folder / "tunings-1").symlink_to(elsewhere)
    (folder / "cubins-x").touch()
    (folder / "cubins-y").mkdir()
    assert cli.main(["cache", "--clear"]) == 0
    assert not [*folder.iterdir()]
    assert (elsewhere / "kept").exists()
