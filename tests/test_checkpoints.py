"""Weights in 4 bits read from files that the tests write by the formats' public descriptions."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import MODULE, Drawn, awq, compressed, gptq, gptq_v2, named, save

from jax_tcgemm import checkpoints
from jax_tcgemm.quantized.arrays import Quantized
from jax_tcgemm.quantized.packed import PackedWeight, unpack

pytest.importorskip("safetensors")

FORMATS = {
    "gptq": (gptq, {"lowest": 1}),  # the file stores zero points minus 1
    "gptq_v2": (gptq_v2, {}),
    "awq": (awq, {}),
    "compressed-tensors": (compressed, {}),
}
KINDS = [
    pytest.param(form, k, n, group, symmetric, id=f"{form}-{k}x{n}-{group}-{symmetric}")
    for form in FORMATS
    for k, n, group, symmetric in ((256, 40, 128, False), (192, 72, 64, True), (96, 8, -1, False))
    if not (form == "awq" and symmetric)
]
KINDS.append(pytest.param("compressed-tensors", 36, 13, -1, False, id="compressed-tensors-odd"))


@pytest.mark.parametrize(("form", "k", "n", "group", "symmetric"), KINDS)
def test_weights_are_read_bit_for_bit(rng, tmp_path, form, k, n, group, symmetric):
    write, options = FORMATS[form]
    dtype = rng.choice([np.float16, ml_dtypes.bfloat16, np.float32])
    x = Drawn(rng, k, n, group, symmetric=symmetric, dtype=dtype, **options)
    tensors, config = write(x)
    norm = rng.standard_normal(n).astype(ml_dtypes.bfloat16)
    save(tmp_path, named(tensors) | {"model.norm.weight": norm}, config)
    found = checkpoints.load(tmp_path)
    assert set(found) == {f"{MODULE}.weight", "model.norm.weight"}
    np.testing.assert_array_equal(found["model.norm.weight"], norm)
    weight = found[f"{MODULE}.weight"]
    assert isinstance(weight, PackedWeight)
    assert weight.shape == (k, n)
    assert weight.dtype == dtype
    assert weight.has_zeros != symmetric
    np.testing.assert_array_equal(weight.dequantize(), x.array)
    values = np.asarray(unpack(weight).qvalue).astype(int)
    np.testing.assert_array_equal(values, x.codes - (8 if symmetric else 0))
    (unpacked,) = checkpoints.load(
        tmp_path / "model.safetensors", config, keep=lambda name: "up_proj" in name, packed=False
    ).values()
    assert isinstance(unpacked, Quantized)
    assert unpacked.qvalue.dtype == (jnp.int4 if symmetric else jnp.uint4)
    np.testing.assert_array_equal(unpacked.dequantize(), x.array)


def test_several_files(rng, tmp_path):
    modules = ["a.q_proj", "a.k_proj", "b.q_proj"]
    drawn = {module: Drawn(rng, 64, 16, 32, symmetric=True) for module in modules}
    files = dict(
        zip(modules, ("x-1.safetensors", "x-2.safetensors", "x-1.safetensors"), strict=True)
    )
    for file in set(files.values()):
        own = {}
        for module in (m for m in modules if files[m] == file):
            tensors, config = gptq(drawn[module])
            own |= named(tensors, module)
        save(tmp_path, own, config, file)
    save(tmp_path, {"unlisted": np.zeros(3, np.float32)}, config, "y.safetensors")
    names = {f"{module}.qweight": file for module, file in files.items()}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    found = checkpoints.load(tmp_path)
    assert set(found) == {f"{module}.weight" for module in modules}
    for module, x in drawn.items():
        np.testing.assert_array_equal(found[f"{module}.weight"].dequantize(), x.array)
    index.unlink()
    assert "unlisted" in checkpoints.load(tmp_path)
    save(tmp_path, {"unlisted": np.zeros(3, np.float32)}, config, "z.safetensors")
    with pytest.raises(ValueError, match=r"z.safetensors repeats the tensor 'unlisted'"):
        checkpoints.load(tmp_path)


def test_groups_of_compressed_tensors_apply_by_name(rng, tmp_path):
    x, y, z = (Drawn(rng, 64, 16, group, symmetric=True) for group in (32, 64, 64))
    _, config = compressed(x)
    groups = {"group_0": config["config_groups"]["group_0"] | {"targets": ["re:.*up_proj$"]}}
    groups["group_1"] = compressed(y)[1]["config_groups"]["group_0"]
    tensors = named(compressed(x)[0]) | named(compressed(y)[0], "down_proj")
    save(tmp_path, tensors, config | {"config_groups": groups})
    found = checkpoints.load(tmp_path)
    np.testing.assert_array_equal(found[f"{MODULE}.weight"].dequantize(), x.array)
    np.testing.assert_array_equal(found["down_proj.weight"].dequantize(), y.array)
    groups["group_2"] = compressed(z)[1]["config_groups"]["group_0"]
    with pytest.raises(ValueError, match=r"targets=.* applies to the module 'down_proj'"):
        checkpoints.load(tmp_path, config | {"config_groups": groups})


def _weights(**changes: Any) -> dict[str, Any]:
    _, config = compressed(Drawn(np.random.default_rng(), 64, 16, 32, symmetric=True))
    group = config["config_groups"]["group_0"]
    return {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


@pytest.mark.parametrize(
    ("write", "changes", "message"),
    [
        (gptq, {"quant_method": "aqlm"}, r"quant_method='aqlm' .* gptq, awq, compressed-tensors"),
        (gptq, {"quant_method": None}, "quant_method=None"),
        (gptq, {"bits": 3}, "bits=3 cannot be read; accepted: 4"),
        (gptq, {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (gptq, {"pack_dtype": "int64"}, "pack_dtype='int64'"),
        (gptq, {"dynamic": {"-:.*": {}}}, "dynamic="),
        (gptq, {"group_size": 0}, "group_size=0"),
        (gptq, {"group_size": 48}, "group_size=48 cannot be read; accepted: a divisor of k=64"),
        (awq, {"version": "gemv"}, "version='gemv' cannot be read; accepted: gemm"),
        (awq, {"bits": None}, "bits=None"),
        (compressed, {"format": "float-quantized"}, "format='float-quantized'"),
        (compressed, {"config_groups": {}}, "config_groups={}"),
        (compressed, _weights(num_bits=8), r"group_0.weights.num_bits=8"),
        (compressed, _weights(type="float"), r"group_0.weights.type='float'"),
        (compressed, _weights(strategy="tensor"), r"group_0.weights.strategy='tensor'"),
        (compressed, _weights(group_size=None), r"group_0.weights.group_size=None"),
    ],
)
def test_refused_configurations(rng, tmp_path, write, changes, message):
    tensors, config = write(Drawn(rng, 64, 16, 32, symmetric=True))
    save(tmp_path, named(tensors), config | changes)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("input_activations", {"num_bits": 8}, r"input_activations=\{'num_bits': 8\}"),
        ("output_activations", {"num_bits": 8}, r"output_activations=\{'num_bits': 8\}"),
        ("targets", "re:.*", r"targets='re:\.\*'"),
        ("targets", ["re:("], r"targets=\['re:\('\]"),
    ],
)
def test_refused_groups(rng, tmp_path, key, value, message):
    tensors, config = compressed(Drawn(rng, 64, 16, 32, symmetric=True))
    config["config_groups"]["group_0"][key] = value
    save(tmp_path, named(tensors), config)
    with pytest.raises(ValueError, match=f"group_0.{message}"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("config", [[], None])
def test_what_is_no_configuration_is_refused(tmp_path, config):
    save(tmp_path, {"x": np.zeros(3, np.float32)}, config)
    with pytest.raises(ValueError, match=r"config.json: quantization_config="):
        checkpoints.load(tmp_path)


def test_an_array_beside_the_codes_is_refused(rng, tmp_path):
    tensors, config = compressed(Drawn(rng, 64, 16, 32, symmetric=True))
    save(tmp_path, named(tensors | {"weight": np.zeros((16, 64), np.float16)}), config)
    with pytest.raises(ValueError, match=r"up_proj.weight' twice, quantized and not"):
        checkpoints.load(tmp_path)


def test_scales_alone_are_an_array(rng, tmp_path):
    """AWQ also scales activations."""
    x = Drawn(rng, 64, 16, 32, symmetric=False)
    tensors, config = awq(x)
    save(tmp_path, named(tensors) | {"act.scales": np.full(64, 2, np.float16)}, config)
    found = checkpoints.load(tmp_path)
    np.testing.assert_array_equal(found["act.scales"], np.full(64, 2))
    np.testing.assert_array_equal(found[f"{MODULE}.weight"].dequantize(), x.array)


def test_a_module_without_a_name(rng, tmp_path):
    x = Drawn(rng, 64, 16, 32, symmetric=True)
    tensors, config = gptq(x)
    save(tmp_path, tensors, config)
    np.testing.assert_array_equal(checkpoints.load(tmp_path)["weight"].dequantize(), x.array)
    del tensors["qweight"]
    save(tmp_path, tensors, config)
    with pytest.raises(ValueError, match="has no qweight, which"):
        checkpoints.load(tmp_path)


def test_damaged_files(rng, tmp_path):
    tensors, config = gptq(Drawn(rng, 64, 16, 32, symmetric=True))
    save(tmp_path, named(tensors), config)
    index = tmp_path / "model.safetensors.index.json"
    for content, message in (
        ({}, "weight_map=None"),
        ({"weight_map": {}}, "weight_map={}"),
        ({"weight_map": {"lost": "model.safetensors"}}, "lists 'lost', which model.safetensors"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            checkpoints.load(tmp_path)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index.json is no JSON"):
        checkpoints.load(tmp_path)
    index.unlink()
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"model.safetensors is no safetensors file"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("write", [gptq, compressed])
def test_permuted_groups_are_refused(rng, tmp_path, write):
    tensors, config = write(Drawn(rng, 64, 16, 32, symmetric=True))
    key = "g_idx" if write is gptq else "weight_g_idx"
    groups = np.arange(64, dtype=np.int32) // 32
    save(tmp_path, named(tensors | {key: groups}), config | {"desc_act": True})
    assert len(checkpoints.load(tmp_path)) == 1
    at = int(rng.integers(32))
    groups[[at, 32]] = groups[[32, at]]
    save(tmp_path, named(tensors | {key: groups}), config)
    with pytest.raises(ValueError, match=rf"up_proj.{key}\[{at}\]=1 cannot be read; .* permuted"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scales", None, r"has no model\S+up_proj.scales, which the module 'model"),
        ("qweight", None, "has no .*up_proj.qweight"),
        ("qzeros", None, "has no .*up_proj.qzeros"),
        ("qweight", np.zeros((8, 16), np.int64), "qweight.dtype='int64' .* accepted: int32"),
        ("qweight", np.zeros(8, np.int32), r"qweight.shape=\(8,\)"),
        ("scales", np.ones((3, 16), np.float16), r"scales.shape=\(3, 16\) .* \(2, 16\)"),
        ("qzeros", np.zeros((2, 1), np.int32), r"qzeros.shape=\(2, 1\) .* \(2, 2\)"),
        ("qzeros", np.zeros((2, 2), np.int32), r"qzeros=1 .* a zero point of 8, because sym=True"),
        ("weight", np.zeros((16, 64), np.float16), "'model.*up_proj.weight' twice"),
        ("g_idx", np.zeros(0, np.int32), r"g_idx.shape=\(0,\) .* \(64,\)"),
        ("g_idx", np.zeros((64, 1), np.int32), r"g_idx.shape=\(64, 1\)"),
        ("g_idx", np.full(64, -1, np.int32), r"g_idx\[0\]=-1"),
        ("g_idx", np.zeros(64, np.float32), "g_idx.dtype='float32'"),
        ("steps", np.array([1, 2**40]), "steps=1099511627776 .* accepted: values of int32"),
    ],
)
def test_refused_tensors(rng, tmp_path, key, value, message):
    tensors, config = gptq(Drawn(rng, 64, 16, 32, symmetric=True))
    tensors.pop(key, None)
    save(tmp_path, named(tensors | ({} if value is None else {key: value})), config)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path)


def test_the_shape_of_compressed_tensors_is_needed(rng, tmp_path):
    tensors, config = compressed(Drawn(rng, 64, 16, 32, symmetric=True))
    tensors["weight_shape"] = np.array([16, 64, 1])
    save(tmp_path, named(tensors), config)
    with pytest.raises(ValueError, match=r"weight_shape=\[16, 64, 1\]"):
        checkpoints.load(tmp_path)


def test_missing_files(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        checkpoints.load(tmp_path / "no folder")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        checkpoints.load(tmp_path)
    config = {"quant_method": "awq", "bits": 4, "group_size": 128}
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors"):
        checkpoints.load(tmp_path, config)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install 'safetensors"):
        checkpoints.load(tmp_path, config)


def test_a_product_with_a_read_weight(rng, tmp_path, normal):
    x = Drawn(rng, 128, 64, 64, symmetric=False)
    tensors, config = awq(x)
    save(tmp_path, named(tensors), config)
    (weight,) = checkpoints.load(tmp_path).values()
    a = normal(3, 128)
    product = jax.jit(lambda a, w: a @ w.dequantize())(a, weight)
    np.testing.assert_allclose(product, a @ x.array, rtol=1e-4, atol=1e-4)
