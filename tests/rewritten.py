"""A model that a test completes, trained as captured and as written: rewriting its graph must not change a bit."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Model(nn.Module):
    """A convolution, a norm, and whatever a test does with them."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.register_buffer("count", torch.tensor(3))
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def image():
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(5))


def assert_trains_like_eager(capture, forward, *, training=True):
    """Outputs, gradients and buffers of one step from the same state, with everything saved and with nothing."""
    for again, copies_parts in ((False, True), (True, True), (True, False)):
        torch._dynamo.reset()
        model = Model(forward).train(training)
        plain = copy.deepcopy(model)
        captured = capture(model, image())
        got = captured.train(image(), again=again, copies_parts=copies_parts)
        expected = plain(image())
        parts = expected if isinstance(expected, tuple) else (expected,)
        sum(part.square().sum() for part in parts if part.requires_grad).backward()
        for ours, theirs in zip(got if isinstance(got, tuple) else (got,), parts, strict=True):
            assert torch.equal(ours, theirs)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), f"gradient of {name}"
        for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs), name
    return captured
