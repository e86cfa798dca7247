"""Refusals: what fills the least budget is named once, in words that a reader of the model knows."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall  # noqa: E402
from elbowroom.session import planning  # noqa: E402
from elbowroom.session.saying import budget_too_small  # noqa: E402
from trained import fit  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class InThree(nn.Module):
    """Three graphs alike in a row: tracing stops between them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3))

    def forward(self, x):
        x = self.parts[0](x).tanh()
        torch._dynamo.graph_break()
        x = self.parts[1](x).tanh()
        torch._dynamo.graph_break()
        return self.parts[2](x).tanh().square().mean()


def test_nothing_is_named_twice_though_there_are_several_graphs():
    with pytest.raises(BudgetTooSmall) as refusal:
        fit(InThree(), torch.ones(500, 32), budget=1000)
    error = refusal.value
    names = [name for name, _ in error.largest]
    assert len(names) == len(set(names)) == 5
    assert any(name.startswith("what earlier parts of the model saved") for name in names)
    assert sum(size for _, size in error.largest) <= error.least_budget
    said = str(error)
    assert len(set(re.findall(r"[a-z][^,:]* [\d.]+ KiB", said))) == len(re.findall(r"[a-z][^,:]* [\d.]+ KiB", said))
    assert not re.search(r"values saved or in use then|aten\\.|cross", said)


@pytest.mark.parametrize("left", [0, 4096, -512])
def test_what_trials_leave_behind_is_part_of_the_least(monkeypatch, left):
    """On a GPU a library takes its workspace when it first runs: it is there when the named budget is given."""
    model = fit(nn.Linear(8, 8), torch.ones(2, 8), budget="1MiB")
    (entry,) = model.elbowroom.entries.values()
    trials = SimpleNamespace(
        graphs=entry.graphs, least_bytes=0, best=lambda *_: None, measure_least=lambda room: None
    )
    before = iter([10**6, 10**6 + left])
    monkeypatch.setattr(planning, "in_use", lambda device: next(before))
    with pytest.raises(BudgetTooSmall) as refusal:
        planning.plan_on_trial(trials, 1, entry.plan.resident, 1)
    with pytest.raises(BudgetTooSmall) as expected:
        model.elbowroom.set_budget(1)
    assert refusal.value.least_budget == expected.value.least_budget + max(0, left)


def test_the_same_thing_of_several_is_added_up():
    things = [("batch", 10), ("optimizer", 7), ("batch", 20), ("buffers", 0)]
    error = budget_too_small(1, 100, things, "of all", "Do something")
    assert error.largest == [("batch", 30), ("optimizer", 7)]
    assert "The largest things in it: batch 30 B, optimizer state 7 B. Do something" in str(error)


def test_a_table_names_no_account_and_no_crossing():
    x, model = torch.ones(500, 32), nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)))
    plain = elbowroom.plan(model, x, budget="1GiB", times="estimate")
    budget = plain.resident_bytes + (plain.plain_peak_bytes - plain.resident_bytes) * 2 // 3
    plan = elbowroom.plan(model, x, budget=budget, times="estimate")
    assert plan.method.startswith("persistent, ")  # as files and programs know it
    text = " ".join(plan.table().split())
    assert "method computed again stage by stage, " in text
    assert "why the fastest of " in text
    assert not re.search(r"persistent|account|cross|value by value|ways to cut", text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "nothing that it returns depends on a tensor that needs a gradient"),
        ({"loss": lambda output: output.sum()}, "its loss does not depend on a tensor that needs a gradient"),
    ],
)
def test_why_there_is_no_backward(options, said):
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.warns(UserWarning, match=said):
        elbowroom.fit(frozen, torch.ones(2, 4), budget="1MiB", times="estimate", **options)
