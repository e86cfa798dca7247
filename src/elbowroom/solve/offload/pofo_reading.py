"""From the tables of `pofo` to schedules, with the bytes that really are stored and on their way."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from elbowroom.problem import Chain
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.solve.kernels.pofo import needs
from elbowroom.solve.kernels.pofo_choices import choose_recomputing, weigh_entry
from elbowroom.solve.kernels.ramps import last_time, left_over, waiting
from elbowroom.solve.method import Options
from elbowroom.solve.offload.graded import Graded
from elbowroom.solve.offload.parts import Moving, Part, in_a_row, walk
from elbowroom.solve.offload.placing import place
from elbowroom.solve.offload.pofo_table import Table

BREADTH = 8  # states that are followed from each stage on
CREDITS = (0.0, 0.5, 1.0, 1.5, 2.0)  # levels: what a table misses, which sees no memory between two of them


@dataclass(frozen=True)
class Reading:
    """A schedule from the tables, and the time that it takes in their model of the link."""

    promise: float
    moving: Moving

    def graded(self, chain: Chain, budget: int, options: Options) -> list[Graded]:
        """What the referee says of it: nothing if it waits for ever, as it may for room on the host."""
        placed = place(chain, self.moving.computing, self.moving.moves, budget, options.platform)
        return [] if placed is None else [Graded(placed, self.promise)]


def readings(table: Table, credit: float = 0.0, breadth: int = BREADTH) -> Iterator[list[Reading]]:
    """Schedules for the budget, and for a level less and less of it: where whole values must leave and return, one
    that was made for less memory may wait less. The best few each time, the best first.

    With `credit` the tables are read so many levels higher.
    """
    for levels in range(table.space.levels + 1):
        reserve = int(levels * table.space.level)
        found = _Reader(table, credit * table.space.level, breadth).read(reserve)
        if not found:
            return
        yield found


@dataclass(frozen=True, slots=True)
class _State:
    """Where a schedule stands: at an entry, with so many bytes stored besides its input, to leave and to come, and
    room on the host; and what was done before, and how long that and what follows from it takes."""

    entry: int
    below: int
    leaving: float
    coming: float
    host: float
    time: float
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class _Choice:
    """What is chosen at a state: a way to save, or the stage to walk to (the other is -1); and the time expected."""

    expected: float
    state: _State
    way: int
    stop: int
    moved: bool


class _Reader:
    """Follows the best choices through the tables. What these say between two levels is about right, so the best few
    are followed from each stage on, and what they really take decides."""

    def __init__(self, table: Table, credit: float, breadth: int) -> None:
        self.table, self.space, self.credit, self.breadth = table, table.space, credit, breadth
        self.costs, self.entries = table.lean.costs, table.lean.entries

    def read(self, reserve: int) -> list[Reading]:
        """The schedules, the best first; none if none fits in what the reserve leaves."""
        n, room = self.table.n, self.table.platform.host_bytes
        ahead: list[list[_Choice]] = [[] for _ in range(n + 2)]
        states = [_State(0, reserve, 0.0, 0.0, float("inf") if room is None else float(room), 0.0)]
        for stage in range(1, n + 1):
            for state in states:
                for choice in self._best_choices(state):
                    ahead[stage + 1 if choice.way >= 0 else choice.stop + 1].append(choice)
            ahead[stage + 1].sort(key=lambda choice: choice.expected)
            states = [self._after(choice) for choice in ahead[stage + 1][: self.breadth]]
        states.sort(key=lambda state: state.time)
        return [Reading(state.time, in_a_row(state.parts)) for state in states]

    def _best_choices(self, state: _State) -> Iterator[_Choice]:
        lean, stage = self.table.lean, int(self.entries.stage[state.entry])
        first, end = int(self.costs.first_way[stage]), int(self.costs.first_way[stage + 1])
        times = weigh_entry(
            self.costs, self.space, lean.reach, lean.least, self.entries, self.table.recomputing, self.table.phases,
            state.entry, float(state.below), state.leaving, state.coming, state.host, self.credit,
        )  # fmt: skip
        for number in np.argsort(times, axis=None, kind="stable")[: self.breadth]:
            choice, moved = divmod(int(number), 2)
            if times[choice, moved] < np.inf:
                saves = choice < end - first
                way, stop = (first + choice, -1) if saves else (-1, stage + choice - (end - first))
                yield _Choice(state.time + float(times[choice, moved]), state, way, stop, moved == 1)

    def _after(self, choice: _Choice) -> _State:
        """The state that a choice leads to; after the loss, its time is that of the schedule."""
        costs, space, n, state = self.costs, self.space, self.table.n, choice.state
        stage, held = int(self.entries.stage[state.entry]), int(self.entries.input[state.entry])
        stored = state.below + held
        if choice.way >= 0:
            part = Part.saving(stage, choice.way - int(costs.first_way[stage]), choice.moved)
            need_f, need_b = needs(costs, space, choice.way, stage, n)
            out = space.forward[choice.way] + waiting(need_f + stored + state.leaving, space.to_host)
            back = space.backward[choice.way] + waiting(need_b + stored + state.coming, space.from_host)
        else:
            again, back = _without_recursion(self._recompute(stage, choice.stop, stored, state.coming))
            part = Part.walking(stage, choice.stop, again, choice.moved)
            need = costs.gradient[n] + space.lag_out[stage, choice.stop] - space.budget
            walked = costs.elapsed[choice.stop] - costs.elapsed[stage - 1]
            out = walked + waiting(need + stored + state.leaving, space.to_host)
        gone = held if choice.moved else 0
        leaving = float(left_over(state.leaving + gone, out, space.to_host))
        coming = float(left_over(state.coming, back, space.from_host)) + gone
        time = state.time + float(out + back)
        if stage == n:
            time += leaving / space.to_host + coming / space.from_host
        entry = n + choice.way if choice.way >= 0 else choice.stop
        return _State(entry, stored - gone, leaving, coming, state.host - gone, time, (*state.parts, part))

    def _recompute(self, s: int, t: int, stored: int, coming: float) -> _Steps:
        costs, space, lean = self.costs, self.space, self.table.lean
        rate, room = space.from_host, self.table.budget - stored
        way, split = choose_recomputing(
            costs, space, lean.reach, lean.least, self.table.recomputing, s, t, room, coming, self.credit
        )
        if way >= 0:
            forward, backward = float(space.forward[way]), float(space.backward[way])
            need_f, need_b = needs(costs, space, way, s, t)
            save = Forward(s, "all", way - int(costs.first_way[s]))
            if s == t:
                time = last_time(coming, forward, backward, need_f, need_b, float(stored), rate)
                return [save, Backward(s)], time
            wait = waiting(need_b + stored + coming, rate)
            before = left_over(coming, backward + wait, rate)
            rest, middle = yield self._recompute(s + 1, t, stored + int(costs.saved[way]), before)
            still = left_over(before, middle, rate)
            time = forward + backward + middle + wait + waiting(need_f + stored + still, rate)
            return [save, *rest, Backward(s)], time
        assert split >= 0, "what has been chosen fits"
        left, last = yield self._recompute(s, split, stored, coming)
        before = left_over(coming, last, rate)
        right, middle = yield self._recompute(split + 1, t, stored + int(costs.output[split]), before)
        need = costs.gradient[t] + space.lag_back[s, split] - space.budget
        wait = waiting(need + stored + left_over(before, middle, rate), rate)
        walked = float(costs.elapsed[split] - costs.elapsed[s - 1])
        return [*walk(s, split), *right, *left], walked + middle + last + wait


_Part = tuple[list[Operation], float]
_Steps = Generator["_Steps", _Part, _Part]


def _without_recursion(first: _Steps) -> _Part:
    """Runs a generator that yields generators whose results it wants, however deep that goes."""
    stack = [first]
    result: _Part | None = None
    while stack:
        try:
            stack.append(stack[-1].send(result))  # type: ignore[arg-type]
            result = None
        except StopIteration as done:
            stack.pop()
            result = done.value
    assert result is not None
    return result
