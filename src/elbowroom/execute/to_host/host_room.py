"""The host's memory for the programs of one session: one piece, of which every forward that is under way has a part.

It is taken when programs are planned, as large as the plans need, and no step takes any. Only if more forwards are
under way than were planned, which is said elsewhere, there are further pieces, for as long as they are needed.
"""

from __future__ import annotations

import weakref
from itertools import count
from threading import RLock
from typing import NamedTuple

import torch

from elbowroom.execute.to_host.lanes import lanes_of
from elbowroom.execute.to_host.lease import Lease
from elbowroom.measure.host_memory import HostPiece
from elbowroom.step.slab import Slab


class _Part(NamedTuple):
    start: int
    bytes: int
    lease: weakref.ref[Lease]


class HostRoom:
    """One piece of memory, and which parts of it are taken."""

    def __init__(self) -> None:
        self._piece: HostPiece | None = None
        self._wanted_bytes = 0
        self._taken: dict[int, _Part] = {}  # by number
        self._recorded: list[Lease] = []  # for good: see `lease`
        self._count = count()
        self._lock = RLock()  # again: a lease may go while the same thread is asking for one

    @property
    def bytes(self) -> int:
        return 0 if self._piece is None else self._piece.bytes

    @property
    def taken_bytes(self) -> int:
        """Of all parts that forwards have."""
        with self._lock:
            self._settle()
            return sum(part.bytes for part in self._taken.values())

    def reserve(self, size: int, device: torch.device) -> None:
        """Have so many bytes, no more and no less, as soon as nobody uses any. A refusal changes nothing."""
        with self._lock:
            self._settle()
            before, self._wanted_bytes = self._wanted_bytes, size
            if self._taken:
                return
            try:
                self._take(size, device)
            except BaseException:
                self._wanted_bytes = before
                self._take(before, device)
                raise

    def lease(self, slab: Slab, device: torch.device) -> Lease:
        """Memory for the values of one forward."""
        lanes = lanes_of(device)
        with self._lock:
            self._settle()
            self._wanted_bytes = max(slab.bytes, self._wanted_bytes)  # on trial: plans are not made yet
            if not self._taken and (self.bytes < self._wanted_bytes or not self._is_on(device)):
                self._take(self._wanted_bytes, device)
            piece, start = self._piece, self._gap(slab.bytes)
            if piece is None or piece.device != device or start is None:
                piece = HostPiece(slab.bytes, device)
                return Lease(piece.memory, slab, lanes, piece)
            lease = Lease(piece.memory[start : start + slab.bytes], slab, lanes, piece)
            part = _Part(start, slab.bytes, weakref.ref(lease, self._let_go))
            self._taken[next(self._count)] = part
            if is_recorded(device):
                # Whoever records a CUDA graph now writes there whenever it is replayed, and nobody tells when it
                # will not be any more.
                self._recorded.append(lease)
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
        for part in sorted(self._taken.values(), key=lambda part: part.start):
            if part.start - start >= size:
                return start
            start = part.start + part.bytes
        return start if self.bytes - start >= size else None

    def _let_go(self, _: object) -> None:
        """A lease has gone, at any moment at which Python collects garbage, in whatever thread does."""
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        """Take back the parts of leases that have gone; memory that no plan wants goes with the last part.

        Nothing but the leases tells which those are: an interrupt in `_let_go` is lost, and nothing with it.
        """
        for number, part in list(self._taken.items()):
            if part.lease() is None:
                self._taken.pop(number, None)
        if not self._taken and self.bytes > self._wanted_bytes:
            self._piece = None


def is_recorded(device: torch.device) -> bool:
    """Whether somebody records a CUDA graph of what is asked for now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
