"""What a plan says of moves is what a step does: on the host, in parts, with several forwards, and from a file."""

from __future__ import annotations

import gc
import json

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.measure.host_memory import held_bytes  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)))


class Halves(nn.Module):
    """Six layers, in one graph or in two."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.first, self.second = layers(), layers()
        self.parts = parts

    def forward(self, x):
        x = self.first(x)
        if self.parts == 2:
            torch._dynamo.graph_break()
        return self.second(x).square().mean()


def fitted(parts: int, forwards: int, share: float):
    """A model whose step has a share of the memory that it would like."""
    model, x = Halves(parts), torch.randn(256, 32)
    wishes = {"times": "estimate", "kernels": "torch", "forwards": forwards}
    plain = elbowroom.plan(model, x, budget="1GiB", **wishes)
    budget = plain.resident_bytes + int(share * (plain.peak_bytes - plain.resident_bytes))
    moves = {"offload": "always", "link": "100MB/s", "host_budget": "4MiB"}
    return elbowroom.fit(model, x, budget=budget, **wishes, **moves), x, wishes


@pytest.mark.parametrize(("parts", "forwards", "share"), [(1, 1, 0.5), (1, 1, 0.8), (2, 1, 0.7), (1, 2, 0.8)])
def test_a_step_has_on_the_host_what_its_plan_says(parts, forwards, share, tmp_path):
    gc.collect()
    others = held_bytes()
    model, x, wishes = fitted(parts, forwards, share)
    plan = model.elbowroom.plan
    assert len(plan.regions) == parts * forwards
    assert 0 < plan.host_bytes <= plan.host_budget_bytes == 4 * 2**20
    assert plan.moved_bytes("to host") == plan.moved_bytes("from host") == plan.host_bytes
    assert plan.platform.rate_to_host == 100e6
    assert plan.copying_s == pytest.approx(2 * plan.host_bytes / 100e6)
    line = plan.timeline
    assert sum(span.moved_bytes for span in line.transfers) == 2 * plan.host_bytes
    assert all(0 <= span.start < span.end <= line.time for span in line.transfers)
    with elbowroom.measure("cpu", timeline=False) as step:
        sum(model(x) for _ in range(forwards)).backward()
    assert step.host_bytes - others == plan.host_bytes
    plan.save(tmp_path / "plan.json")
    for p in model.parameters():
        p.grad = None
    again = elbowroom.fit(model, x, budget=plan.budget_bytes, plan=tmp_path / "plan.json", **wishes)
    assert json.dumps(again.elbowroom.plan.to_json()) == json.dumps(plan.to_json())
