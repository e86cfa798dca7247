"""Memory as the allocator tells it, without any code of elbowroom's."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd import profiler as autograd_profiler


class Meter:
    """Inside the block, bytes above what was allocated when it began: `peak_bytes`, and `end_bytes` when it ended."""

    def __init__(self, device: str) -> None:
        self.on_cuda = torch.device(device).type == "cuda"
        self.peak_bytes = self.end_bytes = 0
        self.cut_off = False  # somebody else ended the profiler that this meter is

    def __enter__(self) -> Meter:
        gc.freeze()  # so that collecting garbage here looks at nothing that is older than the block
        if self.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.began = torch.cuda.memory_allocated()
        else:
            self.profile: Any = autograd_profiler.profile(profile_memory=True)
            self.profile.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated() - self.began
            self.end_bytes = torch.cuda.memory_allocated() - self.began
        else:
            self.cut_off = not torch._C._autograd._profiler_enabled()
            self.profile.__exit__(None, None, None)
            results = self.profile.kineto_results
            self._add_up(results.experimental_event_tree() if results else [])
        gc.unfreeze()

    def _add_up(self, roots: Iterable[Any]) -> None:
        """Sum the allocator's reports in the order of time. What was there before has no size, and counts nothing."""
        reports: list[tuple[int, int, int]] = []
        ahead = list(roots)
        while ahead:
            event = ahead.pop()
            ahead.extend(event.children)
            if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
                reports.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        sizes: dict[int, int] = {}
        held = 0
        # What is freed and allocated in one nanosecond is taken to be freed first: a lower bound.
        for _, address, size in sorted(reports, key=lambda report: (report[0], report[2])):
            held -= sizes.pop(address, 0)
            if size > 0:
                sizes[address] = size
                held += size
            self.peak_bytes = max(self.peak_bytes, held)
        self.end_bytes = held


def storages(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    """The bytes of each storage behind the tensors, by its address."""
    found = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found
