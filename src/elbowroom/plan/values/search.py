"""Looks for faster programs around one that fits, value by value.

Each round reads off a program when its values live, has the linear program choose with that (`choices.py`), and makes
a program of what it chose. That one's values live otherwise, so it may take more than was reckoned: every program is
predicted exactly, and whoever asks takes it or leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from elbowroom.plan.values.choices import Choices, Floats, Predicted, Row
from elbowroom.plan.values.eviction import Eviction
from elbowroom.step.graph import StepGraph
from elbowroom.step.referee import Surroundings

# Rounds and steps bound the time of a search: each solves one linear program and plays one program, and most searches
# stop earlier because a step gains less than _GAIN, a share of the time.
_ROUNDS = 8  # programs that may miss the room, each made with the last one in mind
_STEPS = 8  # from the best that fits; each may change half or twice as much as the last one, as that went
_GAIN = 1e-4
_SMALLEST_STEP = 1 / 300  # of the bytes kept, or of the room: a smaller change moves less than one value as a rule
_PHASES = 4  # where one is not enough; six or eight took longer and found nothing better
# Shares by which a plan is above the least that any program takes. Nearer than the first, dividing the backward into
# phases is not worth its time; nearer than the second, nor is evicting values one by one.
_NEAR = 0.02
_NEARER = 0.005


class Refiner:
    """Refines programs of one graph."""

    def __init__(self, graph: StepGraph, around: Surroundings) -> None:
        self.graph = graph
        self.around = around
        self._once = Choices(graph, around)
        self.eviction = Eviction(self._once)
        self._least: dict[int, float] = {}

    def least_s(self, room: int) -> float:
        """Seconds that any program within the room takes, at the least."""
        if room not in self._least:
            self._least[room] = self._once.least_s(room)
        return self._least[room]

    def programs(self, start: Predicted, room: int, larger: Sequence[Predicted] = ()) -> Iterator[Predicted]:
        """Programs found from one that fits, and from `larger` ones: some fit, and some of those are faster."""
        best = start
        for search in (self._afresh, self._in_one_phase, self._in_phases):
            for found in search(start, best, room):
                yield found
                best = _better(found, best, room)
        for begin in larger if self._is_far(best, room, _NEARER) else ():
            if dropped := self.eviction.until(lambda _, prediction: prediction.peak_bytes <= room, begin, room, best):
                yield dropped
                best = dropped

    def _in_one_phase(self, start: Predicted, best: Predicted, room: int) -> Iterator[Predicted]:
        for begin in _both(start, best):
            yield from self._step_by_step(self._once, begin, room)

    def _in_phases(self, start: Predicted, best: Predicted, room: int) -> Iterator[Predicted]:
        """What is computed again lives through its phase; in a single one that may be too much to fit."""
        if self._is_far(best, room, _NEAR):
            for begin in _both(start, best):
                yield from self._step_by_step(self._divided, begin, room)

    def _is_far(self, best: Predicted, room: int, near: float) -> bool:
        return best.prediction.time_s > (1 + near) * self.least_s(room)

    @cached_property
    def _divided(self) -> Choices:
        return Choices(self.graph, self.around, _PHASES)

    def _afresh(self, start: Predicted, best: Predicted, room: int) -> Iterator[Predicted]:
        """Each from the rows of the last two, asked for less where those took more than they should."""
        choices = self._once
        program, prediction = start
        moments: dict[int, None] = {}
        earlier: list[Row] = []
        aim = float(room)
        for _ in range(_ROUNDS):
            lives = choices.lives(program, prediction)
            moments |= dict.fromkeys(choices.highest(lives))
            rows = choices.rows(lives, moments)
            asked = (_within(aim, earlier + rows), _within(aim, rows), _within(float(room), rows))
            chosen = next((found for found in map(choices.solve, asked) if found is not None), None)
            if chosen is None:
                return
            earlier = rows
            program, prediction = choices.made(chosen, copies_parts=program.copies_parts)
            yield Predicted(program, prediction)
            aim += (room - prediction.peak_bytes) / 2

    def _step_by_step(self, choices: Choices, start: Predicted, room: int) -> Iterator[Predicted]:
        """Only from programs that fit to faster ones that fit, changing less where a change went wrong."""
        best = start
        lives = choices.lives(*best)
        moments = dict.fromkeys(choices.highest(lives))
        missed: list[Row] = []  # rows of what was tried since and did not fit
        all_bytes = max(float(room), float(choices.sizes @ lives.chosen))
        may_change = all_bytes / 4
        for _ in range(_STEPS):
            rows = _within(float(room), choices.rows(lives, moments) + missed)
            chosen = choices.solve([*rows, _no_further(lives.chosen, choices.sizes, may_change)])
            if chosen is None and not missed:
                return
            if chosen is None:  # what did not fit forbids too much
                missed, may_change = [], may_change / 2
                continue
            found = choices.made(chosen, copies_parts=best.program.copies_parts)
            yield found
            lives_found = choices.lives(*found)
            highest = choices.highest(lives_found)
            moments |= dict.fromkeys(highest)
            if _better(found, best, room) is found:
                if best.prediction.time_s - found.prediction.time_s < _GAIN * best.prediction.time_s:
                    return
                best, lives, missed = found, lives_found, []
                may_change *= 2
            else:
                missed += choices.rows(
                    lives_found, [moment for moment in highest if lives_found.bytes[moment] > room]
                )
                changed = float(choices.sizes @ np.abs(lives_found.chosen - lives.chosen))
                may_change = min(changed, may_change) / 2
                if may_change < _SMALLEST_STEP * all_bytes:
                    return


def _both(start: Predicted, best: Predicted) -> list[Predicted]:
    """Neither is always the better one to begin with."""
    return [start] if best is start else [start, best]


def _better(one: Predicted, other: Predicted, room: int) -> Predicted:
    return one if one.prediction.peak_bytes <= room and one.prediction.time_s < other.prediction.time_s else other


def _no_further(chosen: Floats, sizes: Floats, may_change: float) -> Row:
    """Bytes kept otherwise than before, at most."""
    return np.where(chosen > 0, -sizes, sizes), may_change - float(sizes @ chosen)


def _within(room: float, rows: Sequence[Row]) -> list[Row]:
    return [(row, room - besides) for row, besides in rows]
