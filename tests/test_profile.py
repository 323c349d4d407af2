"""A step's times by kernel: the kinds of instructions, and a step on this machine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jax_tcgemm import fuse
from jax_tcgemm.tools.profile import Event, account, comparison, instructions, profile

# Lines as XLA's compilers write them.
PROGRAM = """HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body.1 (p0: bf16[64,32], p1: bf16[32,16]) -> bf16[64,16] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}
}

%body.2 (p2: f32[64,16]) -> (f32[64], f32[]) {
  %p2 = f32[64,16]{1,0} parameter(0)
  %row = f32[64]{0} reduce(%p2, %zero), dimensions={1}, to_apply=%add
  ROOT %both = (f32[64]{0}, f32[]) tuple(%row, %all)
}

%body.3 (p3: bf16[64,16]) -> f32[16,64] {
  %p3 = bf16[64,16]{1,0} parameter(0)
  %wide = f32[64,16]{1,0} convert(%p3)
  ROOT %turned = f32[16,64]{1,0} transpose(%wide), dimensions={1,0}
}

%body.4 (p4: bf16[64,16]) -> bf16[64,16] {
  %p4 = bf16[64,16]{1,0} parameter(0)
  ROOT %tanh = bf16[64,16]{1,0} tanh(%p4)
}

ENTRY %main.9 (x: bf16[64,32], w: bf16[32,16]) -> f32[] {
  %gemm_fusion = bf16[64,16]{1,0} fusion(%x), calls=%body.1, metadata={op_name="jit(step)/dot"}
  %cublas.2 = (bf16[64,16]{1,0}, s8[128]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm"
  %gemm.1 = s8[8] custom-call(%x), custom_call_target="jax_tcgemm_gemm_v1", metadata={op_name="a"}
  %ffi_call.2 = bf16[64,16]{1,0} custom-call(%x), custom_call_target="jax_tcgemm_compiled_gemm_v4"
  %ffi_call.3 = bf16[16,64]{1,0} custom-call(%x), custom_call_target="jax_tcgemm_transpose_v1"
  %pack.4 = u8[1,1,128,16]{3,2,1,0} custom-call(%x), custom_call_target="jax_tcgemm_pack_v1"
  %packed.5 = bf16[64,16]{1,0} custom-call(%x), custom_call_target="jax_tcgemm_packed_v1"
  %theirs = f32[2]{0} custom-call(%x), custom_call_target="TopK"
  %conv = (bf16[8,8]{1,0}, u8[0]{0}) custom-call(%x, %w), custom_call_target="__cudnn$convForward"
  %input_reduce_fusion = (f32[64]{0}, f32[]) fusion(%a), kind=kInput, calls=%body.2
  %turning = f32[16,64]{1,0} fusion(%gemm.1), kind=kLoop, calls=%body.3
  %loop_tanh = bf16[64,16]{1,0} fusion(%gemm.1), kind=kLoop, calls=%body.4
  %all-reduce-start = f32[64]{0} all-reduce-start(%b), to_apply=%add
  %while.5 = (s32[], f32[64]{0}) while(%init), condition=%less, body=%more
  %copy.1 = f32[64]{0:T(64)} copy(%b)
  ROOT %wrapped = f32[] reduce(%b, %zero), dimensions={0}, to_apply=%add
}
"""

KINDS = {
    "gemm_fusion": "products, XLA's",
    "cublas.2": "products, XLA's",
    "gemm.1": "products, ours",
    "ffi_call.2": "products with functions, ours",
    "ffi_call.3": "copies and transposes",
    "pack.4": "copies and transposes",
    "packed.5": "products, ours",
    "theirs": "other calls",
    "conv": "convolutions, XLA's",
    "input_reduce_fusion": "reductions",
    "turning": "copies and transposes",
    "loop_tanh": "elementwise",
    "all-reduce-start": "collectives",
    "while.5": "control",
    "copy.1": "copies and transposes",
    "wrapped": "reductions",
}


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_an_instruction(name):
    assert instructions(PROGRAM)[name].kind == KINDS[name]


def test_shapes_and_sources():
    found = instructions(PROGRAM)
    assert found["gemm_fusion"][1:] == ("bf16[64,16]", "jit(step)/dot")
    assert found["input_reduce_fusion"].shape == "(f32[64], f32[])"
    assert found["copy.1"].source == ""


def test_times_are_means_of_steps_and_of_one_program_alone():
    seen = [
        Event("gpu:0", "jit_step", "gemm.1", 3000.0),
        Event("gpu:0", "jit_step", "gemm.1", 1000.0),
    ] * 2
    seen += [
        Event("gpu:0", "jit_step", "loop_tanh", 500.0),
        Event("gpu:0", "jit_copy", "copy.1", 9e9),
    ]
    seen.append(Event("gpu:0", "jit_step", "memset.7", 100.0))
    found = account(PROGRAM, seen, steps=2)
    assert [(x.name, x.us, x.kernels) for x in found.entries] == [
        ("gemm.1", 4.0, 2.0),
        ("loop_tanh", 0.25, 0.5),
        ("memset.7", 0.05, 0.5),
    ]
    assert found.by_kind() == {"products, ours": 4.0, "elementwise": 0.25, "other": 0.05}
    assert found.us == pytest.approx(4.3)
    table = comparison({"one": found, "two": account(PROGRAM, seen[:1], steps=1)})
    assert table.splitlines()[1].split() == ["products,", "ours", "4.0", "3.0"]
    assert table.splitlines()[-1].split() == ["all", "4.3", "3.0"]
    assert "gemm.1 s8[8] [products, ours] a" in str(found)


def test_devices_count_once_and_what_runs_others_does_not():
    seen = [Event(f"gpu:{i}", "jit_step", "loop_tanh", 1000.0) for i in range(4)]
    seen += [Event(f"gpu:{i}", "jit_step", "while.5", 5000.0) for i in range(4)]
    found = account(PROGRAM, seen, steps=1)
    assert [(x.name, x.us, x.kernels) for x in found.entries] == [("loop_tanh", 1.0, 1.0)]


def test_what_cannot_be_profiled():
    with pytest.raises(ValueError, match="bound to the function"):
        profile(jax.jit(lambda x, n: x * n, static_argnums=1), jnp.ones(3), 3)
    with pytest.raises(ValueError, match="at least 1"):
        profile(jnp.sin, jnp.ones(3), steps=0)


def test_a_step_here():
    def step(state, x):
        y = jnp.tanh(x @ state["w"])
        return {"w": state["w"] + 1e-3 * (x.T @ y), "at": state["at"] + 1}, y.sum()

    state = {"w": jnp.full((256, 256), 0.01), "at": 1.5}
    x = jnp.ones((128, 256))
    for f in (step, jax.jit(step, donate_argnums=0), fuse(step)):
        found = profile(f, state, x, steps=2)
        assert found.us > 0
        assert {entry.what.kind for entry in found.entries} & {"products, XLA's", "products, ours"}
    assert not state["w"].is_deleted()
