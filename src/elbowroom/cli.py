"""The command line. Answers go to standard output; complaints are one line on standard error.

Exit status: 0 answered, 2 bad input, 3 no schedule fits the budget, 1 anything that is our fault.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from elbowroom import __version__
from elbowroom.errors import ElbowroomError, InputError, InvalidSchedule
from elbowroom.files import Request, parse_request, read_text, split_documents
from elbowroom.problem import KINDS, Platform
from elbowroom.report.demo import demo_json, demo_panels, run_demo, show_demo
from elbowroom.report.picture import print_picture, save_plot
from elbowroom.report.progress import progress_bar
from elbowroom.report.tables import memory_unit, methods_table, result_table, simulation_table
from elbowroom.schedule import Simulation, simulate
from elbowroom.solve import AUTO, METHODS, Result, solve
from elbowroom.solve.auto import SUMMARY
from elbowroom.units import parse_bytes

INFEASIBLE = 3
app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train in the memory you have.")

File = Annotated[str | None, typer.Argument(help="A problem file: JSON, or JSON Lines; - is standard input.")]
Budget = Annotated[str | None, typer.Option(help="Memory to stay within: 8589934592, 8GiB, 6.5GB.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


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


@app.command("demo")
def demo_command(
    plot: Annotated[Path | None, typer.Option(help="Also save memory over the step as an image.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan two networks, computed from their layer shapes, with every method at several budgets."""
    with progress_bar("planning ResNet-101 and GPT") as progress:
        demos = run_demo(progress)
    if as_json:
        print(json.dumps(demo_json(demos), allow_nan=False))
    else:
        show_demo(demos, Console())
    if plot is not None:
        save_plot(demo_panels(demos), plot)
        print(f"memory over the step: {plot}", file=sys.stderr)


@app.command("version")
def version_command(as_json: AsJson = False) -> None:
    """Print the version."""
    print(json.dumps({"version": __version__}) if as_json else __version__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit status."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run the command line; the exit status is returned, and complaints are one line each."""
    try:
        outcome = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except typer.Exit as leave:
        return leave.exit_code
    except InputError as error:
        return _complain(str(error), 2)
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


def _print_json(report: dict[str, Any], identifier: Any) -> None:
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
