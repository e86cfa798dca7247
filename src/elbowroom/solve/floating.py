"""`floating`: the fastest schedule of all (001 Theorem 5, completed; the decomposition is in kernels/floating.py).

A saved input may be let go before its backward and be replaced by one further right. On real networks this
rarely beats `persistent`; it is the proof that nothing does better.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from elbowroom.problem import Chain, Problem
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.solve.kernels.costs import Costs, costs_of, need_all, need_step, slots_up
from elbowroom.solve.kernels.floating import fill_least, fill_start, row_of
from elbowroom.solve.kernels.rows import Floats, Ints
from elbowroom.solve.method import Found, Method, Options, Progress, Status
from elbowroom.solve.persistent import forward_and_backward_time
from elbowroom.solve.slots import divide, useful_bytes

State = tuple[int, int, int, int]  # backwards t..ℓ from the input of s, with m slots (or bytes) besides it


@final
class Floating(Method):
    name = "floating"
    kinds = ("chain",)
    summary = "fastest of all schedules; O(stages⁴ · slots)"
    exact = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        n = len(problem)
        divide(problem, 1, None, rows=row_count(n), steps=work(n))  # refuse what no table can hold
        return int(_least(costs_of(problem, unit=1))[row_of(1, n, 1, n)]) + problem.input_bytes

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        n = len(problem)
        budget = min(budget, useful_bytes(problem))
        division = divide(problem, budget, options.slots, rows=row_count(n), steps=work(n))
        costs = costs_of(problem, division.unit)
        schedule, time = _fastest(costs, division.slots, options.progress)
        notes = {"slots": division.slots, "slot_bytes": division.unit}
        if division.exact:
            return Found(schedule, Status.OPTIMAL, time, notes)
        fitted = tuple(_fit_in_bytes(costs, budget))
        fitted_time = forward_and_backward_time(problem, fitted)
        if fitted_time < time:
            status = Status.TIGHT if time == float("inf") else Status.ROUNDED
            return Found(fitted, status, fitted_time, notes)
        return Found(schedule, Status.ROUNDED, time, notes)


def row_count(n: int) -> int:
    return n * (n + 1) * (n + 2) // 6


def work(n: int) -> float:
    """Inner steps per slot."""
    return n**4 / 24 + 1


def _fastest(costs: Costs, slots: int, progress: Progress) -> tuple[tuple[Operation, ...], float]:
    n = len(costs.output) - 1
    top = slots - int(costs.output_slots[0])
    if top < 0:
        return (), float("inf")
    table = np.empty((row_count(n), top + 1))
    first, last = np.zeros(row_count(n), dtype=np.int64), np.zeros(row_count(n))
    for s in range(n, 0, -1):
        fill_start(costs, s, table, first, last)
        progress(((n - s + 1) / n) ** 4)
    time = float(table[row_of(1, n, 1, n), top])
    if time == float("inf"):
        return (), time
    return tuple(_trace(costs, table, top)), time


def _trace(costs: Costs, table: Floats, top: int) -> Iterator[Operation]:
    """Read the schedule off the table: at each state, the first choice whose value is the state's."""
    n = len(costs.output) - 1
    slots = costs.output_slots
    todo: list[State | Operation] = [(1, n, 1, top)]
    while todo:
        item = todo.pop()
        if not isinstance(item, tuple):
            yield item
            continue
        s, t, low, m = item
        value = table[row_of(s, t, low, n), m]
        way = _saving(costs, table, item, value) if low == s else None
        if way is not None:
            todo.append(Backward(s))
            if t > s:
                todo.append((s + 1, t, s + 1, m - slots_up(costs, costs.saved[way])))
            yield Forward(s, "all", way - int(costs.first_way[s]))
            continue
        moved = min(m - int(slots[s] - slots[s - 1]), table.shape[1] - 1)
        if (
            low > s
            and moved >= 0
            and m >= slots_up(costs, need_step(costs, s, t))
            and costs.forward_time[s] + table[row_of(s + 1, t, low, n), moved] == value
        ):
            todo.append((s + 1, t, low, moved))
            yield Forward(s, "nothing")
            continue
        rest = m - int(slots[s])
        cut = next(
            cut
            for cut in range(low + 1, t + 1)
            if (costs.forward_time[s] + table[row_of(s + 1, t, cut, n), rest]) + table[row_of(s, cut - 1, low, n), m]
            == value
        )
        todo += [(s, cut - 1, low, m), (s + 1, t, cut, rest)]
        yield Forward(s, "input")


def _saving(costs: Costs, table: Floats, state: State, value: float) -> int | None:
    s, t, _, m = state
    n = len(costs.output) - 1
    for way in range(int(costs.first_way[s]), int(costs.first_way[s + 1])):
        rest = m - slots_up(costs, costs.saved[way])
        if rest < 0 or m < slots_up(costs, need_all(costs, way, s, t)):
            continue
        time = costs.way_time[way] + (table[row_of(s + 1, t, s + 1, n), rest] if t > s else 0.0)
        if time == value:
            return way
    return None


def _fit_in_bytes(costs: Costs, budget: int) -> Iterator[Operation]:
    """A schedule that fits whenever any does: at each state, the cheapest first choice whose parts still fit."""
    n = len(costs.output) - 1
    least = _least(costs)
    todo: list[State | Operation] = [(1, n, 1, budget - int(costs.output[0]))]
    while todo:
        item = todo.pop()
        if not isinstance(item, tuple):
            yield item
            continue
        s, t, low, m = item
        ways = range(int(costs.first_way[s]), int(costs.first_way[s + 1])) if low == s else ()
        fitting = [
            way
            for way in ways
            if need_all(costs, way, s, t) <= m
            and (t == s or costs.saved[way] + least[row_of(s + 1, t, s + 1, n)] <= m)
        ]
        if fitting:
            way = min(fitting, key=lambda w: costs.way_time[w])
            todo.append(Backward(s))
            if t > s:
                todo.append((s + 1, t, s + 1, m - int(costs.saved[way])))
            yield Forward(s, "all", way - int(costs.first_way[s]))
            continue
        moved = m - int(costs.output[s] - costs.output[s - 1])
        if low > s and need_step(costs, s, t) <= m and least[row_of(s + 1, t, low, n)] <= moved:
            todo.append((s + 1, t, low, moved))
            yield Forward(s, "nothing")
            continue
        rest = m - int(costs.output[s])
        cut = next(
            cut
            for cut in range(low + 1, t + 1)
            if least[row_of(s + 1, t, cut, n)] <= rest and least[row_of(s, cut - 1, low, n)] <= m
        )
        todo += [(s, cut - 1, low, m), (s + 1, t, cut, rest)]
        yield Forward(s, "input")


def _least(costs: Costs) -> Ints:
    n = len(costs.output) - 1
    least = np.zeros(row_count(n), dtype=np.int64)
    fill_least(costs, least)
    return least
