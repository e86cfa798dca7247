"""Plans made earlier: loaded for what they were made for, and refused for anything else."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")


import elbowroom  # noqa: E402
from elbowroom.errors import InputError  # noqa: E402
from trained import Net, batch, fit, only_entry, recomputes, tight  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def test_plans_are_saved_loaded_and_refused(tmp_path):
    model = Net()
    plan = elbowroom.plan(model, *batch(), budget="1GiB", times="estimate")
    least = tight(copy.deepcopy(model), *batch())
    entry = only_entry(least)
    path = tmp_path / "plan.json"
    entry.plan.save(path)
    loaded = elbowroom.Plan.load(path)
    assert loaded == entry.plan
    fitted = fit(model, *batch(), budget=loaded.budget_bytes, plan=loaded)
    assert recomputes(fitted)
    fitted(*batch()).backward()
    fitted.elbowroom.set_budget("1GiB")
    assert not recomputes(fitted)
    with pytest.raises(InputError, match="plan"):
        fit(Net(blocks=3), *batch(), budget="1GiB", plan=loaded)
    with pytest.raises(InputError, match="plan: it needs"):
        fit(Net(), *batch(), budget=loaded.peak_bytes - 1, plan=loaded)
    path.write_text("{}")
    with pytest.raises(InputError, match="plan"):
        elbowroom.Plan.load(path)
    assert plan.peak_bytes > loaded.peak_bytes


@pytest.fixture
def moving():
    """A plan that moves values, and what it is for."""
    model = Net()
    plain = elbowroom.plan(model, *batch(), budget="1GiB", kernels="torch")
    budget = plain.resident_bytes + (plain.peak_bytes - plain.resident_bytes) * 2 // 3
    plan = elbowroom.plan(model, *batch(), budget=budget, kernels="torch", offload="always", host_budget="1MiB")
    assert plan.regions[0].program.moves
    return model, plan


def test_a_plan_that_moves_values_loads_wherever_it_was_made_for(moving, tmp_path):
    """Whatever moves otherwise, and over the link that it was made for."""
    model, plan = moving
    plan.save(tmp_path / "plan.json")
    plain = copy.deepcopy(model)
    fitted = elbowroom.fit(model, *batch(), budget=plan.budget_bytes, kernels="torch", plan=tmp_path / "plan.json")
    loaded = fitted.elbowroom.plan
    assert loaded == plan
    assert loaded.time_s == pytest.approx(plan.time_s)
    torch.manual_seed(1)
    plain(*batch()).backward()
    torch.manual_seed(1)
    fitted(*batch()).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    fitted.elbowroom.set_budget(plan.budget_bytes)
    assert not fitted.elbowroom.plan.regions[0].program.moves  # planned anew, and nothing is to move


def test_a_plan_that_moves_more_than_the_host_has_is_refused(moving):
    model, plan = moving
    wishes = {"budget": plan.budget_bytes, "kernels": "torch", "plan": plan}
    fitted = elbowroom.fit(model, *batch(), host_budget=plan.host_bytes, **wishes)
    assert fitted.elbowroom.plan.host_budget_bytes == plan.host_bytes
    with pytest.raises(InputError, match=r"it moves values that take .* on the host, and the host budget is"):
        elbowroom.fit(model, *batch(), host_budget=plan.host_bytes - 1, **wishes)
    too_little = replace(plan, platform=replace(plan.platform, host_bytes=plan.host_bytes - 1))
    with pytest.raises(InputError, match="the host budget is"):
        elbowroom.fit(model, *batch(), **wishes | {"plan": too_little})
    with pytest.raises(InputError, match="there is no link to the host"):
        elbowroom.fit(model, *batch(), **wishes | {"plan": replace(plan, platform=None)})
