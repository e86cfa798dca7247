"""What to do at a state of `pofo`, by its tables: the bytes stored and on their way need not be whole levels here."""

from __future__ import annotations

import numpy as np

from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.costs import Costs, need_all
from elbowroom.solve.kernels.persistent import row_of
from elbowroom.solve.kernels.pofo import Entries, Space, needs, row_at, width_of
from elbowroom.solve.kernels.ramps import between, last_time, left_over, save_time, split_time, waiting
from elbowroom.solve.kernels.rows import Floats, Ints

UNSEEN = 1e250  # a time for what fits although the tables, which see whole levels only, have none; plus its bytes


@compiled
def choose_recomputing(
    costs: Costs,
    space: Space,
    reach: Ints,
    least: Ints,
    table: Floats,
    s: int,
    t: int,
    room: int,
    coming: float,
    credit: float,
) -> tuple[int, int]:
    """The best way of s to save, and -1; or -1, and the best split.

    `room` is what the budget leaves. The table is read as if so many bytes of `credit` less were stored.
    """
    n = len(costs.output) - 1
    stored = space.budget - room
    best, chosen_way, chosen_split = np.inf, -1, -1
    for way in range(costs.first_way[s], costs.first_way[s + 1]):
        need = need_all(costs, way, s, t)
        if t > s:
            need = max(need, costs.saved[way] + least[s + 1, t])
        if need > room:
            continue
        forward, backward = space.forward[way], space.backward[way]
        need_f, need_b = needs(costs, space, way, s, t)
        value = UNSEEN + need
        if t == s:
            value = last_time(coming, forward, backward, need_f, need_b, stored, space.from_host)
        else:
            rest = row_at(space, table[row_of(s + 1, t, n)], max(0.0, stored + costs.saved[way] - credit))
            if len(rest) > 0:
                value = save_time(
                    coming, rest, space.level, forward, backward, need_f, need_b, stored, space.from_host
                )
        if value < best:
            best, chosen_way, chosen_split = value, way, -1
    for split in range(s, t):
        need = max(least[s, split], costs.output[split] + least[split + 1, t])
        need = max(need, costs.gradient[t] + reach[s, split])
        if need > room:
            continue
        left = row_at(space, table[row_of(s, split, n)], max(0.0, stored - credit))
        right = row_at(space, table[row_of(split + 1, t, n)], max(0.0, stored + costs.output[split] - credit))
        value = UNSEEN + need
        if len(left) > 0 and len(right) > 0:
            walk = costs.elapsed[split] - costs.elapsed[s - 1]
            lag = costs.gradient[t] + space.lag_back[s, split] - space.budget
            first = between(left, coming / space.level)
            value = split_time(coming, first, right, space.level, walk, lag, stored, space.from_host)
        if value < best:
            best, chosen_way, chosen_split = value, -1, split
    return chosen_way, chosen_split


@compiled
def can_go_on(
    costs: Costs, space: Space, least: Ints, entries: Entries, entry: int, stored: float, host: float
) -> bool:
    """Whether something fits from an entry on, with so many bytes stored besides its input and left on the host."""
    if stored + entries.least[entry] <= space.budget and entries.moved[entry] <= host:
        return True
    return stored + entries.alone[entry] <= space.budget


@compiled
def weigh_entry(
    costs: Costs,
    space: Space,
    reach: Ints,
    least: Ints,
    entries: Entries,
    recomputing: Floats,
    table: Floats,
    entry: int,
    below: float,
    leaving: float,
    coming: float,
    host: float,
    credit: float,
) -> Floats:
    """The time from an entry on with each choice, infinite for those that do not fit: first its ways to save, then
    the stages to walk to; of each two, the first keeps the input in memory, and the second moves it.

    `below` are the bytes stored besides the input, `host` is the room there. The tables are read as if so many bytes
    of `credit` less were stored.
    """
    n = len(costs.output) - 1
    s, held = entries.stage[entry], entries.input[entry]
    ways, stored = costs.first_way[s + 1] - costs.first_way[s], below + held
    times = np.full((ways + n - s, 2), np.inf)
    for choice in range(ways):
        way = costs.first_way[s] + choice
        if stored + need_all(costs, way, s, n) > space.budget:
            continue
        need_f, need_b = needs(costs, space, way, s, n)
        forward = space.forward[way] + waiting(need_f + stored + leaving, space.to_host)
        backward = space.backward[way] + waiting(need_b + stored + coming, space.from_host)
        if s == n:
            rest = left_over(leaving, forward, space.to_host) / space.to_host
            rest += left_over(coming, backward, space.from_host) / space.from_host
            times[choice, 0] = (forward + backward) + rest
            continue
        for move in range(2):
            rest = rest_of(
                costs, space, least, entries, n + way, held, below, leaving, coming, host, credit,
                forward, backward, move == 1, table,
            )  # fmt: skip
            times[choice, move] = (forward + backward) + rest
    room = space.budget - below - costs.gradient[n]
    for t in range(s, n):
        if held + costs.output[s] + costs.overhead[s] > room or stored + least[s, t] > space.budget:
            continue
        need = costs.gradient[n] + space.lag_out[s, t] - space.budget
        forward = (costs.elapsed[t] - costs.elapsed[s - 1]) + waiting(need + stored + leaving, space.to_host)
        again = row_at(space, recomputing[row_of(s, t, n)], max(0.0, stored - credit))
        backward = between(again, coming / space.level) if len(again) > 0 else UNSEEN
        for move in range(2):
            if (space.beyond[s, t] if move == 1 else held + reach[s, t]) <= room:
                rest = rest_of(
                    costs, space, least, entries, t, held, below, leaving, coming, host, credit,
                    forward, backward, move == 1, table,
                )  # fmt: skip
                times[ways + t - s, move] = (forward + backward) + rest
    return times


@compiled
def rest_of(
    costs: Costs,
    space: Space,
    least: Ints,
    entries: Entries,
    after: int,
    held: int,
    below: float,
    leaving: float,
    coming: float,
    host: float,
    credit: float,
    forward: float,
    backward: float,
    move: bool,
    table: Floats,
) -> float:
    """The time from the next entry on, if the input of this one, `held` bytes, moves or stays."""
    if move:
        below, leaving, coming, host = below, leaving + held, coming, host - held
    else:
        below = below + held
    if host < 0 or (move and held == 0) or not can_go_on(costs, space, least, entries, after, below, host):
        return np.inf
    left = left_over(leaving, forward, space.to_host)
    came = left_over(coming, backward, space.from_host) + (held if move else 0)
    value = time_at(space, table[after], max(0.0, below - credit), left, came)
    return value if value < np.inf else UNSEEN + (below + entries.least[after])


@compiled
def time_at(space: Space, table: Floats, stored: float, leaving: float, coming: float) -> float:
    """OC of one entry; infinite if it does not fit."""
    at = stored / space.level
    low = int(at)
    part = at - low
    if low > space.levels or (part > 0 and low == space.levels):
        return np.inf
    time = cell_at(space, table, low, leaving, coming)
    if part == 0 or time == np.inf:
        return time
    return (1.0 - part) * time + part * cell_at(space, table, low + 1, leaving, coming)


@compiled
def cell_at(space: Space, table: Floats, a: int, leaving: float, coming: float) -> float:
    """The same with whole levels stored."""
    begin, width = space.plane[a], width_of(space, a)
    if table[begin] == np.inf:
        return np.inf
    low = min(int(leaving / space.level), width - 2)
    part = leaving / space.level - low
    begin += low * width
    first = between(table[begin : begin + width], coming / space.level)
    second = between(table[begin + width : begin + 2 * width], coming / space.level)
    return (1.0 - part) * first + part * second
