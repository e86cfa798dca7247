"""What a compiled program computes and stores: parts of gradients, random numbers that are drawn again."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.capture.operators import draws  # noqa: E402
from elbowroom.capture.rewrites import rewrite  # noqa: E402
from elbowroom.execute import rehearsal  # noqa: E402
from elbowroom.step.program import make_program  # noqa: E402
from elbowroom.step.referee import predict  # noqa: E402
from fusible import needs_compiler  # noqa: E402
from trained import only_entry  # noqa: E402

pytestmark = [needs_compiler, pytest.mark.usefixtures("quick_compiler")]

MARGIN = 2048  # bytes


class Joins(nn.Module):
    """What the first product makes, beside what the others make of it: its gradient waits for theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(32, 16)
        self.between = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        start = x = self.first(x)
        for layer in self.between:
            x = torch.tanh(torch.sin(layer(x)))
        return self.last(torch.cat([start, x], 1)).square().mean()


def test_a_part_of_a_gradient_is_copied_or_stays_a_view(monkeypatch):
    monkeypatch.setattr(rewrite, "_LARGE", 1)
    monkeypatch.setattr(rewrite, "_LONG", {True: 20})
    torch.manual_seed(0)
    model, x = Joins(), torch.randn(256, 16)
    model(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    fitted = elbowroom.fit(model, x, budget="1TiB", loss=lambda loss: loss, kernels="inductor", compilations=1)
    (graph,) = only_entry(fitted).graphs
    region, planner, step = graph.region, graph.planner, graph.planner.graph
    for copies_parts in (False, True):
        region.install(graph.build(make_program(step, step.backward, copies_parts=copies_parts)))
        assert ("force_stride_order" in region.source) == copies_parts
        model.zero_grad()
        fitted(x).backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        measured = rehearsal.launched(region, region.current, 0, planner.around.late_bytes)
        assert measured.peak_bytes <= predict(step, region.program, planner.around).peak_bytes + MARGIN


def test_random_numbers_drawn_again_are_stored_if_they_are_read_twice():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    x = torch.randn(256, 16)
    fitted = elbowroom.fit(model, x, budget="1TiB", loss=lambda y: y.mean(), kernels="inductor", compilations=1)
    (graph,) = only_entry(fitted).graphs
    region, step, cones = graph.region, graph.planner.graph, graph.measured.captured.cones
    (mask,) = (op for op in step.forward if any(map(draws, cones[op][:-1])))
    (dropped,) = (op for op in step.forward if mask in step.ops[op].reads)
    gradients = []
    for again in ([], [mask], [mask, dropped]):
        region.install(graph.build(make_program(step, [*again, *step.backward])))
        assert list(region.program.reruns) == again
        assert ("force_stride_order" in region.source) == (len(again) == 2)
        torch.manual_seed(1)
        fitted.zero_grad()
        fitted(x).backward()
        gradients.append([parameter.grad for parameter in fitted.parameters()])
    for others in gradients[1:]:
        for first, other in zip(gradients[0], others, strict=True):
            assert torch.equal(first, other)
