"""When computing waits for copies: a schedule of the core, written with the four operations of a program.

A schedule says when copies are asked for. When they end, and so when their memory is given back and taken, is up to
the clock of the referee. Execution has another clock: copies are slower or faster than was thought, and memory must
not depend on that. So every wait gets its place here, before anything runs. `Offload` begins a copy; `Release` waits
for it and gives the memory on the device back; `Prefetch` takes memory and begins the copy back; `Await` waits for
that.

- A value is released as late as the peak allows: before an operation, or a prefetch, that would else take more than
  the referee's peak. Of several, the one goes first whose copy the referee saw end first.
- A prefetch stands before the operation during which the referee starts it, if it fits beside that operation without
  a wait of which the referee knows nothing; else it stands after that operation.
- A value is awaited where it is read, or where its room on the host is needed.

**No operation takes more than the referee's peak.** When operation k starts, the referee has released some values.
The last readers of all of these have run, so all of them can be released here, too. It has started some prefetches.
Each that was taken here is one of these, or fitted beside an earlier operation that was still running when the
referee started it. So operation k takes no more here, once enough has been released, than it takes there. Room on the
host is given back where copies back are awaited, and whatever the referee saw come back by then can be awaited here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TypeAlias

from elbowroom.problem import Chain, Saving
from elbowroom.schedule import Backward, Discard, Forward, Offload, Operation, Prefetch, Schedule, Simulation
from elbowroom.schedule.operations import What

Key: TypeAlias = tuple[str, int]  # ("plain", ℓ) is aℓ on its own, ("saved", ℓ) is āℓ
_HAIR = 1e-9  # of a step's time: what sums of times may be off by themselves


@dataclass(frozen=True, slots=True)
class Release:
    """Wait until a value is on the host; from then on its memory on the device is free."""

    at: int
    what: What


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until a value is back."""

    at: int
    what: What


Entry: TypeAlias = Operation | Release | Await


@dataclass(frozen=True)
class WaitingSchedule:
    """Operations with all their waits. No moment takes more than `peak_bytes`, whatever copies take, and no more than
    `host_bytes` are on the host at once."""

    operations: tuple[Entry, ...]
    peak_bytes: int
    host_bytes: int


def with_waits(chain: Chain, simulation: Simulation, host_bytes: int | None = None) -> WaitingSchedule:
    """The schedule that the referee ran, with waits. It ran with `host_bytes` on the host (None: without limit)."""
    return _Writer(chain, simulation, inf if host_bytes is None else host_bytes).written()


def key_of(operation: Offload | Prefetch | Discard | Release | Await) -> Key:
    assert isinstance(operation.at, int)
    return ("saved", operation.at) if operation.what == "all" else ("plain", operation.at - 1)


@dataclass(slots=True)
class _Leaving:
    """A value whose memory on the device may go once the operation `last_reader` has run and its copy is there."""

    last_reader: int
    ends: float  # when its copy ends for the referee
    place: int | None = None  # of its offload among the operations written, if that copies
    goes_anyway: bool = False  # its reader would have let it go, were it not on its way


class _Writer:
    """Goes through a schedule as the referee does, without a clock."""

    def __init__(self, chain: Chain, simulation: Simulation, most_on_host: float) -> None:
        self.chain, self.schedule = chain, simulation.schedule
        self.most, self.most_on_host = simulation.peak_bytes, most_on_host
        self.times = _Times(chain, simulation)
        self.last_readers = _last_readers(self.schedule)
        self.done: list[Entry | None] = []
        self.device: dict[Key, int] = {("plain", 0): chain.input_bytes}
        self.host: dict[Key, int] = {}  # room taken there
        self.leaving: dict[Key, _Leaving] = {}
        self.queue: list[Key] = []  # of these, the ones that wait for room on the host
        self.asked: dict[Key, tuple[int, Prefetch]] = {}  # prefetches that have no place yet
        self.coming: dict[Key, bool] = {}  # those that are not awaited yet; whether their copy on the host stays
        self.ways: dict[int, Saving] = {}
        self.sizes = dict(self.device)  # of whatever has been in memory, as it was last
        self.stored = chain.input_bytes + chain.gradient_bytes[-1]
        self.peak = 0
        self.on_host: list[tuple[int, int]] = []  # where among the operations written room is taken, or given back

    def written(self) -> WaitingSchedule:
        for index, operation in enumerate(self.schedule):
            if isinstance(operation, Offload):
                self._offload(index, key_of(operation))
            elif isinstance(operation, Prefetch):
                self.asked[key_of(operation)] = index, operation
            elif isinstance(operation, Discard):
                self._settle(key_of(operation))
                self.done.append(operation)
                self._drop(key_of(operation))
            elif isinstance(operation, Forward):
                self._forward(index, operation)
            elif isinstance(operation, Backward):
                self._backward(index, operation)
        operations = tuple(operation for operation in self.done if operation is not None)
        return WaitingSchedule(operations, self.peak, _most(self.on_host))

    # --- operations that compute ---

    def _forward(self, index: int, operation: Forward) -> None:
        at = operation.at
        assert isinstance(at, int)
        stage = self.chain.stages[at - 1]
        plain, saved = ("plain", at), ("saved", at)
        if operation.save == "all":
            way = self.ways[at] = stage.ways[operation.way]
            made, size, overhead = saved, way.saved_bytes, way.forward_overhead_bytes
        else:
            made, size, overhead = plain, stage.output_bytes, stage.forward_overhead_bytes
        self._settle(made)
        if operation.save == "all":
            self._settle(plain)
        self._prepare(index, [self._input_of(at)], size + overhead)
        self.done.append(operation)
        if operation.save == "all":
            self._drop(plain)  # the saved set contains the output
        self._drop(made)
        self._store(made, size)
        source = ("plain", at - 1)
        if operation.save == "nothing" and source in self.leaving:
            self.leaving[source].goes_anyway = True
        elif operation.save == "nothing":
            self.stored -= self.device.pop(source, 0)

    def _backward(self, index: int, operation: Backward) -> None:
        at = operation.at
        assert isinstance(at, int)
        way, gradients = self.ways.pop(at), self.chain.gradient_bytes
        saved, source = ("saved", at), self._input_of(at)
        self._prepare(index, [saved, source], gradients[at - 1] + way.backward_overhead_bytes)
        self._settle(("plain", at - 1))
        self.done.append(operation)
        self._drop(saved)
        self._drop(("plain", at - 1))
        self.stored += gradients[at - 1] - gradients[at]

    def _prepare(self, index: int, needs: list[Key], room: int) -> None:
        """What stands right before an operation that computes with so many bytes besides what is stored."""
        for key in self._begun(index):
            if not self._prefetch(key, index, room):
                break
        for key in needs:
            if key in self.asked:
                self._prefetch(key, index, room, forced=True)
            if key in self.coming:
                self._await(key)
        self._make_room(index, room)
        assert self.stored + room <= self.most, "the referee has had room for it"
        self.peak = max(self.peak, self.stored + room)

    def _input_of(self, at: int) -> Key:
        keys = ("plain", at - 1), ("saved", at - 1)
        return next(key for place in (self.device, self.asked) for key in keys if key in place)

    # --- to the host ---

    def _offload(self, index: int, key: Key) -> None:
        if key in self.asked:  # it leaves again
            self._prefetch(key, index, 0, forced=True)
        self._settle(key)
        ends = self.times.ended.get(index, inf)
        self.leaving[key] = _Leaving(self.last_readers.get(index, -1), ends)
        if key in self.host:  # its copy has stayed: nothing is copied
            self.leaving[key].ends = 0.0
            self._write(Offload, key)
            return
        self.queue.append(key)
        self._begin_copies()

    def _begin_copies(self) -> None:
        """Of the offloads that wait for room on the host, those that have it, first come first served."""
        while self.queue and sum(self.host.values()) + self.device[self.queue[0]] <= self.most_on_host:
            key = self.queue.pop(0)
            self.leaving[key].place = len(self.done)
            self._write(Offload, key)
            self.host[key] = self.device[key]
            self.on_host.append((len(self.done), self.host[key]))

    def _release(self, key: Key) -> None:
        while key in self.queue:
            self._await(next(each for each, stays in self.coming.items() if not stays))
        self._write(Release, key)
        del self.leaving[key]
        self.stored -= self.device.pop(key)

    def _make_room(self, index: int, room: int, until: float = inf) -> None:
        """Release values until so many bytes fit beside what is stored."""
        for key in self._ready(index, until):
            if self.stored + room <= self.most:
                return
            self._release(key)

    def _ready(self, index: int, until: float) -> list[Key]:
        """Values that can be released before an operation, whose copies the referee saw end by some moment, in the
        order in which it did."""
        able = [key for key, out in self.leaving.items() if out.last_reader < index and out.ends <= until]
        return sorted(able, key=lambda key: self.leaving[key].ends)

    # --- and back ---

    def _begun(self, index: int) -> Iterator[Key]:
        """Prefetches that the referee starts before an operation, or during it, in order."""
        begun = [(self.times.started.get(asked, inf), key) for key, (asked, _) in self.asked.items()]
        for moment, key in sorted(begun):
            if self.times.running_at(moment) <= index:
                yield key

    def _prefetch(self, key: Key, index: int, room: int, *, forced: bool = False) -> bool:
        """Take memory for a value before an operation that takes so much room, if there is room for both, or if the
        referee has surely taken it by then."""
        asked, operation = self.asked[key]
        late = forced or self.times.running_at(self.times.started.get(asked, inf)) < index
        until = inf if late else self.times.begins(index)
        if key in self.leaving:
            if self._stays(key, operation):
                return True
            if self.leaving[key].ends > until:
                return False
            self._release(key)
        size = self.sizes[key]
        self._make_room(index, size, until)
        able = sum(self.device[each] for each in self._ready(index, until))
        if not late and self.stored + size + max(0, room - able) > self.most:
            return False
        del self.asked[key]
        self._write(Prefetch, key, operation.keep)
        self._store(key, size)
        self.coming[key] = operation.keep
        return True

    def _stays(self, key: Key, operation: Prefetch) -> bool:
        """Whether a value need not leave at all, because nothing has needed its memory until it is to come back."""
        out = self.leaving[key]
        if out.goes_anyway or operation.keep or (out.place is None and key not in self.queue):
            return False  # without its copy on the host it would be missed
        if out.place is None:
            self.queue.remove(key)
        else:
            self.done[out.place] = None
            self.on_host.append((out.place + 1, -self.host.pop(key)))
        del self.leaving[key], self.asked[key]
        self._begin_copies()
        return True

    def _await(self, key: Key) -> None:
        self._write(Await, key)
        if not self.coming.pop(key):
            self._give_back(key)
            self._begin_copies()

    # --- memory ---

    def _settle(self, key: Key) -> None:
        """Nothing of a value may be on its way: it moves again, or goes."""
        self.asked.pop(key, None)
        if key in self.leaving:
            self._release(key)
        if key in self.coming:
            self._await(key)

    def _store(self, key: Key, size: int) -> None:
        self.device[key] = self.sizes[key] = size
        self.stored += size

    def _drop(self, key: Key) -> None:
        self._give_back(key)
        self.stored -= self.device.pop(key, 0)
        self._begin_copies()

    def _give_back(self, key: Key) -> None:
        """A value's room on the host, if it has some."""
        self.on_host.append((len(self.done), -self.host.pop(key, 0)))

    def _write(self, kind: type[Offload | Prefetch | Release | Await], key: Key, keep: bool = False) -> None:
        what: What = "all" if key[0] == "saved" else "input"
        at = key[1] if key[0] == "saved" else key[1] + 1
        self.done.append(Prefetch(at, what, keep) if kind is Prefetch else kind(at, what))


def _most(changes: list[tuple[int, int]]) -> int:
    """The most bytes there at once, if so many come and go at some places; what comes and goes at one, together."""
    at: dict[int, int] = {}
    for place, change in changes:
        at[place] = at.get(place, 0) + change
    return max(accumulate(at[place] for place in sorted(at)), default=0)


class _Times:
    """When the referee ran what, of one schedule."""

    def __init__(self, chain: Chain, simulation: Simulation) -> None:
        ends = {span.operation: span.end for span in simulation.spans}
        self._computing = sorted(ends)
        self._ends = [ends[index] for index in self._computing]
        self._begins = {index: ends[index] - _duration(chain, simulation.schedule, index) for index in ends}
        self._hair = _HAIR * simulation.time
        self.started = {span.operation: span.start for span in simulation.transfers}
        self.ended = {span.operation: span.end for span in simulation.transfers}

    def begins(self, index: int) -> float:
        return self._begins[index] + self._hair

    def running_at(self, moment: float) -> float:
        """The operation that computes at a moment, or the next one that does."""
        found = bisect_right(self._ends, moment)
        return self._computing[found] if found < len(self._ends) else inf


def _duration(chain: Chain, schedule: Schedule, index: int) -> float:
    operation = schedule[index]
    assert isinstance(operation, Forward | Backward)
    assert isinstance(operation.at, int)
    stage = chain.stages[operation.at - 1]
    if isinstance(operation, Forward):
        return stage.ways[operation.way].forward_time if operation.save == "all" else stage.forward_time
    made = (schedule[k] for k in range(index, -1, -1))
    way = next(op.way for op in made if isinstance(op, Forward) and op.at == operation.at and op.save == "all")
    return stage.ways[way].backward_time


def _last_readers(schedule: Schedule) -> dict[int, int]:
    """For each offload (its index), the last operation that reads the value before it is brought back."""
    away: dict[Key, int] = {}
    last: dict[int, int] = {}
    for index, operation in enumerate(schedule):
        if isinstance(operation, Offload):
            away[key_of(operation)] = index
        elif isinstance(operation, Prefetch):
            away.pop(key_of(operation), None)
        elif isinstance(operation, Forward | Backward):
            at = operation.at
            assert isinstance(at, int)
            reads = [
                ("plain", at - 1),
                ("saved", at - 1),
                *([("saved", at)] if isinstance(operation, Backward) else []),
            ]
            last.update({away[key]: index for key in reads if key in away})
    return last
