"""The command line. Answers go to standard output; complaints are one line on standard error.

Exit status: 0 answered, 2 bad input, 3 nothing fits the budget, 1 a verification that failed or anything that is our
fault. Only the commands that take a model import torch, and only once they run.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from elbowroom import __version__
from elbowroom.errors import BudgetTooSmall, ElbowroomError, InputError, InvalidSchedule
from elbowroom.factory import FORM, Training, load_training, require_torch
from elbowroom.files import Request, parse_request, read_text, split_documents
from elbowroom.plans import Plan
from elbowroom.problem import KINDS, Platform
from elbowroom.report.checking import check_step, check_table
from elbowroom.report.demo import demo_json, demo_panels, run_demo, show_demo
from elbowroom.report.picture import import_pyplot, print_picture, save_plot
from elbowroom.report.plan_table import WIDTH, plan_line, print_plan
from elbowroom.report.progress import progress_bar
from elbowroom.report.sweep import save_sweep_plot, sweep_budgets, sweep_table
from elbowroom.report.tables import memory_unit, methods_table, result_table, simulation_table
from elbowroom.schedule import Simulation, simulate
from elbowroom.solve import AUTO, METHODS, Result, solve
from elbowroom.solve.auto import SUMMARY
from elbowroom.units import MAX_BYTES, format_bytes, parse_bytes

INFEASIBLE = 3
app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train in the memory you have.")

File = Annotated[str | None, typer.Argument(help="A problem file: JSON, or JSON Lines; - is standard input.")]
Budget = Annotated[str | None, typer.Option(help="Memory to stay within: 8589934592, 8GiB, 6.5GB.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
FactoryName = Annotated[
    str,
    typer.Argument(metavar="FACTORY", help=f"{FORM}, a function that returns a model and a batch."),
]
StepBudget = Annotated[
    str, typer.Option(help="Bytes the whole step may have: 8589934592, 8GiB, 6.5GB, or 90% of the device.")
]
Times = Annotated[str, typer.Option(help="'measure' the operators on this device, or 'estimate' their times.")]
Kernels = Annotated[str, typer.Option(help="'torch', 'inductor' (fused), or 'auto': fused on a GPU with a compiler.")]
Depth = Annotated[int | None, typer.Option(min=1, help="Names of a module's path to show; all that fit by default.")]
Plot = Annotated[Path | None, typer.Option(help="Also save the picture as an image.")]


@app.command("solve")
def solve_command(
    file: File = None,
    solver: Annotated[str | None, typer.Option(help="A method's name; see --list.")] = None,
    budget: Budget = None,
    slots: Annotated[int | None, typer.Option(help="Slots to divide the budget into.")] = None,
    segments: Annotated[int | None, typer.Option(help="Segments for 'sequential'.")] = None,
    list_methods: Annotated[bool, typer.Option("--list", help="List the methods and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Schedule a chain, a join or a graph within a budget."""
    if list_methods:
        _list_methods(as_json)
        return
    if file is None:
        raise InputError("FILE", "missing; give a problem file, or - for standard input")
    shared_budget = None if budget is None else parse_bytes(budget)

    def answer(request: Request) -> Result:
        name = request.solver or solver or AUTO
        with progress_bar(f"solving with {name}") as progress:
            return solve(
                request.problem,
                _first(request.budget, shared_budget),
                name,
                slots=_first(request.slots, slots),
                segments=_first(request.segments, segments),
                progress=progress,
            )

    def show_answer(request: Request, result: Result) -> None:
        if as_json:
            _print_json(result.to_json(), request.id)
        else:
            Console().print(result_table(request.problem, result))
            if result.simulation is not None:
                print_picture(Console(), result.simulation, result.budget, memory_unit(request.problem))
        if not result.feasible:
            raise typer.Exit(INFEASIBLE)

    _each(file, answer, show_answer)


@app.command("simulate")
def simulate_command(
    file: File = None,
    budget: Budget = None,
    bandwidth: Annotated[float | None, typer.Option(help="Host link, bytes per unit of time.")] = None,
    as_json: AsJson = False,
) -> None:
    """Let the referee run the schedule that a problem file carries."""
    if file is None:
        raise InputError("FILE", "missing; give a problem file with a schedule, or - for standard input")
    shared_budget = None if budget is None else parse_bytes(budget)
    shared_platform = Platform(bandwidth)

    def answer(request: Request) -> Simulation | InvalidSchedule:
        if request.schedule is None:
            raise InputError("schedule", "missing; simulate needs a schedule beside the problem")
        platform = shared_platform if request.bandwidth is None else Platform(request.bandwidth)
        limit = _first(request.budget, shared_budget)
        try:
            return simulate(request.problem, request.schedule, budget=limit, platform=platform)
        except InvalidSchedule as refusal:
            return refusal

    def show_answer(request: Request, answered: Simulation | InvalidSchedule) -> None:
        if as_json:
            _print_json(answered.to_json(), request.id)
        elif isinstance(answered, InvalidSchedule):
            Console().print(f"invalid: {answered}", markup=False, highlight=False)
        else:
            Console().print(simulation_table(request.problem, answered))
            limit = _first(request.budget, shared_budget)
            print_picture(Console(), answered, limit, memory_unit(request.problem))

    _each(file, answer, show_answer)


@app.command("plan")
def plan_command(
    factory: FactoryName,
    budget: StepBudget,
    out: Annotated[Path | None, typer.Option(help="Save the plan as JSON.")] = None,
    times: Times = "measure",
    kernels: Kernels = "auto",
    depth: Depth = None,
    as_json: AsJson = False,
) -> None:
    """Plan the training step of a model within a budget: what is saved, what is computed again."""
    _check_folder("--out", out)
    with _answering(as_json):
        training, session = _fitted(factory, budget, times, kernels)
        plan = _plan_of(training, session)
    if as_json:
        _print_json({"feasible": True, **plan.to_json()})
    else:
        print_plan(_console(), plan, depth)
    if out is not None:
        _save("--out", plan.save, out)
        print(f"plan: {out}", file=sys.stderr)


@app.command("explain")
def explain_command(
    target: Annotated[str, typer.Argument(metavar="FACTORY|PLAN.json", help=f"{FORM}, or a file that 'plan' saved.")],
    budget: Budget = None,
    times: Times = "measure",
    kernels: Kernels = "auto",
    depth: Depth = None,
    source: Annotated[bool, typer.Option("--source", help="Print the programs that run; needs a factory.")] = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan: its table, memory over the step, and the programs it runs."""
    _check_plot(plot)
    programs: list[str] = []
    if ":" in target and not Path(target).exists():
        if budget is None:
            raise InputError("budget", "missing; a factory is planned within one, such as --budget 8GiB")
        with _answering(as_json):
            training, session = _fitted(target, budget, times, kernels)
            plan = _plan_of(training, session)
        programs = [region.source for region in session.prepare(training.args, training.kwargs).regions]
    else:
        if source:
            raise InputError("--source", f"needs a factory ({FORM}): a plan file holds no programs")
        if budget is not None:
            raise InputError("budget", "a saved plan has one already; give a factory to plan within another")
        plan = Plan.load(target)
    if as_json:
        _print_json({"feasible": True, **plan.to_json(), **({"source": programs} if source else {})})
    else:
        console = _console()
        print_plan(console, plan, depth)
        console.print()
        print_picture(console, plan_line(plan), plan.budget_bytes)
        for number, program in enumerate(programs if source else [], start=1):
            print(f"\n# graph {number} of {len(programs)}\n{program}", end="")
    if plot is not None:
        lines = {f"predicted, within {format_bytes(plan.budget_bytes)}": (plan_line(plan), plan.budget_bytes)}
        _save_picture(lambda path: save_plot({target: lines}, path, along="operators run", scale=1), plot)


@app.command("sweep")
def sweep_command(
    factory: FactoryName,
    budgets: Annotated[str | None, typer.Option(help="Budgets to plan within, separated by commas.")] = None,
    points: Annotated[int, typer.Option(min=2, help="How many budgets, from the least to plain.")] = 8,
    times: Times = "measure",
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Draw the memory–time curve of PyTorch's kernels: the extra time of the best plan at each budget."""
    _check_plot(plot)
    with _answering(as_json):
        training = load_training(factory)
        chosen = None if budgets is None else _parse_budgets(budgets, training)
        with progress_bar(f"planning {factory}") as progress:
            session = training.fit(MAX_BYTES, times)
            _plan_of(training, session)
            curve = sweep_budgets(session, training, chosen, points, progress)
    if as_json:
        _print_json(curve.to_json())
    else:
        _console().print(sweep_table(curve))
    if plot is not None:
        _save_picture(lambda path: save_sweep_plot(curve, factory, path), plot)
    if all(point.plan is None for point in curve.points):
        raise typer.Exit(INFEASIBLE)


@app.command("verify")
def verify_command(
    factory: FactoryName,
    budget: StepBudget,
    times: Times = "measure",
    kernels: Kernels = "auto",
    as_json: AsJson = False,
) -> None:
    """Run one step within a budget: its results against plain execution bit by bit, its memory against the budget."""
    with _answering(as_json):
        training, session = _fitted(factory, budget, times, kernels)
        _plan_of(training, session)
        check = check_step(session, training)
    if as_json:
        _print_json(check.to_json())
    else:
        _console().print(check_table(check))
    if not check.passed:
        raise typer.Exit(1)


@app.command("demo")
def demo_command(
    chains: Annotated[bool, typer.Option("--chains", help="Only plan, from layer shapes; needs no torch.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also save memory over the step as an image.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train two small models plainly and in less memory; with --chains, plan two large ones with every method."""
    _check_plot(plot)
    if chains:
        _demo_chains(plot, as_json)
        return
    require_torch()
    from elbowroom.report.training_demo import demo_lines, run_training_demo, training_json, training_table

    with _answering(as_json), progress_bar("training a transformer and a CNN") as progress:
        runs = run_training_demo(progress)
    if as_json:
        _print_json(training_json(runs))
    else:
        _console().print(training_table(runs))
    if plot is not None:
        along = "time in the step (ms, measured with a profiler running)"
        _save_picture(lambda path: save_plot(demo_lines(runs), path, along=along), plot)
    if not all(run.identical for run in runs):
        raise typer.Exit(1)


def _demo_chains(plot: Path | None, as_json: bool) -> None:
    """Plan two networks, computed from their layer shapes, with every method at several budgets."""
    with progress_bar("planning ResNet-101 and GPT") as progress:
        demos = run_demo(progress)
    if as_json:
        _print_json(demo_json(demos))
    else:
        show_demo(demos, Console())
    if plot is not None:
        _save_picture(lambda path: save_plot(demo_panels(demos), path), plot)


@app.command("version")
def version_command(as_json: AsJson = False) -> None:
    """Print the version."""
    print(json.dumps({"version": __version__}) if as_json else __version__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit status."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


@cache
def _parser() -> Callable[..., Any]:
    """Made of the commands above, which takes three times as long as a small problem."""
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run the command line; the exit status is returned, and complaints are one line each."""
    try:
        outcome = _parser()(args=arguments, standalone_mode=False)
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except typer.Exit as leave:
        return leave.exit_code
    except InputError as error:
        return _complain(str(error), 2)
    except BudgetTooSmall as error:
        return _complain(str(error), INFEASIBLE)
    except ElbowroomError as error:
        return _complain(f"this is a bug in elbowroom, please report it: {error}", 1)
    except MemoryError:
        return _complain("not enough memory for this problem; try fewer --slots", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:  # the parser's usage errors, whichever package it comes from
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        return _complain(str(describe()), 2)


# --- models --------------------------------------------------------------------------------------------------


@contextmanager
def _answering(as_json: bool) -> Iterator[None]:
    """Our warnings in one line each, unless a complaint says more; for machines, too small a budget is an answer."""
    said: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_others(message: Warning | str, *rest: Any, **more: Any) -> None:
            if str(message).startswith("elbowroom: "):
                said.append(_one_line(str(message)))
            else:
                show(message, *rest, **more)

        warnings.showwarning = show_others
        try:
            yield
        except InputError:
            said.clear()
            raise
        except BudgetTooSmall as refusal:
            if not as_json:
                raise
            largest = [{"what": what, "bytes": size} for what, size in refusal.largest]
            _print_json({"feasible": False, "least_budget": refusal.least_budget, "largest": largest})
            raise typer.Exit(INFEASIBLE) from None
        finally:
            for line in said:
                print(line, file=sys.stderr)


def _fitted(factory: str, budget: str, times: str, kernels: str) -> tuple[Training, Any]:
    training = load_training(factory)
    return training, training.fit(budget, times, kernels)


def _plan_of(training: Training, session: Any) -> Plan:
    entry = session.prepare(training.args, training.kwargs)
    if entry.plan is None:
        raise InputError(training.name, f"its {type(training.model).__name__} cannot be planned: {entry.unplanned}")
    return entry.plan  # type: ignore[no-any-return]


def _parse_budgets(text: str, training: Training) -> list[int]:
    from elbowroom.measuring.resident import device_bytes

    device = device_bytes(training.model)
    return [parse_bytes(part, field="budgets", device_bytes=device) for part in text.split(",")]


def _console() -> Console:
    """As wide as the terminal; wide enough for module paths where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _check_folder(option: str, path: Path | None) -> None:
    """Say before the work, not after it, that its result cannot be saved."""
    if path is not None and not path.parent.is_dir():
        raise InputError(option, f"{path} cannot be written: there is no folder {path.parent}")


def _check_plot(path: Path | None) -> None:
    _check_folder("--plot", path)
    if path is not None:
        import_pyplot()


def _save_picture(save: Callable[[Path], None], path: Path) -> None:
    _save("--plot", save, path)
    print(f"picture: {path}", file=sys.stderr)


def _save(option: str, save: Callable[[Path], None], path: Path) -> None:
    try:
        save(path)
    except OSError as failure:
        raise InputError(option, f"{path} cannot be written: {failure.strerror or failure}") from None


# --- files ---------------------------------------------------------------------------------------------------


def _each(file: str, answer: Callable[[Request], Any], show_answer: Callable[[Request, Any], None]) -> None:
    """Answer the one request of a file, or every line of a JSON Lines file, where a bad line is an answer too."""
    text = read_text(file)
    lines = split_documents(text)
    if lines is None:
        request = parse_request(text, file)
        show_answer(request, answer(request))
        return
    for number, line in enumerate(lines, start=1):
        try:
            request = parse_request(line, f"line {number}")
            answered = answer(request)
        except InputError as error:
            print(json.dumps({"error": _one_line(str(error))}), flush=True)
            continue
        _print_json(answered.to_json(), request.id)


def _list_methods(as_json: bool) -> None:
    if not as_json:
        Console().print(methods_table())
        return
    entries = [{"name": AUTO, "kinds": list(KINDS), "exact": False, "summary": SUMMARY}]
    for method in METHODS.values():
        entries.append(
            {
                "name": method.name,
                "kinds": list(method.kinds),
                "exact": method.exact,
                "summary": method.summary,
            }
        )
    print(json.dumps(entries))


def _print_json(report: dict[str, Any], identifier: Any = None) -> None:
    if identifier is not None:
        report = {"id": identifier, **report}
    print(json.dumps(report, allow_nan=False), flush=True)


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _complain(message: str, status: int) -> int:
    print(f"elbowroom: {_one_line(message)}", file=sys.stderr)
    return status


def _one_line(message: str) -> str:
    return "".join(c if c.isprintable() else " " for c in message)
