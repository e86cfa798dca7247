"""The memory–time curve: from the least budget to plain execution, never slower with more memory."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from rich.console import Console

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from elbowroom.cli.load_training import Training  # noqa: E402
from elbowroom.errors import BudgetTooSmall  # noqa: E402
from elbowroom.plan.plan import Plan  # noqa: E402
from elbowroom.plan.regions import RegionPlan  # noqa: E402
from elbowroom.report.sweep_table import save_sweep_plot, sweep_table  # noqa: E402
from elbowroom.session.sweeping import spread, sweep_budgets  # noqa: E402


def no_report(part: float) -> None:
    assert 0 <= part <= 1


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELBOWROOM_CACHE", str(tmp_path_factory.mktemp("cache")))
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
        training = Training(
            "here:made", nn.Sequential(*layers), (torch.randn(256, 16),), lambda out: out.square().mean(), None
        )
        session = training.fit(2**40, "estimate")
        return sweep_budgets(session, training.args, training.kwargs, None, 6, no_report)


def test_time_never_rises_with_the_budget(curve):
    assert len(curve.points) == 6
    times = [point.plan.time_s for point in curve.points]
    assert times == sorted(times, reverse=True)
    assert all(a.budget_bytes < b.budget_bytes for a, b in pairwise(curve.points))


def test_from_the_least_to_plain(curve):
    first, last = curve.points[0], curve.points[-1]
    assert first.budget_bytes == curve.least_budget
    assert first.plan.extra_time > 0
    assert last.plan.extra_time == 0
    assert last.plan.peak_bytes == curve.plain.peak_bytes
    assert all(point.plan.peak_bytes <= point.budget_bytes for point in curve.points)


def test_for_machines_and_people(curve, tmp_path):
    answer = json.loads(json.dumps(curve.to_json(), allow_nan=False))
    assert [point["feasible"] for point in answer["points"]] == [True] * 6
    console = Console(width=118, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(sweep_table(curve))
    text = console.export_text()
    assert "everything is saved" in text
    assert "█" in text
    pytest.importorskip("matplotlib")
    save_sweep_plot(curve, "here", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5_000


def test_budgets_are_spread_evenly():
    assert spread(10, 20, 3) == [10, 15, 20]
    assert spread(10, 10, 5) == [10]
    assert spread(0, 7, 2) == [0, 7]


def test_a_planner_that_does_worse_with_more_room_is_not_followed():
    region = RegionPlan("", "made up", None, 5, 5, 1.0, 5, 5, 1.0, (5,), (), ())
    plain = Plan(2**40, {"parameters": 10}, (region,), {"device": "cpu"}, "")
    seconds = {20: 3.0, 30: 2.0, 40: 2.5, 60: 1.0}

    class Fickle:
        """Plans of given times; nothing fits within 50, though it does within 40."""

        plan = plain

        def prepare(self, args, kwargs):
            return SimpleNamespace(plan=self.plan)

        def set_budget(self, budget):
            if budget not in seconds:
                raise BudgetTooSmall("too small", budget, 20, [])
            self.plan = replace(plain, budget_bytes=budget, regions=(replace(region, time_s=seconds[budget]),))

    found = sweep_budgets(Fickle(), (), {}, [50, 60, 40, 30, 20, 5, 20], 8, no_report)
    assert found.least_budget == 20
    assert [point.budget_bytes for point in found.points] == [5, 20, 30, 40, 50, 60]
    assert [point.plan and point.plan.time_s for point in found.points] == [None, 3.0, 2.0, 2.0, 2.0, 1.0]
    assert found.points[0].to_json() == {"budget": 5, "feasible": False}
