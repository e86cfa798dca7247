"""A search for faster choices of values to move than those that are known.

Grading a choice takes the referee milliseconds. So choices are timed from below first, many at once
(`ordered_times`), and only what is faster than the best by this measure is graded, the fastest first.

Where there are few enough, all choices are timed. Otherwise those around the known ones are: one value more or less,
one for another, one stage that saves in another way. The choice next to be looked around is the fastest by the same
measure, so the search also leaves choices that no neighbour improves.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from elbowroom.problem import Chain
from elbowroom.progress import Progress
from elbowroom.solve.offload.limits import SavedChain
from elbowroom.solve.offload.ordered_times import Bools, Floats, Ints, OrderedTimes
from elbowroom.solve.offload.sets import Choice, Trials

_WORK = 2e7  # stages times choices that are timed in one search: a few seconds
_AT_ONCE = 1 << 14  # choices, for the sake of memory
_FIRST = 1000  # choices that take as long as the first alone
_GRADING = 2000  # choices that take as long to time as one to grade
_KEPT = 16  # of one choice's neighbours, how many are remembered as places to go on


def search(trials: Trials, progress: Progress) -> None:
    """Try other choices than those that have been tried, until the bound is reached or enough has been done."""
    if _all_choices(trials.chain) * len(trials.chain) <= _WORK:
        _try_all(trials, progress)
    else:
        _Search(trials, progress).run()


def _all_choices(chain: Chain) -> int:
    return math.prod(len(stage.ways) for stage in chain.stages) << (len(chain) - 1)


def _try_all(trials: Trials, progress: Progress) -> None:
    """Time all choices, then grade them by time while the best is not as fast."""
    if trials.reached:
        return
    chain, ordered = trials.chain, OrderedTimes(trials.chain, trials.budget, trials.platform)
    total = _all_choices(chain)
    times = np.empty(total)
    for first in range(0, total, _AT_ONCE):
        numbers = np.arange(first, min(total, first + _AT_ONCE))
        times[numbers] = ordered.times(*_numbered(chain, numbers))
        progress((first + len(numbers)) / total)
    grades = int(_WORK / _GRADING / len(chain))
    for number in np.argsort(times, kind="stable")[:grades]:
        if times[number] >= trials.best_time * (1 - 1e-9):
            return
        _grade(trials, *_numbered(chain, np.array([number])), 0)


def _numbered(chain: Chain, numbers: Ints) -> tuple[Ints, Bools]:
    """Ways and moved values of the choices with these numbers; the value that cannot move never does."""
    n = len(chain)
    ways = np.empty((len(numbers), n), dtype=np.int64)
    moved = np.zeros((len(numbers), n), dtype=bool)
    for k in range(n - 1):
        numbers, moved[:, k] = numbers // 2, numbers % 2
    for i, stage in enumerate(chain.stages):
        numbers, ways[:, i] = numbers // len(stage.ways), numbers % len(stage.ways)
    return ways, moved


def _grade(trials: Trials, ways: Ints, moved: Bools, row: int) -> None:
    choice = _choice(ways, moved, row)
    trials.attempt(SavedChain(trials.chain, choice.ways), choice.values, won="search")


def _choice(ways: Ints, moved: Bools, row: int) -> Choice:
    return Choice(tuple(ways[row].tolist()), frozenset(np.flatnonzero(moved[row]).tolist()))


class _Search:
    """From choice to choice, the fastest first whose neighbours have not been timed."""

    def __init__(self, trials: Trials, progress: Progress) -> None:
        self.trials, self.chain, self.progress = trials, trials.chain, progress
        self.ordered = OrderedTimes(trials.chain, trials.budget, trials.platform)
        self.work = 0.0
        self.seen: set[Choice] = set()
        self.waiting: list[tuple[float, int, Choice]] = []
        for choice, time in trials.times.items():
            self._remember(choice, time)

    def run(self) -> None:
        while self.waiting and self.work < _WORK and not self.trials.reached:
            _, _, choice = heapq.heappop(self.waiting)
            ways, moved = _neighbours(self.chain, choice)
            times = np.empty(len(ways))
            for first in range(0, len(ways), _AT_ONCE):
                some = slice(first, first + _AT_ONCE)
                times[some] = self.ordered.times(ways[some], moved[some])
            self.work += len(self.chain) * (_FIRST + len(ways))
            self._go_on(ways, moved, times)
            self.progress(min(1.0, self.work / _WORK))

    def _go_on(self, ways: Ints, moved: Bools, times: Floats) -> None:
        """Grade what may be faster than the best, and remember the fastest neighbours."""
        new = 0
        for row in np.argsort(times, kind="stable"):
            if new == _KEPT or times[row] == math.inf:
                return
            choice = _choice(ways, moved, row)
            if choice not in self.seen:
                new += 1
                self._remember(choice, times[row])
                if times[row] < self.trials.best_time * (1 - 1e-9):
                    self.work += len(self.chain) * _GRADING
                    _grade(self.trials, ways, moved, row)

    def _remember(self, choice: Choice, time: float) -> None:
        self.seen.add(choice)
        heapq.heappush(self.waiting, (float(time), len(self.seen), choice))


def _neighbours(chain: Chain, choice: Choice) -> tuple[Ints, Bools]:
    """Rows of ways and of moved values: one value more or less, one for another, one stage in another way."""
    n = len(chain)
    sizes = SavedChain(chain, choice.ways).value_bytes
    movable = [k for k in range(n - 1) if sizes[k]]
    exchanged = [(k, k) for k in movable]
    exchanged += [(k, j) for k in movable if k in choice.values for j in movable if j not in choice.values]
    changed = [(i, way) for i, s in enumerate(chain.stages) for way in range(len(s.ways)) if way != choice.ways[i]]
    rows = len(exchanged) + len(changed)
    ways = np.tile(np.array(choice.ways, dtype=np.int64), (rows, 1))
    moved = np.zeros((rows, n), dtype=bool)
    moved[:, sorted(choice.values)] = True
    for row, pair in enumerate(exchanged):
        moved[row, list(set(pair))] ^= True
    for row, (index, way) in enumerate(changed, start=len(exchanged)):
        ways[row, index] = way
    return ways, moved
