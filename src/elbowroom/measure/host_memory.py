"""Memory on the host for values that move there: taken once, pinned where a GPU copies from it, and counted.

PyTorch's own pinned memory comes in powers of two, and nobody counts it. Here a piece of ordinary memory is pinned as
it is, so that it takes the bytes that were planned and no more.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from threading import RLock
from typing import Any

import torch

from elbowroom.errors import HostMemoryRefused
from elbowroom.units import format_bytes

_COUNTING = RLock()  # again: memory may go, with garbage that Python collects, while this thread is counting
_held_bytes = _most_bytes = 0


class HostPiece:
    """So many bytes on the host, pinned if they are for a GPU. They go when nobody refers to this any more."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = size
        self.device = device
        try:
            self.memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as failure:
            raise _refused(size, str(failure)) from None
        if device.type == "cuda" and size:
            _pin(self, self.memory)
        _count(size)
        weakref.finalize(self, _count, -size).atexit = False


def loose_memory(size: int) -> torch.Tensor:
    """So many bytes that are not pinned. They are counted until nobody holds this tensor, or one that shows it."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = _Counted(size)
    except MemoryError:
        raise _refused(size, "it has no more") from None
    return torch.frombuffer(memory, dtype=torch.uint8)


class _Counted(bytearray):
    """Memory that a storage borrows, and gives back to Python when it dies."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        _count(size)

    def __del__(self) -> None:
        _count(-len(self))


def held_bytes() -> int:
    """Bytes on the host that are held for values that move, in this process."""
    return _held_bytes


def begin_counting() -> None:
    """From now on `most_bytes` is the most since now."""
    global _most_bytes
    with _COUNTING:
        _most_bytes = _held_bytes


def most_bytes() -> int:
    """The most that was held at once since `begin_counting`."""
    return _most_bytes


def free_host_bytes() -> int | None:
    """Memory that the host could give now, as far as the system tells: what is free, or only caches something."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _count(size: int) -> None:
    global _held_bytes, _most_bytes
    with _COUNTING:  # no call is inside, at whose end garbage could be collected
        _held_bytes += size
        if _held_bytes > _most_bytes:
            _most_bytes = _held_bytes


def _pin(owner: HostPiece, memory: torch.Tensor) -> None:
    """Pin memory where it is. The pin is taken off before the memory goes, which the finalizer keeps until then."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failure = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(failure):
        with suppress(RuntimeError):  # PyTorch looks for errors at the next kernel, and is to find this one now
            torch.zeros(1, device=owner.device)
        raise _refused(memory.numel(), f"pinning it failed with CUDA's error {int(failure)}")

    def unpin(kept: torch.Tensor) -> None:
        torch.cuda.synchronize(owner_device)
        cudart.cudaHostUnregister(kept.data_ptr())

    owner_device = owner.device
    weakref.finalize(owner, unpin, memory).atexit = False


def _refused(size: int, why: str) -> HostMemoryRefused:
    return HostMemoryRefused(
        f"the system does not give {format_bytes(size)} of host memory for values that move ({why}); "
        'pass a smaller host_budget=…, or offload="never"'
    )
