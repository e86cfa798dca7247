"""What a program or a schedule moves to the host and back, as data: which values, in which transfers, at what cost.

Everything here is predicted, for the link of a platform: transfers go on beside computing, which waits where the
program says so.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from elbowroom.problem.chain import Chain
from elbowroom.problem.platform import Platform
from elbowroom.schedule import operations as schedules
from elbowroom.schedule.link import Direction
from elbowroom.schedule.operations import Position
from elbowroom.schedule.simulation import Simulation
from elbowroom.schedule.timeline import Span, TimeLine
from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Offload, Operation, Prefetch, Run
from elbowroom.step.program import Program
from elbowroom.step.referee import Surroundings
from elbowroom.step.slab import slab_of
from elbowroom.step.timeline import time_line

# Of a step's time: two moments that are closer are one. An end that is waited for differs from the moment until which
# computing waits in the last digit.
_SAME = 1e-9


@dataclass(frozen=True)
class MovedValue:
    """A value that moves, and the module whose operator computes it."""

    value: int
    module: str
    bytes: int


@dataclass(frozen=True)
class MoveSpan:
    """One transfer of a value: it is under way from one operation to another, both included.

    Operations are counted through the step: those of the forward, the moment between, those of the backward.
    """

    direction: Direction
    value: int
    bytes: int
    begins: int
    ends: int


@dataclass(frozen=True)
class Traffic:
    """What a program asks of the link.

    `host_bytes` are held on the host, for all `values` together. `copying_s` is how long the link is busy, both
    directions added up, and `waits_s` how long computing stands still for it, during the operations `waits_at`.
    """

    host_bytes: int
    copying_s: float
    waits_s: float
    waits_at: tuple[int, ...]
    values: tuple[MovedValue, ...]
    transfers: tuple[MoveSpan, ...]

    def bytes_moved(self, direction: Direction) -> int:
        return sum(each.bytes for each in self.transfers if each.direction == direction)


def traffic_of(graph: StepGraph, program: Program, around: Surroundings, platform: Platform) -> Traffic:
    """What a program with moves does with the link of a platform."""
    operations = (*program.forward, None, *program.backward)  # with the moment between, as time lines count
    line, slab = time_line(graph, program, around, platform), slab_of(graph, program)
    waits = [span for span in line.computing if span.end > span.start and _is_move(operations[span.operation])]
    return Traffic(
        host_bytes=slab.bytes,
        copying_s=sum((span.end - span.start for span in line.transfers), 0.0),
        waits_s=sum((span.end - span.start for span in waits), 0.0),
        waits_at=tuple(span.operation for span in waits),
        values=tuple(MovedValue(op, graph.ops[op].module, graph.value_bytes(op)) for op in slab.places),
        transfers=_transfers(operations, line),
    )


def schedule_traffic(chain: Chain, simulation: Simulation, host_bytes: int) -> Traffic | None:
    """The same for a schedule over stages that was simulated with a link; None if nothing moves.

    The simulation's spans stand for operations. A value has the number of the stage whose saved set or output it is.
    """
    if not simulation.transfers:
        return None
    moment = _Moments(simulation.spans, simulation.time)
    values: dict[tuple[str, Position], MovedValue] = {}
    transfers = []
    for span in sorted(simulation.transfers, key=lambda span: span.start):
        asking = simulation.schedule[span.operation]
        assert isinstance(asking, schedules.Offload | schedules.Prefetch)
        assert isinstance(asking.at, int)
        number = asking.at if asking.what == "all" else asking.at - 1
        module = chain.stages[number - 1].name if number else ""
        values.setdefault((asking.what, asking.at), MovedValue(number, module, span.moved_bytes))
        direction: Direction = "to host" if isinstance(asking, schedules.Offload) else "from host"
        transfers.append(MoveSpan(direction, number, span.moved_bytes, *moment.of(span, 0)))
    waits = [(index, span) for index, span in enumerate(simulation.spans) if span.waits]
    return Traffic(
        host_bytes=host_bytes,
        copying_s=sum((span.end - span.start for span in simulation.transfers), 0.0),
        waits_s=sum((span.end - span.start for _, span in waits), 0.0),
        waits_at=tuple(index for index, _ in waits),
        values=tuple(values.values()),
        transfers=tuple(transfers),
    )


def _transfers(operations: Sequence[Operation | None], line: TimeLine) -> tuple[MoveSpan, ...]:
    moment = _Moments(line.computing, line.time)
    found = []
    for span in line.transfers:
        asking = operations[span.operation]
        assert isinstance(asking, Offload | Prefetch)
        direction: Direction = "to host" if isinstance(asking, Offload) else "from host"
        found.append(MoveSpan(direction, asking.value, span.moved_bytes, *moment.of(span, span.operation)))
    return tuple(found)


class _Moments:
    """During which operations things happen, given the spans of all operations in order."""

    def __init__(self, computing: Sequence[Span], time_s: float) -> None:
        self._ends = [span.end for span in computing]
        self._same = _SAME * time_s

    def of(self, span: Span, asking: int) -> tuple[int, int]:
        """The operations in which a transfer begins and ends, no earlier than the one that asks for it."""
        last = len(self._ends) - 1
        begins = min(last, max(asking, bisect_right(self._ends, span.start + self._same)))
        return begins, min(last, max(begins, bisect_left(self._ends, span.end - self._same)))


def _is_move(operation: Operation | None) -> bool:
    return operation is not None and not isinstance(operation, Run)
