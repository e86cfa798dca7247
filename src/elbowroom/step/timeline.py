"""When each operation of a program happens: operators one after the other, copies beside them on a link to the host.

Each direction of the link carries one copy at a time, first come first served. A copy first takes a fixed time, then
its bytes flow, slower while the other direction is busy, too. Computing goes on meanwhile; it waits where the program
says so: a release for its copy to the host, an await for its copy back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elbowroom.problem.platform import Platform
from elbowroom.schedule.timeline import Resource, Span, TimeLine
from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Await, Offload, Operation, Prefetch, Release, Run
from elbowroom.step.program import Program
from elbowroom.step.referee import Surroundings, predict

Direction = Literal["to host", "from host"]

_INSTANT = 1e-12  # of the time that has passed


def time_line(
    graph: StepGraph, program: Program, around: Surroundings | None = None, platform: Platform | None = None
) -> TimeLine:
    """For every operation its start, its end, the bytes in use and what it occupies; forward first, then backward.

    The moment between forward and backward has no operation: it is the number after the forward's last. The referee
    refuses what cannot run.
    """
    around = around or Surroundings()
    prediction = predict(graph, program, around, platform)
    player = _Player(graph, platform or Platform())
    for operation, level in zip(program.forward, prediction.forward_bytes, strict=True):
        player.perform(operation, level)
    player.add(0.0, prediction.between_bytes)
    for operation, level in zip(program.backward, prediction.backward_bytes, strict=True):
        player.perform(operation, level)
    return player.finish(prediction.peak_bytes)


@dataclass
class _Copy:
    operation: int
    value: int
    bytes: int
    level: int
    issued: float
    waits: float = 0.0  # seconds before the first byte
    left: float = 0.0  # bytes
    start: float = 0.0


class _Player:
    def __init__(self, graph: StepGraph, platform: Platform) -> None:
        self.graph = graph
        self.link = _Link(platform)
        self.now = 0.0
        self.spans: list[Span] = []
        self._index = 0

    def perform(self, operation: Operation, level: int) -> None:
        if isinstance(operation, Run):
            viewed = operation.viewed_in is not None
            self.add(0.0 if viewed else self.graph.ops[operation.op].time, level)
            return
        if isinstance(operation, Offload | Prefetch):
            direction: Direction = "to host" if isinstance(operation, Offload) else "from host"
            self.link.submit(
                direction, operation.value, self.graph.value_bytes(operation.value), self._index, level, self.now
            )
            self.add(0.0, level)
            return
        direction = "to host" if isinstance(operation, Release) else "from host"
        assert isinstance(operation, Release | Await)
        arrival = self.link.finished(direction, operation.value)
        self.add(max(0.0, arrival - self.now), level)

    def add(self, seconds: float, level: int) -> None:
        self.spans.append(Span(self.now, self.now + seconds, level, self._index))
        self.now += seconds
        self._index += 1

    def finish(self, peak_bytes: int) -> TimeLine:
        self.link.run_out()
        spans = sorted([*self.spans, *self.link.spans], key=lambda span: (span.start, span.operation))
        return TimeLine(tuple(spans), peak_bytes, max((span.end for span in spans), default=0.0))


class _Link:
    """Both directions over time. What was submitted later does not change what happened before."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.spans: list[Span] = []
        self._alone: Mapping[Resource, float] = {
            "to host": platform.to_host or 0.0,
            "from host": platform.from_host or 0.0,
        }
        self._clock = 0.0
        self._queues: dict[Direction, deque[_Copy]] = {"to host": deque(), "from host": deque()}
        self._running: dict[Direction, _Copy] = {}
        self._ended: dict[tuple[Direction, int], float] = {}

    def submit(self, direction: Direction, value: int, size: int, operation: int, level: int, now: float) -> None:
        self.advance(now)
        waits = self.platform.seconds_per_copy
        self._ended.pop((direction, value), None)
        self._queues[direction].append(_Copy(operation, value, size, level, now, waits, float(size)))

    def finished(self, direction: Direction, value: int) -> float:
        """When the copy of a value is there; 0 if it was there before anything was copied."""
        pending = self._running.get(direction), *self._queues[direction]
        if any(copy is not None and copy.value == value for copy in pending):
            while (direction, value) not in self._ended:
                self.advance(self._next_event())
        return self._ended.get((direction, value), 0.0)

    def run_out(self) -> None:
        while self._running or any(self._queues.values()):
            self.advance(self._next_event())

    def advance(self, until: float) -> None:
        """Let everything happen up to a moment."""
        while True:
            self._start_waiting()
            event = self._next_event() if self._running else until
            step_end = min(event, until)
            self._flow(max(0.0, step_end - self._clock))
            self._clock = max(self._clock, step_end)
            done = [d for d, copy in self._running.items() if self._left_s(d, copy) <= self._instant]
            for direction in done:
                copy = self._running.pop(direction)
                self._ended[direction, copy.value] = self._clock
                self.spans.append(Span(copy.start, self._clock, copy.level, copy.operation, direction, copy.bytes))
            if not done and self._clock >= until:
                return

    @property
    def _instant(self) -> float:
        """Seconds too short to be told from none at this time: added to the clock, they might not move it."""
        return _INSTANT * max(1.0, self._clock)

    def _start_waiting(self) -> None:
        for direction, queue in self._queues.items():
            if direction not in self._running and queue and queue[0].issued <= self._clock:
                copy = queue.popleft()
                copy.start = self._clock
                self._running[direction] = copy

    def _next_event(self) -> float:
        """When the first of the running copies ends, its setup ends, or a queued one may start."""
        events = []
        for direction, copy in self._running.items():
            events.append(self._clock + (copy.waits if copy.waits > 0 else self._left_s(direction, copy)))
        for direction, queue in self._queues.items():
            if queue and direction not in self._running:
                events.append(max(self._clock, queue[0].issued))
        return min(events, default=self._clock)

    def _left_s(self, direction: Direction, copy: _Copy) -> float:
        return copy.waits + copy.left / self._rate(direction)

    def _rate(self, direction: Direction) -> float:
        both = self.platform.both
        busy = len(self._running) == 2 and all(copy.waits <= 0 for copy in self._running.values())
        return min(both, self._alone[direction]) if both is not None and busy else self._alone[direction]

    def _flow(self, seconds: float) -> None:
        rates = {direction: self._rate(direction) for direction in self._running}
        for direction, copy in self._running.items():
            if copy.waits > 0:
                left = copy.waits - seconds
                copy.waits = left if left > self._instant else 0.0
            else:
                copy.left = max(0.0, copy.left - seconds * rates[direction])
