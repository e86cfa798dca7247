"""`elbowroom demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from elbowroom.cli.load_training import require_torch
from elbowroom.cli.output import AsJson, answering, check_plot, console, print_json, save_picture
from elbowroom.demo.chains import demo_json, demo_panels, run_demo, show_demo
from elbowroom.progress import progress_bar
from elbowroom.report.picture import save_plot


def demo_command(
    chains: Annotated[bool, typer.Option("--chains", help="Only plan, from layer shapes; needs no torch.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also save memory over the step as an image.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train two small models plainly and in less memory; with --chains, plan two large ones with every method."""
    check_plot(plot)
    if chains:
        _demo_chains(plot, as_json)
        return
    require_torch()
    from elbowroom.demo.training import demo_lines, run_training_demo, training_json, training_table

    with answering(as_json), progress_bar("training a transformer and a CNN") as progress:
        runs = run_training_demo(progress)
    if as_json:
        print_json(training_json(runs))
    else:
        console().print(training_table(runs))
    if plot is not None:
        along = "time in the step (ms, measured with a profiler running)"
        save_picture(lambda path: save_plot(demo_lines(runs), path, along=along), plot)
    if not all(run.identical for run in runs):
        raise typer.Exit(1)


def _demo_chains(plot: Path | None, as_json: bool) -> None:
    """Plan two networks, computed from their layer shapes, with every method at several budgets."""
    with progress_bar("planning ResNet-101 and GPT") as progress:
        demos = run_demo(progress)
    if as_json:
        print_json(demo_json(demos))
    else:
        show_demo(demos, Console())
    if plot is not None:
        save_picture(lambda path: save_plot(demo_panels(demos), path), plot)
