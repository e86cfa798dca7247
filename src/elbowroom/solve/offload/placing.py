"""From computing operations and values to move to a schedule: where every copy is asked for.

An offload is asked for where its value is complete, and runs beside what follows. A prefetch is asked for as early as
there is room for its value in every operation from then on until the value is needed, and prefetches keep the order
in which they are needed. Room is counted as if offloads were over when their last reader is: computation waits for
that, so no schedule made here waits for ever, as long as the host has room.

Two things are tried, and the referee says which serves better: whether prefetches may begin while values are still to
be offloaded, which takes their turns on a link that has one queue; and whether one is asked for when the operation
before has ended, or when its own begins, because what comes early may take the room that an operation waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Chain, Platform
from elbowroom.schedule import Backward, Discard, Forward, Offload, Operation, Prefetch, Simulation, simulate
from elbowroom.solve.kernels.rows import Ints

Value = tuple[Literal["input", "all"], int]  # as operations name it: a stage's input, or its saved set


@dataclass(frozen=True, slots=True)
class Move:
    """A value that goes to the host after one computing operation and is back before another (their places in the
    list; -1 is before the first)."""

    at: int
    what: Literal["input", "all"]
    after: int
    before: int


def save_all(chain: Chain, ways: Sequence[int] | None = None) -> tuple[Operation, ...]:
    """Every forward once, saving all, and every backward: what methods compute that only offload."""
    n = len(chain)
    chosen = ways or [0] * n
    forwards = [Forward(at, "all", way) for at, way in enumerate(chosen, start=1)]
    return (*forwards, *(Backward(at) for at in range(n, 0, -1)))


def ordered_moves(chain: Chain, values: Iterable[int]) -> list[Move]:
    """Moves for `save_all`: of values ā_k by number, where ā_0 is the chain's input (001 ch. 3).

    ā_k is read by forward k + 1 and by the backwards of k + 1 and k. Nothing is between forward n and backward n, so
    ā_{n-1} stays.
    """
    n = len(chain)
    moved = sorted(k for k in values if 0 <= k < n - 1)
    return [Move(max(k, 1), "all" if k else "input", k - 1, 2 * n - k - 1) for k in moved]


def place(
    chain: Chain, computing: Sequence[Operation], moves: Iterable[Move], budget: int, platform: Platform
) -> Simulation | None:
    """The fastest schedule found with these moves within a budget, as the referee ran it; None if none fits."""
    return _Placing(chain, computing, moves, budget, platform).best()


class _Absence(NamedTuple):
    """A value that moves, gone from the operation `since` on: when it has been asked to leave, and been read last."""

    move: Move
    since: int
    bytes: int


class _Placing:
    def __init__(
        self, chain: Chain, computing: Sequence[Operation], moves: Iterable[Move], budget: int, platform: Platform
    ) -> None:
        self.chain, self.computing, self.budget, self.platform = chain, computing, budget, platform
        self.levels, readers = levels_without_moves(chain, computing), _readers(computing)
        self.moves: list[_Absence] = []
        for move in sorted(moves, key=lambda each: each.before):
            reading = [k for k in readers.get((move.what, move.at), ()) if move.after < k < move.before]
            since, size = max([move.after, *reading]) + 1, bytes_of(chain, computing, move)
            if since < move.before and size:
                self.moves.append(_Absence(move, since, size))

    def best(self) -> Simulation | None:
        """Of all timings that the referee accepts, the fastest."""
        found = [each for schedule in self._schedules() if (each := self._refereed(schedule)) is not None]
        return min(found, key=lambda each: (each.time, each.peak_bytes), default=None)

    def _refereed(self, schedule: tuple[Operation, ...]) -> Simulation | None:
        try:
            return simulate(self.chain, schedule, budget=self.budget, platform=self.platform)
        except InvalidSchedule:
            return None

    def _schedules(self) -> Iterator[tuple[Operation, ...]]:
        last_offload = max((absence.move.after + 1 for absence in self.moves), default=0)
        seen = set()
        for earliest in dict.fromkeys((last_offload, 0)):
            starts = self._starts(earliest)
            if starts is None:
                return
            for deferred in (False, True):
                schedule = self._written(starts, deferred)
                if schedule not in seen:
                    seen.add(schedule)
                    yield schedule

    def _starts(self, earliest: int) -> list[int] | None:
        """The operation before which each prefetch is asked for, none before `earliest` unless it must be."""
        room = self.budget - self.levels
        for move, since, size in self.moves:
            room[since : move.before] += size
        if (room < 0).any():
            return None
        starts, after = [], earliest
        for move, since, size in self.moves:
            first = min(max(after, since), move.before)
            tight = np.flatnonzero(room[first : move.before] < size)
            after = first + int(tight[-1]) + 1 if len(tight) else first
            room[after : move.before] -= size
            starts.append(after)
        return starts

    def _written(self, starts: Sequence[int], deferred: bool) -> tuple[Operation, ...]:
        """All operations in a row. A deferred prefetch names its operation's place there."""
        offloads: dict[int, list[Move]] = {}
        prefetches: dict[int, list[Move]] = {}
        for (move, _, _), start in zip(self.moves, starts, strict=True):
            offloads.setdefault(move.after, []).append(move)
            prefetches.setdefault(start, []).append(move)
        written: list[Operation] = [Offload(move.at, move.what) for move in offloads.get(-1, [])]
        for index, operation in enumerate(self.computing):
            coming = prefetches.get(index, [])
            place = len(written) + len(coming)
            for move in coming:
                later = deferred and move.before > index
                written.append(Prefetch(move.at, move.what, start=place if later else None))
            written.append(operation)
            written += [Offload(move.at, move.what) for move in offloads.get(index, [])]
        return tuple(written)


def levels_without_moves(chain: Chain, computing: Sequence[Operation]) -> Ints:
    """Bytes in use in each operation if nothing is moved."""
    levels = np.zeros(len(computing), dtype=np.int64)
    for span in simulate(chain, computing).spans:
        levels[span.operation] = max(levels[span.operation], span.bytes)
    return levels


def bytes_of(chain: Chain, computing: Sequence[Operation], move: Move) -> int:
    """How large a value is that moves: a saved set as large as its forward made it."""
    if move.what == "input":
        return chain.output_bytes[move.at - 1]
    made = (computing[k] for k in range(move.after, -1, -1))
    forward = next(op for op in made if isinstance(op, Forward) and op.at == move.at and op.save == "all")
    return chain.stages[move.at - 1].ways[forward.way].saved_bytes


def _readers(computing: Sequence[Operation]) -> dict[Value, list[int]]:
    """The operations that read each value where it is stored."""
    readers: dict[Value, list[int]] = {}
    for index, operation in enumerate(computing):
        if isinstance(operation, Discard):
            continue
        assert isinstance(operation, Forward | Backward)
        at = operation.at
        assert isinstance(at, int)
        reads: list[Value] = [("input", at), ("all", at - 1)]
        if isinstance(operation, Backward):
            reads.append(("all", at))
        for value in reads:
            readers.setdefault(value, []).append(index)
    return readers
