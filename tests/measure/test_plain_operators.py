"""Operators are measured as programs run them: below autocast, which has done its work when the step was traced, and
in no more memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.capture.traced_values import tensors_of  # noqa: E402
from elbowroom.measure.plain_operators import _made_up_call  # noqa: E402


class Mixed(nn.Module):
    """Multiplies in two precisions: autocast would make the float32 product a bfloat16 one, and the sum float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            y = torch.tanh(y.float() @ self.second.weight)
        return self.second(y).softmax(-1)


def test_a_fit_inside_autocast_measures_what_will_run(tmp_path, monkeypatch):
    monkeypatch.setenv("ELBOWROOM_CACHE", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(256, 64)
    with torch.autocast("cpu", torch.bfloat16):
        fitted = elbowroom.fit(model, x, budget="1GiB", strict=True, accumulates=True)
    (entry,) = fitted.elbowroom.entries.values()
    captured = entry.graphs[0].measured.captured
    for op, node in zip(captured.graph.ops, captured.nodes, strict=True):
        if op.makes and op.kind != "input":
            assert op.bytes == sum(t.numel() * t.element_size() for t in tensors_of(node)), op.target
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with elbowroom.measure("cpu", timeline=False) as measured:
        with torch.autocast("cpu", torch.bfloat16):
            loss = fitted(x).square().sum()
        loss.backward()
    assert measured.peak_bytes <= entry.plan.peak_bytes - entry.plan.resident_bytes


def taken(function, free_bytes=None):
    """Bytes that measuring the last operator of a function of a batch of 4,096 bytes takes at the most."""
    traced = make_fx(function, tracing_mode="fake")(torch.randn(32, 32))
    node = [node for node in traced.graph.nodes if node.op == "call_function"][-1]
    with elbowroom.measure("cpu", timeline=False) as measured:
        call = _made_up_call(node, {}, free_bytes)
        call()
        call()
    return measured.peak_bytes


def test_inputs_that_share_memory_are_made_up_once():
    assert taken(lambda x: x * x) == 2 * 4096
    assert taken(lambda x: x[:16] * x[16:]) == 4096 + 2048


def test_where_memory_is_short_an_operator_is_measured_over_its_input():
    assert taken(lambda x: x.exp().tanh()) == 2 * 4096
    assert taken(lambda x: x.exp().tanh(), free_bytes=4 * 4096) == 2 * 4096
    assert taken(lambda x: x.exp().tanh(), free_bytes=4 * 4096 - 1) == 4096
    assert taken(lambda x: x.exp() @ x, free_bytes=0) == 3 * 4096  # no product can be
