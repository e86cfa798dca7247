"""Layouts that an operator leaves otherwise than tracing says. The operators after it must take them as they are."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Turned(nn.Module):
    """A layer whose gradient arrives turned around, because a convolution follows, and a linear layer before it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.up, self.layer, self.conv = nn.Linear(12, 12), layer, nn.Conv1d(12, 12, 3, padding=1)

    def forward(self, x):
        return self.conv(self.layer(self.up(x)).transpose(1, 2)).sin().mean()


LAYERS = {
    "dropout": nn.Dropout(0.2),
    "hardswish": nn.Hardswish(),
    "relu6": nn.ReLU6(),
    "layer norm": nn.LayerNorm(12),
    "log softmax": nn.LogSoftmax(-1),
    "softmax": nn.Softmax(-1),
    "dropout of a softmax": nn.Sequential(nn.Softmax(-1), nn.Dropout(0.2)),
    "dropout of a log softmax": nn.Sequential(nn.LogSoftmax(-1), nn.Dropout(0.2)),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("budget", ["least", "1MiB"])
def test_a_gradient_that_arrives_turned_around(layer, budget):
    torch.manual_seed(0)
    plain, x = Turned(copy.deepcopy(LAYERS[layer])), torch.randn(8, 6, 12)
    fitted = elbowroom.fit(copy.deepcopy(plain), x, budget="1MiB")
    if budget == "least":
        with pytest.raises(elbowroom.BudgetTooSmall) as refused:
            fitted.elbowroom.set_budget(1)
        fitted.elbowroom.set_budget(refused.value.least_budget)
    for model in (plain, fitted):
        torch.manual_seed(0)
        model(x).backward()
    for expected, found in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
