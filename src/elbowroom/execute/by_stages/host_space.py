"""Room on the host for the values of one run, in as many stretches as there are gaps.

A value comes in one piece or in several, so that gaps between values are as good as room at the end: what is planned
to be on the host at once fits into just as many bytes.
"""

from __future__ import annotations

from threading import RLock

import torch


class HostSpace:
    """Which bytes of a piece of memory are free."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._free = [range(memory.numel())]  # in order, and never two that touch
        self._lock = RLock()  # the garbage collector may give stretches back while others are taken

    def take(self, size: int) -> tuple[range, ...] | None:
        """Stretches of so many bytes in all; None if there are not so many."""
        with self._lock:
            if size > sum(map(len, self._free)):
                return None
            taken: list[range] = []
            while size:
                first = self._free.pop(0)
                taken.append(first[:size])
                if len(first) > size:
                    self._free.insert(0, first[size:])
                size -= len(taken[-1])
            return tuple(taken)

    def give(self, stretches: tuple[range, ...]) -> None:
        """Back what was taken."""
        with self._lock:
            free: list[range] = []
            for stretch in sorted([*self._free, *stretches], key=lambda each: each.start):
                if free and free[-1].stop == stretch.start:
                    free[-1] = range(free[-1].start, stretch.stop)
                else:
                    free.append(stretch)
            self._free = free

    def at(self, stretch: range) -> torch.Tensor:
        """The memory of a stretch."""
        return self._memory[stretch.start : stretch.stop]
