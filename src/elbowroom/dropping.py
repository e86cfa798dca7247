"""Makes a program smaller by keeping less: what frees most bytes at the peak for the time that it costs goes first.

The linear program (`keeping.py`) chooses with lives that it reads off a program. Where memory is short, what it
chooses lives otherwise, and nothing that fits may come of it. Here every value that goes makes another program, which
is predicted exactly. The way begins at a program that takes too much, and ends at the first that fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from elbowroom.keeping import Choices, Floats, Found
from elbowroom.program import Prediction, Program

_EFFORT = 150_000  # operators, of all programs on the way, or
_FEWEST = 20  # programs, if that is more, and as many again once one fits
_HOPELESS = 1.01  # times as long as another: keeping more again will not make up for that
_SMALL = 1 / 2000  # of the room: values that nobody asks about
_INSTANT = 1e-4  # of a step: what takes less time is as good as free

Fits = Callable[[Program, Prediction], bool]


class Dropping:
    """For programs of one graph, whose choices are those in one phase."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices

    def until(self, fits: Fits, start: Found, room: int, best: Found | None = None) -> Found | None:
        """A program that fits, and is faster than `best`; None if there is none on the way from `start`.

        A value frees no more than its own bytes, and costs no less than its own operator. So values wait in the order
        of what they promise, and few are tried: the one that keeps its promise better than others promise goes.
        """
        choices, apart = self.choices, start[0].apart
        chosen = choices.lives(*start).chosen
        found = choices.made(chosen, apart=apart)
        instant = _INSTANT * found[1].time_s or 1.0
        values = {
            v: choices.sizes[v] / (time + instant) for v, time in choices.values if choices.sizes[v] > _SMALL * room
        }
        queue = [(-promise, variable) for variable, promise in values.items() if chosen[variable] > 0]
        heapq.heapify(queue)
        left = max(_FEWEST, _EFFORT // max(1, len(choices.joint.ops)))
        while not fits(*found):
            tried: dict[int, Found] = {}
            while queue and left and queue[0][1] not in tried:
                variable = queue[0][1]
                tried[variable] = self._with(chosen, variable, 0.0, apart=apart)
                heapq.heapreplace(queue, (-_gain(found[1], tried[variable][1], instant), variable))
                left -= 1
            if not queue or queue[0][1] not in tried or queue[0][0] >= 0:
                return None
            _, variable = heapq.heappop(queue)
            chosen[variable] = 0.0
            found = tried[variable]
            if best is not None and found[1].time_s >= _HOPELESS * best[1].time_s:
                return None
        gone = sorted((v for v in values if not chosen[v]), key=values.__getitem__)
        found = self._kept_again(fits, found, chosen, gone[: max(left, _FEWEST)])
        return found if best is None or found[1].time_s < best[1].time_s else None

    def _kept_again(self, fits: Fits, found: Found, chosen: Floats, values: Sequence[int]) -> Found:
        """What frees little for its time is kept after all, where there is room."""
        for variable in values:
            other = self._with(chosen, variable, 1.0, apart=found[0].apart)
            if other[1].time_s < found[1].time_s and fits(*other):
                chosen[variable] = 1.0
                found = other
        return found

    def _with(self, chosen: Floats, variable: int, value: float, *, apart: bool) -> Found:
        other = chosen.copy()
        other[variable] = value
        return self.choices.made(other, apart=apart)


def _gain(before: Prediction, after: Prediction, instant: float) -> float:
    """Bytes less at the peak for each second more; below 0 where it is no less."""
    less = before.peak_bytes - after.peak_bytes
    return less / max(instant, after.time_s - before.time_s + instant)
