"""`pofo`: persistent checkpoints, of which any may be on the host until after the loss (001 ch. 4).

The dynamic program (`kernels/pofo.py`) reckons with a link that gives room back byte by byte and is idle at the loss.
Its tables hold a schedule for every amount of memory up to the budget. The referee releases whole values, takes room
for whole values, and does not wait at the loss: what it finds fastest is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import numpy as np

from elbowroom.errors import InputError
from elbowroom.problem import Chain, Problem
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.solve.kernels import pofo as kernel
from elbowroom.solve.kernels.pofo import Space
from elbowroom.solve.kernels.ramps import last_time, left_over, waiting
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.offload.graded import Graded, fallback, without_need
from elbowroom.solve.offload.leanest import Leanest
from elbowroom.solve.offload.parts import Moving, Part, in_a_row, walk
from elbowroom.solve.offload.placing import place
from elbowroom.solve.slots import TABLE_BYTES, divide
from elbowroom.units import format_bytes

CUSTOMARY = 50  # levels of memory, as in 001
FEWEST = 10
WORK = 1e8  # inner steps that may be spent on levels nobody asked for: a fraction of a second
CREDITS = tuple(k / 4 for k in range(9))  # levels: what a table misses, which sees no memory between two of them


@final
class Pofo(Method):
    name = "pofo"
    kinds = ("chain",)
    summary = "recomputes and offloads as 001 ch. 4 does; O(stages² · levels³ + stages³ · levels²)"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        _check_size(problem)
        return Leanest(problem).least_bytes(options.platform)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        fastest = without_need(problem, budget)
        if fastest is not None:
            return fastest
        lean = Leanest(problem)
        best = fallback(lean, budget, options)
        table = Table(lean, budget, options)
        seen = set()
        for credit in CREDITS:
            for reading in table.readings(credit):
                if reading.promise >= best.simulation.time:
                    break  # for less memory the promises are no better
                if reading.moving not in seen:
                    seen.add(reading.moving)
                    best = min([best, *reading.graded(problem, budget, options)], key=lambda each: each.rank)
        return best.found(problem, levels=table.space.levels)


@dataclass(frozen=True)
class Reading:
    """A schedule from the tables, and the time that it takes in their model of the link."""

    promise: float
    moving: Moving

    def graded(self, chain: Chain, budget: int, options: Options) -> list[Graded]:
        """What the referee says of it: nothing if it waits for ever, as it may for room on the host."""
        placed = place(chain, self.moving.computing, self.moving.moves, budget, options.platform)
        return [] if placed is None else [Graded(placed, self.promise)]


class Table:
    """The filled dynamic program for one budget."""

    def __init__(self, lean: Leanest, budget: int, options: Options) -> None:
        self.lean, self.budget, self.platform = lean, budget, options.platform
        self.n = len(lean.chain)
        self.space = _space(lean, budget, options)
        rows = self.n * (self.n + 1) // 2
        self.recomputing = np.empty((rows, _row_cells(self.space.levels)))
        self.phases = np.empty((len(lean.entries.stage), _plane_cells(self.space.levels)))
        threads = os.cpu_count() or 1
        with ThreadPoolExecutor(threads) as pool:
            self._fill_recomputing(pool, 4 * threads, lambda part: options.progress(part / 2))
            self._fill_phases(pool, 4 * threads, lambda part: options.progress((1 + part) / 2))

    def _fill_recomputing(self, pool: ThreadPoolExecutor, pieces: int, progress: Callable[[float], None]) -> None:
        for length in range(self.n):  # stretches of one length do not depend on each other
            count = self.n - length
            step = -(-count // pieces)

            def fill(first: int, length: int = length, step: int = step, end: int = count + 1) -> None:
                last = min(first + step, end)
                kernel.fill_recomputing(
                    self.lean.costs, self.space, self.lean.reach, first, last, length, self.recomputing
                )

            list(pool.map(fill, range(1, count + 1, step)))
            progress((length + 1) / self.n)

    def _fill_phases(self, pool: ThreadPoolExecutor, pieces: int, progress: Callable[[float], None]) -> None:
        """All entries but the first, from which the schedules begin."""
        stages = self.lean.entries.stage
        for stage in range(self.n, 1, -1):
            jobs = [(int(entry), piece) for entry in np.flatnonzero(stages == stage) for piece in range(pieces)]

            def fill(job: tuple[int, int]) -> None:
                entry, piece = job
                kernel.fill_entry(
                    self.lean.costs, self.space, self.lean.reach, self.lean.entries,
                    entry, piece, pieces, self.recomputing, self.phases,
                )  # fmt: skip

            list(pool.map(fill, jobs))
            progress((self.n - stage + 1) / self.n)

    def readings(self, credit: float = 0.0) -> Iterator[Reading]:
        """Schedules for the budget, and for a level less and less of it: where whole values must leave and return, one
        that was made for less memory may wait less. With `credit` the tables are read so many levels higher."""
        for levels in range(self.space.levels + 1):
            reading = _Reader(self, int(levels * self.space.level), credit * self.space.level).read()
            if reading is None:
                return
            yield reading


class _Reader:
    """Follows the best choices through the tables, with the bytes that really are stored and on their way."""

    def __init__(self, table: Table, reserve: int, credit: float) -> None:
        self.table, self.space, self.reserve, self.credit = table, table.space, reserve, credit
        self.costs, self.entries = table.lean.costs, table.lean.entries

    def read(self) -> Reading | None:
        """The schedule; None if none fits in what the reserve leaves."""
        costs, space, entries, n = self.costs, self.space, self.entries, self.table.n
        room = self.table.platform.host_bytes
        host = float("inf") if room is None else float(room)
        entry, below, leaving, coming, time = 0, self.reserve, 0.0, 0.0, 0.0
        parts: list[Part] = []
        while True:
            _, way, stop, moved = kernel.choose_entry(
                costs, space, self.table.lean.reach, self.table.lean.least, entries,
                self.table.recomputing, self.table.phases, entry, float(below), leaving, coming, host, self.credit,
            )  # fmt: skip
            if way < 0 and stop < 0:
                return None
            stage, held = int(entries.stage[entry]), int(entries.input[entry])
            stored = float(below + held)
            if way >= 0:
                parts.append(Part.saving(stage, way - int(costs.first_way[stage]), moved))
                need_f, need_b = kernel.needs(costs, space, way, stage, n)
                out = space.forward[way] + waiting(need_f + stored + leaving, space.to_host)
                back = space.backward[way] + waiting(need_b + stored + coming, space.from_host)
            else:
                again, back = self._recomputing(stage, stop, below + held, coming)
                parts.append(Part.walking(stage, stop, again, moved))
                need = costs.gradient[n] + space.lag_out[stage, stop] - space.budget
                walked = costs.elapsed[stop] - costs.elapsed[stage - 1]
                out = walked + waiting(need + stored + leaving, space.to_host)
            time += out + back
            if stage == n:
                leaving, coming = left_over(leaving, out, space.to_host), left_over(coming, back, space.from_host)
                time += leaving / space.to_host + coming / space.from_host
                return Reading(float(time), in_a_row(parts))
            leaving = left_over(leaving + (held if moved else 0), out, space.to_host)
            coming = left_over(coming, back, space.from_host) + (held if moved else 0)
            below, host = (below, host - held) if moved else (below + held, host)
            entry = n + way if way >= 0 else stop

    def _recomputing(self, s: int, t: int, stored: int, coming: float) -> tuple[list[Operation], float]:
        """Backwards t to s, and the time they take, with so many bytes stored and to come by their end."""
        return _without_recursion(self._recompute(s, t, stored, coming))

    def _recompute(self, s: int, t: int, stored: int, coming: float) -> _Steps:
        costs, space, lean = self.costs, self.space, self.table.lean
        rate, room = space.from_host, self.table.budget - stored
        way, split = kernel.choose_recomputing(
            costs, space, lean.reach, lean.least, self.table.recomputing, s, t, room, coming, self.credit
        )
        if way >= 0:
            forward, backward = float(space.forward[way]), float(space.backward[way])
            need_f, need_b = kernel.needs(costs, space, way, s, t)
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
    stack, result = [first], None
    while stack:
        try:
            stack.append(stack[-1].send(result))  # type: ignore[arg-type]
            result = None
        except StopIteration as done:
            stack.pop()
            result = done.value
    assert result is not None
    return result


# --- levels ------------------------------------------------------------------------------------------------------


def _row_cells(levels: int) -> int:
    """Cells of one row of the table of recomputation, all amounts of memory together."""
    return (levels + 1) * (levels + 4) // 2


def _plane_cells(levels: int) -> int:
    """Cells of one entry in the table of the forward phase."""
    return sum(width * width for width in range(2, levels + 3))


def _space(lean: Leanest, budget: int, options: Options) -> Space:
    levels, level = _levels(lean, budget, options.slots)
    widths = np.array([levels - a + 2 for a in range(levels + 1)], dtype=np.int64)
    stages = lean.chain.stages
    out, back = options.platform.rate_to_host, options.platform.rate_from_host
    assert out is not None
    assert back is not None
    shape = lean.reach.shape
    space = Space(
        levels=levels,
        level=level,
        budget=float(budget),
        to_host=float(out),
        from_host=float(back),
        row=np.cumsum(widths) - widths,
        plane=np.cumsum(widths**2) - widths**2,
        forward=np.array([way.forward_time for stage in stages for way in stage.ways], dtype=np.float64),
        backward=np.array([way.backward_time for stage in stages for way in stage.ways], dtype=np.float64),
        beyond=np.zeros(shape, dtype=np.int64),
        lag_out=np.zeros(shape),
        lag_back=np.zeros(shape),
    )
    kernel.fill_walks(lean.costs, space.to_host, space.from_host, space.beyond, space.lag_out, space.lag_back)
    return space


def _levels(lean: Leanest, budget: int, asked: int | None) -> tuple[int, float]:
    """How many levels, and the bytes of one: the greatest that all sizes share, if those are few enough."""
    n, entries = len(lean.chain), len(lean.entries.stage)
    wanted = asked or max(CUSTOMARY, int((3 * WORK / (n * entries)) ** (1 / 3)))
    division = divide(lean.chain, budget, wanted, rows=1, steps=1)
    levels = division.slots if division.exact else wanted
    need = _table_bytes(n, entries, levels)
    if need > TABLE_BYTES and asked is not None:
        raise InputError("slots", f"{asked} for {n} stages need a table of {format_bytes(need)}")
    while _table_bytes(n, entries, levels) > TABLE_BYTES:
        levels -= 1
    return (levels, float(division.unit)) if division.exact and levels == division.slots else (levels, budget / levels)


def _table_bytes(n: int, entries: int, levels: int) -> int:
    return 8 * (n * (n + 1) // 2 * _row_cells(levels) + entries * _plane_cells(levels))


def _check_size(chain: Chain) -> None:
    n = len(chain)
    entries = n + sum(len(stage.ways) for stage in chain.stages)
    need = _table_bytes(n, entries, FEWEST)
    if need > TABLE_BYTES:
        raise InputError(
            "stages",
            f"{n} are too many for this method: even {FEWEST} levels need a table of {format_bytes(need)}; "
            "use 'sequential'",
        )
