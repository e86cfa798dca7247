"""`persistent`: the fastest schedule in which whatever is saved stays until its backward (001 Theorem 6)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, final

import numpy as np

from elbowroom.problem import Chain, Problem
from elbowroom.progress import Progress
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.solve.fitting import fit
from elbowroom.solve.kernels.costs import Costs, costs_of, need_all, slots_up, ways_of
from elbowroom.solve.kernels.persistent import TILE, fill_least, fill_reach, fill_tile, row_of
from elbowroom.solve.kernels.rows import Ints
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.slots import divide, most_slots, useful_bytes

State = tuple[int, int, int]  # stages s..t with m slots (or bytes) besides the input of s
Choice = tuple[Literal["save", "split"], int, int]  # in which way, or where; and the memory for what follows


@final
class Persistent(Method):
    name = "persistent"
    kinds = ("chain",)
    summary = "fastest when nothing saved is dropped before its backward; O(stages³ · slots)"
    exact = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return least_budget(problem, save_early=True)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        return find(problem, budget, options, save_early=True)


def least_budget(chain: Chain, save_early: bool) -> int:
    most_slots(chain, row_count(len(chain)))  # refuses what no table can hold
    costs = costs_of(chain, unit=1)
    return int(_least(costs, _reach(costs), save_early)[1, len(chain)]) + chain.input_bytes


def row_count(n: int) -> int:
    return n * (n + 1) // 2


def find(chain: Chain, budget: int, options: Options, save_early: bool) -> Found:
    n = len(chain)
    budget = min(budget, useful_bytes(chain))
    division = divide(chain, budget, options.slots, rows=row_count(n), steps=n**3 / 6)
    costs = costs_of(chain, division.unit)
    reach = _reach(costs)
    table = _Table(costs, reach, save_early, division.slots + division.spare, options.progress)
    greedy = () if division.exact else _fit_in_bytes(costs, reach, budget, save_early)
    return fit(chain, budget, division, table, greedy)


class Sweep:
    """Schedules of one chain for any budget up to `most_bytes`, all from one table.

    Finer than solving once per budget is cheap: a planner that checks schedules against something more exact than
    the chain asks for many. It may also know better what a stage takes that is run again right before its backward
    (`last_times`): nobody wants its output then.
    """

    def __init__(
        self, chain: Chain, most_bytes: int, slots: int | None = None, last_times: Sequence[float] | None = None
    ) -> None:
        self.chain = chain
        self.useful_bytes = useful_bytes(chain)
        self.most_bytes = min(most_bytes, self.useful_bytes)
        self.least_bytes = least_budget(chain, save_early=True)
        n = len(chain)
        self._division = divide(chain, self.most_bytes, slots, rows=row_count(n), steps=n**3 / 6)
        self._costs = costs_of(chain, self._division.unit, last_times)
        self._reach = _reach(self._costs)
        self._table = _Table(self._costs, self._reach, True, self._division.slots, lambda part: None)

    def schedule(self, budget: int) -> tuple[Operation, ...]:
        """The fastest schedule within a budget that is at least `least_bytes`."""
        slots = min(budget // self._division.unit, self._division.slots)
        if self._table.time(slots) < float("inf"):
            return self._table.schedule(slots)
        return _fit_in_bytes(self._costs, self._reach, budget, True)


class _Table:
    """The filled dynamic program."""

    def __init__(self, costs: Costs, reach: Ints, save_early: bool, slots: int, progress: Progress) -> None:
        self.costs, self.reach, self.save_early = costs, reach, save_early
        self.n = len(costs.output) - 1
        self.input_slots = int(costs.output_slots[0])
        rows = row_count(self.n)
        self.rows = np.empty((rows, max(0, slots - self.input_slots) + 1))
        first, last = np.zeros(rows, dtype=np.int64), np.zeros(rows)
        tiles = -(-self.n // TILE)

        def fill(i: int, j: int) -> None:
            s_low, t_low = i * TILE + 1, j * TILE + 1
            s_high, t_high = min(self.n, s_low + TILE - 1), min(self.n, t_low + TILE - 1)
            fill_tile(costs, reach, save_early, s_low, s_high, t_low, t_high, self.rows, first, last)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for distance in range(tiles):  # tiles at one distance from the diagonal do not depend on each other
                list(pool.map(fill, range(tiles - distance), range(distance, tiles)))
                progress(_part(distance + 1, tiles))

    def time(self, slots: int) -> float:
        m = slots - self.input_slots
        return float(self.rows[row_of(1, self.n, self.n), m]) if m >= 0 else float("inf")

    def schedule(self, slots: int) -> tuple[Operation, ...]:
        return tuple(_operations(self.costs, (1, self.n, slots - self.input_slots), self._choose))

    def _choose(self, s: int, t: int, m: int) -> Choice:
        """The first choice whose value is the state's."""
        value = self.rows[row_of(s, t, self.n), m]
        for way in ways_of(self.costs, s) if t == s or self.save_early else ():
            rest = m - slots_up(self.costs, self.costs.saved[way])
            if rest < 0 or m < slots_up(self.costs, need_all(self.costs, way, s, t)):
                continue
            after = self.rows[row_of(s + 1, t, self.n), rest] if t > s else 0.0
            time = self.costs.way_time[way] if t > s else self.costs.last_time[way]
            if time + after == value:
                return "save", way, rest
        for split in range(s, t):
            rest = m - int(self.costs.output_slots[split])
            if rest < 0 or self.costs.gradient[t] + self.reach[s, split] > m * self.costs.unit:
                continue
            cost = self.costs.elapsed[split] - self.costs.elapsed[s - 1]
            right, left = row_of(split + 1, t, self.n), row_of(s, split, self.n)
            if (cost + self.rows[right, rest]) + self.rows[left, m] == value:
                return "split", split, rest
        raise AssertionError("no choice explains the table")


def _part(distance: int, tiles: int) -> float:
    """The share of the work done: a tile at distance d costs about d, and there are tiles − d of them."""
    x = distance / tiles
    return x * x * (3 - 2 * x)


def _operations(costs: Costs, state: State, choose: Callable[[int, int, int], Choice]) -> Iterator[Operation]:
    """The schedule that a sequence of choices spells out, from one state down."""
    todo: list[State | Operation] = [state]
    while todo:
        item = todo.pop()
        if not isinstance(item, tuple):
            yield item
            continue
        s, t, m = item
        what, which, rest = choose(s, t, m)
        if what == "save":
            todo.append(Backward(s))
            if t > s:
                todo.append((s + 1, t, rest))
            yield Forward(s, "all", which - int(costs.first_way[s]))
        else:
            todo += [(s, which, m), (which + 1, t, rest)]
            yield Forward(s, "input")
            for h in range(s + 1, which + 1):
                yield Forward(h, "nothing")


def _fit_in_bytes(costs: Costs, reach: Ints, budget: int, save_early: bool) -> tuple[Operation, ...]:
    """A schedule that fits whenever any does: at each state, the cheapest first choice whose parts still fit."""
    least = _least(costs, reach, save_early)

    def choose(s: int, t: int, m: int) -> Choice:
        ways = ways_of(costs, s) if t == s or save_early else range(0)
        after = int(least[s + 1, t]) if t > s else 0
        fitting = [w for w in ways if max(need_all(costs, w, s, t), costs.saved[w] + after) <= m]
        if fitting:
            way = min(fitting, key=lambda w: costs.way_time[w])
            return "save", way, m - int(costs.saved[way])
        for split in range(s, t):
            need = costs.gradient[t] + reach[s, split]
            if max(need, costs.output[split] + least[split + 1, t], least[s, split]) <= m:
                return "split", split, m - int(costs.output[split])
        raise AssertionError("the budget is below the least")

    return tuple(_operations(costs, (1, len(costs.output) - 1, budget - int(costs.output[0])), choose))


def _reach(costs: Costs) -> Ints:
    n = len(costs.output) - 1
    reach = np.zeros((n + 1, n + 1), dtype=np.int64)
    fill_reach(costs, reach)
    return reach


def _least(costs: Costs, reach: Ints, save_early: bool) -> Ints:
    n = len(costs.output) - 1
    least = np.zeros((n + 2, n + 2), dtype=np.int64)
    fill_least(costs, reach, save_early, least)
    return least
