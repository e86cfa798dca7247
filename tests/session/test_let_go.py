"""A fitted model that nobody needs any more goes, with its plan and everything that was traced for it."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from elbowroom.errors import BudgetTooSmall  # noqa: E402
from trained import fit  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.last(torch.tanh(self.first(x)))


class InParts(Counting):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        print(end="")
        return self.last(h)


class Untraceable(Counting):
    @torch._dynamo.disable
    def forward(self, x):
        return self.last(self.first(x))


def trained(kind, **options):
    model = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(model, torch.randn(4, 8), budget="1MiB", **options)
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
    return model


def programs_of(model):
    regions = {*model.elbowroom._looker.looks.regions, *model.elbowroom._looker.part_looks.regions}
    return [weakref.ref(ready) for region in regions for ready in region.programs]


@pytest.mark.parametrize("kind", [Counting, InParts, Untraceable])
def test_a_model_goes_although_its_parameters_stay(kind):
    model = trained(kind)
    kept, known = list(model.parameters()), [weakref.ref(model), weakref.ref(model.elbowroom), *programs_of(model)]
    del model
    gc.collect()
    assert all(each() is None for each in known)
    kept[0].sum().backward()  # and nobody is told


def test_a_model_that_was_refused_goes():
    model = Counting()
    known = weakref.ref(model)
    with pytest.raises(BudgetTooSmall):
        fit(model, torch.randn(4, 8), budget=10)
    del model
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("kind", [Counting, InParts])
def test_a_backward_may_come_when_its_model_has_gone(kind):
    model, x = trained(kind), torch.randn(4, 8)
    weight = model.first.weight
    with model.elbowroom.off():
        (expected,) = torch.autograd.grad(model(x).sum(), weight)
    model.zero_grad()
    loss = model(x).sum()
    del model
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
    assert torch.equal(weight.grad, expected)
