"""Looks for programs that move values to the host, beside those that only keep them or compute them again.

As in `search.py` a linear program chooses (`traffic.py`), a program is made of its choice (`moves.py`), and both are
approximations: every program is played by the referee, its time is that of the time line, and whoever asks takes it
or leaves it. Each round begins with the lives of the last round's tight program. Afterwards single values are chosen
otherwise, as long as that makes the best program faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from elbowroom.plan.values.choices import WHOLE, Choices, Floats, Predicted
from elbowroom.plan.values.moves import Moved, Placed, carriers, graded, place, tight_program
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

    def programs(self, starts: Sequence[Predicted], room: int, enough_s: float = 0.0) -> Iterator[Moved]:
        """All found, which fit; those of `starts` move nothing, and need not fit. One that takes no more than
        `enough_s` is the last."""
        if not self._carriers or not starts:
            return
        best: dict[bool, _Made] = {}  # by whether it is one of the starts

        def learn(made: _Made, is_start: bool) -> Iterator[Moved]:
            if made.placed.found is not None:
                yield made.placed.found
                if is_start not in best or made.time_s < best[is_start].time_s:
                    best[is_start] = made

        for start in starts:
            moved = self._affordable(self._carriers)
            placed = place(self.graph, start.program, moved, room, self.around, self.platform)
            if placed.found is not None:  # as it is, with everything moving that has to give way
                yield placed.found
            chosen = self._choices.lives(*start).chosen
            yield from learn(self._made(chosen, room, copies_parts=start.program.copies_parts), True)
        for made in self._chosen(starts, room):
            yield from learn(made, False)
            if made.time_s <= enough_s:
                return
        for made in sorted(best.values(), key=lambda made: made.time_s):
            yield from self._bettered(made, room, enough_s)

    def lowest(self, starts: Iterable[Predicted]) -> Moved:
        """The lowest peak of programs that move nothing, once all of their values move that may."""
        moved = self._affordable(self._carriers)
        graph, around, platform = self.graph, self.around, self.platform
        made = ((program, tight_program(graph, program, moved, around, platform)) for program, _ in starts)
        program, least = min(made, key=lambda pair: pair[1].prediction.peak_bytes)
        found = place(graph, program, moved, least.prediction.peak_bytes, around, platform).found
        return found or graded(graph, least.program, around, platform)

    def _chosen(self, starts: Sequence[Predicted], room: int) -> Iterator[_Made]:
        everything = np.zeros(self._choices.count)
        everything[self._choices.keep[0]] = everything[self._choices.move] = 1.0
        everything[list(self._choices.ahead.values())] = 1.0
        everything[0] = 0.0
        yield self._made(everything, room, copies_parts=starts[0].program.copies_parts)
        for start in starts:
            yield from self._rounds(start, room)

    def _rounds(self, start: Predicted, room: int) -> Iterator[_Made]:
        """Each asked for less where the last one took more than it should, even tight."""
        choices, copies_parts = self._choices, start.program.copies_parts
        lives = choices.lives(*start)
        moments: dict[int, None] = {}
        aim = float(room)
        for _ in range(_ROUNDS):
            moments |= dict.fromkeys(choices.highest(lives))
            asked = (self._traffic.chosen(lives, moments, each) for each in dict.fromkeys((aim, float(room))))
            chosen = next((found for found in asked if found is not None), None)
            if chosen is None:
                return
            made = [
                self._made(each, room, copies_parts=copies_parts)
                for each in (self._whole(chosen, upwards=upwards) for upwards in (True, False))
            ]
            yield from made
            tight = min(made, key=lambda each: (each.time_s, each.placed.tight.prediction.peak_bytes)).placed.tight
            before, lives = lives, choices.lives(*tight)
            if np.array_equal(before.chosen, lives.chosen):
                return
            aim = min(float(room), aim + (room - tight.prediction.peak_bytes) / 2)

    def _whole(self, chosen: Floats, *, upwards: bool) -> Floats:
        """What is to move in part moves, or runs again if not `upwards`."""
        choices, whole = self._choices, chosen.copy()
        keep, move = chosen[choices.keep[0]], chosen[choices.move]
        moves = (move > 1 - WHOLE) & (keep + move > WHOLE) if upwards else move > WHOLE
        whole[choices.move] = moves
        whole[choices.keep[0]] = np.where(moves, 0.0, keep)
        whole[0] = 0.0
        return whole

    def _made(self, chosen: Floats, room: int, *, copies_parts: bool) -> _Made:
        choices = self._choices
        moved = self._affordable(n for n in self._carriers if chosen[choices.move[n]])
        program = choices.program(chosen, copies_parts=copies_parts, moved=frozenset(moved))
        return _Made(chosen, place(self.graph, program, moved, room, self.around, self.platform))

    def _affordable(self, storages: Iterable[int]) -> set[int]:
        """Values for these storages. Where the host has no room for all, what is made first goes: it has time."""
        left = self.platform.host_bytes
        moved: set[int] = set()
        for n in storages:
            size = int(self._choices.storage_bytes[n])
            if left is None or size <= left:
                moved.add(self._carriers[n])
                left = None if left is None else left - size
        return moved

    def _bettered(self, best: _Made, room: int, enough_s: float) -> Iterator[Moved]:
        """Values that run again move or stay instead; those that move stay, or run again; dearest first."""
        left = max(_FEWEST, _EFFORT // max(1, len(self.graph.ops)))
        tried: set[tuple[int, str]] = set()
        while left and best.time_s > enough_s:
            change = next((each for each in self._changes(best) if each not in tried), None)
            if change is None:
                return
            tried.add(change)
            left -= 1
            copies_parts = best.placed.tight.program.copies_parts
            made = self._made(self._changed(best.chosen, *change), room, copies_parts=copies_parts)
            if made.placed.found is not None and made.time_s < best.time_s:
                best = made
                yield made.placed.found

    def _changes(self, best: _Made) -> Iterator[tuple[int, str]]:
        """An operator, and what may become of what it makes."""
        found = best.placed.found
        assert found is not None
        ops, program = self.graph.ops, found.program
        again = {op: count for op, count in program.reruns.items() if ops[op].bytes and ops[op].time}
        for op in sorted(again, key=lambda op: -ops[op].time * again[op] / ops[op].bytes):
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
