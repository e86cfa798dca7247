"""From values that are to move to a program that moves them: where copies begin, and where computing waits for them.

A value goes to the host in the forward and comes back in the backward, once. Its copy begins after its last reader,
or before that where the link would be idle. Its memory is given back as late as room allows, because computing waits
there for a copy that has not ended; what never has to give way stays after all. It is fetched as early as room
allows, values in the order in which they are read, and computing waits before the first reader.

Whether all that fits depends on the *tight* program alone, in which a value gives way at once after its last reader
and comes back right before its first: its bytes are the least that these moves can take, and what stays longer or
comes earlier is counted on top of them. Memory follows from the order of operations; the clock, which is that of the
time line, only says where waiting costs least.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elbowroom.plan.values.choices import Predicted
from elbowroom.problem.platform import Platform
from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Await, Offload, Operation, Prefetch, Release, Run
from elbowroom.step.program import Program, reads_of
from elbowroom.step.referee import Prediction, Surroundings, predict
from elbowroom.step.timeline import Player, time_line

_AGAIN = (
    2  # so often a program is made again without the values that did not have to give way, so that others move sooner
)


class Moved(NamedTuple):
    """A program, what the referee says of it, and how long it takes with all waiting for the link."""

    program: Program
    prediction: Prediction
    time_s: float

    @property
    def waits_s(self) -> float:
        return max(0.0, self.time_s - self.prediction.time_s)


def carriers(graph: StepGraph) -> dict[int, int]:
    """The value that moves for each storage that may: a tensor of the forward that holds it, and nothing else.

    Parameters and other inputs belong to the caller, and so do results. Of several values in one storage one moves,
    and the others are made from it again as views. Where that cannot be, the storage stays.
    """
    outside = {*graph.inputs, *graph.arriving, *graph.results, *graph.updates}
    barred = {storage for op in outside for storage in graph.storages(op)}
    read_later = {read for op in graph.backward for read in graph.ops[op].reads}
    found: dict[int, int] = {}
    from_carrier: set[int] = set()  # values that are views of one that moves, or move
    for op in graph.forward:
        entry = graph.ops[op]
        viewed = any(read in from_carrier for read in entry.rerun_reads) and entry.is_view
        for storage in entry.storages:
            if storage in barred:
                continue
            if storage not in found and entry.storable and len(entry.storages) == 1:
                found[storage] = op
                viewed = True
            elif storage in found and (not viewed or op in graph.kept) and (op in read_later or op in graph.kept):
                barred.add(storage)
                del found[storage]
        if viewed:
            from_carrier.add(op)
    return {storage: op for storage, op in found.items() if graph.storage_bytes.get(storage, 0)}


@dataclass(frozen=True)
class Needs:
    """When values that are to move are read in a program, by their index among its runs: last in the forward (or made
    there), and first in the backward."""

    last: dict[int, int]
    first: dict[int, int]

    def without(self, values: set[int]) -> Needs:
        last, first = ({v: at for v, at in each.items() if v not in values} for each in (self.last, self.first))
        return Needs(last, first)


def needs(graph: StepGraph, program: Program, values: Iterable[int]) -> Needs:
    """Of those values that are handed from forward to backward, and alone hold their storage then."""
    moving = set(values)
    holders: dict[int, list[int]] = {}
    for op in program.saved:
        for storage in graph.storages(op):
            holders.setdefault(storage, []).append(op)
    alone = {storage: ops[0] for storage, ops in holders.items() if len(ops) == 1 and ops[0] in moving}
    last: dict[int, int] = {}
    for index, run in enumerate(program.forward_runs):
        for op in (run.op, *reads_of(graph, run)):
            for storage in graph.storages(op):
                if storage in alone:
                    last[alone[storage]] = index
    first: dict[int, int] = {}
    for index, run in enumerate(program.backward_runs):
        for read in reads_of(graph, run):
            if read in last:
                first.setdefault(read, index)
    return Needs({value: last[value] for value in first}, first)


def tight(graph: StepGraph, program: Program, need: Needs) -> Program:
    """The program with the fewest bytes: values give way after their last reader and come back before their first."""
    forward: list[Operation] = []
    gone = _by_index(need.last)
    for index, run in enumerate(program.forward_runs):
        forward.append(run)
        for value in gone.get(index, ()):
            forward += Offload(value), Release(value)
    backward: list[Operation] = []
    back = _by_index(need.first)
    for index, run in enumerate(program.backward_runs):
        for value in back.get(index, ()):
            backward += Prefetch(value), Await(value)
        backward.append(run)
    saved = tuple(op for op in program.saved if op not in need.first)
    return replace(program, forward=tuple(forward), backward=tuple(backward), saved=saved)


def tight_program(
    graph: StepGraph, program: Program, values: Iterable[int], around: Surroundings, platform: Platform
) -> Predicted:
    """The tight program of some moves, and what it takes."""
    return _predicted(graph, tight(graph, program, needs(graph, program, values)), around, platform)


def _by_index(places: dict[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for value, index in places.items():
        found.setdefault(index, []).append(value)
    return found


class Placed(NamedTuple):
    """The tight program of some moves, and the fastest that was found with them; None if they do not fit."""

    tight: Predicted
    found: Moved | None


def place(
    graph: StepGraph,
    program: Program,
    values: Iterable[int],
    room: int,
    around: Surroundings,
    platform: Platform,
) -> Placed:
    """Have values move in a program that moves nothing, within the room. Those that it does not save are left out."""
    need = needs(graph, program, values)
    first = least = _predicted(graph, tight(graph, program, need), around, platform)
    if first.prediction.peak_bytes > room:
        return Placed(first, None)
    placer = _Placer(graph, program, need, least, platform, room)
    found = placer.program()
    for _ in range(_AGAIN):
        if not placer.stayed:
            break
        need = need.without(placer.stayed)
        least = _predicted(graph, tight(graph, program, need), around, platform)
        placer = _Placer(graph, program, need, least, platform, room)
        found = placer.program()
    return Placed(first, graded(graph, found, around, platform))


def graded(graph: StepGraph, program: Program, around: Surroundings, platform: Platform) -> Moved:
    line = time_line(graph, program, around, platform)
    return Moved(*_predicted(graph, program, around, platform), line.time)


def _predicted(graph: StepGraph, program: Program, around: Surroundings, platform: Platform) -> Predicted:
    return Predicted(program, predict(graph, program, around, platform))


class _Placer:
    """Writes one program down, operation by operation, beside a clock."""

    def __init__(
        self, graph: StepGraph, program: Program, need: Needs, least: Predicted, platform: Platform, room: int
    ) -> None:
        self.stayed: set[int] = set()  # values that never had to give way
        self._base, self._need, self._room = program, need, room
        self._sizes = {value: graph.value_bytes(value) for value in need.first}
        self._player = Player(graph, platform)
        self._operations: list[Operation] = []
        self._leaving: list[int] = []  # begun and not given back yet, in the order in which their copies end
        # Bytes while each run is performed; what stays longer or comes earlier than it must is added to them.
        tight, prediction = least
        self._forward = _levels(tight.forward, prediction.forward_bytes)
        self._backward = _levels(tight.backward, prediction.backward_bytes)
        self._between = prediction.between_bytes
        self._wanted = sorted(need.first, key=need.first.__getitem__)  # not asked for yet, in the order of need

    def program(self) -> Program:
        """What does not have to give way is saved like anything else, and its copy is not made."""
        self._write_forward()
        self._player.add(0.0, 0)  # the moment between the two
        forward, self._operations = self._operations, []
        there = set(self._leaving)
        self._write_backward()
        saved = tuple(op for op in self._base.saved if op not in self._need.first or op in there)
        left = tuple(each for each in forward if isinstance(each, Run) or each.value not in self.stayed)
        return replace(self._base, forward=left, backward=tuple(self._operations), saved=saved)

    def _perform(self, operation: Operation) -> None:
        self._player.perform(operation, 0)
        self._operations.append(operation)

    def _give_back(self, value: int) -> int:
        """Wait for a copy to the host; returns the bytes that this frees."""
        self._leaving.remove(value)
        self._perform(Release(value))
        return self._sizes[value]

    # --- forward ---

    def _write_forward(self) -> None:
        last, runs = self._need.last, self._base.forward_runs
        made = _by_index({run.op: index for index, run in enumerate(runs) if run.op in last})
        unread = _by_index(last)
        waiting: list[int] = []  # made, and their copies have not begun
        ready: list[int] = []  # leaving, and the forward does not read them any more
        extra = 0
        for index, run in enumerate(runs):
            while ready and self._forward[index] + extra > self._room:
                extra -= self._give_back(ready.pop(0))
            self._perform(run)
            if index in made:
                waiting = sorted((*waiting, *made[index]), key=last.__getitem__)
            while waiting and (last[waiting[0]] <= index or self._is_idle()):
                self._leaving.append(waiting[0])
                self._perform(Offload(waiting.pop(0)))
            if index in unread:
                extra += sum(self._sizes[value] for value in unread[index])
                ready = [value for value in self._leaving if last[value] <= index]
        while ready and self._between + extra > self._room:
            extra -= self._give_back(ready.pop(0))

    def _is_idle(self) -> bool:
        """Whether nothing is on its way to the host."""
        return not self._leaving or self._player.has_arrived(self._leaving[-1], "to host")

    # --- backward ---

    def _write_backward(self) -> None:
        first, levels = self._need.first, self._backward
        for value in self._leaving:
            levels[: first[value]] += self._sizes[value]
        needed = _by_index(first)
        for index, run in enumerate(self._base.backward_runs):
            while levels[index] > self._room and (victim := self._victim(index)) is not None:
                self._take_away(victim, index)
            if self._wanted:
                self._fetch(index)
            for value in needed.get(index, ()):
                if value not in self.stayed:
                    self._perform(Await(value))
            self._perform(run)

    def _take_away(self, value: int, index: int) -> None:
        self._backward[index : self._need.first[value]] -= self._give_back(value)

    def _victim(self, index: int) -> int | None:
        """Who gives way: of those whose copies have ended the one that is needed last, else whose copy ends first."""
        leaving = [value for value in self._leaving if self._need.first[value] > index]
        there = [value for value in leaving if self._player.has_arrived(value, "to host")]
        return max(there, key=self._need.first.__getitem__, default=next(iter(leaving), None))

    def _fetch(self, index: int) -> None:
        """Ask for what is read now, and as far as room allows for what is read next."""
        first, left = self._need.first, list[int]()
        for place, value in enumerate(self._wanted):
            if value in self._leaving:
                if first[value] > index:
                    left.append(value)
                else:
                    self._leaving.remove(value)
                    self.stayed.add(value)
                continue
            if first[value] > index:
                if not self._has_room(value, index):
                    left += self._wanted[place:]
                    break
                self._backward[index : first[value]] += self._sizes[value]
            self._perform(Prefetch(value))
        self._wanted = left

    def _has_room(self, value: int, index: int) -> bool:
        """Whether a value can come now, after others have given way that are needed later and have their copies."""
        until, sizes = self._need.first, self._sizes
        missing = int(self._backward[index : until[value]].max()) + sizes[value] - self._room
        if missing <= 0:
            return True
        later = [each for each in self._leaving if until[each] > until[value]]
        there = sorted((v for v in later if self._player.has_arrived(v, "to host")), key=until.__getitem__)
        if sum(sizes[each] for each in there) < missing:
            return False
        while missing > 0:
            victim = there.pop()
            missing -= sizes[victim]
            self._take_away(victim, index)
        return True


def _levels(operations: tuple[Operation, ...], sizes: tuple[int, ...]) -> NDArray[np.int64]:
    """Bytes while each run is performed."""
    pairs = zip(operations, sizes, strict=True)
    return np.array([size for each, size in pairs if isinstance(each, Run)], dtype=np.int64)
