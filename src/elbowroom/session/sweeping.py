"""The memory–time curve of a training step: plans from the least budget to plain execution, from one capture.

A plan that fits a budget fits every larger one, so time never rises along the curve: where the planner does worse
with more room, the plan of the smaller budget stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elbowroom.errors import BudgetTooSmall
from elbowroom.plan.plan import Plan
from elbowroom.progress import Progress
from elbowroom.session.handle import Handle
from elbowroom.step.allocator import budget_for


@dataclass(frozen=True)
class Point:
    """The best plan known within a budget; None if none is."""

    budget_bytes: int
    plan: Plan | None

    def to_json(self) -> dict[str, Any]:
        if self.plan is None:
            return {"budget": self.budget_bytes, "feasible": False}
        return {
            "budget": self.budget_bytes,
            "feasible": True,
            "peak_bytes": self.plan.peak_bytes,
            "time_s": self.plan.time_s,
            "extra_time": self.plan.extra_time,
            "method": self.plan.method,
            "moved_bytes": self.plan.moved_bytes("to host"),
            "host_bytes": self.plan.host_bytes,
        }


@dataclass(frozen=True)
class Curve:
    """Points from the smallest budget to the largest. `plain` is the plan that saves everything."""

    plain: Plan
    least_budget: int
    points: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "least_budget": self.least_budget,
            "plain_peak_bytes": self.plain.peak_bytes,
            "plain_time_s": self.plain.time_s,
            "resident_bytes": self.plain.resident_bytes,
            "inputs": self.plain.inputs,
            "points": [point.to_json() for point in self.points],
        }


def sweep_budgets(
    session: Handle,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    budgets: Sequence[int] | None,
    count: int,
    report: Progress,
) -> Curve:
    """Plan within the budgets given, or `count` of them spread evenly. The session comes with everything saved."""

    def plan_now() -> Plan:
        plan = session.prepare(args, kwargs).plan
        assert plan is not None
        return plan

    plain = plan_now()
    try:
        session.set_budget(plain.resident_bytes)
    except BudgetTooSmall as refusal:
        least = refusal.least_budget
    else:  # a step that allocates nothing
        least = plain.resident_bytes
    chosen = sorted(set(budgets)) if budgets is not None else spread(least, least_budget_of(plain), count)
    points: list[Point] = []
    best: Plan | None = None
    for done, budget in enumerate(chosen):
        report(done / len(chosen))
        try:
            session.set_budget(budget)
        except BudgetTooSmall:
            points.append(Point(budget, best))
            continue
        found = plan_now()
        if best is None or found.time_s < best.time_s:
            best = found
        points.append(Point(budget, best))
    return Curve(plain, least, tuple(points))


def least_budget_of(plan: Plan) -> int:
    """The least budget within which the planner may choose this plan: its peak and the margin it leaves free."""
    cuda = plan.setting["device"] == "cuda"
    return budget_for(plan.peak_bytes - plan.resident_bytes, plan.resident_bytes, cuda=cuda)


def spread(low: int, high: int, count: int) -> list[int]:
    """`count` budgets from `low` to `high`, both among them."""
    steps = max(1, count - 1)
    return sorted({low + (high - low) * i // steps for i in range(steps)} | {max(low, high)})
