"""Fitting draws no random numbers of the user's: a run has the same stream whether operators were measured or not."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402


@pytest.fixture
def nothing_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("ELBOWROOM_CACHE", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 2))


def rows(count):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count))


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize("by_hand", [False, True])
def test_fitting_leaves_the_stream_and_the_model_alone(by_hand):
    model = network()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    elbowroom.fit(model, rows(5), budget="1GiB", stages=list(model) if by_hand else None)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.usefixtures("nothing_measured")
def test_a_new_shape_in_the_middle_of_training_leaves_the_stream_alone():
    model = network()
    plain = copy.deepcopy(model)
    fitted = elbowroom.fit(model, rows(4), budget="1GiB")
    for each in (plain, fitted):
        torch.manual_seed(7)
        for size in (4, 3, 4):
            each(rows(size)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
