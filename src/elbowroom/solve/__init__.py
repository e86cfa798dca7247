"""Solvers: one method per file behind one interface. `solve` runs a method and lets the referee grade it."""

from __future__ import annotations

import math
import time as clock

from elbowroom.errors import InputError, InvalidSchedule, SolverBug
from elbowroom.problem import Platform, Problem, kind_of
from elbowroom.progress import Progress
from elbowroom.schedule import Simulation, simulate
from elbowroom.solve.auto import AUTO, choose
from elbowroom.solve.method import NO_LINK, Found, Method, Options, Result, Status
from elbowroom.solve.registry import METHODS, method_named

__all__ = ["AUTO", "METHODS", "Method", "Options", "Progress", "Result", "Status", "method_named", "solve"]


def solve(
    problem: Problem,
    budget: int | None = None,
    solver: str = AUTO,
    *,
    slots: int | None = None,
    segments: int | None = None,
    platform: Platform | None = None,
    progress: Progress = lambda part: None,
) -> Result:
    """Schedule a problem within a budget (bytes; slots for a join). `platform` says over which link values may move.

    The result's time and peak are the referee's. An infeasible budget is not an error: the result says so and
    gives the least budget. `InputError` means that the request itself makes no sense.
    """
    options = Options(slots, segments, progress, platform or NO_LINK)
    started = clock.perf_counter()
    if budget is not None and budget < 0:
        raise InputError("budget", "must not be negative")
    if solver == AUTO:
        method, why = choose(problem, budget, options)
    else:
        method, why = method_named(solver), ""
    _check_request(problem, budget, method, options)
    least = method.least_budget(problem, options)
    if budget is not None and budget < least:
        message = f"{why}{Status.INFEASIBLE.value}, {least}"
        seconds = clock.perf_counter() - started
        return Result(method.name, Status.INFEASIBLE, message, seconds, budget, None, least)
    found = method.find(problem, least if budget is None else budget, options)
    simulation = _refereed(problem, budget, method, found, options.platform)
    seconds = clock.perf_counter() - started
    message = why + found.status.value
    return Result(method.name, found.status, message, seconds, budget, simulation, least, found.notes)


def _check_request(problem: Problem, budget: int | None, method: Method, options: Options) -> None:
    kind = kind_of(problem)
    if kind not in method.kinds:
        able = ", ".join(m.name for m in METHODS.values() if kind in m.kinds)
        raise InputError("solver", f"{method.name!r} does not take a {kind}; for a {kind} use {able}")
    if options.slots is not None and options.slots < 1:
        raise InputError("slots", f"must be at least 1, got {options.slots}")
    if method.needs_link and not options.platform.has_link:
        raise InputError("bandwidth", f"missing; {method.name!r} moves values, and needs the rate of the host link")
    if options.segments is not None and method.name != "sequential":
        raise InputError("segments", f"only 'sequential' takes a number of segments, not {method.name!r}")
    if budget is None and method.needs_budget and options.segments is None:
        raise InputError("budget", f"missing; {method.name!r} needs the memory to stay within, such as 8GiB")


def _refereed(problem: Problem, budget: int | None, method: Method, found: Found, platform: Platform) -> Simulation:
    """The referee's measurement of a method's schedule; anything it does not confirm is our bug.

    Only transfers that know of the budget wait for room.
    """
    try:
        if method.needs_link:
            simulation = simulate(problem, found.schedule, budget=budget, platform=platform)
        else:
            simulation = simulate(problem, found.schedule)
    except InvalidSchedule as refusal:
        raise SolverBug(f"{method.name} returned an invalid schedule: {refusal}") from refusal
    if budget is not None and simulation.peak_bytes > budget:
        raise SolverBug(f"{method.name} promised {budget} bytes and its schedule needs {simulation.peak_bytes}")
    if found.time is not None and not math.isclose(found.time, simulation.time, rel_tol=1e-9, abs_tol=1e-12):
        raise SolverBug(f"{method.name} promised a time of {found.time} and its schedule takes {simulation.time}")
    return simulation
