"""`floating`: the fastest schedule of all (001 Theorem 5, completed; the decomposition is in kernels/floating.py).

A saved input may be let go before its backward and be replaced by one further right. On real networks this
rarely beats `persistent`; it is the proof that nothing does better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, final

import numpy as np

from elbowroom.problem import Chain, Problem
from elbowroom.progress import Progress
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.solve.fitting import fit
from elbowroom.solve.kernels.costs import Costs, costs_of, need_all, need_step, slots_up, ways_of
from elbowroom.solve.kernels.floating import fill_least, fill_start, row_of
from elbowroom.solve.kernels.rows import Ints
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.slots import TABLE_BYTES, divide, most_slots, useful_bytes

_PATIENCE = 4e9  # inner steps: a few seconds

State = tuple[int, int, int, int]  # backwards t..ℓ from the input of s, with m slots (or bytes) besides it
Choice = tuple[Literal["save", "move", "keep"], int, int]  # way, next stage or cut; and the memory for what follows


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
        greedy = () if division.exact else _fit_in_bytes(costs, budget)
        return fit(problem, budget, division, table, greedy)


def row_count(n: int) -> int:
    return n * (n + 1) * (n + 2) // 6


def work(n: int) -> float:
    """Inner steps per slot."""
    return n**4 / 24 + 1


def affords(n: int, slots: int) -> bool:
    """Whether this method takes a few seconds, and no more memory than it may, for n stages."""
    return work(n) * slots <= _PATIENCE and 8 * row_count(n) * slots <= TABLE_BYTES / 3


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
        return tuple(_operations(self.costs, (1, self.n, 1, slots - self.input_slots), self._choose))

    def _choose(self, state: State) -> Choice:
        """The first choice whose value is the state's."""
        s, t, low, m = state
        costs, value = self.costs, self._value(state)
        for way in ways_of(costs, s) if low == s else ():
            rest = m - slots_up(costs, costs.saved[way])
            if rest < 0 or m < slots_up(costs, need_all(costs, way, s, t)):
                continue
            after = self._value((s + 1, t, s + 1, rest)) if t > s else 0.0
            if costs.way_time[way] + after == value:
                return "save", way, rest
        step, time = slots_up(costs, need_step(costs, s, t)), costs.forward_time[s]
        rest = min(m - int(costs.output_slots[s] - costs.output_slots[s - 1]), self.rows.shape[1] - 1)
        if low > s and min(rest, m - step) >= 0 and time + self._value((s + 1, t, low, rest)) == value:
            return "move", s + 1, rest
        rest = m - int(costs.output_slots[s])
        for cut in range(low + 1, t + 1):
            if (time + self._value((s + 1, t, cut, rest))) + self._value((s, cut - 1, low, m)) == value:
                return "keep", cut, rest
        raise AssertionError("no choice explains the table")

    def _value(self, state: State) -> float:
        s, t, low, m = state
        return float(self.rows[row_of(s, t, low, self.n), m])


def _operations(costs: Costs, state: State, choose: Callable[[State], Choice]) -> Iterator[Operation]:
    """The schedule that a sequence of choices spells out, from one state down."""
    todo: list[State | Operation] = [state]
    while todo:
        item = todo.pop()
        if not isinstance(item, tuple):
            yield item
            continue
        s, t, low, m = item
        what, which, rest = choose(item)
        if what == "save":
            todo.append(Backward(s))
            if t > s:
                todo.append((s + 1, t, s + 1, rest))
            yield Forward(s, "all", which - int(costs.first_way[s]))
        elif what == "move":
            todo.append((s + 1, t, low, rest))
            yield Forward(s, "nothing")
        else:
            todo += [(s, which - 1, low, m), (s + 1, t, which, rest)]
            yield Forward(s, "input")


def _fit_in_bytes(costs: Costs, budget: int) -> tuple[Operation, ...]:
    """A schedule that fits whenever any does: at each state, the cheapest first choice whose parts still fit."""
    n = len(costs.output) - 1
    least = _least(costs)

    def choose(state: State) -> Choice:
        s, t, low, m = state
        after = int(least[row_of(s + 1, t, s + 1, n)]) if t > s else 0
        ways = ways_of(costs, s) if low == s else range(0)
        fitting = [w for w in ways if max(need_all(costs, w, s, t), costs.saved[w] + after) <= m]
        if fitting:
            way = min(fitting, key=lambda w: costs.way_time[w])
            return "save", way, m - int(costs.saved[way])
        rest = m - int(costs.output[s] - costs.output[s - 1])
        if low > s and need_step(costs, s, t) <= m and least[row_of(s + 1, t, low, n)] <= rest:
            return "move", s + 1, rest
        rest = m - int(costs.output[s])
        for cut in range(low + 1, t + 1):
            if least[row_of(s + 1, t, cut, n)] <= rest and least[row_of(s, cut - 1, low, n)] <= m:
                return "keep", cut, rest
        raise AssertionError("the budget is below the least")

    return tuple(_operations(costs, (1, n, 1, budget - int(costs.output[0])), choose))


def _least(costs: Costs) -> Ints:
    n = len(costs.output) - 1
    least = np.zeros(row_count(n), dtype=np.int64)
    fill_least(costs, least)
    return least
