"""When each operation of a program happens: operators one after the other, copies beside them on a link to the host.

The link is that of `schedule/link.py`. Computing goes on beside copies; it waits where the program says so: a release
for its copy to the host, an await for its copy back.
"""

from __future__ import annotations

from elbowroom.problem.platform import Platform
from elbowroom.schedule.link import Direction, Link, Transfer
from elbowroom.schedule.timeline import Span, TimeLine
from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Offload, Operation, Prefetch, Release, Run
from elbowroom.step.program import Program
from elbowroom.step.referee import Surroundings, predict


def time_line(
    graph: StepGraph, program: Program, around: Surroundings | None = None, platform: Platform | None = None
) -> TimeLine:
    """For every operation its start, its end, the bytes in use and what it occupies; forward first, then backward.

    The moment between forward and backward has no operation: it is the number after the forward's last. The referee
    refuses what cannot run.
    """
    around = around or Surroundings()
    prediction = predict(graph, program, around, platform)
    player = Player(graph, platform or Platform())
    for operation, level in zip(program.forward, prediction.forward_bytes, strict=True):
        player.perform(operation, level)
    player.add(0.0, prediction.between_bytes)
    for operation, level in zip(program.backward, prediction.backward_bytes, strict=True):
        player.perform(operation, level)
    return player.finish(prediction.peak_bytes)


class Player:
    """Performs operations one after the other, from the moment 0 on. Who makes programs with moves asks it, too."""

    def __init__(self, graph: StepGraph, platform: Platform) -> None:
        self.graph = graph
        self.link = Link(platform, ended=self._copied) if platform.has_link else None
        self.now = 0.0
        self.spans: list[Span] = []
        self._index = 0
        self._levels: list[int] = []
        self._latest: dict[tuple[Direction, int], Transfer] = {}

    def perform(self, operation: Operation, level: int) -> None:
        if isinstance(operation, Run):
            viewed = operation.viewed_in is not None
            self.add(0.0 if viewed else self.graph.ops[operation.op].time, level)
            return
        assert self.link is not None  # else the referee has refused
        value = operation.value
        if isinstance(operation, Offload | Prefetch):
            direction: Direction = "to host" if isinstance(operation, Offload) else "from host"
            copy = Transfer(value, direction, self.graph.value_bytes(value), self._index)
            self._latest[direction, value] = copy
            self.link.advance(self.now)
            self.link.submit(copy, self.now)
            self.add(0.0, level)
            return
        direction = "to host" if isinstance(operation, Release) else "from host"
        self.add(max(0.0, self._arrival(self._latest[direction, value]) - self.now), level)

    def add(self, seconds: float, level: int) -> None:
        self.spans.append(Span(self.now, self.now + seconds, level, self._index))
        self._levels.append(level)
        self.now += seconds
        self._index += 1

    def finish(self, peak_bytes: int) -> TimeLine:
        while self.link is not None and (event := self.link.next_event()) is not None:
            self.link.advance(event)
        spans = sorted(self.spans, key=lambda span: (span.start, span.operation))
        return TimeLine(tuple(spans), peak_bytes, max((span.end for span in spans), default=0.0))

    def has_arrived(self, value: int, direction: Direction) -> bool:
        """Whether the latest copy of a value in this direction has ended by now."""
        assert self.link is not None
        self.link.advance(self.now)
        return self._latest[direction, value].done

    def _arrival(self, copy: Transfer) -> float:
        """When a copy has ended. What is asked for later does not change what happens before."""
        assert self.link is not None
        while not copy.done:
            event = self.link.next_event()
            assert event is not None
            self.link.advance(event)
        return copy.end

    def _copied(self, copy: Transfer) -> None:
        self.spans.append(copy.span(self._levels[copy.operation]))
