"""A model's forward as a graph problem."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402


class Small(nn.Module):
    """A convolution whose output is read twice, once through views, and a buffer that nothing returned depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        y = self.conv(x)
        z = F.relu(self.norm(y))
        crop = y[:, :, 1:3, 1:3].flatten(1).unflatten(1, (4, 2, 2)).mean((2, 3))
        return self.head(torch.cat([z.mean((2, 3)), crop], 1)).square().sum()


def test_nodes_are_operators_and_views_are_edges():
    graph = elbowroom.graph_of(Small(), torch.randn(2, 3, 8, 8), time=lambda op: 10 if "conv" in op else 1)
    names = [node.name for node in graph.nodes]
    assert names == ["conv2d", "batch_norm", "relu", "mean", "mean_1", "cat", "linear", "square", "sum_1"]
    assert [node.time for node in graph.nodes] == [10, *[1] * 8]
    assert graph.nodes[0].bytes == 2 * 4 * 8 * 8 * 4
    assert graph.edges == ((0, 1), (0, 3), (1, 2), (2, 4), (3, 5), (4, 5), (5, 6), (6, 7), (7, 8))


def test_nothing_runs_and_times_are_estimated():
    with torch.device("meta"):
        model, x = Small(), torch.empty(2, 3, 8, 8)
    graph = elbowroom.graph_of(model, x)
    assert all(node.time > 0 for node in graph.nodes)
    result = elbowroom.solve(graph, 10**6, "lower-sets")
    assert result.feasible


def test_what_cannot_be_exported_is_said_in_one_line():
    class Asks(nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    with pytest.raises(elbowroom.ElbowroomError, match=r"^model: PyTorch cannot export it") as said:
        elbowroom.graph_of(Asks(), torch.randn(3))
    assert "\n" not in str(said.value)
