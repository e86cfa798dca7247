"""The dynamic program over lower sets of a graph (002, Algorithm 1), with sparse tables.

Sets are numbered by size, from the empty one to the whole graph. A *step* goes from a set to a larger one that
contains it. It has the bytes it needs beside what is kept already (`need`), the bytes it adds to that (`keep`), and
the time of what it will compute again. There may be hundreds of millions, so they are not stored: those to one set
are listed when it is its turn, from sets only that were reached and from which it makes sense to go on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.rows import Floats, Ints

Words = NDArray[np.uint64]
NEVER = 2**62
FASTEST, COARSEST, SMALLEST = 0, 1, 2
_ROUNDING = 1e-9  # of sums of times


class Sets(NamedTuple):
    """The lower sets of a family, as bits, and what kernels need to know of each.

    A list of nodes for every set (those of its boundary; those that lead nowhere outside) is one array and where each
    set's nodes begin. `before` and `after` are bytes of gradients that a step from, or to, a set has to hold.
    `spares` is the time of both its lists: a step to it computes everything else again. `dearest` are all nodes, by
    how much time they take for what it costs to keep them, most first; `price` is that cost, in bytes.
    """

    words: Words
    sizes: Ints
    times: Floats
    before: Ints
    after: Ints
    boundary_starts: Ints
    boundary: Ints
    ending_starts: Ints
    ending: Ints
    spares: Floats
    node_bytes: Ints
    node_times: Floats
    dearest: Ints
    price: Ints


@compiled
def steps_to(
    j: int,
    reached: Ints,
    lowest: Ints,
    earliest: Floats,
    budget: int,
    most_time: float,
    sets: Sets,
    sources: Ints,
    need: Ints,
    keep: Ints,
) -> int:
    """List the steps to set j that may lead somewhere, from sets that were reached; how many there are.

    They are within the budget with the least that may be kept before. `earliest` says when each set is reached at the
    earliest, less the time of its nodes: what arrives at j after `most_time` comes too late.
    """
    latest = most_time - sets.times[j] + sets.spares[j] + _ROUNDING * sets.times[-1]
    found = 0
    for i in reached:
        bytes_needed = _needs(sets, i, j)
        if lowest[i] + bytes_needed > budget or earliest[i] > latest or not _contains(sets.words[j], sets.words[i]):
            continue
        sources[found], need[found] = i, bytes_needed
        keep[found] = _missing(sets.words[i], sets.boundary_starts, sets.boundary, j, sets.node_bytes)
        found += 1
    return found


@compiled
def _needs(sets: Sets, i: int, j: int) -> int:
    """Bytes for the step from set i to set j: the values and gradients of its part, and gradients beside them."""
    return 2 * (sets.sizes[j] - sets.sizes[i]) + sets.before[i] + sets.after[j]  # type: ignore[no-any-return]


@compiled
def _contains(larger: Words, smaller: Words) -> bool:
    missing = np.uint64(0)
    for k in range(len(larger)):
        missing |= smaller[k] & ~larger[k]
    return missing == 0


@compiled
def _missing(words: Words, starts: Ints, members: Ints, j: int, weights: Any) -> Any:
    """The weights of the nodes listed for set j that are not in `words`, added up."""
    total = weights[0] - weights[0]
    for k in range(starts[j], starts[j + 1]):
        if not _has(words, members[k]):
            total += weights[members[k]]
    return total


@compiled
def _has(words: Words, v: int) -> bool:
    return (words[v >> 6] >> np.uint64(v & 63)) & np.uint64(1) != 0


@compiled
def _in_time(
    sets: Sets, j: int, budget: int, most_time: float, times: Floats, kept: Ints, origins: Ints, size: int
) -> int:
    """Drop pairs of set j from which the whole graph is not reached in time, in place; how many are left.

    What is not computed again after j is kept until its backward, or in the last part: it takes room either way. So
    no more is spared than the dearest nodes, as many as there is room for. Pairs are sorted by time.
    """
    left = at = taken = 0
    again = sets.times[-1] - sets.times[j] - _ROUNDING * sets.times[-1]
    for k in range(size):
        room = budget - kept[k]
        while at < len(sets.dearest):
            v = sets.dearest[at]
            if not _has(sets.words[j], v):
                if taken + sets.price[v] > room:
                    break
                taken += sets.price[v]
                again -= sets.node_times[v]
            at += 1
        some = 0.0  # of the next one: a bound need not be a choice
        if at < len(sets.dearest):
            some = sets.node_times[sets.dearest[at]] * (room - taken) / sets.price[sets.dearest[at]]
        if times[k] + max(0.0, again - some) <= most_time:
            times[left], kept[left], origins[left] = times[k], kept[k], origins[k]
            left += 1
    return left


@compiled
def is_reachable(budget: int, sets: Sets) -> bool:
    """Whether steps within the budget lead to the whole graph: the least that may be kept at each set decides."""
    last = len(sets.sizes) - 1
    kept = np.full(last + 1, NEVER, dtype=np.int64)
    kept[0] = 0
    reached, count = np.zeros(last + 1, np.int64), 0
    for j in range(last + 1):
        for i in reached[:count]:
            # What is kept already does not shrink: more than the best so far helps nobody.
            needed = kept[i] + _needs(sets, i, j)
            if kept[i] < kept[j] and needed <= budget and _contains(sets.words[j], sets.words[i]):
                new = _missing(sets.words[i], sets.boundary_starts, sets.boundary, j, sets.node_bytes)
                kept[j] = min(kept[j], kept[i] + new)
        if kept[j] < NEVER:
            reached[count] = j
            count += 1
        # From here the rest may do as one part: no other sets need be looked at.
        if kept[j] + _needs(sets, j, last) <= budget:
            return True
    return False


@compiled
def _is_beaten(times: Floats, kept: Ints, size: int, time: float, keeps: int) -> bool:
    """Whether a pair of a front, sorted by time, takes no more time and keeps no more."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if times[middle] <= time:
            low = middle + 1
        else:
            high = middle
    return bool(low > 0 and kept[low - 1] <= keeps)


@compiled
def _front_of(times: Floats, kept: Ints, origins: Ints, count: int) -> int:
    """Sort pairs by time and drop those that others beat, in place; how many are left."""
    order = np.argsort(kept[:count], kind="mergesort")
    order = order[np.argsort(times[:count][order], kind="mergesort")]
    sorted_times, sorted_kept, sorted_origins = times[:count][order], kept[:count][order], origins[:count][order]
    size, best = 0, NEVER
    for k in range(count):
        if sorted_kept[k] < best:
            best = sorted_kept[k]
            times[size], kept[size], origins[size] = sorted_times[k], best, sorted_origins[k]
            size += 1
    return size


@compiled
def _thin(times: Floats, kept: Ints, origins: Ints, size: int, most: int) -> int:
    """Keep `most` pairs at most, evenly spread over what is kept, the first and the last among them; the new size."""
    share = (kept[0] - kept[size - 1]) / (most - 1)
    chosen, next_kept = 1, kept[0] - share
    for k in range(1, size):
        if kept[k] <= next_kept or k == size - 1:
            next_kept = kept[k] - share
            times[chosen], kept[chosen], origins[chosen] = times[k], kept[k], origins[k]
            chosen += 1
    return chosen


@compiled
def _weigh_parts(goal: int, j: int, sources: Ints, keep: Ints, sets: Sets, part: Floats) -> None:
    """What the part from each source to set j counts as time."""
    last = len(sets.sizes) - 1
    for p in range(len(sources)):
        i = sources[p]
        if goal == SMALLEST:
            part[p] = float(sets.sizes[j] - sets.sizes[i] - keep[p])
        elif goal == COARSEST and j == last:
            part[p] = 0.0
        else:
            spared = _missing(sets.words[i], sets.boundary_starts, sets.boundary, j, sets.node_times)
            spared += _missing(sets.words[i], sets.ending_starts, sets.ending, j, sets.node_times)
            part[p] = spared if goal == COARSEST else max(0.0, sets.times[j] - sets.times[i] - spared)


@compiled
def _collect(
    goal: int,
    j: int,
    budget: int,
    most: int,
    most_time: float,
    sets: Sets,
    steps: tuple[Ints, Ints, Ints, Floats],
    pairs: tuple[Ints, Floats, Ints, Any],
    new: tuple[Floats, Ints, Ints],
) -> tuple[int, bool]:
    """The pairs of set j that no other beats, in `new`: how many, and whether some were thinned out."""
    is_last = j == len(sets.sizes) - 1
    sources, need, keep, part = steps
    starts, times, kept, going_on = pairs
    new_times, new_kept, new_origins = new
    size = found = 0  # the first `size` are a front, those up to `found` candidates; now and then they join
    thinned = False
    for p in range(len(sources)):
        if part[p] > most_time:
            continue
        for q in range(starts[sources[p]], starts[sources[p] + 1]):
            if kept[q] + need[p] > budget or (not going_on[q] and not is_last):
                continue
            time = max(times[q], part[p]) if goal == SMALLEST else times[q] + part[p]
            if time > most_time or _is_beaten(new_times, new_kept, size, time, kept[q] + keep[p]):
                continue
            if found == len(new_times) or found > 3 * size + 128:
                size = _front_of(new_times, new_kept, new_origins, found)
                if size > len(new_times) // 2:
                    size, thinned = _thin(new_times, new_kept, new_origins, size, most), True
                found = size
            new_times[found], new_kept[found], new_origins[found] = time, kept[q] + keep[p], q
            found += 1
    size = _front_of(new_times, new_kept, new_origins, found)
    if goal == FASTEST:
        size = _in_time(sets, j, budget, most_time, new_times, new_kept, new_origins, size)
    if size > most:
        size, thinned = _thin(new_times, new_kept, new_origins, size, most), True
    return size, thinned


@compiled
def _store(
    ends_within: int,
    size: int,
    new: tuple[Floats, Ints, Ints],
    stored: tuple[Floats, Ints, Ints, Any],
    start: int,
) -> None:
    """Put the first `size` new pairs behind those that are stored. One that keeps no more than `ends_within` need not
    go on: the last part is computed once, so what can end there takes no less time on any other way."""
    new_times, new_kept, new_origins = new
    times, kept, origins, going_on = stored
    for k in range(size):
        times[start + k], kept[start + k], origins[start + k] = new_times[k], new_kept[k], new_origins[k]
        going_on[start + k] = new_kept[k] > ends_within


@compiled
def fill_fronts(
    budget: int,
    most_time: float,
    most: int,
    goal: int,
    sets: Sets,
) -> tuple[Ints, Floats, Ints, Ints, bool]:
    """For each set all pairs of time and kept bytes that no other beats. What counts as time depends on the goal:

    FASTEST: what is computed again.
    COARSEST: what is not computed again; the last part counts as if it were.
    SMALLEST: the largest part, in bytes, without its boundary.

    Pairs that take more than `most_time` are left out. Returns where each set's pairs begin, their times and kept
    bytes, and the pair each came from. A set with more than `most` pairs keeps so many of them, evenly spread; the
    last result tells whether one had to.
    """
    count_of_sets = len(sets.sizes)
    last = count_of_sets - 1
    starts = np.zeros(count_of_sets + 1, dtype=np.int64)
    times, kept, origins = np.zeros(1024), np.zeros(1024, dtype=np.int64), np.zeros(1024, dtype=np.int64)
    origins[0] = -1
    starts[1] = count = 1
    # The least kept at each set: of all pairs, and of those to go on from. Others end with the next step.
    least_kept, least_going_on = np.full(count_of_sets, NEVER), np.full(count_of_sets, NEVER)
    least_kept[0] = least_going_on[0] = 0
    earliest = np.full(count_of_sets, 0.0 if goal == FASTEST else -np.inf)  # known of sets that were reached
    going_on = np.full(1024, True)  # pairs from which the rest does not do as one part
    reached, count_of_reached = np.zeros(count_of_sets, np.int64), 1
    sources, need, keep = np.empty(last, np.int64), np.empty(last, np.int64), np.empty(last, np.int64)
    part = np.empty(last)
    room = 4096 + 4 * most
    new_times, new_kept, new_origins = np.empty(room), np.empty(room, np.int64), np.empty(room, np.int64)
    thinned = False
    for j in range(1, count_of_sets):
        lowest = least_kept if j == last else least_going_on
        begins = reached[:count_of_reached]
        steps = steps_to(j, begins, lowest, earliest, budget, most_time, sets, sources, need, keep)
        _weigh_parts(goal, j, sources[:steps], keep, sets, part)
        new, weighed = (new_times, new_kept, new_origins), (sources[:steps], need, keep, part)
        begun = starts, times, kept, going_on
        size, has_thinned = _collect(goal, j, budget, most, most_time, sets, weighed, begun, new)
        thinned = thinned or has_thinned
        while count + size > len(times):
            times, kept = np.append(times, times), np.append(kept, kept)
            origins, going_on = np.append(origins, origins), np.append(going_on, going_on)
        ends_within = -1 if goal != FASTEST else budget - _needs(sets, j, last)
        _store(ends_within, size, new, (times, kept, origins, going_on), count)
        for k in range(count, count + size):
            least_kept[j] = min(least_kept[j], kept[k])
            if going_on[k]:
                least_going_on[j] = min(least_going_on[j], kept[k])
        count += size
        if size > 0:
            reached[count_of_reached] = j
            count_of_reached += 1
            if goal == FASTEST:
                earliest[j] = new_times[0] - sets.times[j]
        starts[j + 1] = count
    return starts, times[:count], kept[:count], origins[:count], thinned
