"""Steps in several graphs: what is made before and between them counts, and so does what comes in another row."""

from __future__ import annotations

import copy
import re
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall  # noqa: E402
from elbowroom.measure.memory import measure  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")

SIZE_BYTES = 64 * 128 * 4  # of one activation


class InParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.last = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def forward(self, x):
        h = self.before(x)
        for layer in self.first:
            h = torch.tanh(layer(h))
        h = self.between(h)
        for layer in self.last:
            h = torch.tanh(layer(h))
        return h

    def before(self, x):
        return x

    def between(self, h):
        torch._dynamo.graph_break()
        return h


class MadeByAGraphWithoutParameters(InParts):
    def before(self, x):
        h = torch.cat([torch.tanh(x), x.softmax(-1)], -1)
        torch._dynamo.graph_break()
        return h[:, 64:192]


class MadeByPython(InParts):
    def before(self, x):
        return _plainly(x)


class MadeBetween(InParts):
    def between(self, h):
        return h * _plainly(h.detach())


class MadeAndKept(InParts):
    """No graph is called with it."""

    def between(self, h):
        torch._dynamo.graph_break()
        self.seen = h.detach().exp().repeat(1, 2)
        torch._dynamo.graph_break()
        return h


class MadeAfterAll(InParts):
    def forward(self, x):
        h = super().forward(x)
        torch._dynamo.graph_break()
        self.seen = h.detach().exp().repeat(1, 2)
        torch._dynamo.graph_break()
        return h


@torch.compiler.disable
def _plainly(x):
    return torch.cat([x.sigmoid(), x.exp()], -1)[:, 64:192]


def at_its_least(model, x, **wishes):
    """Fitted so, and the budget."""
    given = {"loss": functional.mse_loss, "times": "estimate", **wishes}
    try:
        elbowroom.fit(model, *x, budget=1024, **given)
    except BudgetTooSmall as refusal:
        elbowroom.fit(model, *x, budget=refusal.least_budget, **given)
        return refusal.least_budget
    raise AssertionError


def taken_by_step(model, x):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    resident = sum(t.nbytes for t in (*model.parameters(), *gradients, *x))
    with measure("cpu", timeline=False) as measured:
        model(*x).backward()
    return resident + measured.peak_bytes


@pytest.mark.parametrize("kind", [InParts, MadeByAGraphWithoutParameters, MadeByPython, MadeBetween, MadeAndKept])
def test_what_is_made_around_graphs_counts_once_and_steps_that_keep_gradients_fit(kind):
    torch.manual_seed(0)
    model, x = kind(), (torch.randn(64, 128), torch.randn(64, 128))
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budget = at_its_least(model, x)
        for _ in range(4):
            model.zero_grad()
            model(*x).backward()
        model.zero_grad(set_to_none=False)
        taken = taken_by_step(model, x)
    functional.mse_loss(plain(x[0]), x[1]).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    resident = model.elbowroom.plan.resident
    assert resident.get("between graphs", 0) == (0 if kind is InParts else 2 * SIZE_BYTES)
    assert "other" not in resident
    assert taken <= budget


def test_what_is_there_during_the_backward_alone_counts_too():
    model, x = MadeAfterAll(), torch.randn(64, 128)
    elbowroom.fit(model, x, budget="10MiB", times="estimate")
    assert model.elbowroom.plan.resident["between graphs"] == 2 * SIZE_BYTES


def test_the_table_says_what_is_made_around_graphs_in_plain_words():
    model, x = MadeByPython(), torch.randn(64, 128)
    elbowroom.fit(model, x, budget="10MiB", times="estimate")
    words = re.sub(r"\s+", " ", model.elbowroom.table())
    assert "tensors made before and between the planned parts 64 KiB" in words


def test_a_tensor_that_belongs_to_nobody_counts_where_it_is_an_input():
    model, x = InParts(), torch.randn(64, 128)
    table = torch.randn(64, 128)
    model.before = lambda x: x * table
    elbowroom.fit(model, x, budget="10MiB", times="estimate")
    assert model.elbowroom.plan.resident["other"] == SIZE_BYTES
    assert "between graphs" not in model.elbowroom.plan.resident


TAKES = [0]


@torch.compiler.disable
def _takes(h):
    torch.empty(TAKES[0], dtype=torch.uint8)
    return h


class TakesBetween(InParts):
    def between(self, h):
        return _takes(h)


def test_steps_that_keep_gradients_are_watched_when_they_come():
    torch.manual_seed(0)
    model, x = TakesBetween(), (torch.randn(64, 128), torch.randn(64, 128))
    budget = at_its_least(model, x)
    plan = model.elbowroom.plan
    # As much as is free there without gradients, and not with them.
    TAKES[0] = budget - plan.resident_bytes - plan.regions[0].saved_bytes + plan.resident["gradients"] // 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            model(*x).backward()
            model.zero_grad()
        model(*x).backward()
        model.zero_grad(set_to_none=False)
    with pytest.warns(UserWarning, match="more than its budget"):
        model(*x).backward()


class AnyRow(nn.Module):
    """Parts that come, or something little in their place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.parts = nn.ModuleList(nn.Sequential(*(nn.Linear(64, 64), nn.Tanh()) * 6) for _ in range(3))
        self.come = [True] * 3

    def forward(self, x):
        x = self.first(x)
        x = self.parts[0](x) if _comes(self.come, 0) else -x
        x = self.parts[1](x) if _comes(self.come, 1) else -x
        return self.parts[2](x) if _comes(self.come, 2) else -x


@torch.compiler.disable
def _comes(come, n):
    return come[n]


@pytest.mark.parametrize("budget", [3_000_000, 2_000_000])
def test_graphs_that_come_in_another_row_than_planned_fit_beside_each_other_or_it_is_said(budget):
    torch.manual_seed(0)
    model, x = AnyRow(), (torch.randn(512, 64), torch.randn(512, 64))
    plain = copy.deepcopy(model)
    model.come[:] = [True, False, False]
    elbowroom.fit(model, *x, budget=budget, loss=functional.mse_loss, times="estimate")
    said = []
    for come in ([False, True, False], [False, False, True], [True, True, False], [True] * 3):
        model.come[:] = plain.come[:] = come
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                model.zero_grad(set_to_none=False)
                model(*x).backward()
            model.zero_grad(set_to_none=False)
            taken = taken_by_step(model, x)
        said += [str(each.message) for each in caught if "came in an order that was not planned" in str(each.message)]
        assert taken <= budget or said, come
        plain.zero_grad()
        functional.mse_loss(plain(x[0]), x[1]).backward()
        expected = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            gradient = expected[name].grad
            if gradient is None:
                assert parameter.grad is None or not parameter.grad.any()  # zeroed since an earlier step
            else:
                assert torch.equal(parameter.grad, gradient)
    assert not said or budget == 2_000_000
    assert all(region.current == 0 for entry in model.elbowroom.entries.values() for region in entry.regions)
