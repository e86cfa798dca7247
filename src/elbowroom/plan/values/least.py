"""The least time that any program takes within a room, values that move to the host included.

Take any program that the referee lets pass, and the moment between its forward and its backward. Of a storage that
the forward made, and that the backward reads or needs to compute others again, one of three things is true:

    keep     a copy of it is on the device at that moment
    again    its maker runs again in the backward
    move     neither; so what is read of it in the backward comes from the host

Let each be 1 or 0 as it is true of the program. Then all rules of the linear program in `choices.py` hold, with one
phase. The room holds what is kept. And of every storage that moves:

- A copy of it goes to the host after its maker has ended, and has ended before that moment. It is on the host by
  then, for the backward cannot begin a copy of what is not on the device. It is not on the device, so the value that
  was copied has been released, which waits for the copy; a value that is being copied can go in no other way.
- A copy of it begins to come back after that moment, because the forward leaves nothing on its way. Until the first
  such copy has ended, nothing that reads the storage runs, nor anything that needs the results of what does.
- All of them are on the host at that moment, and take its memory.

One direction carries one copy at a time, and a copy takes its latency and its bytes over the rate of its direction
alone, or longer. Operators run one at a time, too. So with F and B for the time that forward and backward take:

    F ≥ time of what runs in the forward
    F ≥ θ + Σ time to the host of what moves and cannot be made before θ             for any θ
    B ≥ time of what runs in the backward
    B ≥ θ + Σ time from the host of what moves and has readers to run for θ at least   for any θ
    F + B ≥ time of what runs at all
    host memory ≥ Σ bytes of what moves

The second row holds because the first of those copies begins at θ or later and all end before F does; the fourth
because the last of those copies to end ends after all of them have been carried, and its readers are still to run. A
storage cannot be made before the operators that it is computed from have run, its maker among them; its readers are
those in the backward and all that is computed from them there. A value may hold several storages and pays its latency
once: each of these is charged its share of the largest such value.

The moves on a link where the directions take turns, or are slower together, are among these programs: between them
lies the moment between forward and backward, so none of those copies meets one of the other direction. The program's
choices satisfy all rows, and its time is F + B, so the linear program's optimum, fractions allowed, is no larger.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from elbowroom.plan.values.choices import Choices, Floats
from elbowroom.problem.platform import Platform
from elbowroom.step.graph import StepGraph
from elbowroom.step.referee import Surroundings, bytes_between

# Moments for which there is a row, in each half: more would sharpen the bound by less than this share of the half.
_MOMENTS = 24

# Of the step's time: copies that take longer count as if they took this. That is a better link, so the bound holds;
# and numbers that lie further apart mislead the solver.
_LONGEST = 1e4


class Least:
    """The bound for one graph and one platform, within any room."""

    def __init__(self, graph: StepGraph, around: Surroundings, platform: Platform) -> None:
        self.graph, self.around, self.platform = graph, around, platform
        self._choices = choices = Choices(graph, around, moves=True)
        self._count = choices.count + 2  # the last two variables are F and B
        self._forward_s = sum(graph.ops[op].time for op in graph.forward if op in choices.always)
        self._backward_s = sum(graph.ops[op].time for op in graph.backward if op not in graph.part_copies)
        self._link = self._link_rows()

    def seconds(self, room: int) -> float:
        """Infinity where nothing fits."""
        choices, count = self._choices, self._count
        rules, most = choices.rules
        kept = np.zeros(count)
        kept[choices.keep[0]] = choices.kept_sizes
        kept[0] = 0.0
        left = float(room + self.around.late_bytes - bytes_between(self.graph, self.around))
        rows, limits = [*(row for row, _ in self._link), kept], [*(limit for _, limit in self._link), left]
        wide = csr_array((rules.data, rules.indices, rules.indptr), shape=(rules.shape[0], count))
        cost = np.zeros(count)
        cost[-2:] = 1.0
        bounds = np.column_stack([np.zeros(count), np.append(choices.most, [np.inf, np.inf])])
        every = vstack([wide, csr_array(np.array(rows))], format="csr")
        found = linprog(cost, every, [*most, *limits], bounds=bounds, method="highs-ds")
        return float("inf") if found.x is None else float(found.fun)

    def _link_rows(self) -> list[tuple[Floats, float]]:
        """What forward and backward take at the least, and what the host has room for."""
        choices, platform = self._choices, self.platform
        assert platform.rate_to_host is not None
        assert platform.rate_from_host is not None
        rows: list[tuple[Floats, float]] = []
        may = np.flatnonzero(choices.move)
        numbers, sizes = choices.move[may], choices.storage_bytes[may]
        latency = platform.seconds_per_copy / self._together()[may]
        halves = (
            (self._forward_s, [choices.ahead], self._made_after(), platform.rate_to_host),
            (self._backward_s, choices.again, self._to_run_after(), platform.rate_from_host),
        )
        both = np.zeros(self._count)
        both[: choices.count] = choices.times
        both[-2:] = -1.0
        rows.append((both, -choices.besides_s))
        for half, (always_s, groups, since, rate) in zip((-2, -1), halves, strict=True):
            row = np.zeros(self._count)
            for numbers_of in groups:
                row[list(numbers_of.values())] = choices.times[list(numbers_of.values())]
            row[half] = -1.0
            rows.append((row, -always_s))
            for moment in _spread(since[may]):
                row = np.zeros(self._count)
                takes = np.minimum(latency + sizes / rate, _LONGEST * choices.besides_s)
                row[numbers] = np.where(since[may] >= moment, takes, 0.0)
                row[half] = -1.0
                rows.append((row, -float(moment)))
        if platform.host_bytes is not None:
            row = np.zeros(self._count)
            row[numbers] = sizes
            rows.append((row, float(platform.host_bytes)))
        return rows

    def _together(self) -> Floats:
        """Of each storage, how many a value that holds it holds at most."""
        graph, found = self.graph, np.ones(len(self._choices.storage_bytes))
        for op in graph.forward:
            held = list(self._choices.storages_of((op,)))
            found[held] = np.maximum(found[held], len(held))
        return found

    def _made_after(self) -> Floats:
        """Of each storage, the time of all that must have run in the forward when it has been made."""
        graph = self.graph
        reads = {op: graph.ops[op].reads for op in graph.forward}
        times = dict(zip(graph.forward, _times_upstream(graph, graph.forward, reads), strict=True))
        return np.array([times[op] for op in self._choices.maker])

    def _to_run_after(self) -> Floats:
        """Of each storage, the time of all in the backward that cannot run before it has come back."""
        graph, choices = self.graph, self._choices
        order = tuple(reversed(graph.backward))
        readers: dict[int, list[int]] = {op: [] for op in order}
        of: list[list[int]] = [[] for _ in choices.maker]
        for op in order:
            for read in graph.ops[op].reads:
                if read in readers:
                    readers[read].append(op)
            for n in choices.storages_of(graph.ops[op].reads):
                of[n].append(op)
        # Every storage is one more that is waited for, after all operators.
        ends = {-1 - n: each for n, each in enumerate(of)}
        times = _times_upstream(graph, (*order, *ends), {**readers, **ends})
        return times[len(order) :]


def _spread(moments: Floats) -> Floats:
    """Some of them, evenly spread from the first to the last."""
    distinct = np.unique(moments)
    if not distinct.size:
        return distinct
    even = np.linspace(distinct[0], distinct[-1], _MOMENTS)
    return np.unique(distinct[np.searchsorted(distinct, even).clip(max=distinct.size - 1)])


def _times_upstream(
    graph: StepGraph, order: Sequence[int], before: dict[int, list[int]] | dict[int, tuple[int, ...]]
) -> Floats:
    """Of each in the order, its time and that of all that comes `before` it, directly or not.

    Sets of operators are rows of bits: a graph has thousands of operators, and any may come before any other. What is
    below 0 takes no time, and neither does a copy of a part, which may be left out.
    """
    place = {op: at for at, op in enumerate(order)}
    takes = np.array([0.0 if op < 0 or op in graph.part_copies else graph.ops[op].time for op in order])
    sets: NDArray[np.uint8] = np.zeros((len(order), -(-len(order) // 8)), dtype=np.uint8)
    times = np.zeros(len(order))
    for at, op in enumerate(order):
        row = sets[at]
        for other in before[op]:
            if other in place:
                row |= sets[place[other]]
        row[at // 8] |= 128 >> at % 8
        times[at] = np.unpackbits(row, count=len(order)) @ takes
    return times
