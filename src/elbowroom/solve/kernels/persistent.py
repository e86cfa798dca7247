"""The dynamic program of 001 Theorem 6: least time of a persistent schedule, for every memory.

C(s, t, m) is the least time to run backwards t to s from the input of stage s, with m slots besides that input.
Either stage s saves all (in one of its ways) and the rest follows, or the forward runs on from s to a split,
whose output is kept while split+1..t is done, before s..split is done in turn.

What makes it fast, all of it exact: rows never rise, so a split is tried only on memories where the row is still
above the best that split reaches with all the memory there is; no split is tried below the memory its two parts
need; and rows are filled in tiles, so that a row read from memory serves many.

The thesis asks for room to run every forward up to t before any split; only those up to the split run, so only
those are asked for here.
"""

from __future__ import annotations

import numpy as np

from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.costs import Costs, need_all, slots_up
from elbowroom.solve.kernels.rows import Floats, Ints, end_above, first_finite, least_of_largest, relax, relax_one

TILE = 24


@compiled
def row_of(s: int, t: int, n: int) -> int:
    """Where the row of (s, t), 1 ≤ s ≤ t ≤ n, lies in the packed table."""
    return (s - 1) * n - (s - 1) * (s - 2) // 2 + (t - s)


@compiled
def fill_reach(costs: Costs, reach: Ints) -> None:
    """reach[s, i]: bytes, besides stage s's input and the gradient, to run forwards s..i without saving."""
    n = len(costs.output) - 1
    for s in range(1, n + 1):
        largest = 0
        for h in range(s, n + 1):
            own_input = costs.output[h - 1] if h > s else 0
            largest = max(largest, own_input + costs.output[h] + costs.overhead[h])
            reach[s, h] = largest


@compiled
def fill_tile(
    costs: Costs,
    reach: Ints,
    save_early: bool,
    s_low: int,
    s_high: int,
    t_low: int,
    t_high: int,
    table: Floats,
    first: Ints,
    last: Floats,
) -> None:
    """Fill the rows (s, t) with s_low ≤ s ≤ s_high and t_low ≤ t ≤ t_high; all shorter tiles are there.

    `first` and `last` keep each row's least feasible memory and its time with all of it. With `save_early` off,
    a stage saves all only right before its own backward (revolve).
    """
    n = len(costs.output) - 1
    for s in range(s_low, s_high + 1):
        for t in range(max(s, t_low), t_high + 1):
            table[row_of(s, t, n)][:] = np.inf
    for split in range(s_high, t_low):  # both parts lie outside the tile: any order will do
        for s in range(s_low, s_high + 1):
            for t in range(t_low, t_high + 1):
                try_split(costs, reach, s, split, t, table, first, last)
    for s in range(s_high, s_low - 1, -1):
        for t in range(max(s, t_low), t_high + 1):
            if t == s or save_early:
                for way in range(costs.first_way[s], costs.first_way[s + 1]):
                    try_save(costs, way, s, t, table, first)
            for split in range(s, min(s_high, t)):
                try_split(costs, reach, s, split, t, table, first, last)
            for split in range(max(t_low, s_high), t):
                try_split(costs, reach, s, split, t, table, first, last)
            row = row_of(s, t, n)
            first[row], last[row] = first_finite(table[row]), table[row][-1]


@compiled
def try_save(costs: Costs, way: int, s: int, t: int, table: Floats, first: Ints) -> None:
    """Stage s saves all now, s+1..t follows, then backward s."""
    n = len(costs.output) - 1
    best = table[row_of(s, t, n)]
    need = slots_up(costs, need_all(costs, way, s, t))
    if t == s:
        for m in range(min(need, len(best)), len(best)):
            best[m] = min(best[m], costs.last_time[way])
        return
    rest = row_of(s + 1, t, n)
    shift = slots_up(costs, costs.saved[way])
    relax_one(best, table[rest], shift, max(need, shift + first[rest]), len(best), costs.way_time[way])


@compiled
def try_split(
    costs: Costs, reach: Ints, s: int, split: int, t: int, table: Floats, first: Ints, last: Floats
) -> None:
    """Forwards s..split, keeping only the input of s; then split+1..t; then s..split."""
    n = len(costs.output) - 1
    left, right = row_of(s, split, n), row_of(split + 1, t, n)
    best = table[row_of(s, t, n)]
    shift = costs.output_slots[split]
    start = max(shift + first[right], first[left])
    need = costs.gradient[t] + reach[s, split]
    if need > start * costs.unit:  # rarely: spare the division
        start = slots_up(costs, need)
    if start >= len(best):
        return
    cost = costs.elapsed[split] - costs.elapsed[s - 1]
    bound = (cost + last[right]) + last[left]
    if best[start] > bound:
        stop = len(best) if best[-1] > bound else end_above(best, start, bound)
        relax(best, table[left], table[right], shift, start, stop, cost)


@compiled
def fill_least(costs: Costs, reach: Ints, save_early: bool, least: Ints) -> None:
    """least[s, t]: the fewest bytes, besides stage s's input, with which (s, t) can be done at all."""
    n = len(costs.output) - 1
    for s in range(n, 0, -1):
        for t in range(s, n + 1):
            best = np.int64(2**62)
            if t == s or save_early:
                for way in range(costs.first_way[s], costs.first_way[s + 1]):
                    value = need_all(costs, way, s, t)
                    if t > s:
                        value = max(value, costs.saved[way] + least[s + 1, t])
                    best = min(best, value)
            if t > s:
                need = costs.gradient[t] + reach[s, s:t]
                right = costs.output[s:t] + least[s + 1 : t + 1, t]
                best = min(best, least_of_largest(need, right, least[s, s:t]))
            least[s, t] = best
