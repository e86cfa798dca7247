"""The host link: one transfer at a time, first come first served, while computing goes on (001, O.1 to O.4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class Transfer:
    key: tuple[str, int]
    direction: Literal["out", "in"]
    bytes: int
    issued: float
    last_reader: int = -1  # of an offload: the last operation (its index) that reads the value on the device
    end: float = 0.0
    blocked: bool = False


class Link:
    """Moves data over time. The owner says, through three callbacks, what a transfer means for memory:
    `fits(bytes)` whether a prefetch may take its room now, `started(transfer, time)`, `ended(transfer, time)`.
    """

    def __init__(
        self,
        bandwidth: float,
        fits: Callable[[int], bool],
        started: Callable[[Transfer, float], None],
        ended: Callable[[Transfer, float], None],
    ) -> None:
        self.bandwidth = bandwidth
        self.busy_time = 0.0
        self._fits, self._started, self._ended = fits, started, ended
        self._queue: deque[Transfer] = deque()
        self._running: Transfer | None = None
        self._free_at = 0.0

    def submit(self, transfer: Transfer) -> None:
        self._queue.append(transfer)

    def advance(self, until: float) -> None:
        """Let every start and end up to a moment happen, in order."""
        while True:
            if self._running is not None:
                if self._running.end > until:
                    return
                self._finish()
            elif not self._queue or not self._start(until):
                return

    def next_event(self) -> float | None:
        """When something happens next without any help from computation; None if nothing will."""
        if self._running is not None:
            return self._running.end
        if self._queue and not self._queue[0].blocked:
            return max(self._queue[0].issued, self._free_at)
        return None

    def memory_freed(self, now: float) -> None:
        """A computation has ended: a prefetch that waited for room may try again from now on."""
        if self._queue and self._queue[0].blocked:
            self._queue[0].blocked = False
            self._free_at = max(self._free_at, now)

    def _start(self, until: float) -> bool:
        transfer = self._queue[0]
        start = max(transfer.issued, self._free_at)
        if start > until:
            return False
        if transfer.direction == "in" and not self._fits(transfer.bytes):
            transfer.blocked = True
            return False
        self._queue.popleft()
        transfer.end = start + transfer.bytes / self.bandwidth
        self._running = transfer
        self._started(transfer, start)
        return True

    def _finish(self) -> None:
        assert self._running is not None
        transfer, self._running = self._running, None
        self._free_at = transfer.end
        self.busy_time += transfer.bytes / self.bandwidth
        self._ended(transfer, transfer.end)
