"""The plots of checkpoint_selection.py: peaks and times beside the paper's, and memory over the phases of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selection_rows import COLUMNS, WEIGHT_COPIES, Row, Setting, grouped
from selection_tables import as_set, is_known, mib, title


def save_plots(rows: Sequence[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    groups = list(grouped(rows))
    plot_tables(groups, folder / "checkpoint_selection.png")
    small = [group for setting, group in groups if setting.batch == 128]
    plot_traces(small or [group for _, group in groups], folder / "checkpoint_selection_traces.png")


def plot_tables(groups: Sequence[tuple[Setting, list[Row]]], path: Path) -> None:
    """Bars of peaks above, of times below, one column for each network and batch."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(groups), figsize=(3.2 * len(groups), 7), squeeze=False)
    for (setting, group), peaks, times in zip(groups, *axes, strict=True):
        these = [row for row in group if row.column]
        names, places = [row.column for row in these], range(len(these))
        peaks.bar([x - 0.2 for x in places], [mib(row.total_bytes) for row in these], 0.4, label="Eq. 12 + weights")
        paper = [row.paper_mib if is_known(row.paper_mib) else 0 for row in these]
        peaks.bar([x + 0.2 for x in places], paper, 0.4, label="paper")
        plain = these[-1].paper_s
        ratios = [row.paper_s / plain if is_known(row.paper_s) and is_known(plain) else 0 for row in these]
        times.bar([x - 0.2 for x in places], [row.slowdown(last_twice=True) for row in these], 0.4, label="estimated")
        times.bar([x + 0.2 for x in places], ratios, 0.4, label="paper")
        peaks.set(title=title(setting), ylabel="peak (MiB)")
        times.set(ylabel="time, without checkpoints = 1")
        for axis in (peaks, times):
            axis.set_xticks(places, names, rotation=60, fontsize=8)
            axis.legend(fontsize=7, loc="lower left")
    save(figure, path)


def plot_traces(groups: Sequence[Sequence[Row]], path: Path) -> None:
    """Memory over a step: a line of plots for each network, one plot for each column of the paper."""
    from matplotlib import pyplot

    size = 4 * len(COLUMNS), 3.2 * len(groups)
    figure, axes = pyplot.subplots(len(groups), len(COLUMNS), figsize=size, squeeze=False)
    for group, line in zip(groups, axes, strict=True):
        for row, axis in zip((row for row in group if row.column), line, strict=True):
            plot_trace(row, axis)
    save(figure, path)


def plot_trace(row: Row, axis: Any) -> None:
    base = row.measured.get("base_bytes", WEIGHT_COPIES * row.setting.network.weight_bytes())
    for label, trace in zip(("Eq. 12", "by layer"), row.traces, strict=True):
        axis.plot([mib(base + held) for held in trace], label=label)
    if "trace_bytes" in row.measured:
        axis.plot([mib(held) for held in row.measured["trace_bytes"]], "--", label="measured")
    axis.set_title(
        f"{title(row.setting)}\n{as_set(row.checkpoints) if row.checkpoints else 'no checkpoints'}", fontsize=8
    )
    axis.set(xlabel="phase", ylabel="MiB, with weights", ylim=(0, None))
    axis.legend(fontsize=7)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"saved {path}")
