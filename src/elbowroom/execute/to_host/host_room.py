"""The host's memory for the programs of one session: one piece, of which every forward that is under way has a part.

It is taken when programs are planned, as large as the plans need, and no step takes any. Only if more forwards are
under way than were planned, which is said elsewhere, there are further pieces, for as long as they are needed.
"""

from __future__ import annotations

import weakref
from threading import RLock

import torch

from elbowroom.execute.to_host.lanes import lanes_of
from elbowroom.execute.to_host.lease import Lease
from elbowroom.measure.host_memory import HostPiece
from elbowroom.step.slab import Slab


class HostRoom:
    """One piece of memory, and which parts of it are taken."""

    def __init__(self) -> None:
        self._piece: HostPiece | None = None
        self._wanted = 0  # bytes for which the plans ask
        self._taken: dict[int, int] = {}  # where a part begins: its bytes
        self._lock = RLock()  # again: a part may be given back by the garbage collector while one is taken

    @property
    def bytes(self) -> int:
        return 0 if self._piece is None else self._piece.bytes

    def reserve(self, size: int, device: torch.device) -> None:
        """Have so many bytes, no more and no less, as soon as nobody uses any."""
        with self._lock:
            self._wanted = size
            if self._taken or (self.bytes == size and (not size or self._is_on(device))):
                return
            self._piece = None  # first: both together may be more than the host has
            if size:
                self._piece = HostPiece(size, device)

    def lease(self, slab: Slab, device: torch.device) -> Lease:
        """Memory for the values of one forward."""
        with self._lock:
            wanted = max(self._wanted, slab.bytes)  # on trial, nothing is planned yet
            if not self._taken and (self.bytes < wanted or not self._is_on(device)):
                self.reserve(wanted, device)
            start = self._gap(slab.bytes) if self._is_on(device) else None
            if start is None:
                return Lease(HostPiece(slab.bytes, device).memory, slab, lanes_of(device))
            assert self._piece is not None
            lease = Lease(self._piece.memory[start : start + slab.bytes], slab, lanes_of(device))
            self._taken[start] = slab.bytes
            weakref.finalize(lease, self._give, start).atexit = False
            return lease

    def _is_on(self, device: torch.device) -> bool:
        return self._piece is not None and self._piece.device == device

    def _gap(self, size: int) -> int | None:
        """Where the first gap of so many bytes begins, if there is one."""
        start = 0
        for taken in sorted(self._taken):
            if taken - start >= size:
                return start
            start = taken + self._taken[taken]
        return start if self.bytes - start >= size else None

    def _give(self, start: int) -> None:
        with self._lock:
            del self._taken[start]
