"""Exported programs depend on the attributes of targets and on names that their source uses.

``pinned_calls.json`` has both, as in programs exported with this version of the targets. A failure
here means that such programs would no longer run. A changed attribute needs a target with a new
number (``_extension.py``), and headers must keep the names that sources use. With a new number,
``JAX_TCGEMM_PIN=1 pytest -n 0 tests/test_pinned_calls.py`` rewrites the file.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import jax
import pytest
from jaxlib.mlir import ir
from native_calls import custom_calls_of
from test_lowered_calls import PROGRAMS, lowered, of

import jax_tcgemm
from jax_tcgemm import _core
from jax_tcgemm.epilogue import compiler
from jax_tcgemm.kernels import table

pytestmark = pytest.mark.any_jax

_FILE = pathlib.Path(__file__).with_name("pinned_calls.json")
_COMPILED = ("operands", "reductions", "truths and a key", "two weights", "groups", "8 bits")
_LARGE = (of(8192, 64), of(64, 8192), of(8192))
_PINNED: dict[str, Any] = json.loads(_FILE.read_text()) if _FILE.exists() else {}


def _activated(x: Any, w: Any, bias: Any) -> Any:
    return jax_tcgemm.gemm(x, w, bias=bias, activation="gelu").sum()


def _type_of(attribute: ir.Attribute) -> str:
    if isinstance(attribute, ir.StringAttr):
        return "string"
    if isinstance(attribute, ir.BoolAttr):
        return "i1"
    if isinstance(attribute, ir.DenseElementsAttr):
        return f"array of {ir.RankedTensorType(attribute.type).element_type}"
    return str(attribute.type)


def _row_for(attributes: dict[str, Any]) -> str:
    """Returns a row of the call's kind that takes functions."""
    grouped = "m" if attributes["has_groups"] else "none"
    return next(
        row.name
        for row in (*table.CONFIGS, *table.RUN_TIME_CONFIGS)
        if _core.row_facts(row.name).takes_functions
        and not row.streams_b
        and (row.algorithm, row.gated, row.grouped)
        == (attributes["algorithm"], attributes["gated"], grouped)
    )


@pytest.mark.usefixtures("no_gpu", "never_apart")
def test_attributes_are_those_of_exported_programs():
    found: dict[str, dict[str, str]] = {}
    sources = {}
    gradient = ("", jax.grad(_activated, argnums=(0, 1, 2)), _LARGE)
    for name, (_, function, arguments) in {**PROGRAMS, "activation": gradient}.items():
        for target, config in custom_calls_of(lowered(function, arguments)):
            types = {each.name: _type_of(each.attr) for each in config}
            assert found.setdefault(target, types) == types, (target, name)
            if name in _COMPILED and "source" in types:
                values = {each.name: each.attr for each in config}
                named = {
                    "algorithm": ir.StringAttr(values["algorithm"]).value,
                    "gated": ir.BoolAttr(values["gated"]).value,
                    "has_groups": ir.BoolAttr(values["has_groups"]).value,
                }
                text = ir.StringAttr(values["source"]).value
                sources[name] = {"row": _row_for(named), "source": text.splitlines()}
    if os.environ.get("JAX_TCGEMM_PIN"):
        content = {"attributes": found, "sources": sources}
        _FILE.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        return
    assert found == _PINNED["attributes"]


@pytest.mark.parametrize("name", _COMPILED)
def test_headers_have_what_exported_source_uses(name, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_TCGEMM_CACHE_DIR", str(tmp_path))
    pinned = _PINNED["sources"][name]
    layout = "nt" if name == "8 bits" else "nn"
    assert compiler.compile_kernel("\n".join(pinned["source"]) + "\n", pinned["row"], layout)
