"""What PyTorch's CPU allocator reports while code runs, taken so that no profiler of the user's notices.

The allocator keeps no figures, but reports each allocation and each free to a profiler of the thread that makes it.
`torch.profiler` cannot be that profiler while the user may have one: there is one for the whole process, and
starting a second ends the first, or crashes the process if the first was only warming up. The profiler before it
(`torch.autograd.profiler_legacy`) belongs to one thread and keeps a list, nothing else: it takes the same reports.
Where a profiler is running in this thread already, the code runs in another thread.

A free is reported if the allocation was, or if an earlier profile left a note at the same address, with the size of
that note. So code whose reports are to be exact must free nothing that is older than itself.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, TypeVar, final

import torch
from torch._C._profiler import ActiveProfilerType, _RecordFunctionFast
from torch.autograd import profiler as autograd_profiler
from torch.autograd import profiler_legacy

_Result = TypeVar("_Result")
_MARK = "elbowroom mark "


def mark(name: str) -> None:
    """Leave a name among the reports of this thread, if it has any. It takes no memory."""
    with _RecordFunctionFast(_MARK + name):
        pass


def changes_during(call: Callable[[], _Result]) -> tuple[_Result, list[int]]:
    """What a call returns, and the bytes of its allocations (positive) and frees (negative), in order."""
    result, reports = reports_during(call)
    return result, [report for report in reports if isinstance(report, int)]


def reports_during(call: Callable[[], _Result]) -> tuple[_Result, list[int | str]]:
    """The same with the names of marks that the call leaves, where it leaves them.

    If a profiler is running in this thread, the call runs in another one, in the same grad mode; whatever else
    belongs to a thread (autocast, modes) the call has to see to itself.
    """
    give_way()
    if not torch._C._autograd._profiler_enabled():
        return _reported(call, torch.is_grad_enabled())
    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(_reported, call, torch.is_grad_enabled()).result()


def profiler_is_running() -> bool:
    """Whether a profiler of the user's is recording, in this thread or for the whole process."""
    if autograd_profiler._is_profiler_enabled:
        return True
    return bool(torch._C._autograd._profiler_enabled()) and threading.get_ident() not in _RUNNING


def give_way() -> None:
    """End the background reports of this thread, if there are any: somebody else needs a profiler here."""
    if _RUNNING.pop(threading.get_ident(), None) is not None:
        _end()
    if not _RUNNING:
        autograd_profiler._run_on_profiler_start = _STARTS


@final
class BackgroundReports:
    """Reports of this thread from now on, until they are ended or a profiler starts in this thread.

    The profiler that starts finds nothing running, and these reports are lost. To be made only where
    `profiler_is_running` says no.
    """

    def __init__(self) -> None:
        give_way()  # what somebody abandoned in another thread's care may still be running here
        self._thread, self._number = threading.get_ident(), next(_NUMBERS)
        _begin()
        _RUNNING[self._thread] = self._number
        autograd_profiler._run_on_profiler_start = _start_after_giving_way

    def end(self) -> list[int | str] | None:
        """Changes and marks so far; None if a profiler took the place, or if it is asked in another thread."""
        if threading.get_ident() != self._thread or _RUNNING.get(self._thread) != self._number:
            return None
        del _RUNNING[self._thread]
        reports = _end()
        give_way()
        return reports


_RUNNING: dict[int, int] = {}  # background reports by their thread
_NUMBERS = count(1)
_STARTS: Callable[[], None] = autograd_profiler._run_on_profiler_start


def _start_after_giving_way() -> None:
    """Called by PyTorch when a profiler starts, in place of its own function. It would fail with ours running."""
    give_way()
    _STARTS()


def _reported(call: Callable[[], _Result], grad_mode: bool) -> tuple[_Result, list[int | str]]:
    collecting = gc.isenabled()
    gc.disable()  # older garbage must not be freed in the middle
    try:
        with torch.set_grad_enabled(grad_mode):
            _begin()
            try:
                result = call()
            finally:
                reports = _end()
    finally:
        if collecting:
            gc.enable()
    return result, reports


def _begin() -> None:
    profile: Any = profiler_legacy.profile(profile_memory=True)
    torch._C._autograd._enable_profiler_legacy(profile.config())


def _end() -> list[int | str]:
    if torch._C._autograd._profiler_type() != ActiveProfilerType.LEGACY:
        return []  # it went with its thread, whose number another thread has now
    threads: Any = torch._C._autograd._disable_profiler_legacy()
    events = [event for thread in threads for event in thread]
    if len(threads) > 1:
        events.sort(key=lambda event: event.start_us())
    return [
        event.cpu_memory_usage() if event.kind() == "memory_alloc" else event.name().removeprefix(_MARK)
        for event in events
        if event.kind() == "memory_alloc" or (event.kind() == "push" and event.name().startswith(_MARK))
    ]
