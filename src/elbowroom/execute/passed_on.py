"""What passes from one graph of a step in parts to the next, and who made it.

A graph may be called with what the graphs before it returned, whose memory their own programs count, and with what
other code has made: a graph without any gradient, which needs no plan, or Python itself. The user's frame holds that
while the graphs run, and no program counts it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elbowroom.measure.memory import is_allocated
from elbowroom.measure.resident import rounded


class PassedOn:
    """Storages seen in one look at a step, by identity. Nothing is kept alive by it, and nothing else gets the
    identity of what has died."""

    def __init__(self) -> None:
        self._own: dict[int, StorageWeakRef] = {}  # made by graphs that are planned
        self._waiting: dict[int, Storage] = {}  # made by other graphs, and maybe dead before the next planned one
        self._found: dict[int, Storage] = {}

    def enter(self, arguments: Iterable[Any]) -> None:
        """A planned graph is called."""
        for key, storage in self._waiting.items():
            if not storage.has_died:
                self._found[key] = storage
        self._waiting = {}
        for storage in storages_behind(arguments):
            if storage.key not in self._own:
                self._found[storage.key] = storage

    def leave(self, outputs: Iterable[Any]) -> None:
        """It has returned these. Those that show what it was called with are none of its own."""
        for storage in storages_behind(outputs):
            if storage.key not in self._found and storage.key not in self._waiting:
                self._own[storage.key] = storage.reference

    def made(self, outputs: Iterable[Any]) -> None:
        """A graph that is not planned has returned these."""
        for storage in storages_behind(outputs):
            if storage.key not in self._own:
                self._waiting[storage.key] = storage

    def end(self) -> None:
        """The forward is over; what is still there is there during the backward, too."""
        self.enter(())

    @property
    def found(self) -> tuple[Storage, ...]:
        """What planned graphs were called with, or what was there meanwhile, and none of them has made. Parameters,
        buffers and the batch are among it."""
        return tuple(self._found.values())


class Storage:
    """What is known of a storage without keeping it alive."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.reference = StorageWeakRef(storage)
        self.key: int = self.reference.cdata
        self.size_bytes = storage.nbytes()
        self.device = storage.device
        self.address = storage.data_ptr()

    @property
    def has_died(self) -> bool:
        return bool(self.reference.expired())


def storages_behind(values: Iterable[Any]) -> tuple[Storage, ...]:
    """Those of some values, each once, as far as PyTorch's allocators gave them."""
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided)
    storages = (tensor.untyped_storage() for tensor in tensors)
    found = (Storage(storage) for storage in storages if storage.device.type != "cpu" or is_allocated(storage))
    return tuple({storage.key: storage for storage in found}.values())


def bytes_besides(
    storages: Iterable[Storage], known: Iterable[torch.Tensor | None], device: torch.device
) -> tuple[int, int]:
    """Bytes of storages on a device that are none of those behind the known tensors: what is there still, which was
    before the step, and what has died since, because the step makes it."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in known if tensor is not None}
    there = made = 0
    for storage in storages:
        if storage.device.type != device.type:
            continue
        if storage.has_died:
            made += rounded(storage.size_bytes, device)
        elif storage.address not in addresses:
            there += rounded(storage.size_bytes, device)
    return there, made
