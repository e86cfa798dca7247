"""The memory–time curve of a training step, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from elbowroom.plan.words import MOVED, method_in_words
from elbowroom.report.picture import import_pyplot, save_figure
from elbowroom.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from elbowroom.session.sweeping import Curve

_BAR = 12  # characters of the longest bar


def sweep_table(curve: Curve) -> Table:
    title = (
        f"without a plan: {format_bytes(curve.plain.peak_bytes)} and {format_seconds(curve.plain.time_s)} a step; "
        f"least budget {format_bytes(curve.least_budget)} ({curve.least_budget})"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    moves = any(point.plan.traffic for point in curve.points if point.plan is not None)
    for name in ("budget", "predicted peak", *(["moved"] if moves else []), "extra time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=_BAR)
    table.add_column("method")
    slowest = max((point.plan.extra_time for point in curve.points if point.plan), default=0.0)
    for point in curve.points:
        budget = format_bytes(point.budget_bytes)
        if point.plan is None:
            table.add_row(budget, "–", *(["–"] if moves else []), "–", "", "does not fit")
            continue
        moved = [format_bytes(size) if (size := point.plan.moved_bytes("to host")) else "–"] if moves else []
        extra = point.plan.extra_time
        bar = "█" * round(_BAR * extra / slowest) if slowest > 0 else ""
        methods = (
            region.method.removesuffix(MOVED) for region in point.plan.regions
        )  # how much moves is told beside
        method = "; ".join(dict.fromkeys(map(method_in_words, methods)))
        table.add_row(budget, format_bytes(point.plan.peak_bytes), *moved, f"{extra:.1%}", bar, method)
    return table


def save_sweep_plot(curve: Curve, title: str, path: Path) -> None:
    """Extra time over the budget, a step down where a better plan fits."""
    pyplot = import_pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    points = [(point.budget_bytes, point.plan.extra_time) for point in curve.points if point.plan is not None]
    unit, size = ("GiB", 2**30) if curve.plain.peak_bytes >= 2**30 else ("MiB", 2**20)
    axis.step([b / size for b, _ in points], [100 * e for _, e in points], where="post", marker="o", markersize=4)
    for budget, label in ((curve.least_budget, "least budget"), (curve.plain.peak_bytes, "plain")):
        axis.axvline(budget / size, linestyle="--", linewidth=0.8, color="grey")
        axis.annotate(
            label, (budget / size, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=8
        )
    axis.set(title=title, xlabel=f"budget ({unit})", ylabel="extra time (%)", ylim=(0, None))
    save_figure(figure, path)
