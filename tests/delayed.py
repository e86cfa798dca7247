"""Lanes between the CPU and itself that behave as a GPU's do: each copies in a thread of its own, later, and holds
nothing. Memory that is given away or read too early is overwritten, or shows something else."""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable

import torch

from elbowroom.execute.to_host import lanes
from elbowroom.execute.to_host.lanes import Lane, Lanes, Wait

POISON = 0xFE  # what lies where a copy has not arrived: no number that a network computes


class DelayedLane(Lane):
    """Copies one after the other, each at most `most_s` late."""

    def __init__(self, device: torch.device, most_s: float = 0.005, seed: int = 0) -> None:
        super().__init__(device)
        self.copies = self.copied_bytes = 0
        self.fails_at: int | None = None  # the number of a copy that fails
        self._most_s, self._chance = most_s, random.Random(seed)
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        assert target.numel() == source.numel()
        size, to, origin = target.numel(), target.data_ptr(), source.data_ptr()
        number, there, failures = self.copies, threading.Event(), list[RuntimeError]()
        self.copies, self.copied_bytes = self.copies + 1, self.copied_bytes + size
        late_s = self._chance.random() * self._most_s
        ctypes.memset(to, POISON, size)

        def job() -> None:
            time.sleep(late_s)
            if number == self.fails_at:
                failures.append(RuntimeError("an error of the link\nand its details"))
            else:
                ctypes.memmove(to, origin, size)
            there.set()

        def wait() -> None:
            there.wait()
            if failures:
                raise failures[0]

        self._jobs.put(job)
        return wait

    def finish(self) -> None:
        self._all_so_far().wait()

    def follow(self, other: Lane) -> None:
        assert isinstance(other, DelayedLane)
        self._jobs.put(other._all_so_far().wait)

    def _all_so_far(self) -> threading.Event:
        """Set when everything is done that was asked for until now."""
        done = threading.Event()
        self._jobs.put(done.set)
        return done

    def _work(self) -> None:
        while True:
            self._jobs.get()()


def delay_copies(monkeypatch, most_s: float = 0.005) -> Lanes:
    """From now on copies are late."""
    cpu = torch.device("cpu")
    delayed = Lanes(DelayedLane(cpu, most_s, 1), DelayedLane(cpu, most_s, 2))
    monkeypatch.setitem(lanes._known, cpu, delayed)
    return delayed
