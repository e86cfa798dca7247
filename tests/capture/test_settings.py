"""What is set and replaced in PyTorch while it traces, where the calls of threads overlap."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.capture.settings import capture_settings  # noqa: E402


def in_force() -> tuple[bool, int, bool]:
    config, builder = torch._dynamo.config, torch._dynamo.variables.builder
    usual = builder.tensor_always_has_static_shape.__module__.startswith("torch")
    return config.allow_rnn, config.recompile_limit, not usual


def test_of_two_threads_each_has_them_as_long_as_it_needs_them():
    before, found = in_force(), []
    first_is_inside, second_is_inside, first_is_out = (threading.Event() for _ in range(3))

    def second() -> None:
        first_is_inside.wait(10)
        with capture_settings(99):
            second_is_inside.set()
            first_is_out.wait(10)
            found.append(in_force())

    thread = threading.Thread(target=second)
    thread.start()
    with capture_settings(55):
        first_is_inside.set()
        second_is_inside.wait(10)
    first_is_out.set()
    thread.join()
    assert found == [(True, 99, True)]
    assert in_force() == before


def test_a_call_is_planned_while_another_thread_traces(monkeypatch):
    """PyTorch notes for the whole process that something is traced."""
    x = torch.randn(4, 8)
    model = elbowroom.fit(nn.Linear(8, 8), x, budget="1MiB", strict=True)
    monkeypatch.setattr("torch.fx._symbolic_trace._is_fx_tracing_flag", True)
    model(x).sum().backward()
    assert model.weight.grad is not None
