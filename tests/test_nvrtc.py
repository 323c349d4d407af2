"""NVRTC is found, and its errors say what is wrong."""

from __future__ import annotations

import pytest

from jax_tcgemm.epilogue import compiler, nvrtc

pytestmark = pytest.mark.any_jax


def test_compiler_is_found():
    found = nvrtc.find()
    assert isinstance(found, nvrtc.Nvrtc), found
    assert found.version >= (12, 5)
    assert (found.headers / "cuda_bf16.h").exists()


def test_errors_carry_the_log():
    found = nvrtc.find()
    assert isinstance(found, nvrtc.Nvrtc)
    with pytest.raises(nvrtc.CompileError, match="nothing_of_this_name"):
        found.compile("int x = nothing_of_this_name;", "sm_90a")


@pytest.mark.parametrize(
    "program",
    ['#include "/etc/passwd"', "%:include <x>", "??=include <x>", "#pragma unroll \\\n#error"],
)
def test_directives_in_a_program_are_refused(program):
    with pytest.raises(nvrtc.CompileError, match="none of ours has"):
        compiler.compile_kernel(program, compiler.source.PASS, "")
