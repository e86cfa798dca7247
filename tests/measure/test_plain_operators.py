"""Operators are measured as programs run them: below autocast, which has done its work when the step was traced."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.capture.traced_values import tensors_of  # noqa: E402


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
