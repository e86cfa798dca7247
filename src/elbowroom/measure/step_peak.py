"""The peak of a training step between two moments that no `with` block joins: how a session checks its own plan.

Meant for the first steps of a plan, in the middle of the user's program: it must disturb nothing there, costs a few
milliseconds on the CPU and nothing on CUDA, and gives up rather than be in the way.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, final

import torch

from elbowroom.measure.allocator_reports import BackgroundReports, mark, profiler_is_running
from elbowroom.measure.memory import allocated_storages, is_measuring


@final
class StepPeak:
    """Measures once: `start` where a step begins, `stop` where it ends, in whatever stack frame that is.

    >>> peak = StepPeak()
    >>> peak.start("cpu")
    True
    >>> kept = torch.zeros(256).exp()
    >>> peak.stop()
    2048
    """

    def __init__(self) -> None:
        self._meter: _OnHost | _OnCuda | None = None
        self._peak_bytes: int | None = None

    def start(
        self,
        device: str | torch.device,
        *,
        limit_bytes: int | None = None,
        watched: Iterable[torch.Tensor] = (),
        uncounted: Iterable[torch.UntypedStorage] = (),
    ) -> bool:
        """Begin now; False if that would be in somebody's way, and then nothing is measured.

        On the CPU that is any profiler that is recording. One that warms up does not mind, and one that starts later
        finds the place free. On CUDA it is a block under `elbowroom.measure`, which sets the allocator's peak back.

        `watched` are tensors from before the step that may go during it, their `.grad` included: the CPU's allocator
        does not say by itself that older memory is freed. Name the parameters, whose gradients go if the user calls
        `zero_grad` between forward and backward. What goes unwatched makes the peak look higher than it is. Memory
        that is `uncounted` in what the caller adds the peak to, as outputs of the step before, may go, too; the peak
        is no lower for it.

        `limit_bytes`, on CUDA, is what the caller allows above the start. The allocator's peak is set back only if an
        earlier one would hide whether this step stays below that; a peak below the limit may then be an earlier one.
        """
        self.stop()
        self._peak_bytes = None
        chosen = torch.device(device)
        if chosen.type == "cuda":
            if is_measuring():
                return False
            self._meter = _OnCuda(chosen, limit_bytes)
        else:
            if profiler_is_running():
                return False
            self._meter = _OnHost(watched, uncounted)
        return True

    def stop(self) -> int | None:
        """The most bytes above the start that were allocated at once; the same again if it is called again.

        None if it was not started, or if the measurement was lost: on the CPU because a profiler started meanwhile,
        which is left alone, or because another thread than the one that started it asks; on CUDA because the
        allocator's statistics were set back.
        """
        meter, self._meter = self._meter, None
        if meter is not None:
            self._peak_bytes = meter.stop()
        return self._peak_bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the block allocates is not the step's. It must leave nothing, and free nothing of the step's."""
        meter = self._meter
        if meter is not None:
            meter.pause()
        try:
            yield
        finally:
            if meter is not None and meter is self._meter:
                meter.go_on()

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process anything may be gone already
            self.stop()


@final
class _OnHost:
    def __init__(self, watched: Iterable[torch.Tensor], uncounted: Iterable[torch.UntypedStorage]) -> None:
        storages = allocated_storages(watched)
        known = {storage._cdata for storage in storages}
        others = [storage for storage in uncounted if storage._cdata not in known]
        self.older = {
            str(number): _Older(storage.nbytes(), number < len(storages))
            for number, storage in enumerate((*storages, *others))
        }
        self.watches = [
            weakref.ref(storage, partial(_leave_mark, name))
            for name, storage in zip(self.older, (*storages, *others), strict=True)
        ]
        del storages, others
        self.earlier: list[int | str] | None = []  # reports from before the latest pause; None if they were lost
        self.reports: BackgroundReports | None = BackgroundReports()

    def pause(self) -> None:
        reports = None if self.reports is None else self.reports.end()
        self.earlier = None if reports is None or self.earlier is None else self.earlier + reports
        self.reports = None

    def go_on(self) -> None:
        if not profiler_is_running():
            self.reports = BackgroundReports()

    def stop(self) -> int | None:
        self.pause()
        self.watches.clear()
        return None if self.earlier is None else _highest(self.earlier, self.older)


class _Older(NamedTuple):
    """Memory from before the step, and whether it counts in what the peak is added to."""

    size_bytes: int
    counts: bool


def _leave_mark(name: str, _: object) -> None:
    mark(name)


def _highest(reports: Sequence[int | str], older: Mapping[str, _Older]) -> int:
    """The highest level. A free of what the step did not allocate may be reported with any size, if it is reported at
    all: only marks tell of older memory, and frees count where something of that size is there to be freed."""
    own: Counter[int] = Counter()
    held = peak = freed = 0
    for report in reports:
        if isinstance(report, str):
            freed, counts = older[report]
            held -= freed if counts else 0
            continue
        if report > 0:
            own[report] += 1
            held += report
            peak = max(peak, held)
        elif own[-report] and report != -freed:  # what was marked may be reported, too, right after its mark
            own[-report] -= 1
            held += report
        freed = 0
    return peak


@final
class _OnCuda:
    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self.device = device
        self.start_bytes = torch.cuda.memory_allocated(device)
        earlier_bytes = torch.cuda.max_memory_allocated(device) - self.start_bytes
        if limit_bytes is None or earlier_bytes > limit_bytes:
            torch.cuda.reset_peak_memory_stats(device)
        self.first_peak_bytes = torch.cuda.max_memory_allocated(device)
        self.earlier_peak_bytes = 0  # from before the latest pause

    def pause(self) -> None:
        self.earlier_peak_bytes = max(self.earlier_peak_bytes, torch.cuda.max_memory_allocated(self.device))

    def go_on(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.first_peak_bytes = torch.cuda.max_memory_allocated(self.device)

    def stop(self) -> int | None:
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        if peak_bytes < self.first_peak_bytes:
            return None
        return max(peak_bytes, self.earlier_peak_bytes) - self.start_bytes
