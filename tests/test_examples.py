"""The examples run, and they fail when they should."""

import importlib.util
import os
import pathlib
import sys

import jax
import pytest
from nightly import slow

import jax_tcgemm
from jax_tcgemm.lowering import unpacked
from jax_tcgemm.tools.collectives import Collective

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
IN_16_BITS = [
    pytest.param("bfloat16", marks=pytest.mark.any_jax),
    pytest.param("float16", marks=[pytest.mark.any_jax, pytest.mark.nightly]),
]


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up here.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def test_quickstart(capsys):
    load("quickstart").main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert "(8, 256, 128) bfloat16" in lines[5]


@pytest.mark.any_jax
def test_custom_epilogue(capsys):
    load("custom_epilogue").main(["--steps", "12", "--rows", "64", "--features", "32"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("a step: ")


@pytest.mark.any_jax
def test_fused_model(capsys):
    load("fused_model").main(["--steps", "30", "--reps", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert int(lines[-3].split()[0]) >= 4  # products with an epilogue
    assert lines[-1] == "OK: the same losses"


@pytest.mark.any_jax
def test_fused_model_fails_when_losses_part(monkeypatch):
    module = load("fused_model")
    right = jax_tcgemm.fuse

    def halved(f):
        return lambda params, *rest: right(f)(jax.tree.map(lambda x: x / 2, params), *rest)

    monkeypatch.setattr(jax_tcgemm, "fuse", halved)
    with pytest.raises(SystemExit, match=r"FAILED: the losses of step 1 part"):
        module.main(["--steps", "1"])


@pytest.mark.nightly
def test_fp8_training(capsys):
    recipes = ["block", "delayed"]
    sizes = ["--steps", "16", "--layers", "1", "--reps", "1"]
    load("fp8_training").main([*sizes, "--recipes", *recipes])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["step", "bf16", *recipes]
    assert len(lines[-2].split()) == 1 + len(recipes)
    assert lines[-1] == "OK: float8 learns what bfloat16 does"


@pytest.mark.any_jax
def test_fp8_training_fails_when_less_is_learnt(monkeypatch):
    module = load("fp8_training")
    right = module.fp8_dot
    monkeypatch.setattr(module, "fp8_dot", lambda *x, **options: right(*x, **options) * 0)
    with pytest.raises(SystemExit, match=r"FAILED: loss .* by current"):
        module.main(["--steps", "16", "--layers", "1", "--recipes", "current"])


@pytest.mark.any_jax
def test_precision(capsys):
    load("precision").main(["--size", "128", "--steps", "12"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("OK: as accurate as jnp")


@pytest.mark.any_jax
def test_train_digits_learns_as_the_jnp_model_does(capsys):
    load("train_digits").main(["--epochs", "12"])
    output = capsys.readouterr().out
    assert output.splitlines()[-1].startswith("OK: equal within rounding")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_train_digits_on_the_gpu(dtype, capsys):
    load("train_digits").main(["--dtype", dtype])
    output = capsys.readouterr().out
    assert "(gpu)" in output
    assert output.splitlines()[-1].startswith("OK: equal within rounding")


@pytest.mark.parametrize("dtype", IN_16_BITS)
def test_train_digits_in_16_bits(dtype, capsys):
    arguments = ["--epochs", "3", "--accuracy", "0.8", "--members", "2", "--dtype", dtype]
    load("train_digits").main(arguments)
    assert "OK" in capsys.readouterr().out


@pytest.mark.any_jax
def test_train_digits_fails_below_the_accuracy():
    with pytest.raises(SystemExit, match="accuracy is not over"):
        load("train_digits").main(["--epochs", "1", "--members", "1"])


@pytest.mark.any_jax
def test_train_digits_fails_when_the_curves_part(monkeypatch):
    module = load("train_digits")
    right = module.dense_gemm
    monkeypatch.setattr(
        module, "dense_gemm", lambda x, w, bias, last: right(x, w, bias, last) * 1.05
    )
    with pytest.raises(SystemExit, match="losses of epoch"):
        module.main(["--epochs", "2", "--members", "1"])


@pytest.mark.parametrize("dtype", [slow("float32"), *IN_16_BITS])
def test_flax_dense_learns_as_without(dtype, capsys):
    pytest.importorskip("flax")
    load("flax_dense").main(["--epochs", "12", "--accuracy", "0.95", "--dtype", dtype])
    assert capsys.readouterr().out.splitlines()[-1] == "OK: equal within rounding"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_flax_dense_on_the_gpu(dtype, capsys):
    pytest.importorskip("flax")
    load("flax_dense").main(["--dtype", dtype])
    output = capsys.readouterr().out
    assert "(gpu)" in output
    assert output.splitlines()[-1] == "OK: equal within rounding"


@pytest.mark.any_jax
def test_flax_dense_fails_when_the_curves_part(monkeypatch):
    pytest.importorskip("flax")
    module = load("flax_dense")
    right = jax_tcgemm.dot_general
    monkeypatch.setattr(jax_tcgemm, "dot_general", lambda *x, **kw: right(*x, **kw) * 1.05)
    with pytest.raises(SystemExit, match="losses of epoch"):
        module.main(["--epochs", "2"])


@pytest.mark.parametrize("dtype", [slow("float32"), IN_16_BITS[0]])
def test_transformer_mlp(dtype, capsys):
    load("transformer_mlp").main(["--dtype", dtype, "--reps", "2", "--seed", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("OK: the same within rounding")
    assert [line.split()[0] for line in lines[-3:-1]] == ["step,", "memory,"]


@pytest.mark.gpu
def test_transformer_mlp_on_the_gpu(capsys):
    arguments = ["--tokens", "512", "--width", "1024", "--hidden", "3584", "--heads", "8"]
    load("transformer_mlp").main([*arguments, "--kv-heads", "2", "--reps", "4", "--tune"])
    output = capsys.readouterr().out
    assert "(gpu)" in output
    assert "tuned in " in output
    assert output.splitlines()[-1].startswith("OK: the same within rounding")


@pytest.mark.any_jax
def test_transformer_mlp_fails_when_a_gradient_is_off(monkeypatch):
    module = load("transformer_mlp")
    right = module.gated_mlp

    def off(x, gate, up, down, **options):
        return right(x, gate, up, down * 1.05, **options)

    monkeypatch.setattr(module, "gated_mlp", off)
    with pytest.raises(SystemExit, match="over twice the plain block's"):
        module.main([])


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", [slow("float32"), "bfloat16"])
def test_moe_learns_as_with_lax(dtype, capsys):
    load("moe").main(["--epochs", "8", "--accuracy", "0.85", "--experts", "4", "--dtype", dtype])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "OK: equal within rounding"
    assert all("ms a training step" in line for line in lines[-3:-1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moe_on_the_gpu(dtype, capsys):
    load("moe").main(["--dtype", dtype])
    output = capsys.readouterr().out
    assert "(gpu)" in output
    assert output.splitlines()[-1] == "OK: equal within rounding"


@pytest.mark.any_jax
def test_moe_fails_when_the_curves_part(monkeypatch):
    module = load("moe")
    right = jax_tcgemm.ragged_dot
    monkeypatch.setattr(jax_tcgemm, "ragged_dot", lambda *x, **kw: right(*x, **kw) * 1.5)
    with pytest.raises(SystemExit, match="losses of epoch"):
        module.main(["--epochs", "4", "--experts", "3"])


TINY_DECODER = [
    "--batch",
    "2",
    "--tokens",
    "3",
    "--layers",
    "2",
    "--width",
    "64",
    "--hidden",
    "128",
]
TINY_DECODER += ["--heads", "4", "--kv-heads", "2", "--cache", "16", "--vocabulary", "48"]
TINY_DECODER += ["--group", "32", "--reps", "1"]


@pytest.mark.any_jax
def test_quantized_decode(capsys, monkeypatch):
    monkeypatch.setattr(unpacked, "LEAST_VALUES", 1)
    load("quantized_decode").main(TINY_DECODER)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[2:-1]] == ["XLA", "bf16", "int8", "int4", "int4"]
    assert lines[-1][0] == "OK:"


@pytest.mark.any_jax
def test_quantized_decode_fails_when_logits_part(monkeypatch):
    module = load("quantized_decode")
    right = module.jax_tcgemm.quantize
    monkeypatch.setattr(jax_tcgemm, "quantize", lambda x, *rest, **how: right(x * 2, *rest, **how))
    with pytest.raises(SystemExit, match="FAILED: the logits of int8 differ by"):
        module.main([*TINY_DECODER, "--forms", "int8"])


@pytest.fixture
def sharded_transformer(monkeypatch):
    """Returns the example, which sets environment variables when it is imported."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("JAX_TCGEMM_PARTITION", "everywhere")
    return load("sharded_transformer")


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", IN_16_BITS[0]])
def test_sharded_transformer(sharded_transformer, dtype, capsys):
    sharded_transformer.main(["--platform", "cpu", "--steps", "3", "--dtype", dtype])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("OK: equal within rounding")
    assert len(lines) == 10


@pytest.mark.any_jax
def test_sharded_transformer_fails_when_the_losses_part(sharded_transformer, monkeypatch):
    right = sharded_transformer.PRODUCTS["jax_tcgemm"]
    off = right._replace(residual=lambda x, w, r: right.residual(x, w, r) * 1.5)
    monkeypatch.setitem(sharded_transformer.PRODUCTS, "jax_tcgemm", off)
    with pytest.raises(SystemExit, match="the losses"):
        sharded_transformer.main(["--platform", "cpu", "--steps", "2", "--layouts", "data"])


@pytest.mark.any_jax
def test_sharded_transformer_fails_where_more_is_gathered(sharded_transformer, monkeypatch):
    monkeypatch.setattr(
        sharded_transformer,
        "collectives",
        lambda text, devices: [Collective("all-gather", 1.0)] * text.count("tcgemm"),
    )
    with pytest.raises(SystemExit, match="all-gathers where jnp has"):
        sharded_transformer.main(["--platform", "cpu", "--steps", "2", "--layouts", "data"])


@pytest.mark.any_jax
def test_fused_decode(capsys):
    load("fused_decode").main(["--tokens", "3", "--batch", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("tokens a second: ")
    assert lines[-1].startswith("OK: the logits differ by ")
    with pytest.raises(SystemExit, match="2"):
        load("fused_decode").main(["--tokens", "1"])


@pytest.mark.any_jax
def test_fused_decode_fails_when_logits_differ(monkeypatch):
    module = load("fused_decode")
    right = jax_tcgemm.fuse

    def wrong(f):
        fused = right(f)

        def doubled(*args):
            caches, logits = fused(*args)
            return caches, 2 * logits

        doubled.report = fused.report
        return doubled

    monkeypatch.setattr(jax_tcgemm, "fuse", wrong)
    with pytest.raises(SystemExit, match="the logits differ"):
        module.main(["--tokens", "2", "--batch", "2"])


def test_every_example_is_tested():
    names = {"moe", "quickstart", "train_digits", "flax_dense", "transformer_mlp"}
    names |= {"custom_epilogue", "fp8_training", "fused_model", "precision", "sharded_transformer"}
    names |= {"fused_decode", "quantized_decode"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == names
    assert not any(name in sys.modules for name in names)
