"""`elbowroom plan`, `explain`, `sweep` and `verify`: the training step of a model that a factory builds."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elbowroom.cli.load_training import FORM, Moves, Training, load_training, require_torch
from elbowroom.cli.output import (
    INFEASIBLE,
    AsJson,
    Budget,
    Plot,
    answering,
    check_folder,
    check_plot,
    console,
    print_json,
    save,
    save_picture,
)
from elbowroom.errors import InputError
from elbowroom.plan.plan import Plan
from elbowroom.progress import progress_bar
from elbowroom.report.check_table import check_table
from elbowroom.report.picture import print_picture, save_plot
from elbowroom.report.plan_table import print_plan
from elbowroom.report.sweep_table import save_sweep_plot, sweep_table
from elbowroom.units import MAX_BYTES, format_bytes, parse_bytes, parse_rate

if TYPE_CHECKING:
    from elbowroom.session.handle import Handle

FactoryName = Annotated[
    str,
    typer.Argument(metavar="FACTORY", help=f"{FORM}, a function that returns a model and a batch."),
]
StepBudget = Annotated[
    str, typer.Option(help="Bytes the whole step may have: 8589934592, 8GiB, 6.5GB, or 90% of the device.")
]
Times = Annotated[str, typer.Option(help="'measure' the operators on this device, or 'estimate' their times.")]
Kernels = Annotated[str, typer.Option(help="'torch', 'inductor' (fused), or 'auto': fused on a GPU with a compiler.")]
Offload = Annotated[
    str, typer.Option(help="Move values to the host and back: 'never', 'auto' (on a GPU, where faster) or 'always'.")
]
HostBudget = Annotated[
    str | None, typer.Option(help="Host memory for values that move, such as 32GiB; half of what is free by default.")
]
Link = Annotated[str | None, typer.Option(help="How fast values move, such as 12GB/s; measured by default.")]
Depth = Annotated[int | None, typer.Option(min=1, help="Names of a module's path to show; all that fit by default.")]


def plan_command(
    factory: FactoryName,
    budget: StepBudget,
    out: Annotated[Path | None, typer.Option(help="Save the plan as JSON.")] = None,
    times: Times = "measure",
    kernels: Kernels = "auto",
    offload: Offload = "never",
    host_budget: HostBudget = None,
    link: Link = None,
    depth: Depth = None,
    as_json: AsJson = False,
) -> None:
    """Plan the training step of a model within a budget: what is saved, what is computed again, what moves."""
    check_folder("--out", out)
    moves = _moves(offload, host_budget, link)
    with answering(as_json):
        training, session = _fitted(factory, budget, times, kernels, moves)
        plan = _plan_of(training, session)
    if as_json:
        print_json({"feasible": True, **plan.to_json()})
    else:
        print_plan(console(), plan, depth)
    if out is not None:
        save("--out", plan.save, out)
        print(f"plan: {out}", file=sys.stderr)


def explain_command(
    target: Annotated[str, typer.Argument(metavar="FACTORY|PLAN.json", help=f"{FORM}, or a file that 'plan' saved.")],
    budget: Budget = None,
    times: Times = "measure",
    kernels: Kernels = "auto",
    offload: Offload = "never",
    host_budget: HostBudget = None,
    link: Link = None,
    depth: Depth = None,
    source: Annotated[bool, typer.Option("--source", help="Print the programs that run; needs a factory.")] = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan: its table, memory over the step, and the programs it runs."""
    check_plot(plot)
    moves = _moves(offload, host_budget, link)
    programs: list[str] = []
    if ":" in target and not Path(target).exists():
        if budget is None:
            raise InputError("budget", "missing; a factory is planned within one, such as --budget 8GiB")
        with answering(as_json):
            training, session = _fitted(target, budget, times, kernels, moves)
            plan = _plan_of(training, session)
        programs = session.prepare(training.args, training.kwargs).sources
    else:
        if source:
            raise InputError("--source", f"needs a factory ({FORM}): a plan file holds operations, and no source")
        if budget is not None:
            raise InputError("budget", "a saved plan has one already; give a factory to plan within another")
        if moves != _moves("never", None, None):
            raise InputError("offload", "a saved plan moves what it moves; give a factory to plan otherwise")
        plan = Plan.load(target)
    if as_json:
        print_json({"feasible": True, **plan.to_json(), **({"source": programs} if source else {})})
    else:
        terminal = console()
        print_plan(terminal, plan, depth)
        terminal.print()
        print_picture(terminal, plan.timeline, plan.budget_bytes)
        for number, program in enumerate(programs if source else [], start=1):
            print(f"\n# graph {number} of {len(programs)}\n{program}", end="")
    if plot is not None:
        lines = {f"predicted, within {format_bytes(plan.budget_bytes)}": (plan.timeline, plan.budget_bytes)}
        save_picture(lambda path: save_plot({target: lines}, path, along="operations", scale=1), plot)


def sweep_command(
    factory: FactoryName,
    budgets: Annotated[str | None, typer.Option(help="Budgets to plan within, separated by commas.")] = None,
    points: Annotated[int, typer.Option(min=2, help="How many budgets, from the least to plain.")] = 8,
    times: Times = "measure",
    offload: Offload = "never",
    host_budget: HostBudget = None,
    link: Link = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Draw the memory–time curve of PyTorch's kernels: the extra time of the best plan at each budget."""
    check_plot(plot)
    moves = _moves(offload, host_budget, link)
    with answering(as_json):
        training = load_training(factory)
        chosen = None if budgets is None else _parse_budgets(budgets, training)
        with progress_bar(f"planning {factory}") as progress:
            session = training.fit(MAX_BYTES, times, **moves)
            _plan_of(training, session)
            from elbowroom.session.sweeping import sweep_budgets

            curve = sweep_budgets(session, training.args, training.kwargs, chosen, points, progress)
    if as_json:
        print_json(curve.to_json())
    else:
        console().print(sweep_table(curve))
    if plot is not None:
        save_picture(lambda path: save_sweep_plot(curve, factory, path), plot)
    if all(point.plan is None for point in curve.points):
        raise typer.Exit(INFEASIBLE)


def verify_command(
    factory: FactoryName,
    budget: StepBudget,
    times: Times = "measure",
    kernels: Kernels = "auto",
    offload: Offload = "never",
    host_budget: HostBudget = None,
    link: Link = None,
    as_json: AsJson = False,
) -> None:
    """Run one step within a budget: its results against plain execution bit by bit, its memory against the budget."""
    moves = _moves(offload, host_budget, link)
    with answering(as_json):
        require_torch()
        from elbowroom.measure.host_memory import held_bytes
        from elbowroom.session.checking import check_step

        gc.collect()  # what nobody needs any more would go while the step is measured
        held_before = held_bytes()
        training, session = _fitted(factory, budget, times, kernels, moves)
        _plan_of(training, session)
        check = check_step(session, training.args, training.kwargs, held_before)
    if as_json:
        print_json(check.to_json())
    else:
        console().print(check_table(check))
    if not check.passed:
        raise typer.Exit(1)


def _moves(offload: str, host_budget: str | None, link: str | None) -> Moves:
    """What is said of moves, refused before any work if it makes no sense."""
    if offload not in ("never", "auto", "always"):
        raise InputError("offload", f"must be never, auto or always, not {offload!r:.40}")
    if host_budget is not None:
        parse_bytes(host_budget, field="host_budget", device_bytes=1)
    if link is not None:
        parse_rate(link)
    return {"offload": offload, "host_budget": host_budget, "link": link}


def _fitted(factory: str, budget: str, times: str, kernels: str, moves: Moves) -> tuple[Training, Handle]:
    training = load_training(factory)
    return training, training.fit(budget, times, kernels, **moves)


def _plan_of(training: Training, session: Handle) -> Plan:
    entry = session.prepare(training.args, training.kwargs)
    if entry.plan is None:
        raise InputError(training.name, f"its {type(training.model).__name__} cannot be planned: {entry.unplanned}")
    return entry.plan


def _parse_budgets(text: str, training: Training) -> list[int]:
    from elbowroom.measure.resident import device_bytes

    device = device_bytes(training.model)
    return [parse_bytes(part, field="budgets", device_bytes=device) for part in text.split(",")]
