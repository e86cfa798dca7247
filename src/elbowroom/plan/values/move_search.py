"""Looks for programs that move values to the host, beside those that only keep them or compute them again.

As in `search.py` a linear program chooses (`traffic.py`), a program is made of its choice (`moves.py`), and both are
approximations: every program is played by the referee, its time is that of the time line, and whoever asks takes it
or leaves it. Each round begins with the lives of the last round's tight program. Afterwards single values are chosen
otherwise, as long as that makes the best program faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from elbowroom.plan.values.choices import WHOLE, Choices, Floats, Lives, Predicted
from elbowroom.plan.values.moves import Moved, Placed, carriers, place
from elbowroom.plan.values.traffic import Traffic
from elbowroom.problem.platform import Platform
from elbowroom.step.graph import StepGraph
from elbowroom.step.referee import Surroundings

_ROUNDS = 8  # programs that may miss the room, each made with the last one in mind
# How many values may be chosen otherwise in the end: so many operators in all of the programs that are tried, or so
# many programs if that is more, as for eviction; a program with moves takes a few times as long to make.
_EFFORT = 100_000
_FEWEST = 20
_GAIN = 1e-4  # a share of the time: less waiting than that is none


class _Made(NamedTuple):
    chosen: Floats
    placed: Placed

    @property
    def time_s(self) -> float:
        return float("inf") if self.placed.found is None else self.placed.found.time_s


class MoveSearch:
    """For one graph and one platform."""

    def __init__(self, graph: StepGraph, around: Surroundings, platform: Platform) -> None:
        self.graph, self.around, self.platform = graph, around, platform
        self._choices = choices = Choices(graph, around, moves=True)
        by_storage = carriers(graph)
        # By the number of a storage, the value that moves for it.
        numbered = ((n, by_storage.get(storage)) for n, storage in enumerate(choices.storages))
        self._carriers = {n: op for n, op in numbered if op is not None and choices.move[n]}
        self._traffic = Traffic(choices, platform, self._carriers)

    def programs(self, starts: Sequence[Predicted], room: int) -> Iterator[Moved]:
        """All found, which fit; those of `starts` move nothing, and need not fit."""
        if not self._carriers:
            return
        best: _Made | None = None
        for made in self._chosen(starts, room):
            if made.placed.found is not None:
                yield made.placed.found
                if best is None or made.time_s < best.time_s:
                    best = made
        if best is not None:
            yield from self._bettered(best, starts[0].program.copies_parts, room)

    def _chosen(self, starts: Sequence[Predicted], room: int) -> Iterator[_Made]:
        copies_parts = starts[0].program.copies_parts
        everything = np.zeros(self._choices.count)
        everything[self._choices.keep[0]] = everything[self._choices.move] = 1.0
        everything[list(self._choices.ahead.values())] = 1.0
        yield self._made(everything, room, copies_parts=copies_parts)
        for start in starts:
            yield from self._rounds(start, room)

    def _rounds(self, start: Predicted, room: int) -> Iterator[_Made]:
        """Each asked for less where the last one took more than it should, even tight."""
        choices, copies_parts = self._choices, start.program.copies_parts
        lives = choices.lives(*start)
        moments: dict[int, None] = {}
        aim = float(room)
        last: Lives | None = None
        for _ in range(_ROUNDS):
            moments |= dict.fromkeys(choices.highest(lives))
            asked = (self._traffic.chosen(lives, moments, each) for each in dict.fromkeys((aim, float(room))))
            chosen = next((found for found in asked if found is not None), None)
            if chosen is None or (last is not None and np.array_equal(last.chosen, lives.chosen)):
                return
            made = self._made(chosen, room, copies_parts=copies_parts)
            yield made
            tight = made.placed.tight
            last, lives = lives, choices.lives(*tight)
            aim = min(float(room), aim + (room - tight.prediction.peak_bytes) / 2)

    def _made(self, chosen: Floats, room: int, *, copies_parts: bool) -> _Made:
        """What is neither kept as a whole nor computed again moves, even if a part of it was to stay."""
        choices = self._choices
        keep, move = chosen[choices.keep[0]], chosen[choices.move]
        moving = [n for n in self._carriers if move[n] > 1 - WHOLE and keep[n] + move[n] > WHOLE]
        # Where the host has no room for all, those made first go: they have the most time.
        left = self.platform.host_bytes
        moved: set[int] = set()
        for n in moving:
            size = int(choices.storage_bytes[n])
            if left is None or size <= left:
                moved.add(self._carriers[n])
                left = None if left is None else left - size
        program = choices.program(chosen, copies_parts=copies_parts, moved=frozenset(moved))
        return _Made(chosen, place(self.graph, program, moved, room, self.around, self.platform))

    def _bettered(self, best: _Made, copies_parts: bool, room: int) -> Iterator[Moved]:
        """Values that run again move or stay instead; those that move stay, or run again; dearest first."""
        left = max(_FEWEST, _EFFORT // max(1, len(self.graph.ops)))
        tried: set[tuple[int, str]] = set()
        while left:
            change = next((each for each in self._changes(best) if each not in tried), None)
            if change is None:
                return
            tried.add(change)
            left -= 1
            made = self._made(self._changed(best.chosen, *change), room, copies_parts=copies_parts)
            if made.placed.found is not None and made.time_s < best.time_s:
                best = made
                yield made.placed.found

    def _changes(self, best: _Made) -> Iterator[tuple[int, str]]:
        """An operator, and what may become of what it makes."""
        found = best.placed.found
        assert found is not None
        ops, program = self.graph.ops, found.program
        again = [op for op in program.reruns if ops[op].bytes and ops[op].time]
        for op in sorted(again, key=lambda op: -ops[op].time * program.reruns[op] / ops[op].bytes):
            yield op, "move"
            yield op, "keep"
        if found.waits_s <= _GAIN * found.time_s:
            return
        makers = {self._choices.maker[self._number_of(each.value)] for each in program.moves}
        for op in sorted(makers, key=lambda op: ops[op].time / ops[op].bytes):
            if op not in self.graph.kept:
                yield op, "again"
            yield op, "keep"

    def _number_of(self, value: int) -> int:
        return next(self._choices.storages_of((value,)))

    def _changed(self, chosen: Floats, op: int, what: str) -> Floats:
        """The same choices but for what an operator makes: it is kept, moves, or is computed again."""
        choices, other = self._choices, chosen.copy()
        for n in (n for n, maker in enumerate(choices.maker) if maker == op):
            other[choices.keep[0, n]] = float(what == "keep")
            other[choices.move[n]] = float(what == "move")
        other[0] = 0.0
        return other
