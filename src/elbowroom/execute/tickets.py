"""Numbers handed to autograd among what a forward saves: they come back with the backward.

Whether a ticket is still held tells whether a backward may still come. Python's weak references do not: a tensor may
live on inside autograd without its Python object. So its storage is asked how many hold it.
"""

from __future__ import annotations

import torch

ALONE = 2  # holders of a storage that one tensor has: the tensor, and who asks


class Tickets:
    """Issued tickets, by number."""

    def __init__(self) -> None:
        self._issued: dict[int, torch.UntypedStorage] = {}

    def issue(self, number: int, *more: int) -> torch.Tensor:
        ticket = torch.tensor((number, *more))
        self._issued[number] = ticket.untyped_storage()
        return ticket

    def collect(self, number: int) -> None:
        """Its backward has come."""
        self._issued.pop(number, None)

    @property
    def waiting(self) -> set[int]:
        """Those whose backward is still to come."""
        self._issued = {number: storage for number, storage in self._issued.items() if holders(storage) > 1}
        return set(self._issued)


def holders(storage: torch.UntypedStorage) -> int:
    """How many hold a storage; the one that asks is among them."""
    return int(torch._C._storage_Use_Count(storage._cdata))
