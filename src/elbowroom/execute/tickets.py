"""Numbers handed to autograd among what a forward saves: they come back with the backward.

Whether a ticket is still held tells whether a backward may still come. Python's weak references to tensors do not: a
tensor may live on inside autograd without its Python object. Those to storages do.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

ALONE = 2  # holders of a storage that one tensor has: the tensor, and who asks


class Tickets:
    """Issued tickets, by number, and what else each says."""

    def __init__(self) -> None:
        self._issued: dict[int, tuple[StorageWeakRef, tuple[int, ...]]] = {}

    def issue(self, number: int, *more: int, held: Any = None) -> torch.Tensor:
        """A ticket. What is `held` with it lives as long as autograd keeps the ticket."""
        ticket = torch.tensor((number, *more)) if held is None else _held_with((number, *more), held)
        self._issued[number] = StorageWeakRef(ticket.untyped_storage()), more
        return ticket

    def collect(self, number: int) -> None:
        """Its backward has come."""
        self._issued.pop(number, None)

    @property
    def waiting(self) -> dict[int, tuple[int, ...]]:
        """Those whose backward is still to come, and what else they say."""
        self._issued = {number: known for number, known in self._issued.items() if not known[0].expired()}
        return {number: more for number, (_, more) in self._issued.items()}


class _Numbers(bytearray):
    """Memory that a storage borrows, and gives back to Python when it dies."""

    held: Any = None


def _held_with(numbers: tuple[int, ...], held: Any) -> torch.Tensor:
    memory = _Numbers(array("q", numbers).tobytes())
    memory.held = held
    return torch.frombuffer(memory, dtype=torch.int64)


def holders(storage: torch.UntypedStorage) -> int:
    """How many hold a storage; the one that asks is among them."""
    return int(torch._C._storage_Use_Count(storage._cdata))
