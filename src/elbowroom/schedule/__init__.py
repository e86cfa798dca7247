"""Schedules and the referee that executes them. Nothing here knows about solvers."""

from __future__ import annotations

from elbowroom.errors import InputError
from elbowroom.problem import Chain, Join, Platform, Problem, Towers
from elbowroom.schedule.chain import simulate_chain
from elbowroom.schedule.graph import simulate_graph
from elbowroom.schedule.join import simulate_join
from elbowroom.schedule.operations import (
    Backward,
    Discard,
    Forward,
    Loss,
    Offload,
    Operation,
    Prefetch,
    Schedule,
    schedule_from_json,
    schedule_to_json,
    show,
)
from elbowroom.schedule.simulation import Simulation
from elbowroom.schedule.timeline import Span, TimeLine
from elbowroom.schedule.towers import simulate_towers

__all__ = [
    "Backward",
    "Discard",
    "Forward",
    "Loss",
    "Offload",
    "Operation",
    "Prefetch",
    "Schedule",
    "Simulation",
    "Span",
    "TimeLine",
    "schedule_from_json",
    "schedule_to_json",
    "show",
    "simulate",
]


def simulate(
    problem: Problem, schedule: Schedule, *, budget: int | None = None, platform: Platform | None = None
) -> Simulation:
    """Execute a schedule on a problem's numbers.

    Raises `InvalidSchedule` for the first operation whose inputs are missing or that no waiting fits into the
    budget; without a budget, memory is only measured.
    """
    if isinstance(problem, Chain):
        return simulate_chain(problem, schedule, budget, platform)
    if platform is not None and platform.has_link:
        raise InputError("bandwidth", "the host link is modelled for chains only")
    if isinstance(problem, Join):
        return simulate_join(problem, schedule, budget)
    if isinstance(problem, Towers):
        return simulate_towers(problem, schedule, budget)
    return simulate_graph(problem, schedule, budget)
