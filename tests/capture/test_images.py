"""Which values are images: those around convolutions, and nothing else with four dimensions."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.capture.images import images  # noqa: E402
from tracing import traced  # noqa: E402

aten = torch.ops.aten


def step(model):
    """A training step of a network and its gradients, as a function of the batch and the parameters."""
    names = [name for name, _ in model.named_parameters()]

    def run(x, *parameters):
        leaves = [leaf.detach().requires_grad_() for leaf in (x, *parameters)]
        loss = torch.func.functional_call(model, dict(zip(names, leaves[1:], strict=True)), tuple(leaves[:1])).sum()
        return torch.autograd.grad(loss, leaves)

    return run


def four_dimensional(model, x):
    """All values with four dimensions that somebody reads: images, and others."""
    graph = traced(step(model), x, *model.parameters()).graph
    found = images(graph)
    values = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].dim() == 4]
    return [n for n in values if n in found], [n for n in values if n not in found]


def test_everything_in_a_convolutional_network_is_an_image():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 4, 3)
            self.norm = nn.BatchNorm2d(4, track_running_stats=False)

        def forward(self, x):
            x = self.norm(self.first(x)).relu()
            low = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2)
            return self.second(torch.cat([x, low], 1))[:, :2]

    found, others = four_dimensional(Net(), torch.randn(2, 3, 8, 8))
    assert not others
    assert any(node.target is aten.cat.default for node in found)
    assert any("slice" in str(node.target) for node in found)


def test_heads_of_an_attention_are_none():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.qkv = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 24)

        def forward(self, x):
            x = self.patches(x).flatten(2).transpose(1, 2)
            q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            return (q @ k.transpose(2, 3)).softmax(3) @ v

    found, others = four_dimensional(Net(), torch.randn(2, 3, 8, 8))
    heads = [node for node in others if node.meta["val"].shape[1:] == (2, 16, 4)]
    assert heads
    assert not any(node.meta["val"].shape[1:] in ((2, 16, 4), (2, 16, 16)) for node in found)
    assert any(node.target is aten.convolution.default for node in found)


def test_an_image_that_was_turned_is_none_until_it_is_turned_back():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(3, 6, 3), nn.LayerNorm(6), nn.Conv2d(6, 4, 3)

        def forward(self, x):
            x = self.norm(self.first(x).permute(0, 2, 3, 1)).exp()
            return self.last(x.permute(0, 3, 1, 2).cos())

    found, others = four_dimensional(Net(), torch.randn(2, 3, 8, 8))
    assert {node.target for node in others} >= {aten.exp.default, aten.permute.default}
    assert aten.exp.default not in {node.target for node in found}
    assert aten.cos.default in {node.target for node in found}
