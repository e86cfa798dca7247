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
from elbowroom.solve.fitting import fit
from elbowroom.solve.kernels.costs import Costs, costs_of, need_all, need_step, slots_up
from elbowroom.solve.kernels.floating import fill_least, fill_start, row_of
from elbowroom.solve.kernels.rows import Ints
from elbowroom.solve.method import Found, Method, Options, Progress
from elbowroom.solve.slots import divide, most_slots, useful_bytes

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
        most_slots(problem, row_count(n))  # refuses what no table can hold
        return int(_least(costs_of(problem, unit=1))[row_of(1, n, 1, n)]) + problem.input_bytes

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        n = len(problem)
        budget = min(budget, useful_bytes(problem))
        division = divide(problem, budget, options.slots, rows=row_count(n), steps=work(n))
        costs = costs_of(problem, division.unit)
        table = _Table(costs, division.slots + division.spare, options.progress)
        greedy = () if division.exact else tuple(_fit_in_bytes(costs, budget))
        return fit(problem, budget, division, table, greedy)


def row_count(n: int) -> int:
    return n * (n + 1) * (n + 2) // 6


def work(n: int) -> float:
    """Inner steps per slot."""
    return n**4 / 24 + 1


class _Table:
    """The filled dynamic program."""

    def __init__(self, costs: Costs, slots: int, progress: Progress) -> None:
        self.costs = costs
        self.n = len(costs.output) - 1
        self.input_slots = int(costs.output_slots[0])
        rows = row_count(self.n)
        self.rows = np.empty((rows, max(0, slots - self.input_slots) + 1))
        first, last = np.zeros(rows, dtype=np.int64), np.zeros(rows)
        for s in range(self.n, 0, -1):
            fill_start(costs, s, self.rows, first, last)
            progress(((self.n - s + 1) / self.n) ** 4)

    def time(self, slots: int) -> float:
        m = slots - self.input_slots
        return self._value((1, self.n, 1, m)) if m >= 0 else float("inf")

    def schedule(self, slots: int) -> tuple[Operation, ...]:
        return tuple(self._trace(slots - self.input_slots))

    def _trace(self, top: int) -> Iterator[Operation]:
        """Read the schedule off the table: at each state, the first choice whose value is the state's."""
        costs, slots = self.costs, self.costs.output_slots
        todo: list[State | Operation] = [(1, self.n, 1, top)]
        while todo:
            item = todo.pop()
            if not isinstance(item, tuple):
                yield item
                continue
            s, t, low, m = item
            way = self._saving(item) if low == s else None
            if way is not None:
                todo.append(Backward(s))
                if t > s:
                    todo.append((s + 1, t, s + 1, m - slots_up(costs, costs.saved[way])))
                yield Forward(s, "all", way - int(costs.first_way[s]))
                continue
            moved = min(m - int(slots[s] - slots[s - 1]), self.rows.shape[1] - 1)
            if low > s and self._can_move(item, moved):
                todo.append((s + 1, t, low, moved))
                yield Forward(s, "nothing")
                continue
            rest = m - int(slots[s])
            cut = self._cut(item, rest)
            todo += [(s, cut - 1, low, m), (s + 1, t, cut, rest)]
            yield Forward(s, "input")

    def _saving(self, state: State) -> int | None:
        costs = self.costs
        s, t, _, m = state
        for way in range(int(costs.first_way[s]), int(costs.first_way[s + 1])):
            rest = m - slots_up(costs, costs.saved[way])
            if rest < 0 or m < slots_up(costs, need_all(costs, way, s, t)):
                continue
            time = costs.way_time[way] + (self._value((s + 1, t, s + 1, rest)) if t > s else 0.0)
            if time == self._value(state):
                return way
        return None

    def _can_move(self, state: State, moved: int) -> bool:
        s, t, low, m = state
        if moved < 0 or m < slots_up(self.costs, need_step(self.costs, s, t)):
            return False
        time = self.costs.forward_time[s] + self._value((s + 1, t, low, moved))
        return bool(time == self._value(state))

    def _cut(self, state: State, rest: int) -> int:
        s, t, low, m = state
        cost, value = self.costs.forward_time[s], self._value(state)
        for cut in range(low + 1, t + 1):
            if (cost + self._value((s + 1, t, cut, rest))) + self._value((s, cut - 1, low, m)) == value:
                return cut
        raise AssertionError("no choice explains the table")

    def _value(self, state: State) -> float:
        s, t, low, m = state
        return float(self.rows[row_of(s, t, low, self.n), m])


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
