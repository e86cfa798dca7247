"""A dynamic program over stages, memory and a price: values may be kept, moved to the host, or computed again.

The time of the link has a price per second, so that which values move follows from what else their room would serve
for. C(s, t, m) is the least cost to run backwards t to s with m slots besides the input of stage s, which stays.
G_x(s, t, m) is the same where the m slots include the room of that input; x says what the input is, an activation of
its own (0) or part of the saved set of the stage before in one of its ways (1, 2, …). There it may stay, or move:

    G_x(s, t, m) = min( C(s, t, m − I_x),  price(I_x) + E_x(s, t, m) )
    C(s, t, m)   = min over ways w    time_w + G_w(s + 1, t, m)                                     if m ≥ need_w
                   min over splits k  time(s..k) + G_0(k + 1, t, m) + C(s, k, m)                    if m ≥ need_k
    E_x(s, t, m) = the same with m ≥ I_x + need, because operations that read the input have it in memory, and with
                   C(s, k, m − I_x), because it is back when s..k are run again

As in `persistent`, whatever is saved stays saved until its backward. Copies take no time here but their price: when
they are asked for, and what waits for them, is for who places them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.costs import Costs, need_all, slots_up
from elbowroom.solve.kernels.persistent import row_of
from elbowroom.solve.kernels.rows import Floats, Ints, relax, relax_one


class Inputs(NamedTuple):
    """What the input of each stage may be. Kinds are numbered across the chain, stage s having those from first[s]
    to first[s + 1] − 1: on its own, then each way of the stage before."""

    first: Ints
    sizes: Ints  # in slots
    prices: Floats


@compiled
def fill_distance(
    costs: Costs, reach: Ints, inputs: Inputs, s: int, distance: int, stays: Floats, moves: Floats, spare: Floats
) -> None:
    """Fill C(s, t) and all G_x(s, t) for t = s + distance; all pairs that are closer together are there.

    `stays` has the rows of C, `moves[kind, t]` those of G; `spare` is a row to work on.
    """
    n = len(costs.output) - 1
    t = s + distance
    best = stays[row_of(s, t, n)]
    best[:] = np.inf
    fill_choices(costs, reach, inputs, s, t, 0, stays, moves, best)
    for kind in range(inputs.first[s], inputs.first[s + 1]):
        row, size = moves[kind, t], inputs.sizes[kind]
        row[:] = np.inf
        relax_one(row, best, size, size, len(row), 0.0)
        if distance > 0 and size > 0:
            spare[:] = np.inf
            fill_choices(costs, reach, inputs, s, t, size, stays, moves, spare)
            relax_one(row, spare, 0, 0, len(row), inputs.prices[kind])


@compiled
def fill_choices(
    costs: Costs, reach: Ints, inputs: Inputs, s: int, t: int, held: int, stays: Floats, moves: Floats, best: Floats
) -> None:
    """All that may be done first in (s, t); `held` slots are the input's, where these count."""
    n = len(costs.output) - 1
    for way in range(costs.first_way[s], costs.first_way[s + 1]):
        start = held + slots_up(costs, need_all(costs, way, s, t))
        if t == s:
            for m in range(min(start, len(best)), len(best)):
                best[m] = min(best[m], costs.last_time[way])
        else:
            kind = inputs.first[s + 1] + 1 + way - costs.first_way[s]
            relax_one(best, moves[kind, t], 0, start, len(best), costs.way_time[way])
    for split in range(s, t):
        start = held + slots_up(costs, costs.gradient[t] + reach[s, split])
        cost = costs.elapsed[split] - costs.elapsed[s - 1]
        right = moves[inputs.first[split + 1], t]
        relax(best, right, stays[row_of(s, split, n)], held, start, len(best), cost)


@compiled
def fill_least_moving(costs: Costs, reach: Ints, inputs: Inputs, stays: Ints, moves: Ints) -> None:
    """The least memory, in slots, with which C(s, t) and G_x(s, t) are finite."""
    n = len(costs.output) - 1
    for distance in range(n):
        for s in range(1, n - distance + 1):
            t = s + distance
            stays[s, t] = least_of_choices(costs, reach, inputs, s, t, 0, stays, moves)
            for kind in range(inputs.first[s], inputs.first[s + 1]):
                size = inputs.sizes[kind]
                moves[kind, t] = stays[s, t] + size
                if distance > 0:
                    gone = least_of_choices(costs, reach, inputs, s, t, size, stays, moves)
                    moves[kind, t] = min(moves[kind, t], gone)


@compiled
def least_of_choices(
    costs: Costs, reach: Ints, inputs: Inputs, s: int, t: int, held: int, stays: Ints, moves: Ints
) -> int:
    """The least that any first choice of (s, t) takes; `held` as above."""
    least = np.int64(2**62)
    for way in range(costs.first_way[s], costs.first_way[s + 1]):
        need = held + slots_up(costs, need_all(costs, way, s, t))
        if t > s:
            need = max(need, moves[inputs.first[s + 1] + 1 + way - costs.first_way[s], t])
        least = min(least, need)
    for split in range(s, t):
        need = max(slots_up(costs, costs.gradient[t] + reach[s, split]), stays[s, split])
        least = min(least, max(held + need, moves[inputs.first[split + 1], t]))
    return least
