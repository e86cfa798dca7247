"""A search for a faster order in which the values of a schedule go to the host.

Values go when they are made, so a small one may have to wait for a large one before it, and an operation for both.
Here a value is let go later, with one that is made after it and then goes first. The values stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from elbowroom.solve.offload.placing import Move, ordered_moves, place, save_all
from elbowroom.solve.offload.sets import Trials, choice_of

_PLAYED = 10_000  # stages of the schedules that are graded in one search: about a second


def search(trials: Trials) -> None:
    """Let values of the fastest schedule go later while that makes it faster."""
    if trials.best is None or trials.reached:
        return
    chain, choice = trials.chain, choice_of(trials.best.schedule)
    computing, moves = save_all(chain, choice.ways), ordered_moves(chain, choice.values)
    time = trials.best_time
    later = _later(moves)
    for _ in range(_PLAYED // len(chain)):
        changed = next(later, None)
        if changed is None:
            return
        found = place(chain, computing, changed, trials.budget, trials.platform)
        if found is not None and found.time < time * (1 - 1e-9):
            trials.take(found, won="search")
            time, later = float(found.time), _later(changed)


def _later(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """The moves with one value that goes with a later one, the next ones first."""
    moments = sorted({move.after for move in moves})
    for distance in range(1, len(moments)):
        for index, move in enumerate(moves):
            place_in_order = moments.index(move.after) + distance
            if place_in_order < len(moments):
                yield [*moves[:index], replace(move, after=moments[place_in_order]), *moves[index + 1 :]]
