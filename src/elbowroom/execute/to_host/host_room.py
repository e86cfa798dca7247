"""The host's memory for the programs of one session: one piece, of which every forward that is under way has a part.

It is taken when programs are planned, as large as the plans need, and no step takes any. Only if more forwards are
under way than were planned, which is said elsewhere, there are further pieces, for as long as they are needed.
"""

from __future__ import annotations

import weakref
from collections import deque
from itertools import count
from threading import Lock

import torch

from elbowroom.execute.to_host.lanes import lanes_of
from elbowroom.execute.to_host.lease import Lease
from elbowroom.measure.host_memory import HostPiece
from elbowroom.step.slab import Slab


class HostRoom:
    """One piece of memory, and which parts of it are taken."""

    def __init__(self) -> None:
        self._piece: HostPiece | None = None
        self._wanted_bytes = 0
        self._taken: dict[int, tuple[int, int]] = {}  # by a lease's number: where its part begins, and its bytes
        self._given: deque[int] = deque()  # numbers of leases that have gone, and are still noted as taken
        self._count = count()
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        return 0 if self._piece is None else self._piece.bytes

    @property
    def taken_bytes(self) -> int:
        """Of all parts that forwards have."""
        with self._lock:
            self._settle()
            return sum(size for _, size in self._taken.values())

    def reserve(self, size: int, device: torch.device) -> None:
        """Have so many bytes, no more and no less, as soon as nobody uses any."""
        with self._lock:
            self._settle()
            self._wanted_bytes = size
            if not self._taken:
                self._take(size, device)

    def lease(self, slab: Slab, device: torch.device) -> Lease:
        """Memory for the values of one forward."""
        lanes = lanes_of(device)
        with self._lock:
            self._settle()
            self._wanted_bytes = max(slab.bytes, self._wanted_bytes)  # on trial: plans are not made yet
            if not self._taken and (self.bytes < self._wanted_bytes or not self._is_on(device)):
                self._take(self._wanted_bytes, device)
            start = self._gap(slab.bytes) if self._is_on(device) else None
            if start is None or self._piece is None:
                piece = HostPiece(slab.bytes, device)
                return Lease(piece.memory, slab, lanes, piece)
            lease = Lease(self._piece.memory[start : start + slab.bytes], slab, lanes, self._piece)
            number = next(self._count)
            if not is_recorded(device):
                # First, so that an interrupt leaves nothing taken. What others record as a CUDA graph writes there
                # whenever they replay it, and nobody tells when they will not any more.
                weakref.finalize(lease, self._give, number).atexit = False
            self._taken[number] = start, slab.bytes
        lanes.to_host.follow(lanes.from_host)  # the part's last holder may still be fetching from there
        return lease

    def _take(self, size: int, device: torch.device) -> None:
        if self.bytes == size and (not size or self._is_on(device)):
            return
        self._piece = None  # first: both together may be more than the host has
        if size:
            self._piece = HostPiece(size, device)

    def _is_on(self, device: torch.device) -> bool:
        return self._piece is not None and self._piece.device == device

    def _gap(self, size: int) -> int | None:
        """Where the first gap of so many bytes begins, if there is one."""
        start = 0
        for taken, taken_bytes in sorted(self._taken.values()):
            if taken - start >= size:
                return start
            start = taken + taken_bytes
        return start if self.bytes - start >= size else None

    def _give(self, number: int) -> None:
        """A lease has gone, at any moment at which Python collects garbage, in whatever thread does."""
        self._given.append(number)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Note what was given back; memory that no plan wants goes with the last part."""
        while self._given:
            self._taken.pop(self._given.popleft(), None)
        if not self._taken and self.bytes > self._wanted_bytes:
            self._piece = None


def is_recorded(device: torch.device) -> bool:
    """Whether somebody records a CUDA graph of what is asked for now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
