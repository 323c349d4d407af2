"""The bytes of collectives, read from compiled programs as XLA's compilers print them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from sharded_checks import put
from sharded_program import mesh_of

from jax_tcgemm.tools.collectives import collectives

pytestmark = pytest.mark.any_jax

LINES = {
    # 16 x 32 of float32; the device already has half
    "%all-gather = f32[16,32]{0,1} all-gather(%x), channel_id=1, replica_groups=[4,2]<=[8], "
    "dimensions={1}": ("all-gather", 1024),
    "ROOT %psum.5 = f32[64,48]{1,0} all-reduce(%y), channel_id=1, "
    "replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true": ("all-reduce", 18432),
    "%all-reduce = (bf16[8,8]{1,0}, f32[8]{0}) all-reduce(%a, %b), "
    "replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2] {'axis_1'}, to_apply=%add": (
        "all-reduce",
        2 * 0.75 * 160,
    ),
    "%all-gather.3 = f32[32,48]{1,0} all-gather(%p), replica_groups=mesh['axis_0'=2,'axis_1'=1,"
    "'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_0'}, dimensions={0}": ("all-gather", 3072),
    "%reduce-scatter = f32[16,48]{1,0} reduce-scatter(%y), replica_groups={{0,1,2,3}}, "
    "dimensions={0}": ("reduce-scatter", 3 * 3072),
    "%all-to-all.5 = (f32[1,8]{1,0}, f32[1,8]{1,0}) all-to-all(%a, %b), "
    "replica_groups={{0,1},{2,3}}": ("all-to-all", 32),
    # to half of the devices; one of them sends to itself
    "%collective-permute = f32[16,24]{1,0} collective-permute(%x), channel_id=1, "
    "source_target_pairs={{0,0},{2,3},{4,5},{6,7}}": ("collective-permute", 1536 * 3 / 8),
    # an asynchronous collective has its operand beside its result
    "%all-gather-start = (bf16[8,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), "
    "replica_groups={{0,1}}, dimensions={0}": ("all-gather", 128),
    "%all-gather-start.2 = ((f32[8], f32[4]), (f32[16], f32[8])) all-gather-start(%x, %y), "
    "replica_groups={{0,1}}, dimensions={0}": ("all-gather", 48),
    "%collective-permute-start = (f32[16], f32[16], u32[], u32[]) collective-permute-start(%x), "
    "source_target_pairs={{0,1},{1,0}}": ("collective-permute", 16),
    "%all-reduce-start.1 = bf16[64]{0} all-reduce-start(%x), replica_groups={}, to_apply=%add": (
        "all-reduce",
        2 * 7 / 8 * 128,
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line(line):
    (found,) = collectives(f"  {line}\n  %other = f32[2]{{0}} add(%a, %b)", 8)
    assert (found.kind, found.received) == LINES[line]


def test_what_waits_is_no_other_collective():
    text = "%all-gather-done = bf16[16,8]{1,0} all-gather-done(%all-gather-start)"
    assert collectives(text, 8) == []


def test_a_group_of_one_receives_nothing():
    text = "%all-reduce = f32[8]{0} all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%add"
    assert collectives(text, 8) == []


def _text(step):
    x = put(mesh_of(), jnp.ones((16, 16)), "x")
    w = put(mesh_of(), jnp.ones((16, 16)), None, "x")
    return jax.jit(step).lower(x, w).compile().as_text()


def layer(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w), jnp.tanh, x)


def test_a_loop_counts_as_often_as_it_runs():
    def loop(x, w):
        return jax.lax.fori_loop(0, 3, lambda _, x: layer(x, w * (1 + x[:1].T)), x)

    texts = [_text(step) for step in (loop, lambda x, w: layer(x, w * (1 + x[:1].T)))]
    found = [sorted(collectives(text, 8)) for text in texts]
    assert found[1]
    assert found[0] == sorted(3 * found[1])
    # Other printers omit the percent signs.
    assert sorted(collectives(texts[0].replace("%", ""), 8)) == found[0]


def test_a_loop_of_unknown_length_counts_once_and_so_does_what_it_asks():
    text = _text(lambda x, w: jax.lax.while_loop(lambda x: x.sum() < 1e6, lambda x: 2 * x, x))
    assert [each.kind for each in collectives(text, 8)] == ["all-reduce"]


def test_what_runs_beside_counts_once():
    text = """
%beside (x: f32[8]) -> f32[16] {
  %all-gather = f32[16]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: f32[8]) -> f32[16] {
  %start = ((f32[8]), f32[16]) async-start(%x), calls=%beside
  %done = f32[16] async-done(%start), calls=%beside
}
"""
    assert [each.kind for each in collectives(text, 8)] == ["all-gather"]
