"""The fastest schedule for measured stages within some bytes, with values that move to the host or without.

Without moves the chain is as it was measured. With moves, its input is taken out of it, because the caller holds it
and no move gives it back; so is what stays of values that move (`staying.py`). Both are counted for the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from elbowroom.execute.by_stages.waiting import Entry, WaitingSchedule, with_waits
from elbowroom.problem import Chain, Platform
from elbowroom.schedule import Offload, Schedule
from elbowroom.solve import Result, solve

_MANY = 200  # stages, for which the methods that choose between moving and computing again take too long


@dataclass(frozen=True)
class HostLink:
    """The link, the host's memory, and how much of the values that move stays on the device. They are `preferred` to
    values that are computed again, even where that is slower."""

    platform: Platform
    staying_bytes: int = 0
    preferred: bool = False


@dataclass(frozen=True)
class Scheduled:
    """A method's answer, on top of bytes that are there during the whole step, and what runs."""

    result: Result
    fixed_bytes: int
    runs: Schedule | WaitingSchedule

    @property
    def peak_bytes(self) -> int:
        return self.result.peak_bytes + self.fixed_bytes

    @property
    def operations(self) -> Sequence[Entry]:
        return self.runs.operations if isinstance(self.runs, WaitingSchedule) else self.runs

    @property
    def moves(self) -> int:
        """How many values go to the host, each time that one does."""
        return sum(isinstance(operation, Offload) for operation in self.operations)

    @property
    def host_bytes(self) -> int:
        return self.runs.host_bytes if isinstance(self.runs, WaitingSchedule) else 0


def schedule_within(chain: Chain, room: int, moving: HostLink | None = None) -> Scheduled | int:
    """The fastest schedule found within some bytes, or the least bytes for which there is one."""
    still = solve(chain, max(0, room))
    assert still.least_budget is not None
    if moving is None:
        return Scheduled(still, 0, still.schedule) if still.feasible else still.least_budget
    if still.simulation is not None and not still.simulation.recomputed_forwards:
        return Scheduled(still, 0, still.schedule)
    fixed_bytes = chain.input_bytes + moving.staying_bytes
    results = list(_with_moves(replace(chain, input_bytes=0), room - fixed_bytes, moving))
    able = [result for result in results if room >= fixed_bytes and result.feasible and _moves(result)]
    if still.feasible and not moving.preferred:
        able = [result for result in able if result.time < still.time]
    if able:
        best = min(able, key=lambda result: (result.time, result.peak_bytes))
        assert best.simulation is not None
        waiting = with_waits(replace(chain, input_bytes=0), best.simulation, moving.platform.host_bytes)
        return Scheduled(best, fixed_bytes, waiting)
    if still.feasible:
        return Scheduled(still, 0, still.schedule)
    return min([still.least_budget, *((result.least_budget or 0) + fixed_bytes for result in results)])


def _with_moves(chain: Chain, room: int, moving: HostLink) -> Iterator[Result]:
    """Answers of methods that may move values. With little room they say how much they need."""
    methods = ["combined"] if len(chain) <= _MANY else []
    if moving.preferred or not methods:
        methods.append("offload-best")
    for method in methods:
        yield solve(chain, max(0, room), method, platform=moving.platform)


def _moves(result: Result) -> bool:
    return any(isinstance(operation, Offload) for operation in result.schedule)
