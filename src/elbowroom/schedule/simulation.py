"""What the referee returns: the time, the peak, and the line of memory over the step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elbowroom.errors import InvalidSchedule
from elbowroom.schedule.operations import Forward, Operation, Position, Schedule, show
from elbowroom.schedule.timeline import Span, TimeLine


@dataclass(frozen=True)
class Simulation:
    """A schedule that ran.

    `time` is computing plus waiting for the host link (`stall_time`); `peak_bytes` is the most memory held at
    once and `peak_index` the operation during which that first happened; `spans` is the memory time line, and
    `transfers` are those over the link, which was busy for `link_time` in all. `host_peak_bytes` is the most that
    lay on the host at once.
    """

    schedule: Schedule
    time: float
    peak_bytes: int
    peak_index: int
    spans: Sequence[Span] = field(repr=False)
    stall_time: float = 0
    link_time: float = 0
    transfers: Sequence[Span] = field(default=(), repr=False)
    host_peak_bytes: int = 0

    @property
    def timeline(self) -> TimeLine:
        spans = sorted([*self.spans, *self.transfers], key=lambda span: span.start) if self.transfers else self.spans
        return TimeLine(spans, self.peak_bytes, self.time)

    @property
    def peak_operation(self) -> Operation:
        return self.schedule[self.peak_index]

    @property
    def forwards(self) -> Counter[Position]:
        """How often each forward ran."""
        return Counter(op.at for op in self.schedule if isinstance(op, Forward))

    @property
    def recomputed_forwards(self) -> int:
        """How many forwards ran again."""
        return sum(count - 1 for count in self.forwards.values())

    def to_json(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "valid": True,
            "time": self.time,
            "peak_bytes": self.peak_bytes,
            "peak_operation": self.peak_index,
            "peak_during": show(self.peak_operation),
        }
        if self.link_time:
            report |= {"stall_time": self.stall_time, "link_time": self.link_time}
            report["host_peak_bytes"] = self.host_peak_bytes
        return report


class Log:
    """Takes down what a referee without a host link runs, operation after operation."""

    def __init__(self, schedule: Schedule, budget: int | None, stored: int) -> None:
        self.schedule = schedule
        self.budget = budget
        self.index = 0
        self.durations: list[float] = []
        self.now: float = 0
        self.spans: list[Span] = []
        self.peak, self.peak_index = stored, 0

    def _take_down(self, level: int, duration: float) -> None:
        """An operation that runs with so much in memory."""
        if level > self.peak:
            self.peak, self.peak_index = level, self.index
        self.durations.append(duration)
        self.spans.append(Span(self.now, self.now + duration, level, self.index))
        self.now += duration

    def _check_bytes(self, level: int) -> None:
        if self.budget is not None and level > self.budget:
            raise self._refuse(f"needs {level - self.budget} bytes more than the budget of {self.budget}")

    def _simulation(self) -> Simulation:
        return Simulation(self.schedule, total(self.durations), self.peak, self.peak_index, tuple(self.spans))

    def _refuse(self, reason: str) -> InvalidSchedule:
        return refusal(self.schedule, self.index, reason)


def refusal(schedule: Schedule, index: int, reason: str) -> InvalidSchedule:
    """The referee's refusal of one operation, which it names."""
    return InvalidSchedule(f"operation {index} ({show(schedule[index])}): {reason}", index)


def total(durations: Iterable[float]) -> float:
    """An exact sum: integers stay integers, and floats do not depend on the order they come in."""
    durations = list(durations)
    if all(type(d) is int for d in durations):
        return sum(durations)
    return math.fsum(durations)
