"""How much memory a block of code takes, told by the allocator itself.

On CUDA the allocator keeps the figures. On the CPU it keeps none, but reports each allocation and each free to
torch's profiler, and a running sum of those is exact. Two things the reports leave out or get wrong:

- A free of memory older than the block is reported not at all, or, where an earlier profile left a note at the same
  address, with the size of that note. So only frees of the block's own memory are believed, and older storages that
  Python's garbage collector knows are watched with weak references, whose callbacks leave a mark among the reports.
  Older memory that only autograd holds (the block runs the backward of an earlier forward) may go unseen: without
  its frees, `peak_bytes` and `end_bytes` are upper bounds.
- Only the thread that measures, and autograd's threads working for it, report. What other threads do is not counted.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch._C._profiler import _EventType, _ProfilerEvent, _RecordFunctionFast
from torch.autograd import profiler as autograd_profiler

from elbowroom.errors import ElbowroomError, InputError
from elbowroom.measure.allocator_reports import give_way
from elbowroom.measure.host_memory import begin_counting, most_bytes
from elbowroom.schedule.timeline import TimeLine
from elbowroom.showing import shown_as

Moment: TypeAlias = tuple[float, int]  # seconds since the start, bytes above the start

TRACE_ENTRIES = 1_000_000  # allocator events that a CUDA timeline holds; each takes about 200 bytes meanwhile
_BEGIN = "elbowroom: begin"
_ONE_AT_A_TIME = Lock()


@dataclass(frozen=True)
class Measurement:
    """What a block took. The figures are there once the block has ended, also if it ended with an exception.

    `peak_bytes` is the most the block had allocated at once and `end_bytes` what it left allocated, both above
    `start_bytes`, what was allocated when it began (0 on the CPU, whose allocator does not tell). `end_bytes` is
    negative if the block freed more than it kept. `reserved_bytes` is the most the CUDA allocator held from the
    device, in use or cached (None on the CPU). `host_bytes` is the most that this process held on the host meanwhile
    for values that move there; it is taken when steps are planned, and is no part of `peak_bytes` then. `time_s` is
    wall time; on the CPU it includes the profiler's.

    `timeline` has one span after each allocator event, up to the next. On the CPU it ends at `end_bytes`, and its
    highest point is `peak_bytes`. On CUDA it counts bytes as requested, before the allocator rounds them up to
    blocks, so it runs a little below. It is None if it was not asked for, or if there were more than `TRACE_ENTRIES`
    events on CUDA.
    """

    device: str
    time_s: float
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    reserved_bytes: int | None
    host_bytes: int
    timeline: TimeLine | None = field(repr=False)

    if not TYPE_CHECKING:  # a checker should know the fields above and no others

        def __getattr__(self, name: str) -> Any:
            """Only reached for what is not there, such as a figure while its block still runs."""
            if name in type(self).__dataclass_fields__:
                raise AttributeError(f"{name}: known only once the measured block has ended")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def to_json(self, *, timeline: bool = False) -> dict[str, Any]:
        """The figures, with the timeline as `[seconds, bytes]` pairs if it is wanted."""
        report: dict[str, Any] = {
            "device": self.device,
            "time_s": self.time_s,
            "start_bytes": self.start_bytes,
            "peak_bytes": self.peak_bytes,
            "end_bytes": self.end_bytes,
            "reserved_bytes": self.reserved_bytes,
            "host_bytes": self.host_bytes,
        }
        if timeline:
            report["timeline"] = None if self.timeline is None else [list(m) for m in self.timeline.moments[1:]]
        return report

    def picture(self, *, width: int = 72, height: int = 8) -> str:
        """Memory above the start over time, as a block chart; what lies below the start is left blank."""
        if self.timeline is None:
            raise ElbowroomError("no timeline to draw: not asked for, or longer than a CUDA trace holds")
        return shown_as("measurement picture", self, width, height)


@contextmanager
def measure(device: str | torch.device | None = None, *, timeline: bool = True) -> Iterator[Measurement]:
    """Measure the memory and the time of the block.

    >>> with measure("cpu") as m:
    ...     kept = torch.zeros(256).exp()
    >>> m.peak_bytes, m.end_bytes
    (2048, 1024)

    `device` is the CPU or a CUDA device; None means the current CUDA device if the process uses CUDA by now, else the
    CPU. Garbage is collected before the block and not during it. One measurement runs at a time, and on the CPU
    beside no other profiler: both are refused.
    """
    chosen = _device(device)
    meter = _CudaMeter(chosen, timeline) if chosen.type == "cuda" else _CpuMeter(timeline)
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise ElbowroomError("measure: already measuring; blocks cannot be nested, nor measured from two threads")
    try:
        with garbage_collected():
            measurement = object.__new__(Measurement)
            begin_counting()
            meter.start()
            failed = True
            try:
                yield measurement
                failed = False
            finally:
                # How far memory rose is worth knowing after a failure too, but nothing may take the failure's place.
                with suppress(Exception) if failed else nullcontext():
                    Measurement.__init__(measurement, **meter.stop(), host_bytes=most_bytes())
    finally:
        _ONE_AT_A_TIME.release()


@contextmanager
def garbage_collected() -> Iterator[None]:
    """Before the block, and not during it: what goes meanwhile would look like memory that the block does without."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def is_measuring() -> bool:
    """Whether a block is being measured, in whatever thread."""
    return _ONE_AT_A_TIME.locked()


def live_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the storages behind the tensors, each counted once however many views it has."""
    # The storages are kept while counting, or the address of one that dies could serve the next.
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError("device", f"must be 'cpu' or a CUDA device such as 'cuda:0', not {device!r:.40}") from None
    if chosen.type == "cpu":
        return torch.device("cpu")
    if chosen.type != "cuda":
        raise InputError("device", f"memory is measured on cpu and cuda, not on {chosen.type}")
    if not torch.cuda.is_available():
        raise InputError("device", f"{chosen}: there is no CUDA device here")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise InputError("device", f"{chosen}: there are only {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", index)


@final
class _CpuMeter:
    """Runs the profiler over the block and adds up what the allocator reported to it."""

    def __init__(self, timeline: bool) -> None:
        self.timeline = timeline

    def start(self) -> None:
        give_way()
        # By type, not isinstance: that may run code of whatever objects there are, of which there are very many.
        kinds = torch.Tensor, torch.profiler.profile
        objects: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
        if _profiling(each for each in objects if isinstance(each, torch.profiler.profile)):
            raise ElbowroomError("measure: another profiler is running, and the CPU is measured with torch's own")
        # Kineto writes two lines per run to standard error below this level. It looks once, at its first run.
        os.environ.setdefault("KINETO_LOG_LEVEL", "7")
        self.older_bytes: dict[str, int] = {}
        tensors = (each for each in objects if not isinstance(each, torch.profiler.profile))
        self.watches = _watch_storages(tensors, self.older_bytes)
        profiler: Any = autograd_profiler.profile(profile_memory=True)
        self.profiler = profiler.__enter__()
        _mark(_BEGIN)
        self.began_s = time.perf_counter()

    def stop(self) -> dict[str, Any]:
        time_s = time.perf_counter() - self.began_s
        with suppress(RuntimeError):  # if it was not running any more, some versions complain here
            self.profiler.__exit__(None, None, None)
        self.watches.clear()
        results = self.profiler.kineto_results
        events = sorted(_walk(results.experimental_event_tree() if results else []), key=_start_ns)
        begin_ns = next((event.start_time_ns for event in events if event.name == _BEGIN), None)
        if begin_ns is None:  # a profiler that starts while another runs silently takes its place
            raise ElbowroomError("measure: the block ran a profiler of its own, which ended the measurement")
        timeline = tuple(_moments(events, self.older_bytes, begin_ns))
        peak_bytes = max([0, *(held for _, held in timeline)])
        return {
            "device": "cpu",
            "time_s": time_s,
            "start_bytes": 0,
            "peak_bytes": peak_bytes,
            "end_bytes": timeline[-1][1] if timeline else 0,
            "reserved_bytes": None,
            "timeline": TimeLine.of_moments(timeline, time_s, peak_bytes) if self.timeline else None,
        }


def _profiling(known: Iterable[torch.profiler.profile]) -> bool:
    if autograd_profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        return True
    # A profiler that warms up sets neither flag, but crashes the process when it stops after another has run.
    backends = [each.profiler for each in known]
    return any(backend is not None and backend.kineto_results is None for backend in backends)


def _watch_storages(
    tensors: Iterable[torch.Tensor], older_bytes: dict[str, int]
) -> list[weakref.ref[torch.UntypedStorage]]:
    """Have a mark left in the profile when a tensor's storage dies; `older_bytes` gets each mark's size."""
    watches = []
    for number, storage in enumerate(allocated_storages(tensors)):
        name = f"elbowroom: freed {number}"
        older_bytes[name] = storage.nbytes()
        watches.append(weakref.ref(storage, partial(_mark, name)))
    return watches


def allocated_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors and their gradients that came from the CPU's allocator, each once."""
    storages: dict[int, torch.UntypedStorage] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            with suppress(RuntimeError):  # sparse tensors, and wrappers without a storage of their own
                # Python may never have seen a gradient that autograd stored.
                for held in (tensor, tensor.grad if tensor.is_leaf else None):
                    if held is not None and is_allocated(storage := held.untyped_storage()):
                        storages[storage._cdata] = storage
    return list(storages.values())


def is_allocated(storage: torch.UntypedStorage) -> bool:
    """Whether it came from the CPU allocator, not from numpy, a file or another process."""
    return storage.device.type == "cpu" and storage.nbytes() > 0 and storage.resizable() and not storage.is_shared()


def _mark(name: str, _: object = None) -> None:
    with _RecordFunctionFast(name):
        pass


def _walk(roots: list[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    """Parents first and siblings in order, so that a stable sort by time keeps events of one instant in order."""
    ahead = roots[::-1]
    while ahead:
        event = ahead.pop()
        yield event
        ahead += event.children[::-1]


def _start_ns(event: _ProfilerEvent) -> int:
    return event.start_time_ns


def _moments(events: Iterable[_ProfilerEvent], older_bytes: dict[str, int], begin_ns: int) -> Iterator[Moment]:
    sizes: dict[int, int] = {}  # of what the block allocated and still has, by address
    held = 0
    for event in events:
        if event.tag == _EventType.Allocation:
            report: Any = event.extra_fields
            if report.device.type != "cpu":
                continue
            change = -sizes.pop(report.ptr, 0)  # before an allocation: what another thread freed without report
            if report.alloc_size > 0:
                sizes[report.ptr] = report.alloc_size
                change += report.alloc_size
        else:
            change = -older_bytes.get(event.name, 0)
        if change:
            held += change
            yield max(0, event.start_time_ns - begin_ns) / 1e9, held


@final
class _CudaMeter:
    """Reads the CUDA allocator's own statistics, and its trace of events for the timeline."""

    def __init__(self, device: torch.device, timeline: bool) -> None:
        self.device = device
        self.timeline = timeline

    def start(self) -> None:
        torch.cuda.synchronize(self.device)
        if self.timeline and torch._C._cuda_isHistoryEnabled():
            raise ElbowroomError("measure: CUDA memory history is being recorded already; use timeline=False")
        torch.cuda.reset_peak_memory_stats(self.device)
        self.start_bytes = torch.cuda.memory_allocated(self.device)
        if self.timeline:
            torch.cuda.memory._record_memory_history(
                "all", context=None, stacks="python", max_entries=TRACE_ENTRIES, clear_history=True
            )
        self.began_us = time.time_ns() / 1e3
        self.began_s = time.perf_counter()

    def stop(self) -> dict[str, Any]:
        try:
            torch.cuda.synchronize(self.device)
            time_s = time.perf_counter() - self.began_s
            return {
                "device": str(self.device),
                "time_s": time_s,
                "start_bytes": self.start_bytes,
                "peak_bytes": torch.cuda.max_memory_allocated(self.device) - self.start_bytes,
                "end_bytes": torch.cuda.memory_allocated(self.device) - self.start_bytes,
                "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
                "timeline": self._trace(time_s) if self.timeline else None,
            }
        finally:
            if self.timeline:
                torch.cuda.memory._record_memory_history(None)

    def _trace(self, time_s: float) -> TimeLine | None:
        trace = torch.cuda.memory._snapshot()["device_traces"][self.device.index]
        if len(trace) >= TRACE_ENTRIES:  # the oldest may have been overwritten
            return None
        peak_bytes = torch.cuda.max_memory_allocated(self.device) - self.start_bytes
        return TimeLine.of_moments(_trace_moments(trace, self.began_us), time_s, peak_bytes)


def _trace_moments(trace: Iterable[dict[str, Any]], began_us: float) -> Iterator[Moment]:
    # The statistics too count a block as free once that is requested, even if another stream delays its reuse.
    signs = {"alloc": 1, "free_requested": -1}
    held = 0
    for entry in trace:
        if sign := signs.get(entry["action"]):
            held += sign * entry["size"]
            yield max(0.0, entry["time_us"] - began_us) / 1e6, held
