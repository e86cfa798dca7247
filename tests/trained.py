"""A small network, fitted so that it must recompute, to be trained beside the original: everything must be equal."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import elbowroom
from elbowroom.errors import BudgetTooSmall

fit = partial(elbowroom.fit, times="estimate")  # faster, and what is computed does not depend on it


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(F.relu(self.norm(self.conv(x)), inplace=True))


class Net(nn.Module):
    """Convolutions, BatchNorm, dropout, an in-place ReLU at the border of every block."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(16, 5)

    def forward(self, x, y=None):
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu_(block(x))
        logits = self.head(x.mean((2, 3)))
        return logits if y is None else F.cross_entropy(logits, y)


class Embeds(nn.Module):
    """Words from a table; the options are those of `nn.Embedding`."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 8, **options), nn.Linear(8, 8)

    def forward(self, tokens):
        return torch.tanh(self.layer(torch.tanh(self.table(tokens)))).square().mean()


def batch(size: int = 4, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 12, 12, generator=generator), torch.randint(5, (size,), generator=generator)


def tight(model, *example, share: float = 0.5, **options):
    """A fitted model whose activations get a share of what they would like, or the least they can do with."""
    fitted = fit(model, *example, budget="1TiB", **options)
    (entry,) = fitted.elbowroom.entries.values()
    resident = entry.plan.resident_bytes
    budget = resident + int(share * (entry.plan.plain_peak_bytes - resident))
    try:
        fitted.elbowroom.set_budget(budget)
    except BudgetTooSmall as too_small:
        fitted.elbowroom.set_budget(too_small.least_budget)
    return fitted


def recomputes(fitted) -> bool:
    return any(region.program.reruns for entry in fitted.elbowroom.entries.values() for region in entry.regions)


def only_entry(fitted):
    (entry,) = fitted.elbowroom.entries.values()
    return entry


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), f"gradient of {name}"
        assert torch.equal(p, q), name
    for (name, p), q in zip(a.named_buffers(), b.buffers(), strict=True):
        assert torch.equal(p, q), name


def both(model, run, *example, **options):
    """Run the same thing on the original and on a fitted copy, from the same seed, and compare everything."""
    ours = copy.deepcopy(model)
    fitted = tight(ours, *example, **options)
    assert recomputes(fitted)
    torch.manual_seed(7)
    expected = run(model)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    got = run(fitted)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_state(model, ours)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, got)
    return fitted
