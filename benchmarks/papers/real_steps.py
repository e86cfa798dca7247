"""Real training steps for figures: seconds and peak of a step on a CUDA device, or on the CPU to try a script."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

WARM_UPS = 2
REPS = 3
Measured = dict[str, float | int | str]


def measured(step: Callable[[], None], device: str) -> Measured:
    """The median time of a step after the first ones, and the most that is allocated above what is there before."""
    try:
        return _on_gpu(step) if device == "cuda" else _on_cpu(step)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    finally:
        clean(device)


def clean(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _on_gpu(step: Callable[[], None]) -> Measured:
    for _ in range(WARM_UPS):
        step()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    seconds = statistics.median(begin.elapsed_time(end) for begin, end in pairwise(marks)) / 1e3
    return {
        "seconds": float(f"{seconds:.4g}"),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "before_bytes": before,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _on_cpu(step: Callable[[], None]) -> Measured:
    from elbowroom.measure.memory import measure

    step()
    started = time.perf_counter()
    step()
    seconds = time.perf_counter() - started
    with measure("cpu", timeline=False) as found:
        step()
    return {
        "seconds": float(f"{seconds:.4g}"),
        "peak_bytes": found.peak_bytes,
        "before_bytes": 0,
        "reserved_bytes": 0,
    }
