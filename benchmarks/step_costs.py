"""The devices that steps run on, and how time and memory of a step are measured there."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from cases import Case

WARM_UPS = 3  # steps that run before those that are timed


@dataclass(frozen=True)
class Cost:
    """What a step took: its time, the resident bytes before it, and its peak above those.

    `ms` is the median over all timed steps, `fastest_ms` the least of them.
    """

    ms: float
    fastest_ms: float
    resident_bytes: int
    peak_bytes: int


class Device:
    """Where the steps run."""

    kind: str

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.kind, torch.bfloat16)

    def clean(self) -> None:
        """Free what nobody needs any more, before something else is measured."""
        gc.collect()

    def resident_bytes(self, case: Case) -> int:
        raise NotImplementedError

    def measure(self, step: Callable[[], None], case: Case, reps: int) -> Cost:
        raise NotImplementedError


class Gpu(Device):
    """Time is taken from CUDA events, memory from the allocator's own count."""

    kind = "cuda"

    def clean(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def resident_bytes(self, case: Case) -> int:
        return torch.cuda.memory_allocated()

    def measure(self, step: Callable[[], None], case: Case, reps: int) -> Cost:
        """Steps run in a row, as in training: the host runs ahead of the GPU, and no step waits for it to start."""
        for _ in range(WARM_UPS):
            step()
        torch.cuda.synchronize()
        gc.collect()
        resident = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(reps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        ms = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
        peak = torch.cuda.max_memory_allocated() - resident
        return Cost(statistics.median(ms), min(ms), resident + self.hidden_bytes(), peak)

    def hidden_bytes(self) -> int:
        """Bytes in the pools of CUDA graphs that PyTorch does not count as allocated: gaps too small for a tensor."""
        self.clean()
        pools = [segment for segment in torch.cuda.memory_snapshot() if any(segment["segment_pool_id"])]
        blocks = [block for segment in pools for block in segment["blocks"]]
        return sum(block["size"] for block in blocks if block["state"] == "inactive")


class Cpu(Device):
    """For trying the scripts: wall time, and the memory of one more step under the profiler."""

    kind = "cpu"

    def __init__(self) -> None:
        torch.set_num_threads(1)  # the steps are too small for more

    def resident_bytes(self, case: Case) -> int:
        from elbowroom.measure.memory import live_bytes

        parameters = list(case.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return live_bytes([*parameters, *gradients, *case.model.buffers(), *case.inputs, case.target])

    def measure(self, step: Callable[[], None], case: Case, reps: int) -> Cost:
        from elbowroom.measure.memory import measure

        for _ in range(WARM_UPS):
            step()
        ms = [self._time(step) for _ in range(reps)]
        with measure("cpu", timeline=False) as measured:
            step()
        return Cost(statistics.median(ms), min(ms), self.resident_bytes(case), measured.peak_bytes)

    def _time(self, step: Callable[[], None]) -> float:
        started = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - started)


def device_for(script: str, *, tiny: bool) -> Device | None:
    """The CPU if the script is only tried, else the GPU. Without a GPU: None, and a message."""
    if tiny:
        return Cpu()
    if torch.cuda.is_available():
        return Gpu()
    print(f"{script}: there is no CUDA device here; --tiny tries the script on the CPU", file=sys.stderr)
    return None
