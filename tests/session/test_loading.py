"""Plans made earlier: loaded for what they were made for, and refused for anything else."""

from __future__ import annotations

import copy

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
