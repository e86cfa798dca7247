"""The dynamic program over lower sets of a graph (002, Algorithm 1), with sparse tables.

Sets are numbered by size, from the empty one to the whole graph. A *step* goes from a set to a larger one that
contains it; for each set, `offsets` says where the steps that lead to it begin. A step has the bytes it needs beside
what is kept already (`need`), the bytes it adds to that (`keep`), and the time of what it will compute again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.rows import Floats, Ints

Words = NDArray[np.uint64]
NEVER = 2**62


@compiled
def count_steps(words: Words, sizes: Ints, before: Ints, after: Ints, limit: int, offsets: Ints) -> None:
    """How many steps need no more than `limit`; `offsets[j + 1]` becomes where those to set j end."""
    for j in range(len(sizes)):
        found = 0
        for i in range(j):
            if 2 * (sizes[j] - sizes[i]) + before[i] + after[j] <= limit and _contains(words[j], words[i]):
                found += 1
        offsets[j + 1] = offsets[j] + found


@compiled
def fill_steps(
    words: Words,
    sizes: Ints,
    before: Ints,
    after: Ints,
    limit: int,
    boundary_starts: Ints,
    boundary: Ints,
    ending_starts: Ints,
    ending: Ints,
    node_bytes: Ints,
    node_times: Floats,
    times: Floats,
    sources: Ints,
    need: Ints,
    keep: Ints,
    again: Floats,
) -> None:
    at = 0
    for j in range(len(sizes)):
        for i in range(j):
            bytes_needed = 2 * (sizes[j] - sizes[i]) + before[i] + after[j]
            if bytes_needed > limit or not _contains(words[j], words[i]):
                continue
            kept, spared = 0, 0.0
            for k in range(boundary_starts[j], boundary_starts[j + 1]):
                if not _has(words[i], boundary[k]):
                    kept += node_bytes[boundary[k]]
                    spared += node_times[boundary[k]]
            for k in range(ending_starts[j], ending_starts[j + 1]):
                if not _has(words[i], ending[k]):
                    spared += node_times[ending[k]]
            sources[at] = i
            need[at] = bytes_needed
            keep[at] = kept
            again[at] = max(0.0, times[j] - times[i] - spared)
            at += 1


@compiled
def _contains(larger: Words, smaller: Words) -> bool:
    missing = np.uint64(0)
    for k in range(len(larger)):
        missing |= smaller[k] & ~larger[k]
    return missing == 0


@compiled
def _has(words: Words, v: int) -> bool:
    return (words[v >> 6] >> np.uint64(v & 63)) & np.uint64(1) != 0


@compiled
def is_reachable(offsets: Ints, sources: Ints, need: Ints, keep: Ints, budget: int) -> bool:
    """Whether steps within the budget lead to the whole graph: the least that may be kept at each set decides."""
    kept = np.full(len(offsets) - 1, NEVER, dtype=np.int64)
    kept[0] = 0
    for j in range(1, len(kept)):
        best = NEVER
        for p in range(offsets[j], offsets[j + 1]):
            if kept[sources[p]] + need[p] <= budget:
                best = min(best, kept[sources[p]] + keep[p])
        kept[j] = best
    return bool(kept[-1] < NEVER)


@compiled
def fill_fronts(
    offsets: Ints,
    sources: Ints,
    need: Ints,
    keep: Ints,
    again: Floats,
    budget: int,
    most_time: float,
    sign: float,
    most: int,
    worst: bool,
) -> tuple[Ints, Floats, Ints, Ints, bool]:
    """For each set all pairs of time and kept bytes that no other beats; `sign` is -1 where more time is better.

    With `worst`, times are not added up: the largest counts. Pairs that take more than `most_time` are left out.
    Returns where each set's pairs begin, their times (with the sign) and kept bytes, and the pair each came from. A
    set with more than `most` pairs keeps so many of them, evenly spread; the last result tells whether one had to.
    """
    starts = np.zeros(len(offsets), dtype=np.int64)
    times, kept, origins = np.zeros(1024), np.zeros(1024, dtype=np.int64), np.zeros(1024, dtype=np.int64)
    origins[0] = -1
    starts[1] = count = 1
    thinned = False
    for j in range(1, len(offsets) - 1):
        most_found = 0
        for p in range(offsets[j], offsets[j + 1]):
            if again[p] <= most_time:
                most_found += starts[sources[p] + 1] - starts[sources[p]]
        new_times, new_kept = np.empty(most_found), np.empty(most_found, dtype=np.int64)
        new_origins = np.empty(most_found, dtype=np.int64)
        found = 0
        for p in range(offsets[j], offsets[j + 1]):
            if again[p] > most_time:
                continue
            for q in range(starts[sources[p]], starts[sources[p] + 1]):
                time = max(times[q], again[p]) if worst else times[q] + sign * again[p]
                if kept[q] + need[p] <= budget and time <= most_time:
                    new_times[found], new_kept[found] = time, kept[q] + keep[p]
                    new_origins[found] = q
                    found += 1
        order = np.argsort(new_kept[:found], kind="mergesort")
        order = order[np.argsort(new_times[order], kind="mergesort")]
        front, best = np.empty(found, dtype=np.int64), NEVER
        size = 0
        for position in order:
            if new_kept[position] < best:
                best = new_kept[position]
                front[size] = position
                size += 1
        if size > most:
            highest, lowest = new_kept[front[0]], new_kept[front[size - 1]]
            chosen, share = 1, (highest - lowest) / (most - 1)
            next_kept = highest - share
            for k in range(1, size):
                if new_kept[front[k]] <= next_kept or k == size - 1:
                    front[chosen] = front[k]
                    chosen += 1
                    next_kept = new_kept[front[k]] - share
            size, thinned = chosen, True
        while count + size > len(times):
            times, kept = np.append(times, times), np.append(kept, kept)
            origins = np.append(origins, origins)
        for k in range(size):
            times[count], kept[count] = new_times[front[k]], new_kept[front[k]]
            origins[count] = new_origins[front[k]]
            count += 1
        starts[j + 1] = count
    return starts, times[:count], kept[:count], origins[:count], thinned
