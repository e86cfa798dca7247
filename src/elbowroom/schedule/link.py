"""The link to the host's memory: transfers beside computation (001, O.1 to O.4), in two directions or taking turns.

Each direction has a queue, first come first served, and carries one transfer at a time. Where the directions take
turns there is one queue for both. A transfer first takes a fixed time, then its bytes flow, slower while those of the
other direction flow, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from elbowroom.problem.platform import Platform
from elbowroom.schedule.timeline import Span

Direction = Literal["to host", "from host"]


@dataclass(slots=True, eq=False)
class Transfer:
    """`operation` is the one (its index) that asked for it. `end` may still move while the transfer is under way."""

    key: Hashable
    direction: Direction
    bytes: int
    operation: int
    issued: float = 0.0
    last_reader: int = -1  # of an offload: the last operation (its index) that reads the value on the device
    start: float = 0.0
    end: float = 0.0
    done: bool = False

    def span(self, level: int) -> Span:
        """Its part of a time line; `level` are the bytes in use meanwhile."""
        return Span(self.start, self.end, level, self.operation, self.direction, self.bytes)


@dataclass(slots=True)
class _Lane:
    """One queue and the transfer that is under way."""

    queue: deque[Transfer] = field(default_factory=deque)
    running: Transfer | None = None
    flowing: bool = False  # whether bytes of the running transfer flow
    rate: float = 0.0  # of those bytes at present
    left: float = 0.0  # bytes that had not flowed at the moment `since`
    since: float = 0.0
    busy_s: float = 0.0  # how long the running transfer takes in all, if its rate stays
    free_at: float = 0.0
    blocked: bool = False  # the head of the queue waits for room


class Link:
    """Moves data over time. The owner says, through three callbacks, what a transfer means for memory:
    `may_start(transfer)` whether there is room now, `started(transfer)` and `ended(transfer)`.
    """

    def __init__(
        self,
        platform: Platform,
        may_start: Callable[[Transfer], bool] = lambda transfer: True,
        started: Callable[[Transfer], None] = lambda transfer: None,
        ended: Callable[[Transfer], None] = lambda transfer: None,
    ) -> None:
        assert platform.rate_to_host is not None
        assert platform.rate_from_host is not None
        self.platform = platform
        self.busy_time = 0.0
        self._alone = {"to host": platform.rate_to_host, "from host": platform.rate_from_host}
        self._may_start, self._started, self._ended = may_start, started, ended
        out = _Lane()
        self._lanes = {"to host": out, "from host": out if platform.takes_turns else _Lane()}

    def submit(self, transfer: Transfer, now: float) -> None:
        transfer.issued = now
        self._lanes[transfer.direction].queue.append(transfer)

    def advance(self, until: float) -> None:
        """Let everything happen up to a moment, in order."""
        while True:
            event = min(self._events(), key=lambda found: found[:2], default=None)
            if event is None or event[0] > until:
                return
            moment, _, lane = event
            if lane.running is None:
                self._start(lane, moment)
            elif lane.flowing:
                self._finish(lane, moment)
            else:
                lane.flowing = True
                self._set_rates(moment)

    def next_event(self) -> float | None:
        """When something happens next without any help from computation; None if nothing will."""
        return min((moment for moment, _, _ in self._events()), default=None)

    def memory_freed(self, now: float) -> None:
        """There may be room now: a transfer that waited for it may try again from now on."""
        for lane in self._each_lane():
            if lane.blocked:
                lane.blocked = False
                lane.free_at = max(lane.free_at, now)

    @property
    def running(self) -> list[Transfer]:
        return [lane.running for lane in self._each_lane() if lane.running is not None]

    # --- what happens ---

    def _each_lane(self) -> list[_Lane]:
        return list({id(lane): lane for lane in self._lanes.values()}.values())

    def _events(self) -> Iterator[tuple[float, int, _Lane]]:
        """When something happens next in each lane. At one moment, ends come before starts."""
        for lane in self._each_lane():
            if lane.running is None:
                if lane.queue and not lane.blocked:
                    yield max(lane.queue[0].issued, lane.free_at), 2, lane
            elif lane.flowing:
                yield lane.running.end, 0, lane
            else:
                yield lane.since, 1, lane

    def _start(self, lane: _Lane, moment: float) -> None:
        transfer = lane.queue[0]
        if not self._may_start(transfer):
            lane.blocked = True
            return
        lane.queue.popleft()
        waits, rate = self.platform.seconds_per_copy, self._alone[transfer.direction]
        lane.running, lane.flowing = transfer, waits == 0
        lane.since, lane.left, lane.rate = moment + waits, float(transfer.bytes), rate
        lane.busy_s = waits + transfer.bytes / rate
        transfer.start, transfer.end = moment, lane.since + transfer.bytes / rate
        self._started(transfer)
        if lane.flowing:
            self._set_rates(moment)

    def _finish(self, lane: _Lane, moment: float) -> None:
        transfer = lane.running
        assert transfer is not None
        lane.running, lane.flowing, lane.free_at = None, False, moment
        self.busy_time += lane.busy_s
        self._set_rates(moment)
        transfer.done = True
        self._ended(transfer)
        self.memory_freed(moment)

    def _set_rates(self, moment: float) -> None:
        """Bytes have begun or ceased to flow in one direction: those of the other have another rate from now on."""
        flowing = [lane for lane in self._each_lane() if lane.flowing]
        for lane in flowing:
            assert lane.running is not None
            rate = self._alone[lane.running.direction]
            if len(flowing) == 2 and self.platform.duplex is not None:
                rate = min(rate, self.platform.duplex)
            if rate != lane.rate:
                lane.left = max(0.0, lane.left - (moment - lane.since) * lane.rate)
                lane.since, lane.rate = moment, rate
                lane.running.end = moment + lane.left / rate
                lane.busy_s = lane.running.end - lane.running.start
