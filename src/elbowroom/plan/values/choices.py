"""Chooses for every value whether it is kept for the backward, computed again or moved: a linear program.

A dynamic program over stages sees a few ways to save each stage. Here every value is a choice of its own. The
backward is divided into *phases*, runs of its operators. A storage is kept across the border before a phase, or not;
what a phase reads was kept across that border, or its operator runs again in that phase, and then what that reads
must be there, too:

    keep[p, n]     storage n is kept across the border before phase p; the first one is between forward and backward
    again[p, v]    operator v runs again in phase p
    ahead[v]       v, which only the backward needs, runs in the forward
    move[n]        storage n goes to the host in the forward and comes back in the first phase; only with a link

    least          Σ time[v] · (Σ again[p, v] + ahead[v])
    such that      keep[p, n] + again[p, maker of n] ≥ 1             for all n that the backward reads in phase p
                   keep[p, n] + again[p, maker of n] ≥ again[p, v]   for all n that v reads
                   keep[p, n] + again[p, maker of n] ≥ keep[p + 1, n]
                   ahead[maker of n] ≥ keep[0, n]
                   ahead[maker of n] ≥ ahead[v]                      for all n that v reads
                   bytes in use ≤ room                               at some moments

In the first phase, wherever keep[0, n] makes something possible, move[n] makes it possible, too. What moves asks of
the link is for others to say: `traffic.py` has rows for it, and `least.py` the bound.

How many bytes are in use at a moment is linear in these choices, given from when to when each value lives; and that
can be read off a program (`Lives`). So a program's highest moments become rows, and what is chosen becomes another
program. What the linear program keeps only in part is not kept.

With one phase and one row, for the moment between forward and backward, the same linear program bounds every plan
that moves nothing: what is not kept then must be computed again, by whatever schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Operation, Run
from elbowroom.step.program import Program, make_program, reads_of
from elbowroom.step.referee import Prediction, Surroundings, bytes_between, predict

# Rows of a program at most, and how many of them would fill the backward evenly: neighbouring moments hold the same
# values, so rows that are closer together say the same twice and only make the linear program slower.
_MOMENTS, _MOMENTS_IN_BACKWARD = 30, 60
WHOLE = 1 - 1e-6  # less than that of a value is not kept

Floats = NDArray[np.float64]
Row = tuple[Floats, float]  # coefficients, and the most that they may add up to


class Predicted(NamedTuple):
    """A program and what the referee says of it."""

    program: Program
    prediction: Prediction


class Lives(NamedTuple):
    """When a program's values live, in moments, and the most bytes in use at each moment.

    Moments count the forward's operators, then the backward's. What runs again before an operator of the backward
    shares its moment. `first` and `last` are when a phase reads a storage. `copies` are storages that are made again:
    which, from when, until when.
    """

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    copies: NDArray[np.int64]
    bytes: Floats
    chosen: Floats


class Choices:
    """The linear program of one graph, and the programs that follow from it.

    Variables have numbers. `keep` has those of storages at each border, `sizes` their bytes, 0 for other variables.
    `move` has those of storages that may move, 0 for others; without `moves` nothing may.
    """

    def __init__(self, graph: StepGraph, around: Surroundings, phases: int = 1, *, moves: bool = False) -> None:
        self.graph = graph
        self.around = around
        self._moves = moves
        self.turn = len(graph.forward)  # the moment between forward and backward
        self._place = {op: at for at, op in enumerate((*graph.forward, *graph.backward))}
        made = [(storage, size, op) for op in graph.forward for storage, size in graph.ops[op].makes]
        self._number = {storage: n for n, (storage, _, _) in enumerate(made)}
        self.storages = tuple(self._number)
        self.maker = [op for _, _, op in made]
        self.made_at = np.array([self._place[op] for op in self.maker], dtype=np.int64)
        self.storage_bytes = np.array([size for _, size, _ in made], dtype=np.float64)
        results = {storage for op in graph.results for storage in graph.storages(op)}
        self.kept_sizes = np.where([storage in results for storage, _, _ in made], 0.0, self.storage_bytes)
        self.read_until = self.made_at.copy()  # in the forward
        for op in graph.forward:
            for n in self.storages_of(graph.ops[op].reads):
                self.read_until[n] = max(self.read_until[n], self._place[op])
        self._parts: dict[int, list[int]] = {}  # of tuples
        for op in graph.forward:
            for read in graph.ops[op].reads[:1]:
                if not graph.ops[read].storable and graph.ops[op].is_view:
                    self._parts.setdefault(read, []).append(op)
        self._phase = self._phases(phases)
        self._number_choices()
        self.rules = self._make_rules()
        everything = make_program(graph, graph.backward, copies_parts=False)
        ahead_s = sum(graph.ops[i.op].time for i in everything.forward_runs if i.op in self.ahead)
        self.besides_s = predict(graph, everything, around).time_s - ahead_s  # whatever is chosen

    @cached_property
    def values(self) -> list[tuple[int, float]]:
        """What may be kept between forward and backward or not: its variable, and the time of its operator."""
        pairs = zip(self.keep[0].tolist(), self.maker, strict=True)
        return [
            (variable, self.graph.ops[op].time) for variable, op in pairs if variable and op not in self.graph.kept
        ]

    def least_s(self, room: int) -> float:
        """Seconds that any program within the room takes, at the least."""
        between = np.zeros(self.count)
        between[self.keep[0]] = self.kept_sizes
        between[0] = 0.0
        left = room + self.around.late_bytes - bytes_between(self.graph, self.around)
        chosen = self.solve([(between, float(left))])
        return float("inf") if chosen is None else self.besides_s + float(self.times @ chosen)

    # --- the linear program ---

    def _phases(self, count: int) -> NDArray[np.int64]:
        """The phase of every moment from the turn on: equal in bytes that the backward reads, for the last time."""
        graph = self.graph
        last = {n: at for at, op in enumerate(graph.backward) for n in self.storages_of(graph.ops[op].reads)}
        done = np.zeros(len(graph.backward) + 1)
        for n, at in last.items():
            done[at] += self.storage_bytes[n]
        share = (np.cumsum(done) - done) / max(1.0, done.sum())
        phase: NDArray[np.int64] = np.minimum((share * count).astype(np.int64), count - 1)
        return phase

    def _number_choices(self) -> None:
        """Variables for what may be of use; all others are variable 0, which is always nothing."""
        graph = self.graph
        phases = int(self._phase[-1]) + 1
        self._needs: list[dict[int, None]] = [{} for _ in range(phases)]
        for phase, op in zip(self._phase.tolist(), graph.backward, strict=False):
            self._needs[phase].update(dict.fromkeys(self.storages_of(graph.ops[op].reads)))
        self.keep = np.zeros((phases, len(self.storage_bytes)), dtype=np.int64)
        self.again = [dict[int, int]() for _ in range(phases)]
        self.count = 1
        useful: set[int] = set()
        for phase in reversed(range(phases)):
            upstream = self._upstream(self._needs[phase])
            useful |= upstream
            self.keep[phase, sorted(useful)] = self.count + np.arange(len(useful))
            self.count += len(useful)
            for op in dict.fromkeys(self.maker[n] for n in sorted(upstream)):
                self.again[phase][op] = self._new()
        wanted = {
            *graph.results,
            *graph.updates,
            *graph.effects,
            *(op for op in graph.forward if graph.ops[op].random),
        }
        for op in reversed(graph.forward):
            if op in wanted:
                wanted.update(graph.ops[op].reads)
        self.always = wanted  # what every program runs in the forward
        self.ahead = {op: self._new() for op in dict.fromkeys(self.maker) if op not in wanted}
        self._number_moves()
        self.times = np.zeros(self.count)
        self.most = np.ones(self.count)
        self.most[0] = 0.0
        for numbers in (*self.again, self.ahead):
            self.times[list(numbers.values())] = [graph.ops[op].time for op in numbers]
        for numbers in self.again:
            self.most[[number for op, number in numbers.items() if op in graph.kept]] = 0.0
        self.sizes = np.zeros(self.count)
        self.sizes[self.keep] = np.maximum(self.storage_bytes, 1.0)
        self.sizes[0] = 0.0

    def _number_moves(self) -> None:
        """Variables for storages that may move: those that may be kept, and that the caller does not hold."""
        self.move = np.zeros(len(self.storage_bytes), dtype=np.int64)
        for n in np.flatnonzero(self.keep[0] * (self.kept_sizes > 0)).tolist() if self._moves else ():
            self.move[n] = self._new()

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def _upstream(self, needs: dict[int, None]) -> set[int]:
        """Storages that computing these again may take."""
        found, waiting = set(needs), list(needs)
        while waiting:
            for n in self.storages_of(self.graph.ops[self.maker[waiting.pop()]].rerun_reads):
                if n not in found:
                    found.add(n)
                    waiting.append(n)
        return found

    def _make_rules(self) -> tuple[csr_array, list[float]]:
        graph = self.graph
        entries: list[tuple[int, int, float]] = []
        most: list[float] = []

        def rule(limit: float, *terms: tuple[int, float]) -> None:
            entries.extend((len(most), variable, value) for variable, value in terms)
            most.append(limit)

        def moved(phase: int, n: int) -> list[tuple[int, float]]:
            return [(self.move[n], -1.0)] if phase == 0 and self.move[n] else []

        for phase, again in enumerate(self.again):
            keep = self.keep[phase]
            for n in self._needs[phase]:
                rule(-1.0, (keep[n], -1.0), (again[self.maker[n]], -1.0), *moved(phase, n))
            for op, number in again.items():
                for n in dict.fromkeys(self.storages_of(graph.ops[op].rerun_reads)):
                    if self.maker[n] != op:
                        there = (keep[n], -1.0), (again[self.maker[n]], -1.0)
                        rule(0.0, (number, 1.0), *there, *moved(phase, n))
            if phase + 1 < len(self.again):
                for n in np.flatnonzero(self.keep[phase + 1]).tolist():
                    made = again.get(self.maker[n], 0)
                    rule(0.0, (self.keep[phase + 1, n], 1.0), (keep[n], -1.0), (made, -1.0), *moved(phase, n))
        for op, number in self.ahead.items():
            for storage, _ in graph.ops[op].makes:
                n = self._number[storage]
                rule(0.0, (self.keep[0, n], 1.0), (number, -1.0))
                if self.move[n]:
                    rule(0.0, (self.move[n], 1.0), (number, -1.0))
            for n in dict.fromkeys(self.storages_of(graph.ops[op].reads)):
                if self.maker[n] in self.ahead and self.maker[n] != op:
                    rule(0.0, (number, 1.0), (self.ahead[self.maker[n]], -1.0))
        rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        return csr_array((values, (rows, columns)), shape=(len(most), self.count)), most

    def solve(self, rows: Sequence[Row]) -> Floats | None:
        """The best choices; None if there are none within all rows."""
        rules, most = self.rules
        limits = vstack([rules, csr_array(np.array([row for row, _ in rows]))], format="csr")
        bounds = np.column_stack([np.zeros(self.count), self.most])
        found = linprog(self.times, limits, [*most, *(limit for _, limit in rows)], bounds=bounds, method="highs-ds")
        return None if found.x is None else np.asarray(found.x)

    def rows(self, lives: Lives, moments: Iterable[int]) -> list[Row]:
        """For each moment, coefficients of the choices, and the bytes in use besides them."""
        rows = []
        for moment in moments:
            if np.isfinite(lives.bytes[moment]):
                row = self.row(lives, moment)
                rows.append((row, float(lives.bytes[moment] - row @ lives.chosen)))
        return rows

    def row(self, lives: Lives, moment: int) -> Floats:
        row = np.zeros(self.count)
        if moment < self.turn:  # what the forward itself still reads is there anyway
            waits = (self.made_at <= moment) & (self.read_until < moment)
            row[self.keep[0]] = np.where(waits, self.kept_sizes, 0.0)
            row[0] = 0.0
            return row
        phase = int(self._phase[moment - self.turn])
        first, last = lives.first[phase], lives.last[phase]
        still = last >= moment
        row[self.keep[phase]] = np.where(still, self.kept_sizes, 0.0)
        if phase + 1 < len(self.keep):
            row[self.keep[phase + 1]] = np.where(still, 0.0, self.kept_sizes)
        # Where nothing was made again, it would have to live as long as it is read.
        alive = (first <= moment) & still
        storages, start, end = lives.copies
        here = (start <= moment) & (moment <= end)
        alive[storages] = False
        alive[storages[here]] = True
        for n in np.flatnonzero(alive).tolist():
            row[self.again[phase].get(self.maker[n], 0)] += self.storage_bytes[n]
        row[0] = 0.0
        return row

    def highest(self, lives: Lives) -> list[int]:
        """The highest moments, not too close to each other."""
        distance = len(self.graph.backward) / _MOMENTS_IN_BACKWARD
        found: list[int] = []
        for moment in np.argsort(-lives.bytes, kind="stable").tolist():
            if len(found) == _MOMENTS or not np.isfinite(lives.bytes[moment]):
                break
            if all(abs(moment - other) > distance for other in found):
                found.append(moment)
        return found

    # --- from programs and to programs ---

    def storages_of(self, ops: Sequence[int]) -> Iterator[int]:
        for op in ops:
            for storage in self.graph.ops[op].storages:
                if storage in self._number:
                    yield self._number[storage]

    def lives(self, program: Program, prediction: Prediction) -> Lives:
        """When a program's values live, and its choices. Bytes are those while operators run."""
        forward, backward = (
            _runs(program.forward, prediction.forward_bytes),
            _runs(program.backward, prediction.backward_bytes),
        )
        graph, phases, turn = self.graph, len(self.again), self.turn
        sizes = np.full(turn + len(graph.backward) + 1, -np.inf)
        for run, size in forward:
            moment = self._place[run.op]
            sizes[moment] = max(sizes[moment], size)
        moment = turn
        sizes[moment] = prediction.between_bytes
        first = np.full((phases, len(self.storage_bytes)), len(sizes))
        last = np.full((phases, len(self.storage_bytes)), -1)
        latest = {n: [n, -1, -1] for n in self.storages_of(program.saved)}
        lives = list(latest.values())
        chosen = np.zeros(self.count)
        chosen[[self.ahead[i.op] for i, _ in forward if i.op in self.ahead]] = 1.0
        for run, size in backward:
            sizes[moment] = max(sizes[moment], size)
            phase = int(self._phase[moment - turn])
            if run.again:
                chosen[self.again[phase].get(run.op, 0)] = 1.0
                for storage, _ in graph.ops[run.op].makes:
                    n = self._number[storage]
                    latest[n] = [n, moment, moment]
                    lives.append(latest[n])
            for n in self.storages_of(reads_of(graph, run)):
                first[phase, n], last[phase, n] = min(first[phase, n], moment), moment
                if n in latest:
                    latest[n][2] = moment
            if not run.again:
                moment = self._place[run.op] + 1
        for n, start, end in lives:
            since = 0 if start < 0 else int(self._phase[start - turn]) + 1
            until = since if end < 0 else int(self._phase[end - turn]) + 1
            chosen[self.keep[since:until, n]] = 1.0
        for move in program.moves:
            chosen[self.move[list(self.storages_of((move.value,)))]] = 1.0
        chosen[0] = 0.0
        copies = np.array([life for life in lives if life[1] >= 0], dtype=np.int64).reshape(-1, 3).T
        return Lives(first, last, copies, sizes, chosen)

    def made(self, chosen: Floats, *, copies_parts: bool) -> Predicted:
        """The program of what was chosen, predicted exactly."""
        program = self.program(chosen, copies_parts=copies_parts)
        return Predicted(program, predict(self.graph, program, self.around))

    def program(self, chosen: Floats, *, copies_parts: bool, moved: frozenset[int] = frozenset()) -> Program:
        """Keeps what was chosen as a whole; anything else is computed when its phase first reads it.

        Values that are `moved` are as good as kept, but other values in their storages are not: these are made from
        them again, as the views that they are.
        """
        graph = self.graph
        whole = chosen[self.keep] > WHOLE
        whole[0, list(self.storages_of(tuple(graph.kept)))] = True
        whole[0, list(self.storages_of(tuple(moved)))] = False
        order: list[int] = []
        saved = set(np.flatnonzero(whole[0]).tolist())
        there: set[int] = set()
        phase = 0
        for moment, op in zip(self._phase.tolist(), graph.backward, strict=False):
            if moment != phase:
                phase = moment
                kept = set(np.flatnonzero(whole[phase]).tolist())
                saved = {n for n in saved if n in kept or self.maker[n] in graph.kept}
                there = {value for value in there if kept.issuperset(self.storages_of((value,)))}
            wanted = [(read, False) for read in reversed(graph.ops[op].reads)]
            while wanted:
                value, is_ready = wanted.pop()
                entry = graph.ops[value]
                if entry.kind != "forward" or value in there or value in moved or self._is_kept(value, saved):
                    continue
                if is_ready:
                    # Parts of a tuple are taken out at once, and the rest of it is gone.
                    run = (value, *self._parts.get(value, ()))
                    there.update(run)
                    order += run
                else:
                    wanted.append((value, True))
                    wanted += [(read, False) for read in reversed(entry.rerun_reads)]
            order.append(op)
        return make_program(graph, order, copies_parts=copies_parts)

    def _is_kept(self, op: int, kept: set[int]) -> bool:
        storages = list(self.storages_of((op,)))
        return self.graph.ops[op].storable and bool(storages) and kept.issuperset(storages)


def _runs(operations: Sequence[Operation], levels: Sequence[int]) -> list[tuple[Run, int]]:
    """The operations that run operators, and the bytes while each does."""
    return [(each, size) for each, size in zip(operations, levels, strict=True) if isinstance(each, Run)]
