"""`persistent`: the fastest schedule in which whatever is saved stays until its backward (001 Theorem 6)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import final

import numpy as np

from elbowroom.problem import Chain, Problem
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.solve.kernels.costs import Costs, costs_of, need_all, slots_up
from elbowroom.solve.kernels.persistent import TILE, fill_least, fill_reach, fill_tile, row_of
from elbowroom.solve.kernels.rows import Floats, Ints
from elbowroom.solve.method import Found, Method, Options, Progress, Status
from elbowroom.solve.slots import divide, useful_bytes

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
    costs = costs_of(chain, unit=1)
    return int(_least(costs, _reach(costs), save_early)[1, len(chain)]) + chain.input_bytes


def find(chain: Chain, budget: int, options: Options, save_early: bool) -> Found:
    """The fastest schedule in slots; or one that fits in bytes alone, where slots are too coarse to see any."""
    n = len(chain)
    budget = min(budget, useful_bytes(chain))
    division = divide(chain, budget, options.slots, rows=n * (n + 1) / 2, steps=n**3 / 6)
    costs = costs_of(chain, division.unit)
    reach = _reach(costs)
    schedule, time = _fastest(costs, reach, division.slots, save_early, options.progress)
    notes = {"slots": division.slots, "slot_bytes": division.unit}
    if division.exact:
        return Found(schedule, Status.OPTIMAL, time, notes)
    fitted = tuple(_fit_in_bytes(costs, reach, budget, save_early))
    fitted_time = forward_and_backward_time(chain, fitted)
    if fitted_time < time:
        status = Status.TIGHT if time == float("inf") else Status.ROUNDED
        return Found(fitted, status, fitted_time, notes)
    return Found(schedule, Status.ROUNDED, time, notes)


def _fastest(
    costs: Costs, reach: Ints, slots: int, save_early: bool, progress: Progress
) -> tuple[tuple[Operation, ...], float]:
    n = len(costs.output) - 1
    top = slots - int(costs.output_slots[0])
    if top < 0:
        return (), float("inf")
    rows = n * (n + 1) // 2
    table = np.empty((rows, top + 1))
    first, last = np.zeros(rows, dtype=np.int64), np.zeros(rows)
    tiles = -(-n // TILE)

    def fill(i: int, j: int) -> None:
        s_low, t_low = i * TILE + 1, j * TILE + 1
        s_high, t_high = min(n, s_low + TILE - 1), min(n, t_low + TILE - 1)
        fill_tile(costs, reach, save_early, s_low, s_high, t_low, t_high, table, first, last)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for distance in range(tiles):  # tiles at one distance from the diagonal do not depend on each other
            list(pool.map(fill, range(tiles - distance), range(distance, tiles)))
            progress(_part(distance + 1, tiles))
    time = float(table[row_of(1, n, n), top])
    if time == float("inf"):
        return (), time
    return tuple(_trace(costs, reach, save_early, table, top)), time


def _part(distance: int, tiles: int) -> float:
    """The share of the work done: a tile at distance d costs about d, and there are tiles − d of them."""
    x = distance / tiles
    return x * x * (3 - 2 * x)


def _trace(costs: Costs, reach: Ints, save_early: bool, table: Floats, top: int) -> Iterator[Operation]:
    """Read the schedule off the table: at each state, the first choice whose value is the state's."""
    n = len(costs.output) - 1
    todo: list[State | Operation] = [(1, n, top)]
    while todo:
        item = todo.pop()
        if not isinstance(item, tuple):
            yield item
            continue
        s, t, m = item
        value = table[row_of(s, t, n), m]
        way = _saving(costs, save_early, table, s, t, m, value)
        if way is not None:
            todo.append(Backward(s))
            if t > s:
                todo.append((s + 1, t, m - slots_up(costs, costs.saved[way])))
            yield Forward(s, "all", way - int(costs.first_way[s]))
            continue
        split = _split(costs, reach, table, s, t, m, value)
        todo += [(s, split, m), (split + 1, t, m - int(costs.output_slots[split]))]
        yield Forward(s, "input")
        for h in range(s + 1, split + 1):
            yield Forward(h, "nothing")


def _saving(costs: Costs, save_early: bool, table: Floats, s: int, t: int, m: int, value: float) -> int | None:
    n = len(costs.output) - 1
    if t > s and not save_early:
        return None
    for way in range(int(costs.first_way[s]), int(costs.first_way[s + 1])):
        rest = m - slots_up(costs, costs.saved[way])
        if rest < 0 or m < slots_up(costs, need_all(costs, way, s, t)):
            continue
        time = costs.way_time[way] + (table[row_of(s + 1, t, n), rest] if t > s else 0.0)
        if time == value:
            return way
    return None


def _split(costs: Costs, reach: Ints, table: Floats, s: int, t: int, m: int, value: float) -> int:
    n = len(costs.output) - 1
    for split in range(s, t):
        rest = m - int(costs.output_slots[split])
        need = int(costs.gradient[t] + reach[s, split])
        if rest < 0 or need > m * costs.unit:
            continue
        cost = costs.elapsed[split] - costs.elapsed[s - 1]
        if (cost + table[row_of(split + 1, t, n), rest]) + table[row_of(s, split, n), m] == value:
            return split
    raise AssertionError("no choice explains the table")


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


def forward_and_backward_time(chain: Chain, schedule: tuple[Operation, ...]) -> float:
    """The time of a chain schedule in which every save is followed, sooner or later, by its backward."""
    total = 0.0
    for op in schedule:
        assert isinstance(op, Forward | Backward)
        assert isinstance(op.at, int)
        stage = chain.stages[op.at - 1]
        if isinstance(op, Backward):
            continue  # counted with the forward that saved for it
        way = stage.ways[op.way]
        total += way.forward_time + way.backward_time if op.save == "all" else stage.forward_time
    return total


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
