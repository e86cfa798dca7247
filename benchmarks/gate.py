"""A gate for processes that work side by side on one machine: the one that measures stops all others meanwhile."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SETTLING_S = 0.1  # after which the GPU has done what the others had queued before they stopped


class Gate:
    """The processes of a run share a folder, in which each has a file named after its process number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def enter(self) -> None:
        (self.folder / str(os.getpid())).touch()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody else measures, then stop all other processes until the block ends."""
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
        """The numbers of all other processes of the run and of their children, but not of this one's children."""
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
