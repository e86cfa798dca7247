"""The memory–time curve of a training step: plans from the least budget to plain execution, from one capture.

A plan that fits a budget fits every larger one, so time never rises along the curve: where the planner does worse
with more room, the plan of the smaller budget stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from elbowroom.errors import BudgetTooSmall
from elbowroom.plans import Plan
from elbowroom.report.picture import import_pyplot, save_figure
from elbowroom.report.plan_table import extra_time
from elbowroom.solve import Progress
from elbowroom.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from elbowroom.execute.session import Session
    from elbowroom.factory import Training

_BAR = 12  # characters of the longest bar


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
            "extra_time": extra_time(self.plan),
            "method": method_of(self.plan),
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
    session: Session, training: Training, budgets: Sequence[int] | None, count: int, report: Progress
) -> Curve:
    """Plan within the budgets given, or `count` of them spread evenly. The session comes with everything saved."""

    def plan_now() -> Plan:
        plan = session.prepare(training.args, training.kwargs).plan
        assert plan is not None
        return plan

    plain = plan_now()
    try:
        session.set_budget(plain.resident_bytes)
    except BudgetTooSmall as refusal:
        least = refusal.least_budget
    else:  # a step that allocates nothing
        least = plain.resident_bytes
    chosen = sorted(set(budgets)) if budgets is not None else spread(least, budget_for(plain), count)
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


def budget_for(plan: Plan) -> int:
    """The least budget within which the planner may choose this plan: its peak and the margin it leaves free."""
    import torch

    from elbowroom.execute import settings

    device = torch.device(plan.setting["device"])
    return settings.budget_for(plan.peak_bytes - plan.resident_bytes, plan.resident, device)


def spread(low: int, high: int, count: int) -> list[int]:
    """`count` budgets from `low` to `high`, both among them."""
    steps = max(1, count - 1)
    return sorted({low + (high - low) * i // steps for i in range(steps)} | {max(low, high)})


def method_of(plan: Plan) -> str:
    return "; ".join(dict.fromkeys(region.method for region in plan.regions))


def sweep_table(curve: Curve) -> Table:
    title = (
        f"plain: {format_bytes(curve.plain.peak_bytes)} and {format_seconds(curve.plain.time_s)} a step; "
        f"least budget {format_bytes(curve.least_budget)} ({curve.least_budget})"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("budget", "predicted peak", "extra time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=_BAR)
    table.add_column("method", no_wrap=True, overflow="ellipsis")
    slowest = max((extra_time(point.plan) for point in curve.points if point.plan), default=0.0)
    for point in curve.points:
        budget = format_bytes(point.budget_bytes)
        if point.plan is None:
            table.add_row(budget, "–", "–", "", "does not fit")
            continue
        extra = extra_time(point.plan)
        bar = "█" * round(_BAR * extra / slowest) if slowest > 0 else ""
        table.add_row(budget, format_bytes(point.plan.peak_bytes), f"{extra:.1%}", bar, method_of(point.plan))
    return table


def save_sweep_plot(curve: Curve, title: str, path: Path) -> None:
    """Extra time over the budget, a step down where a better plan fits."""
    pyplot = import_pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    points = [(point.budget_bytes, extra_time(point.plan)) for point in curve.points if point.plan is not None]
    unit, size = ("GiB", 2**30) if curve.plain.peak_bytes >= 2**30 else ("MiB", 2**20)
    axis.step([b / size for b, _ in points], [100 * e for _, e in points], where="post", marker="o", markersize=4)
    for budget, label in ((curve.least_budget, "least budget"), (curve.plain.peak_bytes, "plain")):
        axis.axvline(budget / size, linestyle="--", linewidth=0.8, color="grey")
        axis.annotate(
            label, (budget / size, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=8
        )
    axis.set(title=title, xlabel=f"budget ({unit})", ylabel="extra time (%)", ylim=(0, None))
    save_figure(figure, path)
