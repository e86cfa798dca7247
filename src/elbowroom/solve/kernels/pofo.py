"""The dynamic program of 001 ch. 4: persistent checkpoints, each of which may be offloaded until after the loss.

What is saved in the forward phase is the input of a part of the chain: a_{s-1} on its own, or inside the saved set
ā_{s-1}. Such an *entry* s is left in one of two ways: stage s saves all, or the forwards walk on to a stage t, whose
output is the next entry, and s..t are recomputed after the loss. Either way its input stays or goes to the host.
The offloads must be over before the backward of the loss, and the prefetches begin after its forward.

Two tables, both in levels of memory:

    C(s, t, A, Δ)        least time to run backwards t to s from the input of s, which is one of the A bytes that are
                         stored, while Δ bytes come back by the end (001 section 4.2.3)
    OC(entry, A, Δ_F, Δ_B)  least time from forward s to backward s with A bytes stored besides the input of s, while
                         Δ_F bytes are still to leave and Δ_B must be back when backward s is done (section 4.2.1)

Nothing is rounded on the way: times are found for whole levels, and read between them along straight lines. So the
few bytes that a short operation moves are never lost, and where all sizes and what the link moves in every operation
are whole levels, all is exact. What does not fit at the upper of two levels counts as not fitting.

001 asks for room to run every forward of s..t before C's first split; only those up to the split run. It takes the
gradient of the loss to come into being after the forward phase; here it is there from the start, as it is for the
referee. And t may be the stage before the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.costs import Costs, need_all
from elbowroom.solve.kernels.persistent import row_of
from elbowroom.solve.kernels.ramps import (
    left_over,
    mixed,
    relax_last,
    relax_plane,
    relax_save,
    relax_split,
    stretched,
    waiting,
)
from elbowroom.solve.kernels.rows import Floats, Ints


class Entries(NamedTuple):
    """Entry s - 1 is the input of stage s on its own, entry n + w the input inside the set saved in way w."""

    stage: Ints  # the stage whose input it is
    input: Ints  # its bytes
    least: Ints  # the fewest bytes, input included, to run from here on if everything may go to the host
    moved: Ints  # how many bytes then go there
    alone: Ints  # the same as `least` if nothing goes


class Space(NamedTuple):
    """A budget in levels. With A levels stored, bytes on their way are tabled from 0 to one level beyond the rest."""

    levels: int
    level: float  # bytes
    budget: float  # bytes
    to_host: float
    from_host: float
    row: Ints  # where the row of A levels begins in C
    plane: Ints  # where the plane of A levels begins in OC
    forward: Floats  # time of forward and backward per way
    backward: Floats
    beyond: Ints  # [s, t]: bytes for the forwards after s up to t, without gradient
    lag_out: Floats  # [s, t]: most that a forward s..t needs, less what has left since s began
    lag_back: Floats  # [s, t]: the same, less what comes back from its end to the end of t


@compiled
def width_of(space: Space, a: int) -> int:
    return space.levels - a + 2


@compiled
def fill_walks(costs: Costs, to_host: float, from_host: float, beyond: Ints, out: Floats, back: Floats) -> None:
    n = len(costs.output) - 1
    for s in range(1, n + 1):
        own = costs.output[s] + costs.overhead[s]
        largest, leaving, coming = np.int64(0), float(own), float(own)
        out[s, s], back[s, s] = leaving, coming
        for t in range(s + 1, n + 1):
            need = costs.output[t - 1] + costs.output[t] + costs.overhead[t]
            largest = max(largest, need)
            leaving = max(leaving, need - to_host * (costs.elapsed[t - 1] - costs.elapsed[s - 1]))
            coming = max(coming - from_host * costs.forward_time[t], float(need))
            beyond[s, t], out[s, t], back[s, t] = largest, leaving, coming


# --- reading tables ----------------------------------------------------------------------------------------------


@compiled
def row_at(space: Space, table: Floats, stored: float) -> Floats:
    """C of one (s, t) by level to come, with so many bytes stored; empty if it does not fit."""
    at = stored / space.level
    low = int(at)
    part = at - low
    if low > space.levels or (part > 0 and low == space.levels):
        return table[0:0]
    begin = space.row[low]
    first = table[begin : begin + width_of(space, low)]
    if part == 0 or first[0] == np.inf:
        return first if first[0] < np.inf else table[0:0]
    begin = space.row[low + 1]
    second = table[begin : begin + width_of(space, low + 1)]
    if second[0] == np.inf:
        return table[0:0]
    return mixed(first[: len(second)], second, part)


@compiled
def plane_at(space: Space, table: Floats, stored: float) -> Floats:
    """OC of one entry by levels to leave and to come, with so many bytes stored; empty if it does not fit."""
    at = stored / space.level
    low = int(at)
    part = at - low
    if low > space.levels or (part > 0 and low == space.levels):
        return table[0:0].reshape((0, 0))
    width = width_of(space, low)
    first = table[space.plane[low] : space.plane[low] + width * width].reshape((width, width))
    if part == 0 or first[0, 0] == np.inf:
        return first if first[0, 0] < np.inf else table[0:0].reshape((0, 0))
    width = width_of(space, low + 1)
    second = table[space.plane[low + 1] : space.plane[low + 1] + width * width].reshape((width, width))
    if second[0, 0] == np.inf:
        return table[0:0].reshape((0, 0))
    return mixed(first[:width, :width], second, part)


# --- C: recomputation while bytes come back ----------------------------------------------------------------------


@compiled
def fill_recomputing(
    costs: Costs, space: Space, reach: Ints, first: int, end: int, length: int, table: Floats
) -> None:
    """C(s, s + length) for first ≤ s < end; all shorter ones are there."""
    n = len(costs.output) - 1
    for s in range(first, end):
        t = s + length
        whole = table[row_of(s, t, n)]
        whole[:] = np.inf
        for a in range(space.levels + 1):
            best = whole[space.row[a] : space.row[a] + width_of(space, a)]
            stored = a * space.level
            for way in range(costs.first_way[s], costs.first_way[s + 1]):
                if stored + need_all(costs, way, s, t) <= space.budget:
                    try_save(costs, space, way, s, t, stored, table, best)
            for split in range(s, t):
                if stored + costs.gradient[t] + reach[s, split] <= space.budget:
                    left = table[row_of(s, split, n)]
                    left = left[space.row[a] : space.row[a] + len(best)]
                    right = row_at(space, table[row_of(split + 1, t, n)], stored + costs.output[split])
                    if left[0] < np.inf and len(right) > 0:
                        walk = costs.elapsed[split] - costs.elapsed[s - 1]
                        need = costs.gradient[t] + space.lag_back[s, split] - space.budget
                        relax_split(best, left, right, space.level, walk, need, stored, space.from_host)


@compiled
def try_save(
    costs: Costs, space: Space, way: int, s: int, t: int, stored: float, table: Floats, best: Floats
) -> None:
    """Stage s saves all now, s + 1..t follows, then backward s."""
    n = len(costs.output) - 1
    forward, backward = space.forward[way], space.backward[way]
    need_f, need_b = needs(costs, space, way, s, t)
    if t == s:
        relax_last(best, space.level, forward, backward, need_f, need_b, stored, space.from_host)
        return
    rest = row_at(space, table[row_of(s + 1, t, n)], stored + costs.saved[way])
    if len(rest) > 0:
        relax_save(best, rest, space.level, forward, backward, need_f, need_b, stored, space.from_host)


@compiled
def needs(costs: Costs, space: Space, way: int, s: int, t: int) -> tuple[float, float]:
    """What a forward that saves all and its backward need besides what is stored, less the budget."""
    forward = costs.gradient[t] + costs.saved[way] + costs.over_f[way]
    backward = costs.saved[way] + costs.gradient[s] + costs.gradient[s - 1] + costs.over_b[way]
    return forward - space.budget, backward - space.budget


# --- OC: the forward phase, and what follows from it -------------------------------------------------------------


@compiled
def fill_entry(
    costs: Costs,
    space: Space,
    reach: Ints,
    entries: Entries,
    entry: int,
    first: int,
    stride: int,
    recomputing: Floats,
    table: Floats,
) -> None:
    """OC of one entry with `first`, `first` + `stride`, … levels stored; those of all later stages are there."""
    s, held = entries.stage[entry], entries.input[entry]
    n = len(costs.output) - 1
    for a in range(first, space.levels + 1, stride):
        width = width_of(space, a)
        best = table[entry, space.plane[a] : space.plane[a] + width * width].reshape((width, width))
        best[:, :] = np.inf
        stored = a * space.level + held
        for way in range(costs.first_way[s], costs.first_way[s + 1]):
            if stored + need_all(costs, way, s, n) <= space.budget:
                if s == n:
                    try_loss(costs, space, way, stored, best)
                else:
                    save_entry(costs, space, n + way, way, s, held, stored, table, best)
        for t in range(s, n):
            if stored + costs.gradient[n] + costs.output[s] + costs.overhead[s] <= space.budget:
                walk_entry(costs, space, reach, s, t, held, stored, recomputing, table, best)


@compiled
def try_loss(costs: Costs, space: Space, way: int, stored: float, best: Floats) -> None:
    """The loss: what is still to leave leaves between its forward and its backward, and then what must come comes."""
    need_f, need_b = needs(costs, space, way, len(costs.output) - 1, len(costs.output) - 1)
    moving = np.arange(len(best)) * space.level
    forward = space.forward[way] + waiting(need_f + stored + moving, space.to_host)
    backward = space.backward[way] + waiting(need_b + stored + moving, space.from_host)
    out = forward + left_over(moving, forward, space.to_host) / space.to_host
    back = backward + left_over(moving, backward, space.from_host) / space.from_host
    for f in range(len(best)):
        best[f] = np.minimum(best[f], out[f] + back)


@compiled
def save_entry(
    costs: Costs,
    space: Space,
    after: int,
    way: int,
    s: int,
    held: int,
    stored: float,
    table: Floats,
    best: Floats,
) -> None:
    """Stage s saves all; the next entry is inside its saved set. `stored` has the input of s in it."""
    need_f, need_b = needs(costs, space, way, s, len(costs.output) - 1)
    moving = np.arange(len(best)) * space.level
    forward = space.forward[way] + waiting(need_f + stored + moving, space.to_host)
    backward = space.backward[way] + waiting(need_b + stored + moving, space.from_host)
    relax_entry(space, held, stored, True, True, moving, forward, backward, table[after], best)


@compiled
def walk_entry(
    costs: Costs,
    space: Space,
    reach: Ints,
    s: int,
    t: int,
    held: int,
    stored: float,
    recomputing: Floats,
    table: Floats,
    best: Floats,
) -> None:
    """The forwards walk on to t, whose output is the next entry, and s..t are recomputed after that."""
    n = len(costs.output) - 1
    stays = stored + costs.gradient[n] + reach[s, t] <= space.budget
    goes = stored - held + costs.gradient[n] + space.beyond[s, t] <= space.budget
    if not (stays or goes):
        return
    again = row_at(space, recomputing[row_of(s, t, n)], stored)
    if len(again) == 0:
        return
    moving = np.arange(len(best)) * space.level
    need = costs.gradient[n] + space.lag_out[s, t] - space.budget
    forward = (costs.elapsed[t] - costs.elapsed[s - 1]) + waiting(need + stored + moving, space.to_host)
    backward = stretched(again, len(best))
    relax_entry(space, held, stored, stays, goes, moving, forward, backward, table[t], best)


@compiled
def relax_entry(
    space: Space,
    held: int,
    stored: float,
    stays: bool,
    goes: bool,
    moving: Floats,
    forward: Floats,
    backward: Floats,
    after: Floats,
    best: Floats,
) -> None:
    """The two choices for the input of an entry: it stays in memory, or goes to the host and comes back."""
    if stays:
        plane = plane_at(space, after, stored)
        if len(plane) > 0:
            leaving = left_over(moving, forward, space.to_host) / space.level
            coming = left_over(moving, backward, space.from_host) / space.level
            relax_plane(best, plane, leaving, forward, coming, backward)
    if goes and held > 0:
        plane = plane_at(space, after, stored - held)
        if len(plane) > 0:
            leaving = left_over(moving + held, forward, space.to_host) / space.level
            coming = (left_over(moving, backward, space.from_host) + held) / space.level
            relax_plane(best, plane, leaving, forward, coming, backward)
