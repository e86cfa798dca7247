"""`persistent`: the fastest schedule in which whatever is saved stays until its backward (001 Theorem 6)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import final

import numpy as np

from elbowroom.problem import Chain, Problem
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.solve.fitting import fit
from elbowroom.solve.kernels.costs import Costs, costs_of, need_all, slots_up
from elbowroom.solve.kernels.persistent import TILE, fill_least, fill_reach, fill_tile, row_of
from elbowroom.solve.kernels.rows import Ints
from elbowroom.solve.method import Found, Method, Options, Progress
from elbowroom.solve.slots import divide, most_slots, useful_bytes

State = tuple[int, int, int]  # stages s..t with m slots (or bytes) besides the input of s


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
    greedy = () if division.exact else tuple(_fit_in_bytes(costs, reach, budget, save_early))
    return fit(chain, budget, division, table, greedy)


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
        return tuple(self._trace(slots - self.input_slots))

    def _trace(self, top: int) -> Iterator[Operation]:
        """Read the schedule off the table: at each state, the first choice whose value is the state's."""
        todo: list[State | Operation] = [(1, self.n, top)]
        while todo:
            item = todo.pop()
            if not isinstance(item, tuple):
                yield item
                continue
            s, t, m = item
            way = self._saving(s, t, m) if t == s or self.save_early else None
            if way is not None:
                todo.append(Backward(s))
                if t > s:
                    todo.append((s + 1, t, m - slots_up(self.costs, self.costs.saved[way])))
                yield Forward(s, "all", way - int(self.costs.first_way[s]))
                continue
            split = self._split(s, t, m)
            todo += [(s, split, m), (split + 1, t, m - int(self.costs.output_slots[split]))]
            yield Forward(s, "input")
            for h in range(s + 1, split + 1):
                yield Forward(h, "nothing")

    def _saving(self, s: int, t: int, m: int) -> int | None:
        costs, value = self.costs, self.rows[row_of(s, t, self.n), m]
        for way in range(int(costs.first_way[s]), int(costs.first_way[s + 1])):
            rest = m - slots_up(costs, costs.saved[way])
            if rest < 0 or m < slots_up(costs, need_all(costs, way, s, t)):
                continue
            time = costs.way_time[way] + (self.rows[row_of(s + 1, t, self.n), rest] if t > s else 0.0)
            if time == value:
                return way
        return None

    def _split(self, s: int, t: int, m: int) -> int:
        costs, value = self.costs, self.rows[row_of(s, t, self.n), m]
        for split in range(s, t):
            rest = m - int(costs.output_slots[split])
            need = int(costs.gradient[t] + self.reach[s, split])
            if rest < 0 or need > m * costs.unit:
                continue
            cost = costs.elapsed[split] - costs.elapsed[s - 1]
            after, before = row_of(split + 1, t, self.n), row_of(s, split, self.n)
            if (cost + self.rows[after, rest]) + self.rows[before, m] == value:
                return split
        raise AssertionError("no choice explains the table")


def _part(distance: int, tiles: int) -> float:
    """The share of the work done: a tile at distance d costs about d, and there are tiles − d of them."""
    x = distance / tiles
    return x * x * (3 - 2 * x)


def _fit_in_bytes(costs: Costs, reach: Ints, budget: int, save_early: bool) -> Iterator[Operation]:
    """A schedule that fits whenever any does: at each state, the cheapest first choice whose parts still fit."""
    n = len(costs.output) - 1
    least = _least(costs, reach, save_early)
    todo: list[State | Operation] = [(1, n, budget - int(costs.output[0]))]
    while todo:
        item = todo.pop()
        if not isinstance(item, tuple):
            yield item
            continue
        s, t, m = item
        ways = range(int(costs.first_way[s]), int(costs.first_way[s + 1])) if t == s or save_early else ()
        fitting = [
            way
            for way in ways
            if need_all(costs, way, s, t) <= m and (t == s or costs.saved[way] + least[s + 1, t] <= m)
        ]
        if fitting:
            way = min(fitting, key=lambda w: costs.way_time[w])
            todo.append(Backward(s))
            if t > s:
                todo.append((s + 1, t, m - int(costs.saved[way])))
            yield Forward(s, "all", way - int(costs.first_way[s]))
            continue
        split = next(
            i
            for i in range(s, t)
            if max(costs.gradient[t] + reach[s, i], costs.output[i] + least[i + 1, t], least[s, i]) <= m
        )
        todo += [(s, split, m), (split + 1, t, m - int(costs.output[split]))]
        yield Forward(s, "input")
        for h in range(s + 1, split + 1):
            yield Forward(h, "nothing")


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
