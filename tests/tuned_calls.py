"""Helpers of tests of measured choices: calls, their lowering, and invented tunings."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from cuda_calls import bf16

from jax_tcgemm import Tunings, gemm
from jax_tcgemm.transforms import tune as tune_module
from jax_tcgemm.tuning.entry import Entry

ROW = "sm90_bf16_128x128x64_s6_c2x1_pingpong"
OTHER = "sm90_bf16_64x64x64_s6_c1x1_cooperative"
KIND = "NVIDIA H200"
SIZES = jnp.asarray([40, 24], jnp.int32)


def f(a, b):
    return gemm(a, b)


E4M3 = jnp.float8_e4m3fn
FEW_ROWS = jnp.zeros((16, 256), E4M3), jnp.zeros((256, 384), E4M3)
H200 = {"sm_count": 132, "shared_memory_per_block": 227 * 1024, "compute_capability": 90}
ARRAYS = bf16(256, 512), bf16(512, 384)
SQUARE = bf16(256, 256), bf16(256, 256)


def lowered(f, *arrays):
    # A new jit, so that no cached program ignores the tuning files.
    anew = jax.jit(lambda *arrays: f(*arrays))
    return anew.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def configs(f, *arrays):
    """Returns the configurations that a program's custom calls name; none is empty."""
    return re.findall(r'(?<!_)config = "([^"]*)"', lowered(f, *arrays))


def entry(config):
    return Entry.measured(config, 1e-6, 2e-6, 1.5e-6)


def problems(f, *arrays):
    return [each.problem for each in tune_module.find_products(f, *arrays)]


def only(f, *types):
    """Returns a function's one product."""
    (product,) = tune_module.find_products(f, *types)
    return product


def tuned(config, f=f, arrays=ARRAYS, kind=KIND):
    return Tunings({(kind, each): entry(config) for each in problems(f, *arrays)})
