"""The values that one forward has sent to the host, until nobody can run its backward any more.

A program asks for the four operations of `step/operations.py` by the number of a value. What is copied is the storage
behind the value, byte by byte, and what comes back lies in a storage just as large: strides, gaps and all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elbowroom.errors import ElbowroomError
from elbowroom.execute.to_host.lanes import Lanes, Wait
from elbowroom.step.slab import Slab


@dataclass(frozen=True)
class Form:
    """How a tensor lies in its storage, and where that is."""

    device: torch.device
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    bytes: int
    is_conjugated: bool
    is_negated: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> Form:
        return cls(
            value.device,
            value.dtype,
            value.size(),
            value.stride(),
            int(value.storage_offset()),
            value.untyped_storage().nbytes(),
            value.is_conj(),
            value.is_neg(),
        )

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """A tensor of this form in other memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        tensor.set_(memory.untyped_storage(), self.offset, self.size, self.stride)  # type: ignore[call-overload]
        if self.is_conjugated:
            torch._C._set_conj(tensor, True)  # type: ignore[attr-defined]
        if self.is_negated:
            torch._C._set_neg(tensor, True)  # type: ignore[attr-defined]
        return tensor


class Lease:
    """A part of the host's memory, cut for one program, and what has been copied there."""

    def __init__(self, memory: torch.Tensor, slab: Slab, lanes: Lanes) -> None:
        self.memory, self._slab, self._lanes = memory, slab, lanes
        self._forms: dict[int, Form] = {}
        self._leaving: dict[int, Wait] = {}
        self._coming: dict[int, Wait] = {}

    def offload(self, number: int, value: torch.Tensor) -> None:
        """Begin to copy a value to the host."""
        self._forms[number] = form = Form.of(value)
        place = self._place(number, form.bytes)
        self._leaving[number] = self._lanes.to_host.copy(place, bytes_behind(value))

    def release(self, number: int) -> None:
        """Wait until a value is on the host; from then on its memory on the device may go."""
        if number in self._leaving:
            self._leaving.pop(number)()

    def prefetch(self, number: int) -> torch.Tensor:
        """Take memory for a value and begin to copy it back; what is returned may be read after `arrive`."""
        form = self._forms[number]
        memory = torch.empty(form.bytes, dtype=torch.uint8, device=form.device)
        self._coming[number] = self._lanes.from_host.copy(memory, self._place(number, form.bytes))
        return form.over(memory)

    def arrive(self, number: int) -> None:
        """Wait until a value is back."""
        self._coming.pop(number)()

    def abandon(self) -> None:
        """The program has failed. Wait for what is on its way: the memory it comes from or goes to is free now."""
        for waits in (self._leaving, self._coming):
            while waits:
                waits.popitem()[1]()

    def _place(self, number: int, size: int) -> torch.Tensor:
        start, room = self._slab.places[number]
        if size > room:
            raise ElbowroomError(f"value {number} has {size} bytes to move and was planned with {room}; plan again")
        return self.memory[start : start + size]


def bytes_behind(value: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(0, dtype=torch.uint8, device=value.device)
    return memory.set_(value.untyped_storage())  # type: ignore[call-overload, no-any-return]
