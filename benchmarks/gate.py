"""Lets processes work side by side on one machine and measure alone: whoever measures stops all others meanwhile."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SETTLING_S = 0.1  # until work that others have queued on the GPU is done


class Gate:
    """Shared through a folder in which every process of the run has a file named after its number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def enter(self) -> None:
        (self.folder / str(os.getpid())).touch()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            others = self._others()
            try:
                _send(signal.SIGSTOP, others)
                time.sleep(_SETTLING_S)
                yield
            finally:
                _send(signal.SIGCONT, others)

    def _others(self) -> list[int]:
        """All processes of the run but this one and its own children."""
        members = {int(file.name) for file in self.folder.iterdir() if file.name.isdigit()} - {os.getpid()}
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parent = stat.read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(stat.parent.name))
        found: list[int] = []
        waiting = list(members)
        while waiting:
            found.append(waiting.pop())
            waiting += children.get(found[-1], [])
        return found


def _send(number: signal.Signals, processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
