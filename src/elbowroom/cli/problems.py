"""`elbowroom solve` and `elbowroom simulate`: problems as numbers, from files; no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from elbowroom.cli.output import INFEASIBLE, AsJson, Budget, first, one_line, print_json
from elbowroom.cli.requests import Request, parse_request, platform_of, read_text, split_documents
from elbowroom.errors import InputError, InvalidSchedule
from elbowroom.problem import KINDS
from elbowroom.progress import progress_bar
from elbowroom.report.picture import print_picture
from elbowroom.report.tables import memory_unit, methods_table, result_table, simulation_table
from elbowroom.schedule import Simulation, simulate
from elbowroom.solve import AUTO, METHODS, Result, solve
from elbowroom.solve.auto import SUMMARY
from elbowroom.units import parse_bytes

_RATE = "bytes per unit of time"
Bandwidth = Annotated[float | None, typer.Option(help=f"Rate of the host link, {_RATE}; both directions share it.")]
ToHost = Annotated[float | None, typer.Option(help=f"Rate to the host, {_RATE}.")]
FromHost = Annotated[float | None, typer.Option(help=f"Rate from the host, {_RATE}.")]
Duplex = Annotated[
    float | None, typer.Option(help="What each direction carries while both are busy; 0: they take turns.")
]
PerCopy = Annotated[float | None, typer.Option("--seconds-per-copy", help="Time before the first byte of a copy.")]
HostBudget = Annotated[str | None, typer.Option(help="Memory that the host gives, such as 32GiB.")]
File = Annotated[str | None, typer.Argument(help="A problem file: JSON, or JSON Lines; - is standard input.")]


def solve_command(
    file: File = None,
    solver: Annotated[str | None, typer.Option(help="A method's name; see --list.")] = None,
    budget: Budget = None,
    slots: Annotated[int | None, typer.Option(help="Slots to divide the budget into.")] = None,
    segments: Annotated[int | None, typer.Option(help="Segments for 'sequential'.")] = None,
    bandwidth: Bandwidth = None,
    to_host: ToHost = None,
    from_host: FromHost = None,
    duplex: Duplex = None,
    seconds_per_copy: PerCopy = None,
    host_budget: HostBudget = None,
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
    link = _link(bandwidth, to_host, from_host, duplex, seconds_per_copy, host_budget)

    def answer(request: Request) -> Result:
        name = request.solver or solver or AUTO
        with progress_bar(f"solving with {name}") as progress:
            return solve(
                request.problem,
                first(request.budget, shared_budget),
                name,
                slots=first(request.slots, slots),
                segments=first(request.segments, segments),
                platform=platform_of(request.platform, link),
                progress=progress,
            )

    def show_answer(request: Request, result: Result) -> None:
        if as_json:
            print_json(result.to_json(), request.id)
        else:
            Console().print(result_table(request.problem, result))
            if result.simulation is not None:
                print_picture(Console(), result.simulation.timeline, result.budget, memory_unit(request.problem))
        if not result.feasible:
            raise typer.Exit(INFEASIBLE)

    _each(file, answer, show_answer)


def simulate_command(
    file: File = None,
    budget: Budget = None,
    bandwidth: Bandwidth = None,
    to_host: ToHost = None,
    from_host: FromHost = None,
    duplex: Duplex = None,
    seconds_per_copy: PerCopy = None,
    host_budget: HostBudget = None,
    as_json: AsJson = False,
) -> None:
    """Let the referee run the schedule that a problem file carries."""
    if file is None:
        raise InputError("FILE", "missing; give a problem file with a schedule, or - for standard input")
    shared_budget = None if budget is None else parse_bytes(budget)
    link = _link(bandwidth, to_host, from_host, duplex, seconds_per_copy, host_budget)

    def answer(request: Request) -> Simulation | InvalidSchedule:
        if request.schedule is None:
            raise InputError("schedule", "missing; simulate needs a schedule beside the problem")
        platform = platform_of(request.platform, link)
        limit = first(request.budget, shared_budget)
        try:
            return simulate(request.problem, request.schedule, budget=limit, platform=platform)
        except InvalidSchedule as refusal:
            return refusal

    def show_answer(request: Request, answered: Simulation | InvalidSchedule) -> None:
        if as_json:
            print_json(answered.to_json(), request.id)
        elif isinstance(answered, InvalidSchedule):
            Console().print(f"invalid: {answered}", markup=False, highlight=False)
        else:
            Console().print(simulation_table(request.problem, answered))
            limit = first(request.budget, shared_budget)
            print_picture(Console(), answered.timeline, limit, memory_unit(request.problem))

    _each(file, answer, show_answer)


def _link(
    bandwidth: float | None,
    to_host: float | None,
    from_host: float | None,
    duplex: float | None,
    seconds_per_copy: float | None,
    host_budget: str | None,
) -> dict[str, Any]:
    """What the options say of the platform."""
    named = {
        "bandwidth": bandwidth,
        "to_host": to_host,
        "from_host": from_host,
        "duplex": duplex,
        "seconds_per_copy": seconds_per_copy,
        "host_bytes": None if host_budget is None else parse_bytes(host_budget, field="host_budget"),
    }
    given = {name: value for name, value in named.items() if value is not None}
    platform_of(given)  # which refuses what is wrong, before any file is read
    return given


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
            print(json.dumps({"error": one_line(str(error))}), flush=True)
            continue
        print_json(answered.to_json(), request.id)


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
