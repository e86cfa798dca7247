"""From a table over slots to a schedule in bytes.

Sizes round up, so a schedule for m slots uses fewer bytes than m slots hold. The table is therefore filled a
little beyond the budget, and the schedule for the most slots whose true peak still fits is taken.
"""

from __future__ import annotations

from typing import Protocol

from elbowroom.problem import Problem
from elbowroom.schedule import Operation, simulate
from elbowroom.solve.method import Found, Status
from elbowroom.solve.slots import Division


class Table(Protocol):
    """A filled dynamic program: the least time with so many slots in all, and the schedule that takes it."""

    def time(self, slots: int) -> float: ...

    def schedule(self, slots: int) -> tuple[Operation, ...]: ...


def fit(problem: Problem, budget: int, division: Division, table: Table, greedy: tuple[Operation, ...]) -> Found:
    """The fastest schedule found that fits in bytes; `greedy` is one that fits whatever the slots see."""
    notes = {"slots": division.slots, "slot_bytes": division.unit}
    if division.exact:
        return Found(table.schedule(division.slots), Status.OPTIMAL, table.time(division.slots), notes)
    slots = _most_slots(problem, budget, division, table)
    greedy_time = float(simulate(problem, greedy).time)
    if slots is None:
        return Found(greedy, Status.TIGHT, greedy_time, notes)
    if greedy_time < table.time(slots):
        return Found(greedy, Status.ROUNDED, greedy_time, notes)
    return Found(table.schedule(slots), Status.ROUNDED, table.time(slots), notes)


def _most_slots(problem: Problem, budget: int, division: Division, table: Table) -> int | None:
    """A bisection: with more slots the true peak rises, but for jitter that costs at most a better plan."""
    low = division.slots if table.time(division.slots) < float("inf") else None
    below, high = division.slots, division.slots + division.spare
    while below < high:
        middle = (below + high + 1) // 2
        finite = table.time(middle) < float("inf")
        if not finite or simulate(problem, table.schedule(middle)).peak_bytes <= budget:
            below = middle
            low = middle if finite else low
        else:
            high = middle - 1
    return low
