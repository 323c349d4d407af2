"""The log: it prints each decision once, with bounded memory."""

from __future__ import annotations

from jax_tcgemm.problem import log as log_module
from jax_tcgemm.problem.log import log


def test_each_line_once_and_only_if_asked(monkeypatch, capfd):
    monkeypatch.delenv("JAX_TCGEMM_LOG", raising=False)
    log("a line of test_log")
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    log("a line of test_log")
    log("a line of test_log")
    assert capfd.readouterr().err == "jax_tcgemm: a line of test_log\n"


def test_new_lines_for_ever_do_not_fill_memory(monkeypatch, capfd):
    monkeypatch.delenv("JAX_TCGEMM_LOG", raising=False)
    before = log_module.print_once.cache_info().currsize
    for i in range(100):
        log(f"unprinted {i}")
    assert log_module.print_once.cache_info().currsize == before
    assert log_module.print_once.cache_info().maxsize is not None
