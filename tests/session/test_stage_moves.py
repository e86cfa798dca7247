"""Models that run stage by stage with values that move to the host, planned and run by `fit`."""

from __future__ import annotations

import copy
import gc

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall, HostMemoryRefused  # noqa: E402
from elbowroom.execute.by_stages.waiting import Release  # noqa: E402
from elbowroom.measure import host_memory  # noqa: E402
from fitted import least_budget, step_peak  # noqa: E402
from staged import Block  # noqa: E402
from trained import assert_same_state, only_entry  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")
X = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))


def loss(output):
    return output.square().mean()


def fitted(budget="1GiB", **wishes):
    """A row of blocks whose values move wherever the budget does not hold everything, and a copy of it as it was."""
    torch.manual_seed(2)
    model = nn.Sequential(*(Block(32) for _ in range(6)))
    plain = copy.deepcopy(model)
    wishes = {"offload": "always", "host_budget": "64MiB", "link": "4GB/s", **wishes}
    return elbowroom.fit(model, X, budget=budget, stages=list(model), loss=loss, **wishes), plain


def within(model, part):
    """Plan a fitted model again, between its least budget and what the plain step takes."""
    least, plan = least_budget(model), only_entry(model).plan
    model.elbowroom.set_budget(int(least + part * (plan.plain_peak_bytes - least)))
    return only_entry(model)


def moves(entry):
    return any(isinstance(operation, Release) for operation in entry.runner.schedule)


def steps(model, plain, count=2):
    for each in (model, plain):
        each.zero_grad()
    for _ in range(count):
        torch.manual_seed(5)
        model(X).backward()
        torch.manual_seed(5)
        loss(plain(X)).backward()
    assert_same_state(plain, model)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
def test_steps_are_plain_ones_and_keep_both_budgets(part):
    model, plain = fitted()
    held = host_memory.held_bytes()
    assert not moves(only_entry(model))
    entry = within(model, part)
    assert moves(entry)
    steps(model, plain)
    plan, resident = entry.plan, entry.plan.resident_bytes
    assert step_peak(model, (X,), kept=True) <= plan.peak_bytes - resident <= plan.budget_bytes - resident
    assert host_memory.held_bytes() - held == entry.runner.host_bytes <= 64 << 20
    host_memory.begin_counting()
    steps(model, plain, count=3)
    assert host_memory.most_bytes() - held == entry.runner.host_bytes, "no step takes more"
    assert plan.host_bytes == entry.runner.host_bytes
    assert plan.host_budget_bytes == 64 << 20
    assert plan.moved_bytes("to host") == sum(
        module.moved_bytes for region in plan.regions for module in region.modules
    )
    assert 0 <= plan.waits_s <= plan.copying_s
    assert "   to host │" in plan.picture()
    assert "4 GB/s to the host, 4 GB/s back" in plan.table()
    assert elbowroom.Plan.from_json(plan.to_json()) == plan


def test_a_least_budget_that_is_named_can_be_had():
    model, plain = fitted()
    least = least_budget(model)
    with pytest.raises(BudgetTooSmall, match="host_budget"):
        model.elbowroom.set_budget(least - 1)
    model.elbowroom.set_budget(least)
    steps(model, plain)


def test_moving_reaches_further_than_running_again():
    """Inner activations are small beside the stages' inputs, which recomputation alone must hold or make from the
    first."""

    def row():
        torch.manual_seed(2)
        return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))

    x = torch.randn(2048, 256)
    least = {}
    for offload in ("never", "always"):
        model = row()
        wishes = {"offload": offload, "host_budget": "64MiB", "link": "4GB/s"}
        elbowroom.fit(model, x, budget="1GiB", stages=list(model), loss=loss, **wishes)
        least[offload] = least_budget(model)
    assert least["always"] <= least["never"]
    model.elbowroom.set_budget(least["always"])
    model(x).backward()


def test_a_small_host_budget_is_kept():
    tight, plain = fitted(host_budget="1MiB")
    entry = within(tight, 0.5)
    assert 0 < entry.runner.host_bytes <= 1 << 20
    steps(tight, plain)
    none, plain = fitted(host_budget=0)
    assert not moves(within(none, 0.2))
    steps(none, plain)


def test_nothing_moves_where_nobody_asks_for_it():
    for offload in ("never", "auto"):  # a CPU's values are on the host already
        model, plain = fitted(offload=offload)
        entry = within(model, 0.2)
        assert not moves(entry)
        assert entry.runner.host is None
        steps(model, plain)


def test_host_memory_is_given_back():
    gc.collect()
    held = host_memory.held_bytes()
    model, plain = fitted()
    within(model, 0.2)
    assert host_memory.held_bytes() > held
    model.elbowroom.set_budget("1GiB")
    assert host_memory.held_bytes() == held
    steps(model, plain)
    within(model, 0.2)
    model.elbowroom.off()
    del model
    gc.collect()
    assert host_memory.held_bytes() == held


def test_memory_that_the_system_does_not_give(monkeypatch):
    model, plain = fitted()
    least = least_budget(model)
    before = only_entry(model)
    refused = HostMemoryRefused("the system does not give it")

    def refuse(*_):
        raise refused

    with monkeypatch.context() as patch:
        patch.setattr("elbowroom.execute.to_host.host_room.HostPiece", refuse)
        with pytest.raises(HostMemoryRefused, match="does not give"):
            model.elbowroom.set_budget(least)
    assert only_entry(model) is before
    steps(model, plain)
