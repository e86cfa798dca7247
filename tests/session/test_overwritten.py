"""Tensors that a step overwrites after it has computed with them, in the same graph or in a later part of the step:
what the backward needs of them is kept as it was."""

from __future__ import annotations

import copy
import random
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from trained import fit  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.register_buffer("keys", torch.randn(32, 24))
        self.random = random.Random(3)

    def forward(self, x):
        return self.last(self.between(torch.tanh(self.first(x)))).square().mean()


class Queue(Base):
    """One graph, in which a copy of a buffer is seen through a view."""

    def between(self, h):
        similar = h @ self.keys.clone()[None][0]
        self.keys.mul_(0.9)
        return h * similar.logsumexp(1, keepdim=True)


class Transposed(Base):
    def between(self, h):
        similar = h @ self.keys.clone()
        mixed = similar @ self.keys.clone().t()
        self.keys.mul_(0.9)
        return h * mixed


class InALaterPart(Base):
    """Tracing ends where a private generator draws; afterwards, the buffer is overwritten."""

    def between(self, h):
        h = h * self.keys[:, 0].sin().exp()
        factor = self.random.random()
        self.keys.mul_(0.9)
        return h * factor


class ActivationInALaterPart(Base):
    def between(self, h):
        h = h * 1.5
        grown = h.exp()
        factor = self.random.random()
        h.relu_()
        return grown * factor + h


class MomentumContrast(nn.Module):
    """As in MoCo: an encoder that follows another, by new data for its parameters, and a queue of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.follower = (nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32)) for _ in range(2))
        self.follower.requires_grad_(False)
        self.register_buffer("keys", F.normalize(torch.randn(32, 24), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        for leader, follower in zip(self.first.parameters(), self.follower.parameters(), strict=True):
            follower.data = follower.data * 0.9 + leader.data * 0.1

    @torch.no_grad()
    def append(self, keys):
        place = int(self.place)
        self.keys[:, place : place + len(keys)] = keys.T
        self.place[0] = (place + len(keys)) % 24

    def forward(self, x):
        query = F.normalize(self.first(x), dim=1)
        with torch.no_grad():
            self.follow()
            order = torch.randperm(len(x))
            key = F.normalize(self.follower(x[order]), dim=1)[torch.argsort(order)]
        positive = torch.einsum("nc,nc->n", [query, key]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [query, self.keys.clone().detach()])
        self.append(key)
        return F.cross_entropy(torch.cat([positive, negative], dim=1) / 0.07, torch.zeros(len(x), dtype=torch.long))


@pytest.mark.parametrize("kind", [Queue, Transposed, InALaterPart, ActivationInALaterPart, MomentumContrast])
def test_gradients_are_of_what_was_there(kind):
    torch.manual_seed(0)
    plain, x = kind(), torch.randn(8, 16)
    ours = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(ours, x, budget="1MiB", strict=True)
        for model in (plain, ours):
            torch.manual_seed(1)
            for _ in range(4):
                model(x).backward()
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    for (name, p), q in zip(plain.named_buffers(), ours.buffers(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.slow  # a compiler runs
def test_fused_kernels_keep_it_too():
    torch.manual_seed(0)
    plain, x = Queue(), torch.randn(8, 16)
    ours = copy.deepcopy(plain)
    fit(ours, x, budget="1MiB", kernels="inductor")
    for model in (plain, ours):
        for _ in range(3):
            model(x).backward()
    torch.testing.assert_close(ours.first.weight.grad, plain.first.weight.grad)
