"""Models that hold iterators, and run in parts: looking at them advances none."""

from __future__ import annotations

import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Draws(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.held = held

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h * _drawn(self.held))


@torch.compiler.disable
def _drawn(held):
    return next(held if hasattr(held, "__next__") else held[0])


def generator():
    yield from itertools.count(1.0)


def shared():
    inner = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    return [zip(inner, itertools.cycle([0])), inner]


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.cycle([1.0, 2.0]),
        lambda: itertools.count(1.0),
        lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0]),
        lambda: map(float, range(1, 9)),
        lambda: [itertools.islice(itertools.cycle([1.0, 2.0, 3.0]), 100)],
    ],
)
def test_an_iterator_is_where_it_was_after_fit(make):
    model, x = Draws(make()), torch.randn(4, 8)
    held, other = model.held, Draws(make())
    other.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elbowroom.fit(model, x, budget="1MiB", times="estimate")
        assert model.held is held
        for _ in range(3):
            output = model(x)
            assert torch.equal(output, other(x))
            output.sum().backward()
    assert model.elbowroom.plan.regions


@pytest.mark.parametrize(
    "make", [generator, lambda: [generator()], lambda: map(abs, generator()), lambda: (iter([1.0]),)]
)
def test_one_that_cannot_be_set_back_is_not_advanced_and_that_is_said(make):
    model, x = Draws(make()), torch.randn(4, 8)
    with pytest.warns(UserWarning, match="holds a .*, which could not be set back; stages=") as said:
        elbowroom.fit(model, x, budget="1MiB", times="estimate")
    assert len(said) == 1
    assert _drawn(model.held) == 1.0


def test_iterators_that_share_one_are_copied_together():
    model, x = Draws(shared()), torch.randn(4, 8)
    model.forward = lambda x: model.last(torch.tanh(model.first(x)) * _drawn(model.held)[0])
    elbowroom.fit(model, x, budget="1MiB", times="estimate")
    assert [next(model.held[1]), next(model.held[0])[0]] == [1.0, 2.0]
