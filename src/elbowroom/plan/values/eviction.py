"""Makes a program smaller by keeping less: what frees most bytes at the peak for the time that it costs goes first.

The linear program (`choices.py`) chooses with lives that it reads off a program. Where memory is short, what it
chooses lives otherwise, and nothing that fits may come of it. Here every value that goes makes another program, which
is predicted exactly. The way begins at a program that takes too much, and ends at the first that fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from elbowroom.plan.values.choices import Choices, Floats, Predicted
from elbowroom.step.program import Program
from elbowroom.step.referee import Prediction

# How long the way may be: so many operators in all of its programs together, which is about a second, or so many
# programs if that is more; and as many again once one fits.
_EFFORT = 150_000
_FEWEST = 20
_HOPELESS = 1.01  # times as long as another program: what is kept again in the end rarely makes up for 1 %
_SMALL = 1 / 2000  # of the room: smaller values are left alone, because there are many and they free little
# Of a step: operators that take less time count as if they took this much, or they would all go first.
_INSTANT = 1e-4

Fits = Callable[[Program, Prediction], bool]


class Eviction:
    """For programs of one graph, whose choices are those in one phase."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices

    def until(self, fits: Fits, start: Predicted, room: int, best: Predicted | None = None) -> Predicted | None:
        """A program that fits, and is faster than `best`; None if there is none on the way from `start`.

        A value frees no more than its own bytes, and costs no less than its own operator. So values wait in the order
        of what they promise, and few are tried: the one that keeps its promise better than others promise goes.
        """
        choices, copies_parts = self.choices, start.program.copies_parts
        chosen = choices.lives(*start).chosen
        found = choices.made(chosen, copies_parts=copies_parts)
        instant = _INSTANT * found.prediction.time_s or 1.0
        values = {
            v: choices.sizes[v] / (time + instant) for v, time in choices.values if choices.sizes[v] > _SMALL * room
        }
        queue = [(-promise, variable) for variable, promise in values.items() if chosen[variable] > 0]
        heapq.heapify(queue)
        left = max(_FEWEST, _EFFORT // max(1, len(choices.graph.ops)))
        while not fits(*found):
            tried: dict[int, Predicted] = {}
            while queue and left and queue[0][1] not in tried:
                variable = queue[0][1]
                tried[variable] = self._with(chosen, variable, 0.0, copies_parts=copies_parts)
                heapq.heapreplace(queue, (-_gain(found.prediction, tried[variable].prediction, instant), variable))
                left -= 1
            if not queue or queue[0][1] not in tried or queue[0][0] >= 0:
                return None
            _, variable = heapq.heappop(queue)
            chosen[variable] = 0.0
            found = tried[variable]
            if best is not None and found.prediction.time_s >= _HOPELESS * best.prediction.time_s:
                return None
        gone = sorted((v for v in values if not chosen[v]), key=values.__getitem__)
        found = self._kept_again(fits, found, chosen, gone[: max(left, _FEWEST)])
        return found if best is None or found.prediction.time_s < best.prediction.time_s else None

    def _kept_again(self, fits: Fits, found: Predicted, chosen: Floats, values: Sequence[int]) -> Predicted:
        """What frees little for its time is kept after all, where there is room."""
        for variable in values:
            other = self._with(chosen, variable, 1.0, copies_parts=found.program.copies_parts)
            if other.prediction.time_s < found.prediction.time_s and fits(*other):
                chosen[variable] = 1.0
                found = other
        return found

    def _with(self, chosen: Floats, variable: int, value: float, *, copies_parts: bool) -> Predicted:
        other = chosen.copy()
        other[variable] = value
        return self.choices.made(other, copies_parts=copies_parts)


def _gain(before: Prediction, after: Prediction, instant: float) -> float:
    """Bytes less at the peak for each second more; below 0 where it is no less."""
    less = before.peak_bytes - after.peak_bytes
    return less / max(instant, after.time_s - before.time_s + instant)
